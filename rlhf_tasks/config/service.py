"""How the Prefect flow runs the stages; changes no result."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from rlhf_tasks.config.types import Count, NonNegativeFloat, PositiveFloat, Section


class Care(Section):
    """With what care one stage is run."""

    retries: Count = Field(description="after a fault; a mistake in the configuration is never retried")
    retry_delay_seconds: NonNegativeFloat = Field(description="before the first retry; doubled at each")
    timeout_seconds: PositiveFloat | None = Field(description="of one try; null: none")
    gpu_slots: Count = Field(description="held of the concurrency limit `gpu` while the stage really runs")


class Service(Care):
    grace_seconds: Annotated[float, Field(gt=0, le=25)] = Field(
        description="from a cancelled stage's interrupt to its kill; Prefect itself kills after 30"
    )
    stages: dict[str, dict[str, Any]] = Field(description="what differs per stage")

    @model_validator(mode="after")
    def _stages_are_told_as_care(self) -> Service:
        problems = []
        for stage in self.stages:
            try:
                self.care(stage)
            except ValidationError as error:
                problems += [
                    f"stages.{stage}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                    for problem in error.errors()
                ]
        if problems:
            raise ValueError(f"{'; '.join(problems)}; known keys are {', '.join(Care.model_fields)}")
        return self

    def care(self, stage: str) -> Care:
        """The care of one stage: what is told for all, and what differs for it."""
        common = {name: getattr(self, name) for name in Care.model_fields}
        return Care.model_validate(common | self.stages.get(stage, {}))
