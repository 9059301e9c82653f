"""`data.mix`, and prompts or unpaired labels alone, through every stage on a toy model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlhf_tasks.config import Stage
from rlhf_tasks.data.splits import shares
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.reward_diagnostics import read_pairs
from rlhf_tasks.project.paths import Paths
from tests import small, toy
from tests.data.conftest import jsonl

STAGES: tuple[Stage, ...] = ("prepare", "base", "sft", "preferences", "reward", "ppo", "judge")
READY: dict[str, dict[str, Any]] = {
    "sft": {"from": "foreign/base"},
    "reward": {"train": False},
    "ppo": {
        "scorers": [{"kind": "reward_model", "path": "foreign/reward"}],
        "advantages": {"kind": "rloo", "samples_per_prompt": 2},
    },
    "judge": {
        "judges": [{"kind": "reward_model", "name": "other", "path": "foreign/other"}],
        "retention": None,
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    toy.foreign("foreign/base", "llama")


def prompts(count: int = 60) -> list[dict[str, str]]:
    pairs = [(a, b) for a in toy.WORDS for b in toy.WORDS if a != b]
    return [{"prompt": f"a {a} cat and a {b} box : the cat is"} for a, b in pairs][:count]


# ---------------------------------------------------------------------------------- prompts alone


def test_prompts_alone_go_through_every_stage_where_sft_and_reward_come_ready() -> None:
    jsonl(Path("given/prompts.jsonl"), *prompts())
    for seed, name in enumerate(("reward", "other"), start=3):
        toy.foreign(f"foreign/{name}", "llama", seed=seed, labels=1)
    metrics = toy.run_stages(toy.write_params(**READY), *STAGES)
    assert 0 <= metrics["other/policy_vs_sft/win_rate"] <= 1
    assert not any("reference" in name or "rouge" in name for name in metrics)
    table = pq.read_table("data/prompts/test.parquet")
    assert table["reference"].null_count == len(table) == 8
    assert len(pq.read_table("data/sft/train.parquet")) == 0


def test_a_chat_of_prompts_and_a_name_without_role_are_prompts_alone_too() -> None:
    toy.foreign("foreign/base", "llama", words=toy.tokenizer(chat_template=toy.CHAT))
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts()]
    jsonl(Path("given/rows.jsonl"), *rows)
    metrics = toy.run("prepare", toy.write_params(data={"max_prompt_tokens": 40}, **READY))
    assert metrics["rows/prompts/train"] == 56 - 16
    assert metrics["rows/sft/train"] == metrics["rows/preferences/train"] == 0


ENOUGH = r"prompts alone, which are enough with model\.base, .* sft\.from, .* reward\.train: false"


def test_what_prompts_alone_lack_is_refused_before_anything_trains() -> None:
    jsonl(Path("given/prompts.jsonl"), *prompts())
    with pytest.raises(UserError, match=f"model.base: scratch has no text.*{ENOUGH}"):
        toy.run("prepare", toy.write_params(model={"base": "scratch", "scratch": {}}))
    without_sft = toy.write_params(**READY | {"sft": {"from": None}})
    toy.run_stages(without_sft, "prepare", "base")
    with pytest.raises(UserError, match=f"sft.from is null, and there is no demonstration.*{ENOUGH}"):
        toy.run("sft", without_sft)
    without_reward = toy.write_params(sft={"from": "foreign/base"})
    toy.run("sft", without_reward)
    with pytest.raises(UserError, match=f"preferences.num_prompts to 0 where.*{ENOUGH}"):
        toy.run("preferences", without_reward)


def test_prompts_with_and_without_references_are_refused_together() -> None:
    jsonl(Path("given/prompts.train.jsonl"), *prompts())
    jsonl(Path("given/prompts.test.jsonl"), {"prompt": "a cat", "reference": " now"})
    with pytest.raises(UserError, match=r"prompts\.train\.jsonl: prompts alone, and other prompts have ref"):
        toy.run("prepare", toy.write_params(**READY))


# ------------------------------------------------------------------------------- unpaired labels


def write_labels(**changes: Any) -> Any:
    good = [row | {"completion": " red now", "label": True} for row in prompts(40)]
    bad = [row | {"completion": " blue", "label": False} for row in prompts(56)[20:]]
    jsonl(Path("given/thumbs.jsonl"), *good, *bad)
    steps = {"train": True, "loss": "kto", "batch_size": 8, "num_epochs": 2.0, "learning_rate": 0.01}
    sections = READY | {"preferences": {"num_prompts": 0}, "ppo": {"train": False}, "sft": {"from": None}}
    sections |= {"data": {"format": "unpaired_labels"}, "dpo": {**steps, "micro_batch_tokens": 4096}}
    toy.foreign("foreign/other", "llama", seed=4, labels=1)
    return toy.write_params(**sections | changes)


def test_a_policy_is_trained_and_judged_on_labels_alone() -> None:
    settings = write_labels()
    toy.run_stages(settings, "prepare", "base", "sft", "preferences", "reward")
    sides = pq.read_table("data/comparisons/train.parquet").select(["chosen", "rejected"]).to_pylist()
    assert {(row["chosen"], row["rejected"]) for row in sides} == {(" red now", None), (None, " blue")}
    assert toy.run("dpo", settings)["loss"] < 0.45, "it is 1/2 at the start"
    assert 0 <= toy.run_stages(settings, "value", "ppo", "judge")["other/policy_vs_sft/win_rate"] <= 1


def test_reward_models_learn_from_the_pairs_beside_labels(capsys: pytest.CaptureFixture[str]) -> None:
    with_reward: dict[str, Any] = {"reward": {"train": True}, "judge": {"judges": [small.HELDOUT]}}
    settings = write_labels(**with_reward)
    toy.run_stages(settings, "prepare", "base", "sft")
    with pytest.raises(UserError, match=r"reward\.train: true needs pairs, and the data has \d+ unpaired"):
        toy.run("preferences", settings)
    write_sets()
    both = [*mixture(cats=1), {"name": "thumbs", "path": "given", "format": "unpaired_labels"}]
    settings = write_labels(**with_reward, data={"source": "mix", "mix": both})
    toy.run_stages(settings, "prepare", "base", "sft", "preferences")
    num_pairs = sets("comparisons", "train")["cats"]
    assert f"train on {num_pairs} pairs, and no unpaired label" in capsys.readouterr().out
    assert 0 <= toy.run("reward", settings)["accuracy/given"] <= 1
    assert len(read_pairs(Paths())["given"]) == sets("comparisons", "test")["cats"]
    assert toy.run("dpo", settings)["selected_step"] > 0


# --------------------------------------------------------------------------------------- mixtures


def write_sets() -> None:
    """Forty pairs of cats and twenty of dogs; some prompts are in both sets."""
    rows = prompts(56)
    pairs = [row | {"chosen": " red now", "rejected": " blue"} for row in rows]
    jsonl(Path("cats.jsonl"), *pairs[:40])
    dogs = [{**row, "prompt": row["prompt"].replace("cat", "dog")} for row in pairs[:20]]
    jsonl(Path("dogs/train.jsonl"), *dogs)


def mixture(**weights: float) -> list[dict[str, Any]]:
    paths = {"cats": "cats.jsonl", "dogs": "dogs"}
    return [{"name": name, "path": paths[name], "weight": weight} for name, weight in weights.items()]


def sets(role: str, split: str) -> Counter[str]:
    return Counter(pq.read_table(f"data/{role}/{split}.parquet")["set"].to_pylist())


def test_a_weight_is_the_share_of_the_train_rows_and_the_same_seed_gives_the_same_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_sets()
    settings = toy.write_params(data={"source": "mix", "mix": mixture(cats=1, dogs=3)})
    metrics = toy.run("prepare", settings)
    total = metrics["rows/preferences/train"]
    held_out = sum(metrics[f"rows/preferences/{split}"] for split in ("validation", "test"))
    assert total + held_out == 60
    counts = sets("preferences", "train")
    assert counts == {"cats": total / 4, "dogs": 3 * total / 4}
    assert sets("preferences", "test") + sets("preferences", "validation") != {}
    assert "Mixture (a weight is a share of the train rows)" in capsys.readouterr().out
    first = {str(file): file.read_bytes() for file in Path("data").rglob("*.parquet")}
    toy.run("prepare", settings)
    assert first == {str(file): file.read_bytes() for file in Path("data").rglob("*.parquet")}


def test_a_prompt_of_two_sets_is_in_one_split() -> None:
    write_sets()
    cats = [json.loads(line) for line in Path("cats.jsonl").read_text().splitlines()]
    jsonl(Path("dogs/train.jsonl"), *(row | {"chosen": " green now"} for row in cats[:30]))
    toy.run("prepare", toy.write_params(data={"source": "mix", "mix": mixture(cats=1, dogs=1)}))
    tables = {s: pq.read_table(f"data/preferences/{s}.parquet") for s in ("train", "validation", "test")}
    found = {split: set(table["prompt"].to_pylist()) for split, table in tables.items()}
    assert not found["train"] & (found["validation"] | found["test"])
    assert not found["validation"] & found["test"]


def test_losses_accuracies_and_win_rates_are_measured_by_set() -> None:
    write_sets()
    settings = toy.write_params(data={"source": "mix", "mix": mixture(cats=2, dogs=1)})
    metrics = {stage: toy.run(stage, settings) for stage in STAGES}
    for name in ("cats", "dogs"):
        assert metrics["base"][f"loss/in/{name}"] > 0
        assert metrics["sft"][f"loss/in/{name}"] > 0
        assert 0 <= metrics["reward"][f"accuracy/in/{name}"] <= 1
        assert 0 <= metrics["reward"][f"heldout/accuracy/in/{name}/low"] <= 1
        assert 0 <= metrics["judge"][f"reward_model/policy_vs_sft/win_rate/in/{name}"] <= 1
    low, high = sorted(metrics["sft"][f"loss/in/{name}"] for name in ("cats", "dogs"))
    assert low <= metrics["sft"]["loss"] <= high


def test_shares_are_whole_numbers_with_the_given_sum() -> None:
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(7, [0.5, 2.5]) == [1, 6]
    assert shares(0, [1, 2]) == [0, 0]


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([], "add at least one, such as"),
        ([{"name": "a", "path": "x"}, {"name": "a", "path": "y"}], "several sets have the name a"),
        ([{"name": "a"}], "set a: give `path` or `hub`, one of them"),
        (None, "`data.mix` names the data sets of `source: mix`"),
    ],
)
def test_a_mixture_that_says_nothing_or_two_things_is_refused(mix: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        toy.write_params(data={"source": "mix", "mix": mix})
