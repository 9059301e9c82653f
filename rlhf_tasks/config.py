"""`params.yaml` as frozen, typed sections.

`params.yaml` holds the values; the types below hold names, units, ranges and rules, and no
defaults, so that each value lives once. An optional feature is a section that is null when off.
Every problem of a file is told in one `ConfigError`, before anything is loaded. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

Stage = Literal["prepare", "base", "sft", "preferences", "reward", "ppo", "judge", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Split = Literal["train", "validation", "test"]

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class UserError(Exception):
    """A mistake that the user can mend: shown as one message, exit code 2."""


class ConfigError(UserError):
    """Every problem of a parameter file, in one message."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _pinned_revision(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError(
            "a hub revision must be a full commit hash (40 hex digits), so that a rerun reads the same bytes"
        )
    return value


Revision = Annotated[str, AfterValidator(_pinned_revision)]


def is_hub_id(source: str) -> bool:
    """A model source is a local folder where one exists, `NAME/REPO` on the hub otherwise."""
    return not Path(source).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None


def _checked_source(source: str | None, revision: str | None, key: str) -> None:
    if source is None:
        if revision is not None:
            raise ValueError(f"{key} names no model: `revision` would be ignored; set it to null too")
        return
    if is_hub_id(source) and revision is None:
        raise ValueError(
            f"{key}={source!r} is no local folder, so it is read as a hub id, and needs `revision`: "
            "a commit hash; "
            f"`git ls-remote https://huggingface.co/{source} HEAD` tells it"
        )
    if revision is not None and Path(source).exists():
        raise ValueError(f"{key}={source!r} is a local folder: `revision` would be ignored; set it to null")


# ---------------------------------------------------------------------------------------- data


class Columns(Section):
    """What the user's files call our columns; null where the file has none."""

    prompt: str
    completion: str
    chosen: str
    rejected: str


class HubSet(Section):
    id: str
    revision: Revision
    name: str | None = Field(description="the set's configuration, if it has several")

    @model_validator(mode="before")
    @classmethod
    def _is_pinned(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "id" in values and values.get("revision") is None:
            where = f"https://huggingface.co/datasets/{values['id']}"
            raise ValueError(
                f"{values['id']!r} needs `revision`: a commit hash; `git ls-remote {where} HEAD` tells it"
            )
        return values


class HubSources(Section):
    """A `datasets` id per role. `preferences` null: the SFT policy's own samples are the rejected ones."""

    sft: HubSet
    preferences: HubSet | None


class Data(Section):
    source: Literal["synthetic", "docstrings", "files", "hub"]
    path: str = Field(description="file or folder of `source: files`; a DVC dependency")
    hub: HubSources | None
    columns: Columns
    on_bad_row: Literal["fail", "quarantine"]
    max_prompt_tokens: PositiveInt
    max_completion_tokens: PositiveInt = Field(description="EOS included")
    num_validation: PositiveInt = Field(description="prompts, where the source has no such split")
    num_test: PositiveInt = Field(description="prompts, where the source has no such split")
    max_rows: PositiveInt | None = Field(description="train rows kept per role; null keeps all")

    @model_validator(mode="after")
    def _hub_goes_with_its_source(self) -> Data:
        if (self.source == "hub") != (self.hub is not None):
            raise ValueError("`data.hub` names the sets of `source: hub`: set both, or `hub: null`")
        return self


class Scratch(Section):
    """Shape of a base model trained from nothing."""

    family: Literal["gpt_neox", "llama", "qwen2", "gpt2"]
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    vocab_size: PositiveInt = Field(description="upper bound for the trained tokenizer")
    tokenizer: Literal["words", "bpe"]

    @model_validator(mode="after")
    def _heads_divide(self) -> Scratch:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} / num_heads={self.num_heads} must be an even whole number "
                "(rotary embeddings)"
            )
        return self


class Model(Section):
    base: str = Field(description="`scratch`, a local folder, or a hub id")
    revision: Revision | None
    scratch: Scratch | None

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.base == "scratch") != (self.scratch is not None):
            raise ValueError("`model.scratch` is the shape of `base: scratch`: set both, or `scratch: null`")
        _checked_source(None if self.base == "scratch" else self.base, self.revision, "model.base")
        return self


