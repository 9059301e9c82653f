"""The sections of params.yaml but `ppo` and `judge`, and all of them as one `Config`.

The types hold names, units, ranges, rules and defaults: what params.yaml does not have is at its default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rlhf_tasks.config import types as t
from rlhf_tasks.config.judge import CombinedJudge, Judge, Judging, RewardModelJudge, optimized_by
from rlhf_tasks.config.ppo import Lora, Ppo
from rlhf_tasks.config.scorers import OPTIMIZED, reward_folders
from rlhf_tasks.config.types import Section, check_source

Schedule = Literal["constant", "linear", "cosine"]
NumEpochs = Annotated[float, Field(gt=0, le=10_000)]
Source = Annotated[
    str, t.import_path("synthetic", "files", "hub", "mix", example="examples.arithmetic:arithmetic")
]
NumProcesses = Annotated[int, Field(ge=1, le=2**16)]

# ------------------------------------------------------------------------------------- data and model


TEXTS = "prompts", "responses", "completions", "a", "b"
"""The parameters by which functions of the user's get texts."""


class Columns(Section):
    """The names of the columns in the user's files or hub data sets."""

    prompt: str = "prompt"
    """Column that holds the prompt."""
    completion: str = "completion"
    """Column that holds the reference: a human-written response."""
    chosen: str = "chosen"
    """Column that holds the preferred response of a pair."""
    rejected: str = "rejected"
    """Column that holds the other response of a pair."""
    system: str | None = None
    """Column of a system message that stands before the prompt; null: the column `system`, if it exists."""
    keep: t.Names = ()
    """List of further columns of the prompts' rows for scorers and judges. The built-in task has `who`,
    `thing`, `place` and `plan`."""

    def problems(self) -> Iterator[str]:
        roles = "prompt", "completion", "chosen", "rejected", "system"
        names = {role: name.strip().casefold() for role in roles if (name := getattr(self, role)) is not None}
        if taken := [name for name in self.keep if name in TEXTS]:
            yield (
                f"keep: functions get texts of their own as {', '.join(TEXTS)}; give the column "
                f"{', '.join(taken)} another name"
            )
        for one, other in itertools.combinations(names, 2):
            if names[one] == names[other]:
                yield f"{one} and {other} name the same column, {names[one]!r}; each needs a name of its own"


