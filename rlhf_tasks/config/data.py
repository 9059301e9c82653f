"""Where data and the base model come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_tasks.config.types import PositiveInt, Revision, Section, check_source


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
    tokenizer: Literal["words", "bpe", "bpe_uncased"]

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
        check_source(None if self.base == "scratch" else self.base, self.revision, "model.base")
        return self
