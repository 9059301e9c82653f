"""The part of `params.yaml` that each stage reads: one frozen, typed view per stage.

A stage receives nothing else, and stage `inputs` writes the same values to inputs/STAGE.json, on which the
stage depends. So a change of a judge retrains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from rlhf_tasks.config import schema as s
from rlhf_tasks.config.judge import Judge, Judging
from rlhf_tasks.config.ppo import Ppo, ScoreScaling, Truncation
from rlhf_tasks.config.scorers import Scorer
from rlhf_tasks.config.types import STAGES, Stage, flatten

PRECISION = "launch.precision"
"""The only key of where and how a stage runs that changes results."""
KEEP = "model.keep"
KEY = "key"
"""The name, in a field's metadata, of the dotted key of one value inside a section."""


class Ready(NamedTuple):
    """A model that params.yaml names, and that no stage trains."""

    key: str
    """model.base, sft.from or reward.from."""
    name: str
    """A folder, a hub id, a GGUF file, or `package:NAME/FILE`."""
    revision: str | None


@dataclass(frozen=True, kw_only=True)
class StageView:
    """What every stage reads: where and how it runs. Subclasses add what their stage declares."""

    stage: ClassVar[Stage]

    launch: s.Launch
    resume: s.Resume
    tracking: s.Tracking
    reference: Ready | None
    """The ready model to which the stage writes a reference; null where it trains or copies one."""
    declared: Mapping[str, Any]
    """The declared parameters as plain `{"ppo.kl_coef": 0.05, …}`, for tracking and model cards."""

    @classmethod
    def _own(cls) -> dict[str, str]:
        """The dotted key of each field that the stage declares."""
        common = {one.name for one in fields(StageView)}
        return {one.name: one.metadata.get(KEY, one.name) for one in fields(cls) if one.name not in common}

    @classmethod
    def reads(cls) -> tuple[str, ...]:
        """The dotted keys of the parameters on which the stage's results depend."""
        return (*cls._own().values(), *([PRECISION] if issubclass(cls, ModelView) else []))

    @classmethod
    def of(cls, config: s.Config) -> Self:
        """The stage's part of a config."""
        flat, sections = flatten(config.model_dump(mode="json", by_alias=True)), cls.reads()
        declared = {key: flat[key] for key in flat if any(f"{key}.".startswith(f"{r}.") for r in sections)}
        own = {one.name: _value(config, one) for one in fields(cls) if one.name in cls._own()}
        # a value inside a section that is null is at its default
        inner = {key: own[name] for name, key in cls._own().items() if key.rpartition(".")[0] in flat}
        declared |= inner
        # only a stage that fetches a ready model depends on how that is kept
        ready, keep = _ready(cls.stage, flat), declared.pop(KEEP, config.model.keep)
        declared |= {} if ready is None else {KEEP: keep}
        where = {name: getattr(config, name) for name in ("launch", "resume", "tracking")}
        reference = ready if keep == "reference" else None
        return cls(declared=declared, reference=reference, **where, **own)


def _ready(stage: Stage, flat: Mapping[str, Any]) -> Ready | None:
    """The ready model that a stage fetches."""
    key = {"base": "model.base", "sft": "sft.from", "reward": "reward.from"}.get(stage, "")
    name = flat.get(key)
    return None if name in (None, "scratch") else Ready(key, name, flat[f"{key.split('.')[0]}.revision"])


def _value(config: s.Config, field_of_view: Field[Any]) -> Any:
    """The value of a field's key; the field's default inside of a section that is null."""
    value: Any = config
    for part in field_of_view.metadata.get(KEY, field_of_view.name).split("."):
        if value is None:
            return field_of_view.default
        value = getattr(value, part, None)
    return field_of_view.default if value is None and field_of_view.default is not MISSING else value


V = TypeVar("V", bound=StageView)


def _keep(view: V, *keys: str) -> V:
    """The view of a stage that reads only these of its parameters, such as one that trains nothing."""
    return replace(view, declared={key: view.declared[key] for key in keys if key in view.declared})


@dataclass(frozen=True, kw_only=True)
class PrepareView(StageView):
    stage = "prepare"

    seed: int
    data: s.Data
    model: s.Model
    prepare: s.Prepare
    train_on: Literal["last", "all"] = field(metadata={KEY: "sft.train_on"})
    response_length: int = field(metadata={KEY: "ppo.response_length"})


@dataclass(frozen=True, kw_only=True)
class ModelView(StageView):
    """Of a stage that computes with models, so that its results depend on PRECISION."""

    seed: int


@dataclass(frozen=True, kw_only=True)
class BaseView(ModelView):
    stage = "base"

    model: s.Model
    base: s.Base


@dataclass(frozen=True, kw_only=True)
class SftView(ModelView):
    stage = "sft"

    sft: s.Sft


