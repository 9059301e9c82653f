"""The base class of all sections, number types, and checks of model sources and store addresses."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)
from pydantic.fields import FieldInfo

Stage = Literal[
    "prepare", "base", "sft", "preferences", "reward", "dpo", "value", "ppo", "judge", "verdict", "report"
]
STAGES: tuple[Stage, ...] = get_args(Stage)
Split = Literal["train", "validation", "test"]


LARGEST = 2**31 - 1  # of any whole number: 32 bits hold it everywhere
LAST_SEED = 2**32 - 1  # of NumPy, whose range is the smallest of all generators'
PositiveInt = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
NumRows = Annotated[int, Field(ge=1, le=10_000_000)]  # held in memory: about a kilobyte each
Tokens = Annotated[int, Field(ge=1, le=2**20)]  # the length of one text
BatchSize = Annotated[int, Field(ge=1, le=2**20)]
AUTO = 0


def _tokens_or_auto(value: Any) -> Any:
    if value == "auto":
        return AUTO
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be auto, or a whole number of tokens above 0")
    return value


MicroBatchTokens = Annotated[
    int,
    Field(ge=AUTO, le=LARGEST),
    BeforeValidator(_tokens_or_auto),
    PlainSerializer(lambda value: value or "auto", return_type=int | str),
]
"""Tokens, or `auto`, which is AUTO until the stage begins: training/auto.py says what it stands for."""
Width = Annotated[int, Field(ge=1, le=2**16)]  # a side of a weight matrix
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of params.yaml: strict and frozen. A key that is not given has its default.

    The docstring below a field is its description in the reference.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _complete_kinds(cls, values: Any) -> Any:
        """A section of several kinds that names no kind has the default's."""
        if not isinstance(values, Mapping):
            return values
        complete = dict(values)
        for key, field in cls.model_fields.items():
            if isinstance(value := values.get(key), Mapping) and hasattr(field.default, "kind"):
                complete[key] = {"kind": field.default.kind, **value}
        return complete

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if problems := list(self.problems()):
            raise ValueError("; ".join(problems))
        return self

    def problems(self) -> Iterator[str]:
        """What is wrong with the values together; sections with rules override it."""
        return iter(())


def sections(annotation: Any) -> list[type[Section]]:
    """The section types that occur anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections(inner)]


def kinds(section: type[Section]) -> Sequence[str]:
    """The values of `kind` that name this type among several kinds; empty for other sections."""
    field = section.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def field_of(owner: type[Section] | None, key: str) -> FieldInfo | None:
    """The field that `key` of params.yaml names in a section."""
    fields = {} if owner is None else owner.model_fields
    return next((field for name, field in fields.items() if key == (field.alias or name)), None)


def section_of(owner: type[Section] | None, key: str, given: Mapping[str, Any]) -> type[Section] | None:
    """The type of the section `key` with these values: of several kinds the given one, or the default's."""
    field = field_of(owner, key)
    if field is None:
        return None
    kind, found = given.get("kind", getattr(field.default, "kind", None)), sections(field.annotation)
    return next((one for one in found if kind is None or kind in kinds(one)), None)


def description(section: type[Section], name: str) -> str:
    """The docstring below a field, or below the inherited one of which it only changes the default."""
    owners = (owner for owner in section.__mro__ if issubclass(owner, Section))
    fields = (owner.model_fields[name] for owner in owners if name in owner.model_fields)
    return next(field.description for field in fields if field.description)


def pinned_revision(value: str) -> str:
    """A full commit hash; raises ValueError for any other text."""
    if not re.fullmatch(r"[0-9a-f]{40}", value):
        raise ValueError(
            "a hub revision must be a full commit hash (40 hex digits), so that a rerun reads the same bytes"
        )
    return value


def store_uri(value: str) -> str:
    """An address of MLflow's store that does not depend on the working folder.

    Stages also run in git worktrees, which are removed at the end of the run.

    Raises:
        ValueError: for a database or folder with a relative path.
    """
    scheme, parts = value.partition(":")[0].partition("+")[0], urlsplit(value)
    place = unquote(parts.path)
    if scheme == "sqlite":
        place = place.removeprefix("/")
    elif scheme != "file" and (":" in value or value == "databricks"):
        return value
    if not Path(place).is_absolute():
        raise ValueError(
            f"{value!r} is relative to the working folder, and some runs work in a git worktree that is "
            "removed at their end; give an absolute path such as sqlite:////FOLDER/mlflow.db (four slashes), "
            "or null for the store under .rlhf/"
        )
    return value


def _address(value: str) -> str:
    """An http address that httpx accepts, without a login, which would be stored wherever parameters are."""
    import httpx  # here, because most files name no address

    _ = urlsplit(value).port  # which raises for one that cannot be
    try:
        has_host = re.match(r"https?://[^\s/]", value) and httpx.URL(value).host
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"is not an address: {error}") from None
    if not has_host:
        raise ValueError("must begin with http:// or https:// and name a host")
    if "@" in value.split("//", 1)[1].split("/", 1)[0]:
        raise ValueError(
            "holds a login, which would be stored in git, dvc.lock and MLflow; remove it, and name the "
            "environment variable of a key by `key_variable`"
        )
    return value


Revision = Annotated[str, AfterValidator(pinned_revision)]
StoreUri = Annotated[str, AfterValidator(store_uri)]
Address = Annotated[str, AfterValidator(_address)]
KeyVariable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


def import_path(*built_in: str, example: str = "") -> AfterValidator:
    """For a function of the user's, as `module:function`, or the name of a built-in one."""
    own = f"a function of yours as module:function{example and f', such as {example}'}"
    allowed = ", ".join([*built_in, f"or {own}"]) if built_in else own

    def check(value: str) -> str:
        if value not in built_in and not re.fullmatch(r"[\w.]+:\w+", value):
            raise ValueError(f"must be {allowed}")
        return value

    return AfterValidator(check)


ImportPath = Annotated[str, import_path()]


def at_least_one(example: str) -> AfterValidator:
    """For a list that must not be empty; its message has an example of what to add."""

    def check(value: Sequence[Any]) -> Sequence[Any]:
        if not value:
            raise ValueError(f"add at least one, such as {example}")
        return value

    return AfterValidator(check)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{', '.join(twice)} is there twice; name each once")
    return names


Names = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), AfterValidator(_distinct)
]


def is_hub_id(source: str) -> bool:
    """Whether a model source is an id of the hub, OWNER/NAME, and no local folder or name of a file."""
    files = (".gguf", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".gz", ".zst")
    return (
        not (Path(source).exists() or source.endswith(files))
        and re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None
    )


def check_source(source: str | None, revision: str | None, key: str) -> Iterator[str]:
    """The problems of a model source `key`: a hub id has a revision, and nothing else has one."""
    if source is None:
        if revision is not None:
            yield f"{key} names no model: `revision` would be ignored; set it to null too"
    elif is_hub_id(source) and revision is None:
        yield (
            f"{key}={source!r} is no folder here. If it is a model of the hub, it needs `revision`: a commit "
            f"hash; `git ls-remote https://huggingface.co/{source} HEAD` prints it"
        )
    elif revision is not None and (Path(source).exists() or source.endswith(".gguf")):
        yield f"{key}={source!r} is no hub id: `revision` would be ignored; set it to null"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one level of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
