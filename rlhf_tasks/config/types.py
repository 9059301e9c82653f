"""What all sections are made of: strict, frozen, without defaults; number types; pinned model sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Stage = Literal["prepare", "base", "sft", "preferences", "reward", "ppo", "judge", "verdict", "report"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Split = Literal["train", "validation", "test"]

PositiveInt = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a running mean, per step."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def pinned_revision(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError(
            "a hub revision must be a full commit hash (40 hex digits), so that a rerun reads the same bytes"
        )
    return value


Revision = Annotated[str, AfterValidator(pinned_revision)]


def store_uri(value: str) -> str:
    """An address of MLflow's store that means the same in every folder.

    Stages also run in git worktrees, which are removed with all that is in them.

    Raises:
        ValueError: for a database or folder by a relative path.
    """
    scheme, parts = value.partition(":")[0].partition("+")[0], urlsplit(value)
    if scheme == "sqlite":
        place = unquote(parts.path).removeprefix("/")
    elif scheme == "file" or (":" not in value and value != "databricks"):
        place = unquote(parts.path)
    else:
        return value
    if not Path(place).is_absolute():
        raise ValueError(
            f"{value!r} is relative to the working folder, which for some runs is a git worktree that is "
            "removed at their end; give an absolute path, as sqlite:////FOLDER/mlflow.db (four slashes), or "
            "none for the store under .rlhf/"
        )
    return value


StoreUri = Annotated[str, AfterValidator(store_uri)]


def is_hub_id(source: str) -> bool:
    """A model source is a local folder where one exists, `NAME/REPO` on the hub otherwise."""
    return not Path(source).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None


def check_source(source: str | None, revision: str | None, key: str) -> None:
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


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