@dataclass(frozen=True, kw_only=True)
class PreferencesView(ModelView):
    stage = "preferences"

    data_source: s.Source = field(metadata={KEY: "data.source"})
    max_completion_tokens: int = field(metadata={KEY: "data.max_completion_tokens"})
    preferences: s.Preferences
    train_reward_model: bool = field(metadata={KEY: "reward.train"})
    train_dpo: bool = field(metadata={KEY: "dpo.train"})
    stop_token: Literal["eos"] | int = field(metadata={KEY: "ppo.stop_token"})

    @classmethod
    def of(cls, config: s.Config) -> Self:
        """Where a reward model needs the pairs, they are there for stage dpo too, and nothing runs again."""
        view = super().of(config)
        others = [key for key in view.declared if key != "dpo.train"]
        return _keep(view, *others) if view.train_reward_model else view

    @property
    def uses_pairs(self) -> bool:
        """Whether a later stage trains on pairs."""
        return self.train_reward_model or self.train_dpo


@dataclass(frozen=True, kw_only=True)
class RewardView(ModelView):
    stage = "reward"

    reward: s.Reward


@dataclass(frozen=True, kw_only=True)
class DpoView(ModelView):
    stage = "dpo"

    dpo: s.Dpo
    score_scaling: ScoreScaling | None = field(metadata={KEY: "ppo.score_scaling"})
    truncation: Truncation = field(metadata={KEY: "ppo.truncation"})
    response_length: int = field(metadata={KEY: "ppo.response_length"})
    temperature: float = field(metadata={KEY: "ppo.temperature"})
    stop_token: Literal["eos"] | int = field(metadata={KEY: "ppo.stop_token"})
    has_reward_model: bool = field(metadata={KEY: "reward.train"})
    labeler: str | None = field(default=None, metadata={KEY: "preferences.function"})
    num_labeled: int = field(metadata={KEY: "preferences.num_prompts"})

    @classmethod
    def of(cls, config: s.Config) -> Self:
        """Without a policy to train, only that is read."""
        view = super().of(config)
        return view if view.dpo.train else _keep(view, "dpo.train")


@dataclass(frozen=True, kw_only=True)
class ValueView(ModelView):
    stage = "value"

    value: s.Value
    train_ppo: bool = field(metadata={KEY: "ppo.train"})
    critic_init: str | None = field(default=None, metadata={KEY: "ppo.advantages.critic.init"})
    gamma: float = field(default=1.0, metadata={KEY: "ppo.advantages.gamma"})
    scorers: tuple[Scorer, ...] = field(metadata={KEY: "ppo.scorers"})
    score_scaling: ScoreScaling | None = field(metadata={KEY: "ppo.score_scaling"})
    truncation: Truncation = field(metadata={KEY: "ppo.truncation"})
    response_length: int = field(metadata={KEY: "ppo.response_length"})
    temperature: float = field(metadata={KEY: "ppo.temperature"})
    stop_token: Literal["eos"] | int = field(metadata={KEY: "ppo.stop_token"})
    gradient_checkpointing: bool = field(metadata={KEY: "ppo.gradient_checkpointing"})
    has_reward_model: bool = field(metadata={KEY: "reward.train"})

    @classmethod
    def of(cls, config: s.Config) -> Self:
        """Without a critic to train, only that is read: another scorer does not run the stage again."""
        view = super().of(config)
        if view.critic_init == "value" and view.train_ppo:
            return view
        return _keep(view, "ppo.advantages.critic.init" if view.train_ppo else "ppo.train")


@dataclass(frozen=True, kw_only=True)
class PpoView(ModelView):
    stage = "ppo"

    ppo: Ppo
    has_reward_model: bool = field(metadata={KEY: "reward.train"})
    is_trial: bool = field(default=False, metadata={KEY: "promotion.trial"})
    """Written into the policy: what was trained as a trial is never promoted, whatever the gate's settings
    are later."""

    @classmethod
    def of(cls, config: s.Config) -> Self:
        """Where stage dpo's policy is passed on, no other key of the section is read."""
        view = super().of(config)
        return view if view.ppo.train else _keep(view, "ppo.train", "promotion.trial")


@dataclass(frozen=True, kw_only=True)
class JudgeView(ModelView):
    stage = "judge"

    data_source: s.Source = field(metadata={KEY: "data.source"})
    max_completion_tokens: int = field(metadata={KEY: "data.max_completion_tokens"})
    judge: Judging


@dataclass(frozen=True, kw_only=True)
class VerdictView(StageView):
    stage = "verdict"

    promotion: s.Promotion | None
    judges: tuple[Judge, ...] = field(metadata={KEY: "judge.judges"})
    bar: Literal["base", "reference"] = field(metadata={KEY: "judge.bar"})


@dataclass(frozen=True, kw_only=True)
class ReportView(StageView):
    stage = "report"

    preset: str | None
    seed: int
    data: s.Data
    model: s.Model
    prepare: s.Prepare
    base: s.Base
    sft: s.Sft
    preferences: s.Preferences
    reward: s.Reward
    dpo: s.Dpo
    value: s.Value
    ppo: Ppo
    judge: Judging
    promotion: s.Promotion | None


_KNOWN = [*StageView.__subclasses__(), *ModelView.__subclasses__()]
_VIEW_OF = {view.stage: view for view in _KNOWN if view is not ModelView}
VIEWS: Mapping[Stage, type[StageView]] = {stage: _VIEW_OF[stage] for stage in STAGES}