# ---------------------------------------------------------------------------------- optimisation


class Optimisation(Section):
    """What every supervised loop has. AdamW, betas .9/.98, eps 1e-5 (arXiv 2403.17031, appendix)."""

    learning_rate: PositiveFloat
    schedule: Literal["constant", "linear", "cosine"]
    warmup_fraction: Fraction
    weight_decay: NonNegativeFloat
    max_grad_norm: PositiveFloat
    batch_size: PositiveInt = Field(description="rows per optimiser step, over all processes")
    micro_batch_tokens: PositiveInt = Field(description="padded tokens per forward pass and process")
    num_epochs: PositiveFloat


class Prepare(Section):
    synthetic_sft_rows: PositiveInt
    synthetic_preference_rows: PositiveInt
    docstrings_max_pairs: PositiveInt = Field(description="upper bound on mined pairs")


class Base(Optimisation):
    pass


class Sft(Optimisation):
    source: str | None = Field(
        alias="from", description="a ready SFT model: folder or hub id; null trains one"
    )
    revision: Revision | None
    evals_per_epoch: PositiveInt
    patience: PositiveInt = Field(description="evaluations without a new validation minimum before it stops")

    @model_validator(mode="after")
    def _origin(self) -> Sft:
        _checked_source(self.source, self.revision, "sft.from")
        return self


class Preferences(Section):
    num_prompts: Count = Field(
        description="prompts answered by the SFT policy for comparison; 0: given pairs only"
    )
    pairs_per_prompt: PositiveInt
    temperature: PositiveFloat
    label_noise: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        description="share of the gold judge's labels that are flipped (synthetic task)"
    )


class Reward(Optimisation):
    source: str | None = Field(
        alias="from", description="a ready reward model: folder or hub id; null trains one"
    )
    revision: Revision | None
    margin: NonNegativeFloat = Field(description="chosen must lead by this much: −log σ(Δ − margin)")
    centring_coef: NonNegativeFloat = Field(description="× mean (r_chosen + r_rejected)², arXiv 2312.09244")
    lm_coef: NonNegativeFloat = Field(description="× LM loss on the chosen answer, PPO-max's β")

    @model_validator(mode="after")
    def _origin(self) -> Reward:
        _checked_source(self.source, self.revision, "reward.from")
        return self


class Ppo(Section):
    """The names are the papers'; see README for each one's formula."""

    total_episodes: PositiveInt
    rollout_batch_size: PositiveInt = Field(description="episodes per update, over all processes")
    num_mini_batches: PositiveInt = Field(description="optimiser steps per epoch")
    num_ppo_epochs: PositiveInt
    micro_batch_tokens: PositiveInt = Field(description="padded tokens per forward pass and process")
    learning_rate: PositiveFloat
    schedule: Literal["constant", "linear", "cosine"]
    warmup_fraction: Fraction
    max_grad_norm: PositiveFloat
    response_length: PositiveInt
    temperature: PositiveFloat
    truncation: Literal["eos_trick_replace", "none"]
    missing_eos_score: float = Field(description="score of an answer without EOS under eos_trick_replace")
    kl_coef: NonNegativeFloat
    cliprange: PositiveFloat
    cliprange_value: PositiveFloat
    vf_coef: NonNegativeFloat
    gamma: Fraction
    lam: Fraction
    whiten_rewards: bool
    num_sample_generations: Count
    num_selections: PositiveInt = Field(
        description="times models/reward_heldout tries the policy on validation prompts; the best is kept"
    )
    num_selection_prompts: PositiveInt

    @model_validator(mode="after")
    def _whole_batches(self) -> Ppo:
        if self.rollout_batch_size % self.num_mini_batches:
            raise ValueError(
                f"rollout_batch_size={self.rollout_batch_size} is not divisible by "
                f"num_mini_batches={self.num_mini_batches}"
            )
        if self.total_episodes < self.rollout_batch_size:
            raise ValueError(
                f"total_episodes={self.total_episodes} is less than one rollout of "
                f"{self.rollout_batch_size}: nothing would be trained"
            )
        return self


