"""The shipped presets, and single values set on top of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks import cli, config, presets
from rlhf_tasks.data.batches import micro_batches
from tests import toy
from tests.test_contracts import UNPINNED

ROOT = Path(__file__).parents[1]


def with_preset(name: str) -> config.Config:
    tree: Any = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    presets.overlay_onto(tree, presets.read(name))
    presets.overlay_onto(tree, UNPINNED.get(name, {}))
    return config.validate(tree, name)


def test_values_are_set_on_top_of_presets(project: Path) -> None:
    words = ["preset", "smoke", "--set", "seed=7", "sft.learning_rate=1.0e-4", "data.max_rows=null"]
    assert cli.main(words) == 0
    found = config.load()
    assert (found.seed, found.sft.learning_rate, found.data.max_rows) == (7, 1e-4, None)
    assert found.ppo.total_episodes == with_preset("smoke").ppo.total_episodes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("seed", "give KEY=VALUE"),
        ("seed=[", "not readable as YAML"),
        ("sed=2", "did you mean 'seed'"),
        ("seed=two", "should be a valid integer"),
        (
            "sft.revision=0123456789abcdef0123456789abcdef01234567",
            "sft.from names no model: `revision` would be",
        ),
    ],
)
def test_a_value_that_cannot_be_set_changes_nothing(
    project: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("params.yaml").read_text(encoding="utf-8")
    assert cli.main(["preset", "--set", words]) == 2
    assert message in capsys.readouterr().err
    assert Path("params.yaml").read_text(encoding="utf-8") == before


def test_the_tldr_preset_asks_for_the_hashes_it_lacks(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["preset", "tldr-pythia-1b"]) == 2
    told = capsys.readouterr().err
    for where in (
        "datasets/trl-lib/tldr-preference",
        "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",
    ):
        assert f"git ls-remote https://huggingface.co/{where} HEAD" in told
    pins = [f"{key}={value}" for key, value in config.flatten(UNPINNED["tldr-pythia-1b"]).items()]
    assert cli.main(["preset", "tldr-pythia-1b", "--set", *pins]) == 0
    assert config.load() == with_preset("tldr-pythia-1b")


def test_the_tldr_preset_has_the_benchmarks_sizes() -> None:
    """512 episodes = 16 rows × 4 accumulated × 8 processes, each row of 512 + 53 tokens; 1M of them."""
    found = with_preset("tldr-pythia-1b")
    own = found.ppo.rollout_batch_size // found.launch.num_processes
    longest = (found.data.max_prompt_tokens, found.ppo.response_length)
    cut = micro_batches([longest] * own, found.ppo.micro_batch_tokens)
    assert [len(rows) for rows in cut] == [16, 16, 16, 16]
    assert (found.ppo.num_ppo_epochs, found.ppo.num_mini_batches) == (4, 1)
    assert (found.ppo.learning_rate, found.ppo.schedule) == (3e-6, "linear")
    assert (found.ppo.kl_coef, found.ppo.temperature, found.ppo.response_length) == (0.05, 0.7, 53)
    assert (found.ppo.truncation, found.ppo.missing_eos_score) == ("eos_trick_replace", -1.0)
    assert found.ppo.total_episodes == 1_000_000
    assert found.judge.num_examples == 1000


def test_the_tldr_preset_runs_on_a_shrunken_model_of_its_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-NeoX, ready SFT and reward models; only the number of episodes, and the texts, are small."""
    monkeypatch.chdir(tmp_path)
    preset = presets.read("tldr-pythia-1b")
    ppo = preset["ppo"] | {"total_episodes": 16, "rollout_batch_size": 16}
    toy.write_given()
    toy.foreign("foreign/base", "gpt_neox", max_position_embeddings=128)
    toy.foreign("foreign/sft", "gpt_neox", seed=2, max_position_embeddings=128)
    toy.foreign("foreign/reward", "gpt_neox", seed=3, labels=1, max_position_embeddings=128)
    settings = toy.write_params(
        data={"max_completion_tokens": 53},
        sft=preset["sft"] | {"from": "foreign/sft"},
        preferences=preset["preferences"],
        reward=preset["reward"] | {"from": "foreign/reward"},
        ppo=ppo,
        judge=preset["judge"],
    )
    for stage in ("prepare", "base", "sft", "preferences", "reward"):
        toy.run(stage, settings)
    found = toy.run("ppo", settings)
    assert found["lr"] == 3e-6
    assert found["val/response_length"] <= 53
    assert found["val/ratio"] == pytest.approx(1, abs=1e-3), "four epochs at 3e-6 hardly move it"
    assert found["objective/kl"] == pytest.approx(0, abs=1e-3), "the policy is its reference at first"
    assert 0 <= toy.run("judge", settings)["reward_model/policy_vs_reference/win_rate"] <= 1
