"""The part of `params.yaml` that each stage reads: one frozen, typed view per stage.

A stage receives nothing else, and stage `inputs` writes the same values to inputs/STAGE.json, on which the
stage depends. So a change of a judge retrains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self

from rlhf_tasks.config import schema as s
from rlhf_tasks.config.judge import Judge, Judging
from rlhf_tasks.config.ppo import Ppo
from rlhf_tasks.config.types import Stage, flatten

RUNTIME_SECTIONS = ("launch", "resume", "tracking")
"""Sections that every stage may read: where and how it runs. Only PRECISION changes results."""
PRECISION = "launch.precision"
KEY = "key"
"""The name, in a field's metadata, of the dotted key of one value inside a section."""
DataSource = Literal["synthetic", "arithmetic", "docstrings", "files", "hub"]


@dataclass(frozen=True, kw_only=True)
class StageView:
    """The sections that every stage reads. Subclasses add those that their stage declares."""

    stage: ClassVar[Stage]
    has_models: ClassVar[bool] = False
    """Whether the stage computes with models, so that its results depend on PRECISION."""

    launch: s.Launch
    resume: s.Resume
    tracking: s.Tracking
    declared: Mapping[str, Any]
    """The declared parameters as plain `{"ppo.kl_coef": 0.05, …}`, for tracking and model cards."""

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """The dotted keys of the parameters on which the stage's results depend."""
        own = [one for one in fields(cls) if one.name not in (*RUNTIME_SECTIONS, "declared")]
        return (*(one.metadata.get(KEY, one.name) for one in own), *([PRECISION] if cls.has_models else []))

    @classmethod
    def of(cls, config: s.Config) -> Self:
        """The stage's part of a config."""
        reads = cls.reads()
        flat = flatten(config.model_dump(mode="json", by_alias=True))
        declared = {
            key: v for key, v in flat.items() if any(key == r or key.startswith(f"{r}.") for r in reads)
        }
        values: dict[str, Any] = {name: getattr(config, name) for name in RUNTIME_SECTIONS}
        for one in fields(cls):
            if one.name not in (*RUNTIME_SECTIONS, "declared"):
                value: Any = config
                for part in one.metadata.get(KEY, one.name).split("."):
                    value = getattr(value, part)
                values[one.name] = value
        return cls(declared=declared, **values)


@dataclass(frozen=True, kw_only=True)
class PrepareView(StageView):
    stage = "prepare"

    seed: int
    data: s.Data
    model: s.Model
    prepare: s.Prepare


@dataclass(frozen=True, kw_only=True)
class BaseView(StageView):
    stage = "base"
    has_models = True

    seed: int
    model: s.Model
    base: s.Base


@dataclass(frozen=True, kw_only=True)
class SftView(StageView):
    stage = "sft"
    has_models = True

    seed: int
    sft: s.Sft


@dataclass(frozen=True, kw_only=True)
class PreferencesView(StageView):
    stage = "preferences"
    has_models = True

    seed: int
    data_source: DataSource = field(metadata={KEY: "data.source"})
    max_completion_tokens: int = field(metadata={KEY: "data.max_completion_tokens"})
    preferences: s.Preferences
    train_reward_model: bool = field(metadata={KEY: "reward.train"})


@dataclass(frozen=True, kw_only=True)
class RewardView(StageView):
    stage = "reward"
    has_models = True

    seed: int
    reward: s.Reward


@dataclass(frozen=True, kw_only=True)
class PpoView(StageView):
    stage = "ppo"
    has_models = True

    seed: int
    ppo: Ppo
    has_reward_model: bool = field(metadata={KEY: "reward.train"})


@dataclass(frozen=True, kw_only=True)
class JudgeView(StageView):
    stage = "judge"
    has_models = True

    seed: int
    data_source: DataSource = field(metadata={KEY: "data.source"})
    max_completion_tokens: int = field(metadata={KEY: "data.max_completion_tokens"})
    judge: Judging


@dataclass(frozen=True, kw_only=True)
class VerdictView(StageView):
    stage = "verdict"

    promotion: s.Promotion | None
    judges: tuple[Judge, ...] = field(metadata={KEY: "judge.judges"})


@dataclass(frozen=True, kw_only=True)
class ReportView(StageView):
    stage = "report"

    seed: int
    data: s.Data
    model: s.Model
    prepare: s.Prepare
    base: s.Base
    sft: s.Sft
    preferences: s.Preferences
    reward: s.Reward
    ppo: Ppo
    judge: Judging
    promotion: s.Promotion | None


VIEWS: Mapping[Stage, type[StageView]] = {view.stage: view for view in StageView.__subclasses__()}
