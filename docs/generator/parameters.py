"""parameters.md, from the types of the configuration and params.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import PlainSerializer
from pydantic.fields import FieldInfo

from docs.generator.text import Lines, prose, sentence
from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.types import description, kinds, sections

BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", "≥"), (Lt, "lt", "<"), (Le, "le", "≤"))


def parameters() -> Lines:
    yield "# Parameters"
    yield ""
    yield (
        "`params.yaml` has a section per stage and holds what a run sets. Each key below has its type, its "
        "default, and its meaning. A key that `params.yaml` does not have is at its default; `rlhf "
        "params` prints all values in force. A section that may be `null` is an optional feature, and `null` "
        "turns it off. A section of several kinds has the keys of its `kind` and no others. Unknown keys and "
        "wrong types are errors."
    )
    for name, field in Config.model_fields.items():
        section = next(iter(sections(field.annotation)), None)
        yield ""
        yield f"## {name}"
        yield ""
        if section is None:
            yield from _entry(Config, name)
            continue
        yield prose(section)
        if NoneType in get_args(field.annotation):
            yield ""
            yield _described(Config, name)
        for key, inner in section.model_fields.items():
            yield ""
            yield f"### `{name}.{inner.alias or key}`"
            yield ""
            yield from _entry(section, key)


def _entry(owner: type[Section], key: str) -> Lines:
    """One parameter: meaning, type, default, and what is inside it."""
    field = owner.model_fields[key]
    yield _described(owner, key)
    inside = sections(field.annotation)
    if field.annotation not in inside:
        yield ""
        yield f"Type: {_type(field.annotation, field.metadata)}.{_default(field)}"
    for section in inside:
        names = " or ".join(f"**`kind: {kind}`**" for kind in kinds(section))
        yield ""
        yield f"{names}: {prose(section)}" if names else prose(section)
        yield ""
        yield from _bullets(section)


def _bullets(section: type[Section]) -> Lines:
    """The fields of a nested section, one bullet each."""
    for key, field in section.model_fields.items():
        if key == "kind" and len(kinds(section)) == 1:
            continue
        kind = f"Type: {_type(field.annotation, field.metadata)}."
        yield f"- `{key}`: {_described(section, key)} {kind}{_default(field)}"
        for inner in sections(field.annotation):
            names = " or ".join(f"`kind: {name}`" for name in kinds(inner))
            if not names:
                yield from (f"  {line}" for line in _bullets(inner))
            elif not field.is_required():  # a judge of another list is described there
                yield f"  - {names}: {prose(inner)}"
                yield from (f"    {line}" for line in _bullets(inner))


def _default(field: FieldInfo) -> str:
    """The default as a sentence; a section's is its kind, or follows below."""
    if field.is_required():
        return " It has no default."
    if isinstance(field.default, Section):
        return f" Default: `kind: {field.default.kind}`." if hasattr(field.default, "kind") else ""
    if isinstance(field.default, tuple) and any(isinstance(one, Section) for one in field.default):
        given = [one.model_dump(exclude_defaults=True) for one in field.default]
        return f" Default: `{_value(given)}`."
    writers = [one for one in field.metadata if isinstance(one, PlainSerializer)]
    written: Any = field.default
    for writer in writers:  # t.MicroBatchTokens writes 0 as `auto`
        written = writer.func(written)  # type: ignore[call-arg]
    return f" Default: `{_value(written)}`."


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if any(isinstance(one, PlainSerializer) for one in metadata):
        return "`auto` or whole number above 0"
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return _either([f"`{_value(value)}`" for value in arguments])
    if origin in (Union, UnionType):
        others = [part for part in arguments if part is not NoneType and not sections(part)]
        parts = ["section"] * bool(sections(annotation))
        parts += [f"`{value}`" for part in others for value in get_args(part) if get_origin(part) is Literal]
        parts += [_type(part, metadata) for part in others if get_origin(part) is not Literal]
        return _either(parts + ["`null`"] * (NoneType in arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return "list of sections" if sections(annotation) else "list of texts"
        return f"list of {len(arguments)}: {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    return " ".join([names.get(annotation, "mapping"), *_bounds(metadata)])


def _bounds(metadata: Sequence[Any]) -> list[str]:
    """The bounds of a number, as `≥ 0 and < 1` or `from 1 to 10`."""
    parts = [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    bounds = {
        sign: f"{getattr(part, name):,}"
        for part in parts
        for kind, name, sign in BOUNDS
        if isinstance(part, kind)
    }
    if bounds.keys() == {"≥", "≤"}:
        return [f"from {bounds['≥']} to {bounds['≤']}"]
    return [" and ".join(f"{sign} {bound}" for sign, bound in bounds.items())] if bounds else []


def _either(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _value(value: Any) -> str:
    """A value as YAML holds it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _described(section: type[Section], key: str) -> str:
    """A parameter's description as a sentence, `null` as code."""
    pieces = sentence(description(section, key)).split("`")
    pieces[::2] = [re.sub(r"\bnull\b", "`null`", piece) for piece in pieces[::2]]
    return "`".join(pieces)
