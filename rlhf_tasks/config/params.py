"""`params.yaml` as one frozen, typed `Config`; reading and checking it.

Every problem of a file is reported in one `ConfigError`, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_tasks.config.data import Data, Model
from rlhf_tasks.config.engine import process_conflicts
from rlhf_tasks.config.judge import OPTIMISED, Judging
from rlhf_tasks.config.ppo import Ppo
from rlhf_tasks.config.promotion import Promotion, conflicts
from rlhf_tasks.config.scorers import reward_folders
from rlhf_tasks.config.service import Service
from rlhf_tasks.config.training import Base, Preferences, Prepare, Reward, Sft
from rlhf_tasks.config.types import (
    NumProcesses,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    StoreUri,
)
from rlhf_tasks.errors import ConfigError

MAX_SHOWN_VALUE = 200  # characters of a wrong value in a message

# ---------------------------------------------------- sections that change where and how a stage runs

Layout = Literal["ddp", "zero2", "zero3", "fsdp2"]
Precision = Literal["auto", "fp32", "bf16"]


class Launch(Section):
    """Processes and precision of the training stages."""

    num_processes: NumProcesses
    """Number of processes, over all machines; above 1, `accelerate launch` starts them."""
    num_machines: NumProcesses
    """Number of machines that share the processes."""
    layout: Layout
    """What the processes share of a model in training. `ddp`: each has all of it. `zero2` (DeepSpeed): each
    keeps a part of the gradients and of the optimiser's state. `zero3` (DeepSpeed) and `fsdp2` (PyTorch):
    each keeps a part of the weights too."""
    offload: bool
    """Whether what a process keeps of the optimiser's state, and of the weights where the layout shards them,
    is in the machine's memory and not in the GPU's. Not with `ddp`."""
    precision: Precision
    """Number format of forward and backward passes: float32 or bfloat16. `auto` is bf16 where every GPU has
    compute capability 8.0 or more, and fp32 elsewhere; stage `inputs` decides. On a CPU, with `ddp`, bf16
    rounds the factors and results of the layers' matrix products, and the factors of those of the vocabulary
    head, and nothing else; a CPU without instructions for it computes in float32."""
    compile: bool
    """Whether torch compiles the models' layers for the passes that train them. It takes some seconds at the
    start of a stage, and pays for itself in long runs. Only with `ddp`; it needs a C++ compiler."""


class Resume(Section):
    """Snapshots from which a training stage resumes after a crash or a kill."""

    every_seconds: PositiveFloat
    """Time between two snapshots, in seconds."""
    keep: PositiveInt
    """Number of snapshots kept, in case the last one is damaged."""


class Tracking(Section):
    """MLflow: whether and where runs are tracked."""

    enabled: bool
    """Whether stages log to MLflow."""
    uri: StoreUri | None
    """Address of MLflow's store, a database or folder by its absolute path; null: the environment variable
    MLFLOW_TRACKING_URI, else .rlhf/mlflow.db of the main checkout."""
    experiment: str
    """Name of the MLflow experiment."""


class Config(Section):
    """All of `params.yaml`."""

    seed: Seed
    """Seed of every random number of the pipeline."""
    data: Data
    """Source, limits and sizes of the data."""
    model: Model
    """The base model, trained or fetched."""
    prepare: Prepare
    """Sizes of generated or mined data."""
    base: Base
    """Training of the base model."""
    sft: Sft
    """Training of the SFT model."""
    preferences: Preferences
    """Pairs made from samples."""
    reward: Reward
    """Training of the reward models."""
    ppo: Ppo
    """Training of the PPO policy."""
    judge: Judging
    """Judges, retention and diagnostics."""
    promotion: Promotion | None
    """Criteria of the gate; null: there is no gate."""
    launch: Launch
    """Processes and precision of training."""
    resume: Resume
    """Snapshots of a training stage."""
    tracking: Tracking
    """Where runs are tracked."""
    service: Service
    """How the Prefect flow runs stages."""

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        problems = [
            *self._conflicts(), *self._column_conflicts(), *self._reward_model_conflicts(),
            *self._size_conflicts(),
        ]  # fmt: skip
        if self.promotion is not None:
            problems += conflicts(self.promotion, self.judge, self.ppo)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _conflicts(self) -> Iterator[str]:
        guards = self.ppo.guards
        if guards is not None and guards.action == "roll_back" and self.launch.layout != "ddp":
            yield (
                "ppo.guards.action: roll_back keeps a checkpoint in memory, and with launch.layout: "
                f"{self.launch.layout} no process holds all of it; set ppo.guards.action to stop, or "
                "launch.layout to ddp"
            )
        if self.launch.offload and self.launch.layout == "ddp":
            yield (
                "launch.offload: true has nothing to move with launch.layout: ddp; set launch.layout to "
                "fsdp2, zero3 or zero2, or launch.offload to false"
            )
        if self.launch.compile and self.launch.layout != "ddp":
            yield (
                "launch.compile: true compiles whole layers, which launch.layout: "
                f"{self.launch.layout} splits; set launch.compile to false, or launch.layout to ddp"
            )
        yield from process_conflicts(self.ppo.engine, self.launch.num_processes, self.launch.layout)
        if any(judge.kind == "gold" for judge in self.judge.judges) and self.data.source != "synthetic":
            yield (
                "judge.judges: gold only judges the synthetic task, and data.source is "
                f"{self.data.source!r}; remove it, or set data.source to synthetic"
            )

    def _column_conflicts(self) -> Iterator[str]:
        """A verifier reads columns that are kept."""
        users = [("ppo.scorers", one.checks) for one in self.ppo.scorers if one.kind == "verifier"]
        users += [("judge.judges", one.checks) for one in self.judge.judges if one.kind == "verifier"]
        for key, checks in users:
            lost = {check.column for check in checks} - set(self.data.columns.keep)
            if lost:
                names = ", ".join(sorted(lost))
                yield f"{key}: a verifier needs the column {names}; add it to data.columns.keep"

    def _reward_model_conflicts(self) -> Iterator[str]:
        """A reward model is trained if and only if something uses it."""
        users = [
            key
            for key, uses_reward_model in {
                "ppo.scorers": OPTIMISED in reward_folders(self.ppo.scorers),
                "ppo.critic_init": self.ppo.critic_init == "reward",
                "judge.judges": self.judge.needs_pipeline_reward_model,
            }.items()
            if uses_reward_model
        ]
        if users and not self.reward.train:
            yield f"reward.train is false, but a reward model is needed by {', '.join(users)}; set it to true"
        if not users and self.reward.train:
            yield "reward.train is true, but no scorer, critic or judge uses one; set it to false"

    def _size_conflicts(self) -> Iterator[str]:
        if self.ppo.response_length > self.data.max_completion_tokens:
            yield (
                f"ppo.response_length={self.ppo.response_length} exceeds data.max_completion_tokens="
                f"{self.data.max_completion_tokens}, the longest completion in the training data"
            )
        world = self.launch.num_processes
        for key, size in {
            "base.batch_size": self.base.batch_size,
            "sft.batch_size": self.sft.batch_size,
            "reward.batch_size": self.reward.batch_size,
            "ppo.rollout_batch_size / num_mini_batches": self.ppo.rollout_batch_size
            // self.ppo.num_mini_batches,
            "ppo.rollout_batch_size / samples_per_prompt": self.ppo.rollout_batch_size
            // self.ppo.samples_per_prompt,
        }.items():
            if size % world:
                yield f"{key}={size} is not divisible by launch.num_processes={world}"


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
                message = f"{message} (given: {_shown(problem['input'])})"
            lines.append(f"  {key}: {message}")
        raise ConfigError(f"{origin} has {len(lines)} problem(s):\n" + "\n".join(lines)) from None


def _shown(value: Any) -> str:
    """A value in a message, cut after a line or so."""
    text = hex(value) if type(value) is int and value.bit_length() > 256 else repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}…"


def _did_you_mean(loc: tuple[str | int, ...]) -> str:
    import difflib

    owners: list[Any] = [Config]
    for part in loc[:-1]:
        fields = [f for owner in owners for n, f in owner.model_fields.items() if part in (n, f.alias)]
        if fields:
            owners = [section for field in fields for section in _sections(field.annotation)]
        elif isinstance(part, str):  # the `kind` of a section
            owners = [o for o in owners if part in get_args(o.model_fields["kind"].annotation)]
    names = [f.alias or n for owner in owners for n, f in owner.model_fields.items()]
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return (
        f"unknown key; did you mean {close[0]!r}?"
        if close
        else f"unknown key; known here: {', '.join(names)}"
    )


def _sections(annotation: Any) -> list[type[Section]]:
    """The section types that occur anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]


def missing_keys(path: Sequence[str], keys: Collection[str]) -> list[str]:
    """The keys that the section at `path` needs beside the given ones.

    Where several kinds of section are allowed, those of the kind that needs the fewest. Empty where there
    is no section.
    """
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
    return validate(parse(read_text(path), str(path)), str(path))


def read_text(path: Path) -> str:
    """The text of a parameter file.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; run from the project's folder") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from None


def parse(text: str, origin: str) -> Mapping[str, Any]:
    """The tree of a YAML file's text (YAML 1.2, as DVC reads it).

    Raises:
        ConfigError: if it is not YAML or not a mapping; `origin` names the file.
    """
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, RecursionError) as error:  # for a number too long, or too deep lists
        reason = str(error).partition("\nTo suppress this check")[0].rstrip()  # advice for programmers
        raise ConfigError(f"{origin} is not readable as YAML: {reason}") from None
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{origin} must hold sections (a mapping), but holds {type(tree).__name__}")
    return tree
