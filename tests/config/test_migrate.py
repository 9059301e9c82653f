"""A params.yaml of version 0.1: refused with the new place of each key, and upgraded to the same values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.config.migrate import MOVED
from rlhf_tasks.errors import ConfigError
from tests.conftest import Command

OLDER = (Path(__file__).parent / "older.yaml").read_text(encoding="utf-8")
LORA = {"r": 2, "alpha": 4.0}
CRITIC = dict.fromkeys(("value_model", "critic_init", "cliprange_value", "vf_coef", "lam"))


def with_ppo(changes: dict[str, Any]) -> str:
    tree = config.round_trip().load(OLDER)
    tree["ppo"].update(changes)
    return config.written(tree)


TOKENS = {"micro_batch_tokens": 4096}
"""Given in an older file, where it was the default."""


def test_every_key_of_an_older_file_is_where_it_was_or_has_a_new_place() -> None:
    present = config.in_force(config.Config())
    moved = {key for key in config.flatten(config.parse(OLDER, "older")) if key not in present}
    gone = {"judge.num_traces", "launch.compile", "ppo.combine_reward_models"}
    assert moved == {*MOVED} - {"ppo.lora.value"} | gone, "its section is null there"
    sections = {
        "data.options.max_pairs",
        "ppo.advantages.critic.warmup",
        "ppo.advantages.critic.lora",
        "ppo.sampler",
    }
    assert set(MOVED.values()) - sections <= present.keys()


def test_an_older_file_is_refused_in_one_message_with_each_new_place() -> None:
    with pytest.raises(ConfigError) as raised:
        config.validate(config.parse(OLDER, "params.yaml"), "params.yaml")
    message = str(raised.value)
    assert message.startswith("params.yaml has 23 problem(s):")
    for old in MOVED.keys() - {"ppo.lora.value"}:
        assert f"  {old}: has moved to {MOVED[old]}\n" in message
    assert "  launch.compile: was removed; delete it\n" in message
    assert message.endswith(
        "`rlhf params --upgrade` writes the file in the present shape, with the same values in force"
    )


def test_an_upgrade_keeps_values_and_comments(project: Path, rlhf: Command) -> None:
    file = Path("params.yaml")
    file.write_text(OLDER, encoding="utf-8")
    out = rlhf("params --upgrade").out
    assert "ppo.lam → ppo.advantages.lam\n" in out
    assert "ppo.engine is left out: it has no effect\n" in out
    assert config.load() == config.validate(dict.fromkeys(("base", "sft", "reward", "ppo"), TOKENS), "new")
    text = file.read_text(encoding="utf-8")
    assert "parallelism: ddp # ddp | zero2 | zero3 | fsdp2" in text
    assert "truncation: {kind: eos_trick_replace, missing_eos_score: -1.0} # eos_trick_replace | " in text
    assert "nothing to move" in rlhf("params --upgrade").out
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {**CRITIC, "advantages": "rloo", "samples_per_prompt": 4, "kl_in": "loss", "kl_estimator": "k2"},
            {"advantages": {"kind": "rloo"}, "kl": {"kind": "in_loss", "estimator": "k2"}},
        ),
        (
            {"lora": {**LORA, "value": True}, "value_learning_rate": 1e-4, "sampling_batch_size": 8},
            {
                "lora": LORA,
                "advantages": {"critic": {"learning_rate": 1e-4, "lora": LORA}},
                "sampler": {"batch_size": 8},
            },
        ),
    ],
    ids=["rloo", "lora"],
)
def test_an_upgrade_moves_what_a_kind_has_and_leaves_the_rest(
    project: Path, old: dict[str, Any], new: dict[str, Any], rlhf: Command
) -> None:
    Path("params.yaml").write_text(with_ppo(old), encoding="utf-8")
    rlhf("params --upgrade")
    assert config.load().ppo == config.validate({"ppo": new | TOKENS}, "new").ppo


@pytest.mark.parametrize(
    ("half", "new", "line"),
    [
        (
            {"lora": {**LORA, "value": True}},
            {"lora": LORA, "advantages": {"critic": {"lora": LORA}}},
            "ppo.lora.value → ppo.advantages.critic.lora",
        ),
        (
            {"advantages": {"kind": "gae"}, "gamma": 0.9},
            {"advantages": {"gamma": 0.9}},
            "ppo.gamma → ppo.advantages.gamma",
        ),
        (
            {"advantages": {"kind": "rloo"}, "gamma": 0.9},
            {"advantages": {"kind": "rloo"}},
            "ppo.gamma is left out: it has no effect",
        ),
        (
            {"advantages": {"gamma": 0.8}, "gamma": 0.9},
            {"advantages": {"gamma": 0.8}},
            "ppo.gamma is left out: ppo.advantages.gamma is given",
        ),
    ],
)
def test_an_upgrade_of_a_part_of_a_file_says_what_becomes_of_each_value(
    project: Path, half: dict[str, Any], new: dict[str, Any], line: str, rlhf: Command
) -> None:
    Path("params.yaml").write_text(json.dumps({"ppo": half}), encoding="utf-8")
    assert line in rlhf("params --upgrade").out.splitlines()
    assert config.load().ppo == config.validate({"ppo": new}, "new").ppo


def test_an_upgrade_that_would_not_be_valid_writes_nothing(project: Path, rlhf: Command) -> None:
    text = with_ppo({"kl_coef": -1.0})
    Path("params.yaml").write_text(text, encoding="utf-8")
    assert "ppo.kl_coef" in rlhf("params --upgrade", status=2).err
    assert Path("params.yaml").read_text(encoding="utf-8") == text


def test_all_values_in_force_are_printed_with_their_source(project: Path, rlhf: Command) -> None:
    Path("params.yaml").write_text("ppo: {advantages: {lam: 0.9}, guards: null}\n", encoding="utf-8")
    rows = [line.split() for line in rlhf("params").out.splitlines()]
    for row in (
        ["ppo.advantages.lam", "0.9", "params.yaml"],
        ["ppo.advantages.gamma", "1.0", "default"],
        ["ppo.guards", "null", "params.yaml"],
        ["ppo.micro_batch_tokens", "4096", "default:", "auto"],
    ):
        assert row in [[word for word in words if word != "|"] for words in rows]
