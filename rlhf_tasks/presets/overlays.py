"""Overlays on params.yaml: each file in this folder holds only the values that differ from it."""

from __future__ import annotations

import copy
import io
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from rlhf_tasks import config
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.project import atomic

FOLDER = Path(__file__).parent
PLAIN = re.compile(r"(?!(true|false|null)$)[a-z][\w./-]*", re.IGNORECASE)  # texts without quotes in YAML


@dataclass(frozen=True)
class Request:
    """The changes of a run to the committed parameters: a preset, then single values."""

    preset: str | None = None
    seed: int | None = None
    overrides: dict[str, Any] | None = None

    def overlays(self) -> list[dict[str, Any]]:
        return [*self._presets(), *self._single()]

    def _presets(self) -> list[dict[str, Any]]:
        return [read(self.preset)] if self.preset else []

    def _single(self) -> list[dict[str, Any]]:
        given = dict(self.overrides or {}) | ({} if self.seed is None else {"seed": self.seed})
        return [nested(key, value) for key, value in given.items()]

    def resolve(self, text: str) -> tuple[str, config.Config, list[str]]:
        """The text of params.yaml with the changes, as a checked config, and the changes.

        Raises:
            ConfigError: naming every problem of the result.
        """
        return combined(text, self._presets(), "params.yaml with the run's changes", self._single())


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def summary(name: str) -> str:
    """The comment on the file's first line."""
    with (FOLDER / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()


def read(name: str) -> dict[str, Any]:
    """A preset's own keys, nested as in params.yaml.

    Raises:
        UserError: for a name that no preset has.
    """
    if name not in names():
        raise UserError(f"there is no preset {name!r}; give one of {', '.join(names())}")
    return YAML(typ="safe", pure=True).load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")) or {}


def matching(values: Mapping[str, Any]) -> list[str]:
    """The presets whose values are all among these, by dotted key; a section that is null stays null."""

    def has(key: str, value: Any) -> bool:
        parts = key.split(".")
        null = any(values.get(".".join(parts[:n]), "") is None for n in range(1, len(parts)))
        return null or (key in values and values[key] == value)

    return [
        name for name in names() if all(has(key, value) for key, value in config.flatten(read(name)).items())
    ]


def apply(chosen: Sequence[str], path: Path, settings: Sequence[str] = ()) -> list[str]:
    """Apply presets to a parameter file, in order, and keep its comments; an invalid result is not written.

    The file itself may be invalid, so that a value can be repaired.

    `settings` are single values that come last, each `KEY=VALUE` with a dotted key and a value in YAML.
    Returns the changes as `key: old → new`, and the sections that stay null.
    """
    overlays, single = [read(name) for name in chosen], [_setting(words) for words in settings]
    origin = f"params.yaml with {', '.join([*chosen, *settings])}"
    text, _, changes = combined(config.read_text(path), overlays, origin, single)
    atomic.write_text(path, text)
    return changes


def combined(
    text: str,
    overlays: Sequence[Mapping[str, Any]],
    origin: str,
    single: Sequence[Mapping[str, Any]] = (),
) -> tuple[str, config.Config, list[str]]:
    """A parameter file's text with overlays, its config, and the changes as `key: old → new`.

    Comments are kept. A preset does not turn on a section that is null: one that loosens the gate does not
    create a gate. `single` values come last; a section that one of them turns on is on for presets too.

    Raises:
        ConfigError: naming every problem of the result, or single values of a section that is null.
    """
    yaml, safe = _round_trip(), YAML(typ="safe", pure=True)
    before, tree = config.parse(text, origin), yaml.load(text)
    left_off = []
    for overlay in single:
        if _turns_on(tree, overlay):
            overlay_onto(tree, copy.deepcopy(dict(overlay)))
    for overlay in overlays:
        fitting = copy.deepcopy(dict(overlay))
        for path, keys in list(_of_null(tree, fitting)):
            _take_out(fitting, path)
            left_off.append(f"{'.'.join(path)} stays null (a preset changes its {', '.join(keys)})")
        overlay_onto(tree, fitting)
    for overlay in single:
        for path, keys in _of_null(tree, overlay):
            raise ConfigError(
                f"{origin}: {'.'.join(path)} is null, so that {', '.join(keys)} alone cannot be set; give "
                f"{', '.join(config.missing_keys(path, keys))} too, as one {'.'.join(path)}={{…}}"
            )
        overlay_onto(tree, overlay)
    written = io.StringIO()
    yaml.dump(tree, written)
    after = safe.load(written.getvalue())
    settings = config.validate(after, origin)
    old, new = config.flatten(before), config.flatten(after)
    changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    changes = [f"{key}: {in_yaml(old.get(key))} → {in_yaml(new.get(key))}" for key in changed]
    return written.getvalue(), settings, changes + left_off


def in_yaml(value: Any) -> str:
    """A value as one line of YAML; JSON is YAML."""
    is_plain = isinstance(value, str) and PLAIN.fullmatch(value)
    return value if is_plain else json.dumps(value, ensure_ascii=False, default=str)


def replaced(text: str, sections: Mapping[str, Any], origin: str) -> tuple[str, config.Config]:
    """A parameter file's text with some sections replaced, and its config.

    Raises:
        ConfigError: naming every problem of the text or of the result.
    """
    tree = {**config.parse(text, origin), **sections}
    written = io.StringIO()
    _round_trip().dump(tree, written)
    return written.getvalue(), config.validate(tree, origin)


def _of_null(
    tree: Mapping[str, Any], overlay: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Sections that are null in a parameter file, and of which an overlay gives only some keys."""
    for key, value in overlay.items():
        here = (*path, key)
        if isinstance(value, Mapping) and isinstance(tree.get(key), Mapping):
            yield from _of_null(tree[key], value, here)
        elif isinstance(value, Mapping) and tree.get(key, value) is None and config.missing_keys(here, value):
            yield here, list(value)


def _turns_on(tree: Mapping[str, Any], overlay: Mapping[str, Any], path: tuple[str, ...] = ()) -> bool:
    """Whether an overlay gives all keys of a section that is null in a parameter file."""
    return any(
        _turns_on(tree[key], value, (*path, key))
        if isinstance(tree.get(key), Mapping)
        else tree.get(key, value) is None and not config.missing_keys((*path, key), value)
        for key, value in overlay.items()
        if isinstance(value, Mapping)
    )


def _take_out(tree: dict[str, Any], path: Sequence[str]) -> None:
    *sections, last = path
    for section in sections:
        tree = tree[section]
    del tree[last]


def overlay_onto(tree: MutableMapping[str, Any], overlay: Mapping[str, Any]) -> None:
    """Merge sections key by key; values and lists replace, and so does a section or a null for the other."""
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), MutableMapping):
            overlay_onto(tree[key], value)
        else:
            tree[key] = value


def _setting(words: str) -> dict[str, Any]:
    key, equals, value = words.partition("=")
    if not (key and equals):
        raise UserError(f"--set {words}: give KEY=VALUE, such as --set ppo.kl_coef=0.1")
    try:
        tree: Any = YAML(typ="safe", pure=True).load(value)
    except YAMLError as error:
        raise UserError(f"--set {words}: the value is not readable as YAML: {error}") from None
    return nested(key, tree)


def nested(key: str, value: Any) -> dict[str, Any]:
    """`nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    tree = value
    for part in reversed(key.split(".")):
        tree = {part: tree}
    result: dict[str, Any] = tree
    return result


def _round_trip() -> YAML:
    class Representer(RoundTripRepresenter):
        def represent_null(self, data: None) -> ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:null", "null")  # instead of an empty value

    Representer.add_representer(type(None), Representer.represent_null)
    yaml = YAML()
    yaml.Representer = Representer
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)  # as params.yaml is written
    return yaml
