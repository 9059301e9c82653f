"""How the Prefect flow runs the stages; it changes no result."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from rlhf_tasks.config.types import Count, NonNegativeFloat, PositiveFloat, Section


class TaskPolicy(Section):
    """How the Prefect task of one stage is retried, timed out and queued."""

    retries: Count
    """Number of retries after a fault; a user's mistake is never retried."""
    retry_delay_seconds: NonNegativeFloat
    """Wait before the first retry, in seconds; each later wait is twice as long."""
    timeout_seconds: PositiveFloat | None
    """Longest time of one try, in seconds; null: no limit."""
    gpu_slots: Count
    """Number of slots of the concurrency limit `gpu` that the stage holds while it runs. Where the machine
    has GPUs, each slot is one of them, and a training stage holds at least one per process."""


class Service(TaskPolicy):
    """How the Prefect flow runs the stages: one policy for all, and exceptions by stage."""

    grace_seconds: Annotated[float, Field(gt=0, le=25)]
    """Time that a cancelled stage has to save its state before it is killed, in seconds; Prefect itself kills
    after 30."""
    stages: dict[str, dict[str, Any]]
    """Values that differ for a stage, by its name: retries, retry_delay_seconds, timeout_seconds,
    gpu_slots."""

    @model_validator(mode="after")
    def _stages_hold_policies(self) -> Service:
        problems = []
        for stage in self.stages:
            try:
                self.policy(stage)
            except ValidationError as error:
                problems += [
                    f"stages.{stage}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                    for problem in error.errors()
                ]
        if problems:
            raise ValueError(f"{'; '.join(problems)}; known keys are {', '.join(TaskPolicy.model_fields)}")
        return self

    def policy(self, stage: str) -> TaskPolicy:
        """The policy of one stage: the common values, replaced by those of `stages`."""
        common = {name: getattr(self, name) for name in TaskPolicy.model_fields}
        return TaskPolicy.model_validate(common | self.stages.get(stage, {}))
