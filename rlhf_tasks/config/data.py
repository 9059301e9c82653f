"""The sources of the data and of the base model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_tasks.config.types import (
    NumLayers,
    NumRows,
    NumTokens,
    PositiveInt,
    Revision,
    Section,
    Width,
    check_source,
)


class Columns(Section):
    """The names of the columns in the user's files or hub data sets."""

    prompt: str
    """Column that holds the prompt."""
    completion: str
    """Column that holds the reference: a human-written answer."""
    chosen: str
    """Column that holds the preferred response of a pair."""
    rejected: str
    """Column that holds the other response of a pair."""
    keep: tuple[Annotated[str, Field(min_length=1)], ...] = Field(strict=False)
    """List of further columns of the prompt rows, such as `answer`, that scorers and judges get; empty: none.
    The built-in task has `who`, `thing`, `place` and `plan`, arithmetic has `answer`."""

    @model_validator(mode="after")
    def _once_each(self) -> Columns:
        if len(set(self.keep)) < len(self.keep):
            raise ValueError(f"`keep` names a column twice: {', '.join(self.keep)}; name each once")
        return self


class HubSet(Section):
    """One data set of the Hugging Face hub, pinned to a commit."""

    id: str
    """Id of the data set, OWNER/NAME."""
    revision: Revision
    """Commit hash of the data set, 40 hex digits."""
    name: str | None
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
    """The hub data sets of `data.source: hub`."""

    sft: HubSet
    """Data set of demonstrations."""
    preferences: HubSet | None
    """Data set of preference pairs; null: pairs are made from samples of the SFT model."""


class Data(Section):
    """The data that stage prepare reads, checks and splits."""

    source: Literal["synthetic", "arithmetic", "docstrings", "files", "hub"]
    """Origin of the data: the built-in TL;DR task, sums and products, docstrings of installed packages, the
    user's files, or data sets of the Hugging Face hub."""
    path: str
    """File or folder that `source: files` reads; a DVC dependency of stage prepare."""
    hub: HubSources | None
    """Data sets of `source: hub`; null for any other source."""
    columns: Columns
    """Column names of `source: files` and `source: hub`."""
    on_bad_row: Literal["fail", "quarantine"]
    """What happens to rows that cannot be used: `fail` stops the stage and names all of them, `quarantine`
    writes them to data/quarantine and continues without them."""
    max_prompt_tokens: NumTokens
    """Longest prompt, in tokens; a longer one is a bad row."""
    max_completion_tokens: NumTokens
    """Longest completion, in tokens, EOS included; a longer one is a bad row."""
    num_validation: NumRows
    """Number of validation prompts, if the source has no validation split."""
    num_test: NumRows
    """Number of test prompts, if the source has no test split."""
    max_rows: PositiveInt | None
    """Largest number of train rows kept per role (sft, preferences, prompts); null: all of them."""

    @property
    def in_words(self) -> str:
        """The source as people read it; `path` only where it is read."""
        match self.source:
            case "synthetic":
                return "the built-in task"
            case "arithmetic":
                return "sums and products"
            case "docstrings":
                return "docstrings of installed packages"
            case "files":
                return self.path
            case "hub":
                assert self.hub is not None, "checked below"
                sets = (one for one in (self.hub.sft, self.hub.preferences) if one is not None)
                return ", ".join(f"{one.id} at {one.revision[:10]}" for one in sets)

    @model_validator(mode="after")
    def _hub_goes_with_its_source(self) -> Data:
        if (self.source == "hub") != (self.hub is not None):
            raise ValueError("`data.hub` names the data sets of `source: hub`: set both, or `hub: null`")
        return self


MOST_PARAMETERS = 10**11  # every process holds the whole model: 400 GB in float32


class Scratch(Section):
    """The shape of a base model that starts from random weights."""

    family: Literal["gpt_neox", "llama", "qwen2", "gpt2"]
    """Architecture of the model."""
    hidden_size: Width
    """Width of the hidden states."""
    num_layers: NumLayers
    """Number of transformer layers."""
    num_heads: Width
    """Number of attention heads; it divides hidden_size."""
    vocab_size: PositiveInt
    """Largest vocabulary of the trained tokenizer, in tokens."""
    tokenizer: Literal["words", "bpe", "bpe_uncased"]
    """Kind of the trained tokenizer: whole words, byte-pair encoding, or byte-pair encoding of lower-cased
    text."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Scratch:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} / num_heads={self.num_heads} must be an even whole number "
                "(rotary embeddings)"
            )
        return self

    @model_validator(mode="after")
    def _a_machine_holds_it(self) -> Scratch:
        in_layers = 12 * self.num_layers * self.hidden_size**2  # four matrices of attention, eight of the MLP
        if in_layers > MOST_PARAMETERS:
            raise ValueError(
                f"hidden_size={self.hidden_size} and num_layers={self.num_layers} make about "
                f"{in_layers / 1e9:,.0f} billion parameters, {4 * in_layers / 1e9:,.0f} GB in float32; at "
                f"most {MOST_PARAMETERS // 10**9} billion are allowed: lower one of them"
            )
        return self


class Model(Section):
    """The base model that SFT starts from."""

    base: str
    """Base model: `scratch`, a local folder, or a hub id."""
    revision: Revision | None
    """Commit hash of a hub id; null for anything else."""
    scratch: Scratch | None
    """Shape of the model for `base: scratch`; null otherwise."""

    @model_validator(mode="after")
    def _one_origin(self) -> Model:
        if (self.base == "scratch") != (self.scratch is not None):
            raise ValueError("`model.scratch` is the shape of `base: scratch`: set both, or `scratch: null`")
        check_source(None if self.base == "scratch" else self.base, self.revision, "model.base")
        return self