class HubSet(Section):
    """One data set of the Hugging Face hub, pinned to a commit."""

    id: str
    """Id of the data set, OWNER/NAME."""
    revision: t.Revision
    """Commit hash of the data set, 40 hex digits."""
    name: str | None = None
    """Configuration of the data set; null: it has only one."""

    @model_validator(mode="before")
    @classmethod
    def _is_pinned(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "id" in values and values.get("revision") is None:
            where = f"https://huggingface.co/datasets/{values['id']}"
            raise ValueError(
                f"{values['id']!r} needs `revision`, a commit hash; `git ls-remote {where} HEAD` prints it"
            )
        return values


class HubSources(Section):
    """The hub data sets of `data.source: hub`: one of them is enough, as one file is."""

    sft: HubSet | None = None
    """Data set of demonstrations; null: the chosen answers of `preferences` are."""
    preferences: HubSet | None = None
    """Data set of preference pairs; null: pairs are made from samples of the SFT model."""
    prompts: HubSet | None = None
    """Data set of PPO's prompts with references; null: those of the demonstrations are."""

    @property
    def by_role(self) -> dict[str, HubSet]:
        """The sets that are given."""
        return {name: found for name in type(self).model_fields if (found := getattr(self, name)) is not None}

    def problems(self) -> Iterator[str]:
        if not self.by_role:
            yield "names no data set; give `sft`, `preferences` or both"


class MixedSet(Section):
    """One data set of a mixture."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """Name of the set in metrics."""
    path: str | None = None
    """File or folder of the set; a DVC dependency of stage prepare."""
    hub: HubSet | None = None
    """Data set of the hub, in place of `path`."""
    format: str | None = None
    """How its rows are read, as in `data.format`; null: as `data.format` says."""
    weight: t.PositiveFloat = 1.0
    """Share of the train rows, relative to the weights of the other sets of the role. Rows are left out or
    repeated so that the shares hold; as many rows are in the mixture as the sets have together."""

    def problems(self) -> Iterator[str]:
        if (self.path is None) == (self.hub is None):
            yield f"set {self.name}: give `path` or `hub`, one of them"


def _as_day(value: Any) -> Any:
    """A date as YAML reads it, or as text: 2025-01-01."""
    try:
        return (value if isinstance(value, date) else date.fromisoformat(value)).isoformat()
    except (TypeError, ValueError):
        raise ValueError("give a date as year-month-day, such as 2025-01-01") from None


Day = Annotated[str, BeforeValidator(_as_day)]


class Data(Section):
    """The data that stage prepare reads, checks and splits."""

    source: Source = "synthetic"
    """Origin: the built-in TL;DR task (`synthetic`), the user's `files`, data sets of the Hugging Face `hub`,
    a mixture of sets (`mix`), or a function that returns rows, such as `examples.arithmetic:arithmetic`."""
    options: dict[str, Any] = Field(default={})
    """Arguments of the function in `source`, by name."""
    path: str = "rlhf_tasks/data/examples"
    """File or folder that `source: files` reads; a DVC dependency of stage prepare."""
    hub: HubSources | None = None
    """Data sets of `source: hub`; null for any other source."""
    mix: Annotated[tuple[MixedSet, ...], t.at_least_one("{name: chat, path: chat.jsonl}")] | None = Field(
        default=None, strict=False
    )
    """List of the sets of `source: mix`; null for any other source. Losses, accuracies and win rates are
    measured by their names too."""
    columns: Columns = Columns()
    """Column names of the sources `files`, `hub` and `mix`."""
    format: str | None = None
    """How rows are read: `demonstrations`, `good_answers`, `label_pairs` or `unpaired_labels` (for `dpo.loss:
    kto`) for answers marked good or bad; the column of the vote or score that pairs answers; or a function of
    yours, `module:function`, that gets a record and returns a row; null: by columns and types."""
    shapes: str | None = None
    """File of shapes of your own, in the form of rlhf_tasks/data/readers/shapes.yaml, which are tried before
    those that are known; null: none."""
    pairs: Literal["best_worst", "best_each", "adjacent", "all"] | None = None
    """The pairs made of ranked or scored answers to a prompt: the best against the worst, the best against
    each other, neighbors, or all; null: `best_each` for trees of messages, else `best_worst`."""
    margin: t.NonNegativeFloat = 0.0
    """Difference of two scores above which they make a pair."""
    on_bad_row: Literal["fail", "quarantine"] = "fail"
    """Rows that cannot be used: `fail` names them and ends the stage, `quarantine` leaves them out and writes
    them to data/quarantine."""
    max_prompt_tokens: t.Tokens = 80
    """Longest prompt, in tokens; a longer one is a bad row."""
    max_completion_tokens: t.Tokens = 32
    """Longest completion, in tokens, EOS included; a longer one is a bad row."""
    num_validation: t.NumRows = 500
    """Number of validation prompts, if the source has no validation split."""
    num_test: t.NumRows = 1000
    """Number of test prompts, if the source has no test split."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether a plain prompt is a user's turn in the chat template of the model, and its answer the
    assistant's: `auto` where the tokenizer has a template and the prompt does not hold its marks already."""
    chat_date: Day = "2025-01-01"
    """The date that a chat template prints where it prints today's: results do not depend on the day."""
    max_rows: t.PositiveInt | None = None
    """Largest number of train rows kept per role (sft, preferences, prompts); null: all of them."""

    @property
    def in_words(self) -> str:
        """The source for people."""
        if self.mix is not None:
            return ", ".join(f"{one.name} ({one.weight:g})" for one in self.mix)
        if self.hub is not None:
            return ", ".join(f"{one.id} at {one.revision[:10]}" for one in self.hub.by_role.values())
        return {"synthetic": "the built-in task", "files": self.path}.get(self.source, self.source)

    def problems(self) -> Iterator[str]:
        if (self.source == "hub") != (self.hub is not None):
            yield "`data.hub` names the data sets of `source: hub`: set both, or `hub: null`"
        if (self.source == "mix") != (self.mix is not None):
            yield "`data.mix` names the data sets of `source: mix`: set both, or `mix: null`"
        if self.options and ":" not in self.source:
            yield "`data.options` are arguments of a function in `source`: set both, or remove the options"
        names = [one.name for one in self.mix or ()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"`data.mix`: several sets have the name {', '.join(twice)}; give each its own name"


class Scratch(Section):
    """The shape of a base model that starts from random weights."""

    family: Literal["gpt_neox", "llama", "qwen2", "gpt2"] = "gpt_neox"
    """Architecture of the model."""
    hidden_size: t.Width = 96
    """Width of the hidden states."""
    num_layers: Annotated[int, Field(ge=1, le=1024)] = 4
    """Number of transformer layers."""
    num_heads: t.Width = 4
    """Number of attention heads; it divides hidden_size."""
    vocab_size: t.PositiveInt = 1024
    """Largest vocabulary of the trained tokenizer, in tokens."""
    tokenizer: Literal["words", "bpe"] = "words"
    """Kind of the trained tokenizer: whole words, or byte-pair encoding."""

    def problems(self) -> Iterator[str]:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            yield (
                f"hidden_size={self.hidden_size} / num_heads={self.num_heads} must be an even whole number "
                "(rotary embeddings)"
            )


class Model(Section):
    """The base model that SFT starts from."""

    base: str = "scratch"
    """Base model: `scratch`, a local folder, a hub id, a GGUF file, or `package:NAME/FILE` for one that an
    installed package ships."""
    revision: t.Revision | None = None
    """Commit hash of a hub id; null for anything else."""
    scratch: Scratch | None = Scratch()
    """Shape of the model for `base: scratch`; null otherwise, as it is where it is left out."""
    keep: Literal["reference", "copy"] = "reference"
    """How the stages keep ready models, of `base`, `sft.from` and `reward.from`: `reference` notes where the
    weights are and their hashes, `copy` puts the weights into DVC."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_shape_of_its_own(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("base", "scratch") != "scratch":
            return {"scratch": None, **values}
        return values

    def problems(self) -> Iterator[str]:
        if (self.base == "scratch") != (self.scratch is not None):
            yield "`model.scratch` is the shape of `base: scratch`: set both, or `scratch: null`"
        yield from check_source(None if self.base == "scratch" else self.base, self.revision, "model.base")


# ---------------------------------------------------------------------------------- supervised stages


class Prepare(Section):
    """The sizes of the data of `data.source: synthetic`."""

    synthetic_prompt_rows: t.NumRows = 2000
    """Number of train prompts."""
    synthetic_sft_rows: t.NumRows = 600
    """Number of those prompts that have a demonstration."""
    synthetic_preference_rows: t.NumRows = 20_000
    """Number of train preference pairs."""

    def problems(self) -> Iterator[str]:
        if self.synthetic_sft_rows > self.synthetic_prompt_rows:
            yield (
                f"synthetic_sft_rows={self.synthetic_sft_rows} must not exceed synthetic_prompt_rows="
                f"{self.synthetic_prompt_rows}: every demonstration answers a prompt"
            )


class Optimization(Section):
    """The parameters of a supervised training loop.

    The optimizer is AdamW with betas 0.9 and 0.98 and eps 1e-5 (arXiv 2403.17031, appendix).
    """

    learning_rate: t.PositiveFloat = 3e-3
    """Peak learning rate, reached after the warm-up."""
    schedule: Schedule = "constant"
    """Shape of the learning rate after the warm-up; `linear` and `cosine` fall to zero."""
    warmup_fraction: t.Fraction = 0.05
    """Share of the optimizer steps in which the learning rate rises linearly from zero."""
    weight_decay: t.NonNegativeFloat = 0.01
    """Weight decay of AdamW."""
    max_grad_norm: t.PositiveFloat | None = 1.0
    """Largest L2 norm of a gradient; a larger one is scaled down; null: no clipping."""
    batch_size: t.BatchSize = 64
    """Rows per optimizer step, over all processes."""
    micro_batch_tokens: t.MicroBatchTokens = t.AUTO
    """Maximum padded tokens per micro-batch and rank; `auto`: by the model (a hub id counts as one of eight
    billion parameters) and the memory of the device, at most 4,096 on a CPU."""
    num_epochs: NumEpochs = 1.0
    """Passes over the train rows; may be a fraction."""


class Base(Optimization):
    """Training of the base model from random weights, for `model.base: scratch`."""


class Trained(Optimization):
    """A model that a stage trains, or that is given."""

    source: str | None = Field(default=None, alias="from")
    """Folder or hub id of a ready model; null: the stage trains one."""
    revision: t.Revision | None = None
    """Commit hash of a hub id in `from`; null otherwise."""

    def problems(self) -> Iterator[str]:
        yield from check_source(self.source, self.revision, f"{type(self).__name__.lower()}.from")


class Sft(Trained):
    """Supervised fine-tuning on demonstrations, to the minimum of the validation loss."""

    schedule: Schedule = "cosine"
    warmup_fraction: t.Fraction = 0.02
    num_epochs: NumEpochs = 12.0
    train_on: Literal["last", "all"] = "last"
    """The turns of the assistant in a conversation that are trained on: the `last` one, or `all` of them."""
    evals_per_epoch: t.PositiveInt = 2
    """Number of evaluations on the validation split per epoch."""
    patience: t.PositiveInt = 4
    """Number of evaluations in a row without a lower validation loss after which training ends."""


class Preferences(Section):
    """Preference pairs made from samples of the SFT model, beside the pairs of the data.

    The chosen response is the reference, the rejected one is a sample. With a `function`, and in the
    synthetic task by its gold judge, both are samples: the best and the worst of `samples_per_pair`.
    """

    num_prompts: t.Count = 2000
    """Number of train prompts for each of which a pair is made; 0: only the pairs of the data."""
    samples_per_pair: Annotated[int, Field(ge=2, le=64, multiple_of=2)] = 2
    """Even number of samples of which the ones with the highest and the lowest score are the pair. With more
    than two the order of a pair is less often chance, and there is more to sample."""
    temperature: t.PositiveFloat = 1.0
    """Sampling temperature of the SFT model."""
    function: t.ImportPath | None = None
    """`module:function` that scores samples, called as a scorer's function is; it returns one float per
    response. A sample with NaN is left out, and equal scores make no pair. null: samples are compared with
    references."""
    label_noise: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Share of the train labels that are flipped: of `function` for samples, and all of the synthetic task;
    0.5: random labels."""


class Reward(Trained):
    """Two reward models: one that PPO optimizes, one held out for selection and judging."""

    train: bool = True
    """Whether reward models are made; false if no scorer, critic, judge or guard uses one."""
    side_by_side: bool = True
    """Whether one process on a CPU becomes two, and each trains one of the two models on half of the cores:
    faster where a model is too small for all cores, in twice the memory. A GPU trains one after the other."""
    learning_rate: t.PositiveFloat = 1e-3
    schedule: Schedule = "linear"
    batch_size: t.BatchSize = 16
    num_epochs: NumEpochs = 3.0
    margin: t.NonNegativeFloat = 0.0
    """Margin m by which r_chosen should exceed r_rejected: the loss is −log σ(r_chosen − r_rejected − m)."""
    centering_coef: t.NonNegativeFloat = 0.01
    """Weight of (r_chosen + r_rejected)² in the loss (arXiv 2312.09244); 0: no such term."""
    lm_coef: t.NonNegativeFloat = 0.0
    """Weight β of the language-model loss on the chosen response (arXiv 2307.04964, eq. 4); 0: none."""
    lora: Lora | None = None
    """Low-rank adapters for the reward models; null: full training."""


DPO_LOSSES = ("sigmoid", "ipo", "kto", "nll")


class Dpo(Optimization):
    """A policy that is trained on preference pairs before PPO, or in its place (`ppo.train: false`).

    It learns from the pairs that models/reward learns from, and models/reward_heldout, which learns from the
    others, chooses its weights by responses to validation prompts, sampled as in PPO. AdamW's eps is
    `adam_eps` here.
    """

    train: bool = False
    """Whether a policy is trained on the pairs; models/dpo is then where PPO starts."""
    loss: Annotated[str, t.import_path(*DPO_LOSSES)] = "sigmoid"
    """`sigmoid` (DPO, arXiv 2305.18290), `ipo` (2310.12036), `kto` (2402.01306, which takes single good and
    bad responses, and a pair as one of each), `nll` (fine-tuning on the chosen response), or a function of
    yours as `module:function`."""
    beta: t.PositiveFloat = 0.1
    """Strength of the tie to the SFT model: with a higher one the policy stays closer."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the labels that `sigmoid` takes for wrong (cDPO)."""
    desirable_weight: t.PositiveFloat = 1.0
    """Weight of the good (chosen) responses in `kto`."""
    undesirable_weight: t.PositiveFloat = 1.0
    """Weight of the bad (rejected) responses in `kto`."""
    learning_rate: t.PositiveFloat = 1e-4
    schedule: Schedule = "linear"
    warmup_fraction: t.Fraction = 0.1
    adam_eps: t.PositiveFloat = 1e-8
    """AdamW's eps: the policy's gradient may lie below 1e-5."""
    batch_size: t.BatchSize = 32
    num_epochs: NumEpochs = 3.0
    evals_per_epoch: t.PositiveInt = 4
    """Number of evaluations per epoch, on validation pairs and on responses to validation prompts."""
    patience: t.PositiveInt = 4
    """Number of evaluations in a row without a better one after which training ends."""
    num_selection_prompts: t.PositiveInt = 256
    """Number of validation prompts that are responded to in an evaluation."""
    max_kl: t.PositiveFloat | None = None
    """Highest KL from the SFT model, in nats per response, of weights that are kept; null: no bound."""
    lora: Lora | None = None
    """Low-rank adapters for the policy; null: full training."""

    def problems(self) -> Iterator[str]:
        if self.label_smoothing and self.loss != "sigmoid":
            yield f"label_smoothing belongs to loss: sigmoid, and not to {self.loss}; set it to 0"
        if (self.desirable_weight, self.undesirable_weight) != (1, 1) and self.loss != "kto":
            yield f"the weights of good and bad responses belong to loss: kto, and not to {self.loss}"


class Value(Optimization):
    """The critic that PPO starts from with `critic.init: value`, trained on Monte Carlo returns.

    They are the discounted scores of responses that the SFT model samples as PPO will, under PPO's rule for
    cut ones. AdamW's eps is `adam_eps` here.
    """

    num_prompts: t.PositiveInt = 1024
    """Number of train prompts that are responded to, at most; a quarter as many of the validation prompts."""
    samples_per_prompt: Annotated[int, Field(ge=2, le=1024)] = 4
    """Responses to each prompt; from two on it shows how much a prompt says of the score."""
    init: Literal["reward", "sft", "base"] = "sft"
    """Initial weights: the reward model with its head, or the trunk of the SFT or base model."""
    learning_rate: t.PositiveFloat = 1e-3
    schedule: Schedule = "cosine"
    adam_eps: t.PositiveFloat = 1e-8
    """AdamW's eps: the gradient of a trunk below a new head lies below 1e-5."""
    batch_size: t.BatchSize = 32
    num_epochs: NumEpochs = 4.0
    evals_per_epoch: t.PositiveInt = 2
    """Number of evaluations on responses to validation prompts per epoch."""
    patience: t.PositiveInt = 4
    """Number of evaluations in a row without a lower validation loss after which training ends."""
    lora: Lora | None = None
    """Low-rank adapters for the critic; null: full training."""


# --------------------------------------------------------------------------------------------- gate


LEAST_BOUND = 0.4
"""Smallest bound on a win rate that can promote: a stated small loss may pass (non-inferiority)."""


class Promotion(Section):
    """The gate's criteria; null turns a criterion off. None of them reads the reward that PPO optimized."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "rlhf-policy"
    """Name of the registered model in MLflow."""
    judge: str = "gold"
    """Name of the judge in judge.judges whose win rates decide."""
    second_judge: str | None = "reward_model"
    """Name of a second judge whose win rates must exceed the same bounds; null: one judge decides."""
    over_sft: t.Fraction = 0.5
    """Bound that the lower end of the 95% interval of the win rate over SFT must exceed; at least 0.4, unless
    `trial`: below that, a policy that clearly loses would pass. The same holds for the next two."""
    over_champion: t.Fraction | None = 0.5
    """The same bound for the win rate over the champion, if there is one; null: it is not compared."""
    over_bar: t.Fraction = 0.5
    """The same bound for the win rate over `judge.bar` as long as there is no champion, or without
    `over_champion`."""
    trial: bool = False
    """Whether these settings only try the pipeline out: no policy that they train is ever promoted."""
    max_kl: t.PositiveFloat | None = 10.0
    """Largest KL from SFT of the checkpoint that PPO kept, in nats per response."""
    max_perplexity_growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    """Largest ratio of the policy's perplexity to SFT's, on each text of judge.retention."""
    max_response_perplexity_growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = 2.0
    """Largest ratio of the perplexities, by the SFT model, of the policy's responses and of SFT's own."""
    min_distinct_ratio: t.Fraction | None = 0.3
    """Smallest ratio, policy to SFT, of the share of different 2-grams in all responses together."""
    max_choice_drop: t.Fraction | None = 0.05
    """Largest drop of multiple-choice accuracy from SFT to the policy."""
    max_task_drop: t.NonNegativeFloat | None = None
    """Largest drop from SFT to the policy on each task of judge.retention.tasks, in its first metric."""
    max_failure_share: t.Fraction | None = 0.02
    """Largest share of failures among the comparisons of the gate's judges."""
    min_examples: t.PositiveInt = 200
    """Smallest number of comparisons per judge and pair, without failures."""

    detects: Annotated[float, Field(gt=0.5, le=0.7)] = 0.6
    """Win rate that min_examples comparisons must tell from one half: in four of five cases its 95% interval
    is above that."""

    @property
    def least_examples(self) -> int:
        """The comparisons that `detects` needs, by the normal approximation at a power of 80%."""
        p = self.detects
        return math.ceil(((1.96 * 0.5 + 0.8416 * math.sqrt(p * (1 - p))) / (p - 0.5)) ** 2)

    @property
    def named(self) -> tuple[str, ...]:
        """The gate's judges."""
        return (self.judge,) if self.second_judge is None else (self.judge, self.second_judge)

    def conflicts(self, config: Config) -> Iterator[str]:
        """The problems of the section that come from other sections."""
        yield from self._judge_conflicts(config)
        judging, retention = config.judge, config.judge.retention
        for key in ("max_perplexity_growth", "max_choice_drop"):
            if getattr(self, key) is not None and retention is None:
                yield f"promotion.{key} needs judge.retention, which measures it; set it to null"
        if not self.trial:
            for key in ("over_sft", "over_champion", "over_bar"):
                if (bound := getattr(self, key)) is not None and bound < LEAST_BOUND:
                    yield (
                        f"promotion.{key}={bound} would pass a policy that clearly loses; give at least "
                        f"{LEAST_BOUND}, or mark the settings by promotion.trial: true"
                    )
        if self.max_task_drop is not None and (retention is None or retention.tasks is None):
            yield "promotion.max_task_drop needs judge.retention.tasks, whose tasks it bounds; set it to null"
        if not self.trial and self.min_examples < self.least_examples:
            yield (
                f"promotion.min_examples={self.min_examples} is less than the {self.least_examples} that "
                f"tell a win rate of {self.detects:.0%} from 50% in four of five cases; raise it, or "
                "promotion.detects, or mark the settings by promotion.trial: true"
            )
        if self.min_examples > judging.num_examples:
            yield (
                f"promotion.min_examples={self.min_examples} is more than judge.num_examples="
                f"{judging.num_examples}, so that no policy could pass"
            )
        if self.max_kl is not None and config.ppo.reference_sync is not None:
            yield (
                "promotion.max_kl bounds the KL from SFT, but with ppo.reference_sync PPO measures the KL "
                "from a reference that follows the policy; set promotion.max_kl to null"
            )

    def _judge_conflicts(self, config: Config) -> Iterator[str]:
        """The gate's judges exist, decided nothing that the policy learned from, and are independent."""
        judges, makes_pairs = config.judge.judges, config.dpo.train and config.preferences.num_prompts > 0
        known = [judge.name for judge in judges]
        scorers = config.ppo.scorers if config.ppo.train else ()
        labels = config.preferences.function if makes_pairs else None
        used = {name: [one for one in judges if one.name in with_parts(judges, name)] for name in self.named}
        for key, name in zip(("judge", "second_judge"), self.named, strict=False):
            if name not in known:
                yield (
                    f"promotion.{key}={name!r} is not in judge.judges ({', '.join(known)}); name one of "
                    "those, or set promotion to null"
                )
            for one in used[name]:
                if reward := optimized_by(scorers, one):
                    yield (
                        f"promotion.{key}={name!r} uses {reward}, which PPO optimizes, so it cannot show "
                        "whether the policy got better; name another judge"
                    )
                if one.kind == "function" and one.function == labels:
                    yield (
                        f"promotion.{key}={name!r} uses {labels}, which labels the pairs that stage dpo "
                        "learns from, so it cannot show whether the policy got better; name another judge"
                    )
        definitions = [one.definition for one in used[self.judge]]
        second = used[self.second_judge] if self.second_judge is not None else []
        if shared := sorted(one.name for one in second if one.definition in definitions):
            yield (
                f"promotion.second_judge={self.second_judge!r} and promotion.judge={self.judge!r} both use "
                f"{', '.join(shared)}; name a second judge that is independent, or set it to null"
            )


def with_parts(judges: Sequence[Judge], name: str) -> set[str]:
    """A judge's name, and the names of the judges that it combines."""
    combined = (one for one in judges if isinstance(one, CombinedJudge) and one.name == name)
    return {name} | {part for one in combined for part in one.judges}


# ------------------------------------------------------------------------ where and how a stage runs

Parallelism = Literal["ddp", "zero2", "zero3", "fsdp2", "hsdp"]
Precision = Literal["auto", "fp32", "bf16"]


class Launch(Section):
    """Processes and precision of the training stages."""

    num_processes: NumProcesses = 1
    """Number of processes, over all machines; above 1, `accelerate launch` starts them."""
    num_machines: NumProcesses = 1
    """Number of machines that share the processes."""
    parallelism: Parallelism = "ddp"
    """What the processes shard: `ddp` nothing, `zero2` (DeepSpeed) gradients and optimizer state, `zero3`
    (DeepSpeed) and `fsdp2` (PyTorch) the weights too; `hsdp` does so within each machine, and every machine
    has a copy."""
    offload: bool = False
    """Whether the shards of optimizer state and weights are in the machine's memory; not with `ddp`."""
    precision: Precision = "auto"
    """Number format of forward and backward passes: float32 or bfloat16; `auto`: bf16 on GPUs that have it,
    and on a CPU with AMX for models at least 512 wide with `ddp`, else fp32. On a CPU, with `ddp`, bf16 only
    rounds the factors and results of matmuls."""
    try_functions: bool = True
    """Whether the Python functions of scorers, judges and labels are called once on four rows, and losses and
    estimators of advantages on random numbers, in a process of their own, before anything trains. It is
    repeated when a function's code changes. And whether each `key_variable` must hold its key by then: false
    where a later stage, on another machine, has it."""

    @property
    def num_shards(self) -> int:
        """The processes that share the weights of a model: 1 where each has all of them."""
        if self.parallelism == "hsdp":
            return self.num_processes // self.num_machines if self.num_machines > 1 else 1
        return self.num_processes if self.parallelism in ("zero3", "fsdp2") else 1


class Resume(Section):
    """Snapshots from which a training stage resumes after a crash or a kill."""

    every_seconds: t.PositiveFloat = 60.0
    """Time between two snapshots, in seconds. Longer until a step ends and the last snapshot is written, and
    where training waits more than 2% of it for the disk, or 10% for a copy in memory."""
    keep: t.PositiveInt = 2
    """Number of snapshots kept, in case the last one is damaged."""


class Tracking(Section):
    """MLflow: whether and where runs are tracked."""

    enabled: bool = True
    """Whether stages log to MLflow."""
    uri: t.StoreUri | None = None
    """Address of MLflow's store, by absolute path if local; null: the environment's MLFLOW_TRACKING_URI, else
    .rlhf/mlflow.db of the main checkout."""
    experiment: str = "rlhf"
    """Name of the MLflow experiment."""


class TaskPolicy(Section):
    """How the Prefect task of one stage is retried, timed out and queued."""

    retries: t.Count = 2
    """Number of retries after a fault; a user's mistake is never retried."""
    retry_delay_seconds: t.NonNegativeFloat = 10.0
    """Wait before the first retry, in seconds; each later wait is twice as long."""
    timeout_seconds: t.PositiveFloat | None = None
    """Longest time of one try, in seconds; null: no limit."""
    gpu_slots: t.Count = 1
    """Slots of the concurrency limit `gpu` that the stage holds while it runs: each is one of the machine's
    GPUs, and a training stage holds at least one per process."""


class Service(TaskPolicy):
    """How the Prefect flow runs the stages: one policy for all, exceptions by stage. It changes no result."""

    grace_seconds: Annotated[float, Field(gt=0, le=25)] = 20.0
    """Time that a cancelled stage has to save its state, in seconds; Prefect itself kills after 30."""
    stages: dict[str, dict[str, Any]] = Field(default={})
    """Values of the keys above that differ for a stage, by its name. The stages prepare, verdict and report
    hold no slot unless `gpu_slots` is given for them here."""

    def problems(self) -> Iterator[str]:
        known = ", ".join(TaskPolicy.model_fields)
        for stage in self.stages:
            try:
                self.policy(stage)
            except ValidationError as error:
                for problem in error.errors():
                    key = ".".join(map(str, (stage, *problem["loc"])))
                    yield f"stages.{key}: {problem['msg']}; known keys are {known}"

    def policy(self, stage: str) -> TaskPolicy:
        """The policy of one stage: the common values, replaced by those of `stages`."""
        common = {name: getattr(self, name) for name in TaskPolicy.model_fields}
        if stage in ("prepare", "verdict", "report"):
            common["gpu_slots"] = 0
        return TaskPolicy.model_validate(common | self.stages.get(stage, {}))


class Config(Section):
    """All of `params.yaml`."""

    preset: str | None = None
    """The presets that were applied last, which `rlhf preset` writes here: they name the run and change
    nothing; null: none."""
    seed: Annotated[int, Field(ge=0, le=t.LAST_SEED)] = 1
    """Seed of every random number of the pipeline."""
    data: Data = Data()
    """Source, limits and sizes of the data."""
    model: Model = Model()
    """The base model, trained or fetched."""
    prepare: Prepare = Prepare()
    """Sizes of the built-in task's data."""
    base: Base = Base()
    """Training of the base model."""
    sft: Sft = Sft()
    """Training of the SFT model."""
    preferences: Preferences = Preferences()
    """Pairs made from samples."""
    reward: Reward = Reward()
    """Training of the reward models."""
    dpo: Dpo = Dpo()
    """Training of a policy on preference pairs."""
    value: Value = Value()
    """Training of a critic before PPO."""
    ppo: Ppo = Ppo()
    """Training of the PPO policy."""
    judge: Judging = Judging()
    """Judges, retention and diagnostics."""
    promotion: Promotion | None = Promotion()
    """Criteria of the gate; null: there is no gate."""
    launch: Launch = Launch()
    """Processes and precision of training."""
    resume: Resume = Resume()
    """Snapshots of a training stage."""
    tracking: Tracking = Tracking()
    """Where runs are tracked."""
    service: Service = Service()
    """How the Prefect flow runs stages."""

    def problems(self) -> Iterator[str]:
        yield from self._launch_problems()
        yield from self._data_problems()
        yield from self._reward_model_problems()
        if self.promotion is not None:
            yield from self.promotion.conflicts(self)

    def _launch_problems(self) -> Iterator[str]:
        launch = self.launch
        how, processes = f"launch.parallelism: {launch.parallelism}", launch.num_processes
        if launch.parallelism == "ddp" and launch.offload:
            yield f"launch.offload: true has nothing to move with {how}; set one that shards, as fsdp2"
        if launch.parallelism == "hsdp" and launch.num_shards < 2:
            yield (
                f"{how} needs at least two machines and two processes on each, and launch.num_machines is "
                f"{launch.num_machines}, launch.num_processes {processes}; set it to fsdp2, or raise them"
            )
        trains = {"base": self.model.scratch is not None, "sft": self.sft.source is None}
        trains |= {"reward": self.reward.train, "dpo": self.dpo.train}
        trains["value"] = self.ppo.train and self.ppo.critic_init == "value"
        sizes = {f"{name}.batch_size": getattr(self, name).batch_size for name in trains if trains[name]}
        if self.ppo.train:
            rollout = self.ppo.rollout_batch_size
            sizes["ppo.rollout_batch_size / num_mini_batches"] = rollout // self.ppo.num_mini_batches
            sizes["ppo.rollout_batch_size / samples_per_prompt"] = rollout // self.ppo.samples_per_prompt
        for key, size in sizes.items():
            if size % processes:
                yield f"{key}={size} is not divisible by launch.num_processes={processes}"
        critic, is_zero = self.ppo.critic, launch.parallelism.startswith("zero")
        steps, norm = getattr(critic, "steps", 1), getattr(critic, "max_grad_norm", None)
        if is_zero and self.ppo.train and (steps > 1 or norm is not None):
            yield (
                f"ppo.advantages.critic: {how} steps and clips policy and critic as one; set steps to 1 and "
                "max_grad_norm to null, or launch.parallelism to ddp, fsdp2 or hsdp"
            )

    def _data_problems(self) -> Iterator[str]:
        """What scorers, judges and PPO need of the data."""
        if any(judge.kind == "gold" for judge in self.judge.judges) and self.data.source != "synthetic":
            yield (
                "judge.judges: gold only judges the synthetic task, and data.source is "
                f"{self.data.source!r}; remove it, or set data.source to synthetic"
            )
        for key, users in {"ppo.scorers": self.ppo.scorers, "judge.judges": self.judge.judges}.items():
            for one in users:
                columns = {check.column for check in one.checks} if one.kind == "verifier" else set()
                columns |= {*getattr(one, "by", ()), *filter(None, [getattr(one, "column", None)])}
                if lost := columns - set(self.data.columns.keep):
                    names = ", ".join(sorted(lost))
                    yield f"{key}: {one.kind} needs the column {names}; add it to data.columns.keep"
        if self.data.chat == "always" and self.model.base == "scratch":
            yield "data.chat: always needs a chat template, and model.base: scratch has none; set it to auto"
        formats = {self.data.format, *(one.format for one in self.data.mix or ())}
        if "unpaired_labels" in formats and self.dpo.train and self.dpo.loss != "kto":
            yield (
                f"dpo.loss={self.dpo.loss} needs pairs, and data.format: unpaired_labels gives good and bad "
                "responses alone; set dpo.loss to kto, or data.format to label_pairs"
            )
        count = self.preferences.samples_per_pair
        is_sampled = self.preferences.num_prompts and (self.reward.train or self.dpo.train)
        if count > 2 and is_sampled and not self.preferences.function and self.data.source != "synthetic":
            yield (
                f"preferences.samples_per_pair: {count} needs scores of the samples; set "
                "preferences.function, or samples_per_pair to 2"
            )
        if self.ppo.response_length > self.data.max_completion_tokens:
            yield (
                f"ppo.response_length={self.ppo.response_length} exceeds data.max_completion_tokens="
                f"{self.data.max_completion_tokens}, the longest completion in the training data"
            )

    def _reward_model_problems(self) -> Iterator[str]:
        """A reward model is trained if and only if something uses it."""
        if not (self.ppo.train or self.dpo.train):
            yield (
                "ppo.train and dpo.train are false, so that there is no policy but the SFT model; set one of "
                "them to true"
            )
        critic_init = self.ppo.critic_init if self.ppo.train else None
        users = {
            "ppo.scorers": self.ppo.train and OPTIMIZED in reward_folders(self.ppo.scorers),
            "ppo.advantages.critic.init": critic_init == "reward",
            "value.init": critic_init == "value" and self.value.init == "reward",
            "judge.judges": any(
                isinstance(one, RewardModelJudge) and one.is_of_pipeline for one in self.judge.judges
            ),
            "judge.best_of_n": self.judge.best_of_n is not None,
            "ppo.guards.gap_max": self.ppo.train and getattr(self.ppo.guards, "gap_max", None) is not None,
        }
        named = ", ".join(key for key, uses_reward_model in users.items() if uses_reward_model)
        if named and not self.reward.train:
            yield f"reward.train is false, but a reward model is needed by {named}; set it to true"
        if not named and self.reward.train and not self.dpo.train:
            yield "reward.train is true, but no scorer, critic, judge or guard uses one; set it to false"
