"""`params.yaml` as one frozen, typed `Config`, and how it is read and checked.

Every problem of a file is reported in one `ConfigError`, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_tasks.config.data import Data, Model
from rlhf_tasks.config.judge import Judging
from rlhf_tasks.config.ppo import Ppo
from rlhf_tasks.config.promotion import Promotion, conflicts
from rlhf_tasks.config.service import Service
from rlhf_tasks.config.training import Base, Preferences, Prepare, Reward, Sft
from rlhf_tasks.config.types import (
    Count,
    PositiveFloat,
    PositiveInt,
    Section,
    StoreUri,
)
from rlhf_tasks.errors import ConfigError

# ------------------------------------------------------------------- where and how, not what


class Launch(Section):
    """How training stages are started; no stage's result is named by it."""

    num_processes: PositiveInt
    num_machines: PositiveInt
    deepspeed: Literal["zero2", "zero3"] | None
    mixed_precision: Literal["no", "bf16"]


class Resume(Section):
    """Checkpoints that a training stage goes on from after it was killed; kept apart from the outs."""

    every_seconds: PositiveFloat
    keep: PositiveInt = Field(description="the last ones kept, so that a torn one costs little")


class Tracking(Section):
    enabled: bool
    uri: StoreUri | None = Field(description="null: the SQLite store under .rlhf/")
    experiment: str


class Config(Section):
    """All of `params.yaml`."""

    seed: Count
    data: Data
    model: Model
    prepare: Prepare
    base: Base
    sft: Sft
    preferences: Preferences
    reward: Reward
    ppo: Ppo
    judge: Judging
    promotion: Promotion | None
    launch: Launch
    resume: Resume
    tracking: Tracking
    service: Service

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = []
        guards = self.ppo.guards
        if guards is not None and guards.action == "roll_back" and self.launch.deepspeed is not None:
            problems.append(
                "ppo.guards.action: roll_back keeps a good state in memory, which DeepSpeed's cannot be; use "
                "stop with launch.deepspeed, and go on by hand"
            )
        if any(judge.kind == "gold" for judge in self.judge.judges) and self.data.source != "synthetic":
            problems.append(
                f"judge.judges: gold knows the synthetic task only, data.source is {self.data.source!r}"
            )
        wants = [
            key
            for key, wanted in {
                "ppo.scorers": any(scorer.kind == "reward_model" for scorer in self.ppo.scorers),
                "ppo.critic_init": self.ppo.critic_init == "reward",
                "judge.judges": self.judge.asks_for_own_reward_model,
            }.items()
            if wanted
        ]
        if wants and not self.reward.train:
            problems.append(f"reward.train is false, but {', '.join(wants)} ask(s) for a reward model")
        if not wants and self.reward.train:
            problems.append("reward.train is true, but no scorer, critic or judge uses one; set it to false")
        if self.ppo.response_length > self.data.max_completion_tokens:
            problems.append(
                f"ppo.response_length={self.ppo.response_length} exceeds data.max_completion_tokens="
                f"{self.data.max_completion_tokens}, the longest answer any stage has seen"
            )
        if self.promotion is not None:
            problems += conflicts(self.promotion, self.judge, self.ppo)
        world = self.launch.num_processes
        for key, size in {
            "base.batch_size": self.base.batch_size,
            "sft.batch_size": self.sft.batch_size,
            "reward.batch_size": self.reward.batch_size,
            "ppo.rollout_batch_size / num_mini_batches": self.ppo.rollout_batch_size
            // self.ppo.num_mini_batches,
        }.items():
            if size % world:
                problems.append(f"{key}={size} is not divisible by launch.num_processes={world}")
        if problems:
            raise ValueError("; ".join(problems))
        return self


def validate(tree: Mapping[str, Any], origin: str) -> Config:
    """Types, ranges and rules of a parsed parameter file.

    Raises:
        ConfigError: naming every problem at once, as `key: what is wrong (given: value)`.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"]) or "params"
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = _did_you_mean(problem["loc"])
            elif problem["type"] == "missing":
                message = "is missing"
            elif not isinstance(problem["input"], Mapping):
                message = f"{message} (given: {problem['input']!r})"
            lines.append(f"  {key}: {message}")
        raise ConfigError(f"{origin} has {len(lines)} problem(s):\n" + "\n".join(lines)) from None


def _did_you_mean(loc: tuple[str | int, ...]) -> str:
    import difflib

    owners: list[Any] = [Config]
    for part in loc[:-1]:
        fields = [f for owner in owners for n, f in owner.model_fields.items() if part in (n, f.alias)]
        if fields:
            owners = [section for field in fields for section in _sections(field.annotation)]
        elif isinstance(part, str):  # one of several kinds of section
            owners = [o for o in owners if part in get_args(o.model_fields["kind"].annotation)]
    names = [f.alias or n for owner in owners for n, f in owner.model_fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return (
        f"unknown key; did you mean {close[0]!r}?"
        if close
        else f"unknown key; known here: {', '.join(names)}"
    )


def _sections(annotation: Any) -> list[type[Section]]:
    """The sections named anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]


def lacking(path: Sequence[str], keys: Collection[str]) -> list[str]:
    """The keys that a section at this place of params.yaml needs beside the given ones; of several kinds of
    section those of the one that lacks fewest. Empty where no section stands."""
    owners: list[type[Section]] = [Config]
    for part in path:
        found = [f for owner in owners for n, f in owner.model_fields.items() if part in (n, f.alias)]
        owners = [section for field in found for section in _sections(field.annotation)]
    needed = [[f.alias or n for n, f in o.model_fields.items() if f.is_required()] for o in owners]
    rests = [[key for key in names if key not in keys] for names in needed]
    return min(rests, key=len, default=[])


def load(path: Path = Path("params.yaml")) -> Config:
    """Read and check a parameter file (YAML 1.2, as DVC reads it).

    Raises:
        ConfigError: if it cannot be read or has any problem.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; run from the project's folder") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from None
    return validate(parse(text, str(path)), str(path))


def parse(text: str, origin: str) -> Mapping[str, Any]:
    """The tree of a YAML file's text (YAML 1.2, as DVC reads it).

    Raises:
        ConfigError: if it is no YAML, or holds no sections; `origin` names the file.
    """
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"{origin} is not readable as YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{origin} must hold sections (a mapping), but holds {type(tree).__name__}")
    return tree
