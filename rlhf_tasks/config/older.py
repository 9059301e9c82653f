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
"""The present key of each key that has moved; all other keys are where they were."""
CONVERTED: Mapping[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "ppo.kl_in": lambda value, ppo: f"in_{value}",
    "ppo.lora.value": lambda value, ppo: (
        {key: inner for key, inner in ppo["lora"].items() if key != "value"} if value else None
    ),
}
"""The present value of those whose value changes too, from the old one and the section `ppo`."""


def new_place(location: Sequence[str | int], value: Any) -> str | None:
    """The present key of an old one with this value; None for a key that has not moved."""
    key = ".".join(map(str, location))
    is_present = isinstance(value, Mapping) and MOVED.get(key, "").startswith(f"{key}.")
    return None if is_present else MOVED.get(key)


def upgrade(tree: CommentedMap) -> list[str]:
    """Move the keys of an older file to their present places, with their comments where the key is the same.

    Returns a line per key. A value is left out if it is the default null, or if the present kind of its
    section does not have it, so that it had no effect.
    """
    given = {old: _inside(tree, old) for old in MOVED}
    found = [old for old, value in given.items() if value is not MISSING and new_place(old.split("."), value)]
    new: dict[str, Any] = {}
    for old in found:
        *path, last = MOVED[old].split(".")
        section = new
        for part in path:
            section[part] = section.get(part) or {}
            section = section[part]
        value = copy.deepcopy(given[old])
        section[last] = CONVERTED[old](value, tree["ppo"]) if old in CONVERTED else value
    _drop_unknown(new, Config)
    for old in found:
        path_of_owner, _, last = old.rpartition(".")
        owner = _inside(tree, path_of_owner)
        position, comment = list(owner).index(last), owner.ca.items.pop(last, None)
        del owner[last]
        if not MOVED[old].startswith(f"{path_of_owner}."):
            continue
        target, _, rest = MOVED[old].removeprefix(f"{path_of_owner}.").partition(".")
        value = _inside(new, f"{path_of_owner}.{target}")
        if target not in owner and value not in (MISSING, None):
            owner.insert(position, target, _in_one_line(value))
            if comment is not None and (target == last or not rest):
                owner.ca.items[target] = comment
    return [
        f"{old} is left out: it has no effect"
        if _inside(new, MOVED[old]) is MISSING
        else f"{old} → {MOVED[old]}"
        for old in found
    ]


def _inside(tree: Any, key: str) -> Any:
    """The value of a dotted key, or MISSING."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return MISSING
        tree = tree[part]
    return tree


def _drop_unknown(tree: dict[str, Any], owner: type[Section] | None) -> None:
    """Remove the keys that the sections, by their kinds, do not have, and nulls that are defaults anyway."""
    for key, value in list(tree.items()):
        field = field_of(owner, key)
        if isinstance(value, dict):
            _drop_unknown(value, section_of(owner, key, value))
        if field is None or value == {} or (value is None and field.default is None):
            del tree[key]


def _in_one_line(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = CommentedMap({key: _in_one_line(inner) for key, inner in value.items()})
        value.fa.set_flow_style()
    return value
