"""Read and check params.yaml: every problem of a file is in one `ConfigError`, before anything is loaded."""

from __future__ import annotations

import copy
import difflib
import io
import json
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from rlhf_tasks.config.schema import Config
from rlhf_tasks.config.types import Section, field_of, flatten, kinds, section_of, sections
from rlhf_tasks.errors import ConfigError

PLAIN = re.compile(r"(?!(true|false|null)$)[a-z][\w./-]*", re.IGNORECASE)  # texts without quotes in YAML

MAX_SHOWN_VALUE = 200  # characters of a wrong value in a message


def load(path: Path = Path("params.yaml")) -> Config:
    """Read and check a parameter file (YAML 1.2, as DVC reads it).

    Raises:
        ConfigError: if it cannot be read or has any problem.
    """
    return validate(parse(read_text(path), str(path)), str(path))


def read_text(path: Path) -> str:
    """The text of params.yaml, or of a file of DVC.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; run from the project's folder") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from None


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
        raise ConfigError(f"{origin} must hold sections (a mapping), but holds {_shown(tree)}")
    return tree


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
            key = ".".join(_place(problem["loc"])[0])
            message = problem["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
            if problem["type"] == "extra_forbidden":
                message = _did_you_mean(problem["loc"])
            elif problem["type"] == "missing":
                message = "is missing"
            elif problem["type"] == "union_tag_not_found":
                message = "kind is missing, which says what this is (docs/reference/parameters.md)"
            elif problem["type"] == "union_tag_invalid":
                message = f"kind is {problem['ctx']['tag']}; give one of {problem['ctx']['expected_tags']}"
            elif not isinstance(problem["input"], Mapping):
                message = f"{message} (given: {_shown(problem['input'])})"
            lines.append(f"  {key or 'params'}: {message}")
        raise ConfigError("\n".join([f"{origin} has {len(lines)} problem(s):", *lines])) from None


def _shown(value: Any) -> str:
    """A value in a message, cut after a line or so."""
    text = hex(value) if type(value) is int and value.bit_length() > 256 else repr(value)
    return text if len(text) <= MAX_SHOWN_VALUE else f"{text[:MAX_SHOWN_VALUE]}…"


def _did_you_mean(location: Sequence[str | int]) -> str:
    _, owners = _place(location[:-1])
    names = [field.alias or name for owner in owners for name, field in owner.model_fields.items()]
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return (
        f"unknown key; did you mean {close[0]!r}?"
        if close
        else f"unknown key; known here: {', '.join(names)}"
    )


def _place(location: Sequence[str | int]) -> tuple[list[str], list[type[Section]]]:
    """The key at pydantic's location, which names kinds too, and the types of the section at it."""
    path, owners = list[str](), list[type[Section]]([Config])
    for part in map(str, location):
        if len(owners) > 1 and (of_kind := [owner for owner in owners if part in kinds(owner)]):
            owners = of_kind
            continue
        path.append(part)
        if fields := [field for owner in owners if (field := field_of(owner, part)) is not None]:
            owners = [section for field in fields for section in sections(field.annotation)]
    return path, owners


def in_force(config: Config) -> dict[str, Any]:
    """All values of a config by dotted key."""
    return flatten(config.model_dump(mode="json", by_alias=True))


def values(tree: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """All values in force by dotted key; those of the tree alone if it is not valid."""
    try:
        return in_force(validate(tree, origin))
    except ConfigError:
        return flatten(tree)


def is_given(tree: Mapping[str, Any], key: str) -> bool:
    """Whether a parsed file has the value of a dotted key."""
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def merge(
    tree: MutableMapping[str, Any], overlay: Mapping[str, Any], owner: type[Section] | None = Config
) -> None:
    """Merge sections key by key; values and lists replace, and so does a section of another kind.

    A key inside a section that the tree does not have changes the default of that section. Another source of
    data drops the options of the former one.
    """
    if "source" in tree and overlay.get("source", tree["source"]) != tree["source"]:
        tree.pop("options", None)
    for key, value in overlay.items():
        present, field = tree.get(key), field_of(owner, key)
        if isinstance(value, Mapping) and isinstance(present, MutableMapping):
            kind = present.get("kind", getattr(field and field.default, "kind", None))
            if kind is None or value.get("kind", kind) == kind:
                merge(present, value, section_of(owner, key, present))
                continue
        if key not in tree and tree and isinstance(tree, CommentedMap) and not tree.fa.flow_style():
            tree.insert(len(tree) - 1, key, None)  # the last key keeps the empty line below the section
        tree[key] = copy.deepcopy(value)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed between two sets of values by dotted key, as `key: old → new`.

    The keys that only a former kind of a section had are left out.
    """
    changed = [key for key in sorted(new) if key not in old or old[key] != new[key]]
    return [
        f"{key}: {in_yaml(old[key])} → {in_yaml(new[key])}" if key in old else f"{key}: {in_yaml(new[key])}"
        for key in changed
    ]


def in_yaml(value: Any) -> str:
    """A value as one line of YAML; JSON is YAML."""
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return value if is_plain else json.dumps(value, ensure_ascii=False, default=str)


def nested(key: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def round_trip() -> YAML:
    """A reader and writer of YAML that keeps comments, in the form of params.yaml."""

    class Representer(RoundTripRepresenter):
        def represent_null(self, data: None) -> ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:null", "null")  # instead of an empty value

        def represent_text(self, data: str) -> ScalarNode:
            style = '"' if ":" in data else None  # DVC's parser refuses a plain address in {braces}
            return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Representer.add_representer(type(None), Representer.represent_null)
    Representer.add_representer(str, Representer.represent_text)
    yaml = YAML()
    yaml.Representer = Representer
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def written(tree: Any) -> str:
    """The text of a tree that `round_trip` read."""
    text = io.StringIO()
    round_trip().dump(tree, text)
    return text.getvalue()
