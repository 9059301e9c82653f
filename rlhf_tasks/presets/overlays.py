"""Overlays on params.yaml: each file in this folder holds only the values that differ from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_tasks import config
from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.types import field_of, section_of
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.project import atomic

FOLDER = Path(__file__).parent
BETWEEN = "+"  # between the names in the key `preset`
NAMED, LONGEST_NAME = 4, 80  # changes and characters in the name of a run


@dataclass(frozen=True)
class Request:
    """The changes of a run to the committed parameters: a preset, then single values."""

    preset: str | None = None
    seed: int | None = None
    overrides: dict[str, Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is changed."""
        return self.preset is None and self.seed is None and not self.overrides

    def name(self, identity: str) -> str:
        """The name of a run with these changes, such as `smoke-kl_coef=0.05-seed=2-7f3a`.

        `identity` tells runs with the same changes apart. The name can be that of a DVC experiment.
        """
        changes = dict(self.overrides or {}) | ({} if self.seed is None else {"seed": self.seed})
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in changes.items()]
        if len(parts) > NAMED:
            parts = [*parts[:NAMED], f"{len(parts) - NAMED}-more"]
        slug = re.sub(r"(?:[^A-Za-z0-9_=.-]|\.{2,})+", "_", "-".join([self.preset or "default", *parts]))
        return f"{slug[:LONGEST_NAME].rstrip('.-_')}-{identity[-4:]}"

    def resolve(self, text: str) -> tuple[str, config.Config, list[str]]:
        """The text of params.yaml with the changes, as a checked config, and the changes.

        Raises:
            ConfigError: naming every problem of the result.
        """
        given = dict(self.overrides or {}) | ({} if self.seed is None else {"seed": self.seed})
        single = _together([config.nested(key, value) for key, value in given.items()])
        chosen = [self.preset] if self.preset else []
        return _combine(text, chosen, single, "params.yaml with the run's changes")


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


def apply(chosen: Sequence[str], path: Path, settings: Sequence[str] = ()) -> list[str]:
    """Apply presets to a parameter file, in order, and keep its comments; an invalid result is not written.

    The file itself may be invalid, so that a value can be repaired.

    `settings` are single values that come last, each `KEY=VALUE` with a dotted key and a value in YAML.
    Returns the changes as `key: old → new`, and the sections that stay null.
    """
    text, _, changes = combine(config.read_text(path), chosen, settings)
    atomic.write_text(path, text)
    return changes


def combine(
    text: str, chosen: Sequence[str], settings: Sequence[str] = ()
) -> tuple[str, config.Config, list[str]]:
    """What `apply` makes of a parameter file's text: the new text, its config, and the changes."""
    single = _together([_setting(words) for words in settings])
    return _combine(text, chosen, single, f"params.yaml with {', '.join([*chosen, *settings])}")


def _combine(
    text: str, chosen: Sequence[str], single: Mapping[str, Any], origin: str
) -> tuple[str, config.Config, list[str]]:
    """A parameter file's text with presets, its config, and the changes as `key: old → new`.

    Comments are kept, and `preset` names the presets. `single` values come last. A preset does not turn on a
    section that the file, and no single value, turns off: one that loosens the gate does not create a gate.
    Neither does it change the kind of a section if it names none: what the kind in force does not have is
    left off.

    Raises:
        ConfigError: naming every problem of the result.
    """
    before = config.parse(text, origin)
    tree = config.round_trip().load(text)
    left_off: list[str] = []
    for name in chosen:
        config.merge(tree, dict(_fitting(read(name), tree, single, Config, (), left_off)))
    if chosen:
        if "preset" not in tree:
            tree.insert(0, "preset", None)
        tree["preset"] = BETWEEN.join(chosen)
    config.merge(tree, single)
    written = config.written(tree)
    after = config.parse(written, origin)
    settings = config.validate(after, origin)
    try:
        changes = config.differences(
            config.in_force(config.validate(before, origin)), config.in_force(settings)
        )
    except ConfigError:  # an invalid file is repaired
        changes = config.differences(config.flatten(before), config.flatten(after))
    return written, settings, changes + left_off


def _is_partial(value: Mapping[str, Any], field: FieldInfo) -> bool:
    return not type(field.default).model_fields.keys() <= value.keys()


def _fitting(
    overlay: Mapping[str, Any],
    tree: Mapping[str, Any],
    single: Mapping[str, Any],
    owner: type[Section] | None,
    path: tuple[str, ...],
    left_off: list[str],
) -> Iterator[tuple[str, Any]]:
    """The items of a preset that fit the sections of a file; the others are named in `left_off`."""
    for key, value in overlay.items():
        name, own, field = ".".join((*path, key)), single.get(key, {}), field_of(owner, key)
        present = tree.get(key, {})
        if not isinstance(value, Mapping) or field is None:
            yield key, value
        elif present is None and isinstance(field.default, Section) and not own and _is_partial(value, field):
            left_off.append(f"{name} stays null (a preset changes its {', '.join(value)})")
        elif not isinstance(present, Mapping) or "kind" in value:
            yield key, value
        else:
            section = section_of(owner, key, present)
            lost = [inner for inner in value if section is not None and field_of(section, inner) is None]
            if "kind" in present and lost:
                kind = present["kind"]
                left_off.append(
                    f"{name}.kind stays {kind}, which has no {', '.join(lost)} (a preset gives it)"
                )
                value = {inner: one for inner, one in value.items() if inner not in lost}
            own = own if isinstance(own, Mapping) else {}
            yield key, dict(_fitting(value, present, own, section, (*path, key), left_off))


def _setting(words: str) -> dict[str, Any]:
    key, equals, value = words.partition("=")
    if not (key and equals):
        raise UserError(f"--set {words}: give KEY=VALUE, such as --set ppo.kl_coef=0.1")
    try:
        tree: Any = YAML(typ="safe", pure=True).load(value)
    except YAMLError as error:
        raise UserError(f"--set {words}: the value is not readable as YAML: {error}") from None
    return config.nested(key, tree)


def _together(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Single values as one overlay, so that the order of a kind and of its keys does not matter."""
    tree: dict[str, Any] = {}
    for setting in settings:
        config.merge(tree, setting, None)
    return tree