JudgeName = Literal["gold", "reward_model"]


class Judge(Section):
    judges: tuple[JudgeName, ...] = Field(strict=False, min_length=1)
    num_examples: PositiveInt
    temperature: PositiveFloat
    num_samples_shown: Count


# ------------------------------------------------------------------- where and how, not what


class Launch(Section):
    """How training stages are started; no stage's result is named by it."""

    num_processes: PositiveInt
    num_machines: PositiveInt
    deepspeed: Literal["zero2", "zero3"] | None
    mixed_precision: Literal["no", "bf16"]


class Tracking(Section):
    enabled: bool
    uri: str | None = Field(description="null: the SQLite store under .rlhf/")
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
    judge: Judge
    launch: Launch
    tracking: Tracking

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = []
        if "gold" in self.judge.judges and self.data.source != "synthetic":
            problems.append(
                f"judge.judges: gold knows the synthetic task only, data.source is {self.data.source!r}"
            )
        if self.ppo.response_length > self.data.max_completion_tokens:
            problems.append(
                f"ppo.response_length={self.ppo.response_length} exceeds data.max_completion_tokens="
                f"{self.data.max_completion_tokens}, the longest answer any stage has seen"
            )
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


# What each stage may read of params.yaml; dvc.yaml declares the same (tests/test_contracts.py).
# A stage is handed nothing else, so that a judge's knob retrains nothing.
READS: Mapping[Stage, tuple[str, ...]] = {
    "prepare": ("seed", "data", "model", "prepare"),
    "base": ("seed", "model", "base"),
    "sft": ("seed", "sft"),
    "preferences": ("seed", "data.source", "data.max_completion_tokens", "preferences"),
    "reward": ("seed", "reward"),
    "ppo": ("seed", "ppo"),
    "judge": ("seed", "data.source", "data.max_completion_tokens", "judge"),
    "report": (),
}


class StageView:
    """The part of a config that one stage declares; anything else raises AttributeError."""

    ambient: ClassVar[tuple[str, ...]] = ("launch", "tracking")

    def __init__(self, config: Config, stage: Stage) -> None:
        self._config, self.stage = config, stage

    def __getattr__(self, name: str) -> Any:
        reads = READS[self.stage]
        if name in reads or name in self.ambient:
            return getattr(self._config, name)
        inner = {r.split(".")[1] for r in reads if r.startswith(f"{name}.")}
        if inner:
            return _Fields(getattr(self._config, name), inner, f"{self.stage} reads of {name}")
        raise AttributeError(
            f"stage {self.stage!r} does not declare params section {name!r} (it reads {', '.join(reads)})"
        )

    def declared(self) -> dict[str, Any]:
        """The declared parameters as plain `{"ppo.kl_coef": 0.05, …}`, for tracking and model cards."""
        flat = flatten(self._config.model_dump(mode="json", by_alias=True))
        return {
            k: v for k, v in flat.items() if any(k == r or k.startswith(f"{r}.") for r in READS[self.stage])
        }


class _Fields:
    def __init__(self, section: Section, names: set[str], who: str) -> None:
        self._section, self._names, self._who = section, names, who

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"{self._who} only {', '.join(sorted(self._names))}, not {name!r}")
        return getattr(self._section, name)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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

    owner: Any = Config
    for part in loc[:-1]:
        field = next((f for n, f in owner.model_fields.items() if part in (n, f.alias)), None)
        owner = (
            next(
                (
                    a
                    for a in (field.annotation, *get_args(field.annotation))
                    if isinstance(a, type) and issubclass(a, Section)
                ),
                Section,
            )
            if field
            else Section
        )
    names = [f.alias or n for n, f in owner.model_fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return (
        f"unknown key; did you mean {close[0]!r}?"
        if close
        else f"unknown key; known here: {', '.join(names)}"
    )


def load(path: Path = Path("params.yaml")) -> Config:
    """Read and check a parameter file (YAML 1.2, as DVC reads it).

    Raises:
        ConfigError: if it cannot be read or has any problem.
    """
    try:
        tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; run from the project's folder") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} must hold sections (a mapping), but holds {type(tree).__name__}")
    return validate(tree, str(path))
