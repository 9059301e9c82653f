"""A params.yaml of version 0.1, of which some keys have moved: where they are now, and how they get there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ruamel.yaml.comments import CommentedMap

from rlhf_tasks.config.schema import Config
from rlhf_tasks.config.types import Section, field_of, section_of

MISSING = object()
CRITIC = "ppo.advantages.critic"
MOVED: Mapping[str, str] = {
    "prepare.docstrings_max_pairs": "data.options.max_pairs",
    "reward.centring_coef": "reward.centering_coef",
    "launch.layout": "launch.parallelism",
    "ppo.kl_in": "ppo.kl.kind",
    "ppo.kl_estimator": "ppo.kl.estimator",
    "ppo.truncation": "ppo.truncation.kind",
    "ppo.missing_eos_score": "ppo.truncation.missing_eos_score",
    "ppo.engine": "ppo.sampler",
    "ppo.sampling_batch_size": "ppo.sampler.batch_size",
    "ppo.advantages": "ppo.advantages.kind",
    "ppo.samples_per_prompt": "ppo.advantages.samples_per_prompt",
    "ppo.gamma": "ppo.advantages.gamma",
    "ppo.lam": "ppo.advantages.lam",
    "ppo.whiten_rewards": "ppo.advantages.whiten_rewards",
    "ppo.value_model": f"{CRITIC}.kind",
    "ppo.critic_init": f"{CRITIC}.init",
    "ppo.value_learning_rate": f"{CRITIC}.learning_rate",
    "ppo.critic_warmup": f"{CRITIC}.warmup",
    "ppo.vf_coef": f"{CRITIC}.vf_coef",
    "ppo.cliprange_value": f"{CRITIC}.cliprange_value",
    "ppo.lora.value": f"{CRITIC}.lora",
}
"""The present key of each key that has moved, the kind of a section first; others are where they were."""
CONVERTED: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "ppo.kl_in": lambda value, ppo: f"in_{value}",
    "ppo.lora.value": lambda value, ppo: (
        {key: inner for key, inner in ppo["lora"].items() if key != "value"} if value else None
    ),
}
"""The present value of those whose value changes too, from the old one and the section `ppo`."""
REMOVED: Mapping[str, Any] = {
    "launch.compile": False,
    "ppo.combine_reward_models": "sum",
    "ppo.engine.ahead": 0,
    "ppo.sampler.ahead": 0,
    "judge.num_traces": ...,
}
"""Keys that are gone, with the value that has no effect, or `...` for any, which `upgrade` leaves out."""
NO_LABELS = "rlhf_tasks/evaluation/no_labels.jsonl"
"""An empty file that stood for no human labels."""


def new_place(location: Sequence[str | int], value: Any) -> str | None:
    """The present key of an old one with this value; None for a key that has not moved."""
    key = ".".join(map(str, location))
    is_present = isinstance(value, Mapping) and MOVED.get(key, "").startswith(f"{key}.")
    return None if is_present else MOVED.get(key)


def upgrade(tree: CommentedMap) -> list[str]:
    """Move the keys of an older file to their present places, with their comments where the key is the same.

    Returns a line per key. A value is left out if the file gives its present key too, or if it had no effect:
    it is the default null, or the kind of its section does not have it.
    """
    lines = []
    for gone, without_effect in REMOVED.items():
        value = inside(tree, gone)
        if value is not MISSING and without_effect in (value, ...):
            section, _, last = gone.rpartition(".")
            del inside(tree, section)[last]
            lines.append(f"{gone} is left out: it has no effect")
    given = {old: inside(tree, old) for old in MOVED}
    found = [old for old, value in given.items() if value is not MISSING and new_place(old.split("."), value)]
    lines += [_move(tree, old) for old in found]
    if str(inside(tree, "judge.labels")) == NO_LABELS:
        tree["judge"]["labels"] = None
        lines.append(f"judge.labels: {NO_LABELS} → null")
    return lines


def _move(tree: CommentedMap, old: str) -> str:
    """Move one key into the tree, where the kind of its section is by now; the line that says so."""
    path_of_owner, _, last = old.rpartition(".")
    value, owner = inside(tree, old), inside(tree, path_of_owner)
    if old in CONVERTED:
        value = CONVERTED[old](value, tree["ppo"])
    position, comment = list(owner).index(last), owner.ca.items.pop(last, None)
    del owner[last]
    section, missing = tree, MOVED[old].split(".")
    kind: type[Section] | None = Config
    while missing[0] in section:
        part = missing.pop(0)
        if not missing or not isinstance(section[part], Mapping):
            return f"{old} is left out: {MOVED[old].removesuffix('.'.join(['', *missing]))} is given"
        kind, section = section_of(kind, part, section[part]), section[part]
    for part in missing[:-1]:
        kind = section_of(kind, part, {})
    field = field_of(kind, missing[-1])
    is_default = value is None and field is not None and isinstance(field.default, Section | None)
    if field is None or is_default:
        return f"{old} is left out: it has no effect"
    key, *inner = missing
    for part in reversed(inner):
        value = {part: value}
    if section is not owner:  # in a block, the last key keeps the empty line below the section
        position = len(section) if section.fa.flow_style() else max(len(section) - 1, 0)
    section.insert(position, key, _in_one_line(copy.deepcopy(value)))
    if comment is not None and section is owner and (key == last or not inner):
        section.ca.items[key] = comment
    return f"{old} → {MOVED[old]}"


def inside(tree: Any, key: str) -> Any:
    """The value of a dotted key, or MISSING."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return MISSING
        tree = tree[part]
    return tree


def _in_one_line(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = CommentedMap({key: _in_one_line(inner) for key, inner in value.items()})
        value.fa.set_flow_style()
    return value
