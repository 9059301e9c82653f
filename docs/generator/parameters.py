"""parameters.md, from the types of the configuration and params.yaml."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from docs.generator.text import Lines, load_yaml, prose, sentence
from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.types import Between

BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", "≥"), (Lt, "lt", "<"), (Le, "le", "≤"))


def parameters() -> Lines:
    values = load_yaml("params.yaml")
    yield "# Parameters"
    yield ""
    yield (
        "`params.yaml` holds every value of the pipeline, one section per stage. Each key below has its "
        "type, its value in the shipped `params.yaml`, and its meaning. A section that may be `null` is an "
        "optional feature, and `null` turns it off. Unknown keys, missing keys and wrong types are errors."
    )
    for name, field in Config.model_fields.items():
        section = next(_sections(field.annotation), None)
        yield ""
        yield f"## {name}"
        yield ""
        if section is None:
            yield from _entry(Config, name, values[name])
            continue
        yield prose(section)
        if NoneType in get_args(field.annotation):
            yield ""
            yield _described(Config, name)
        for key, inner in section.model_fields.items():
            shown = inner.alias or key
            yield ""
            yield f"### `{name}.{shown}`"
            yield ""
            yield from _entry(section, key, (values[name] or {}).get(shown))


def _entry(owner: type[Section], key: str, value: Any) -> Lines:
    """One parameter: meaning, type, shipped value, and what is inside it."""
    field = owner.model_fields[key]
    yield _described(owner, key)
    inside = [*_sections(field.annotation)]
    if field.annotation not in inside:
        shipped = f" Shipped value: `{_value(value)}`." if value is None or not inside else ""
        yield ""
        yield f"Type: {_type(field.annotation, field.metadata)}.{shipped}"
    for section in inside:
        kinds = [f"**`kind: {kind}`**" for kind in _kinds(section)]
        yield ""
        yield f"{' or '.join(kinds)}: {prose(section)}" if kinds else prose(section)
        yield ""
        yield from _bullets(section, value if not kinds and isinstance(value, Mapping) else {})


def _bullets(section: type[Section], values: Mapping[str, Any]) -> Lines:
    """The fields of a nested section, one bullet each."""
    for key, field in section.model_fields.items():
        if key == "kind" and len(_kinds(section)) == 1:
            continue
        shipped = f" Shipped value: `{_value(values[key])}`." if key in values else ""
        kind = f"Type: {_type(field.annotation, field.metadata)}."
        yield f"- `{key}`: {_described(section, key)} {kind}{shipped}"
        for inner in _sections(field.annotation):
            if not _kinds(inner):
                yield from (f"  {line}" for line in _bullets(inner, values.get(key) or {}))


def _kinds(section: type[Section]) -> Sequence[str]:
    """The values of `kind` that identify this section in a list; empty for other sections."""
    field = section.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The section types directly in a type, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _sections(inner)


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return _either([f"`{_value(value)}`" for value in arguments])
    if origin in (Union, UnionType):
        sections = [*_sections(annotation)]
        others = [part for part in arguments if part is not NoneType and not [*_sections(part)]]
        parts = ["section"] * bool(sections)
        parts += [f"`{value}`" for part in others for value in get_args(part) if get_origin(part) is Literal]
        parts += [_type(part, metadata) for part in others if get_origin(part) is not Literal]
        return _either(parts + ["`null`"] * (NoneType in arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return "list of sections" if [*_sections(annotation)] else "list of texts"
        return f"list of {len(arguments)}: {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    return " ".join([names.get(annotation, "mapping"), *_bounds(metadata)])


def _bounds(metadata: Sequence[Any]) -> list[str]:
    """The bounds of a number, as `≥ 0 and < 1` or `from 1 to 10`."""
    parts = [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    ranges = [f"from {part.low:,} to {part.high:,}" for part in parts if isinstance(part, Between)]
    bounds = [
        f"{sign} {getattr(part, name):g}"
        for part in parts
        for kind, name, sign in BOUNDS
        if isinstance(part, kind)
    ]
    return ranges or ([" and ".join(bounds)] if bounds else [])


def _either(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _value(value: Any) -> str:
    """A value as YAML holds it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@cache
def descriptions(section: type[Section]) -> Mapping[str, str]:
    """The docstrings below the fields of a section, by field; Python does not keep them at run time."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, Section):
            body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
            for field, below in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def _described(section: type[Section], key: str) -> str:
    """A parameter's description as a sentence, `null` as code."""
    pieces = sentence(descriptions(section)[key]).split("`")
    pieces[::2] = [re.sub(r"\bnull\b", "`null`", piece) for piece in pieces[::2]]
    return "`".join(pieces)
