"""Unpaired labels through the stages: `dpo.loss: kto` learns from them, reward models from pairs alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.reward_diagnostics import read_pairs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import NullTracker
from tests import small, toy
from tests.data.conftest import jsonl

KTO: dict[str, Any] = {
    "train": True,
    "loss": "kto",
    "batch_size": 8,
    "num_epochs": 2.0,
    "learning_rate": 0.01,
    "micro_batch_tokens": 4096,
    "num_selection_prompts": 8,
}
UNPAIRED: dict[str, Any] = {"format": "unpaired_labels"}
ALONE: dict[str, Any] = {
    "data": UNPAIRED,
    "dpo": KTO,
    "ppo": {"train": False},
    "reward": {"train": False},
    "preferences": {"num_prompts": 0},
    "judge": {"judges": [{"kind": "reward_model", "name": "other", "path": "foreign/other"}]},
}


def split_pairs(split: str) -> None:
    """Each pair of data/comparisons becomes two rows, a good response and then a bad one."""
    file = Paths().table("comparisons", split)  # type: ignore[arg-type]
    known = pq.read_table(file)
    rows = [row | {side: None} for row in known.to_pylist() for side in ("rejected", "chosen")]
    pq.write_table(pa.Table.from_pylist(rows, known.schema), file)


@pytest.mark.parametrize("heldout", [{}, small.WITHOUT_REWARD])
def test_kto_learns_the_same_from_pairs_and_from_their_responses_as_single_rows(
    models_here: Path, heldout: dict[str, Any]
) -> None:
    histories: list[Sequence[Any]] = []
    changes = {"dpo": KTO, "ppo.micro_batch_tokens": 4096, "ppo.response_length": 6, **heldout}
    for is_split in (False, True):
        for split in ("train", "validation", "test") if is_split else ():
            split_pairs(split)
        tracker = NullTracker("dpo")
        small.run("dpo", changes, tracker)
        histories.append(tracker.history())
    losses = [row["train/loss"] for row in histories[0] if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert histories[0] == histories[1]


def test_other_losses_need_pairs(models_here: Path) -> None:
    split_pairs("train")
    with pytest.raises(UserError, match=r"dpo\.loss=ipo needs pairs, and .* alone; set dpo\.loss to kto"):
        small.run("dpo", {"dpo": KTO | {"loss": "ipo"}})
    mixed = {"source": "mix", "mix": [{"name": "a", "path": "a.jsonl", **UNPAIRED}], "format": None}
    for data in (UNPAIRED, mixed):
        with pytest.raises(UserError, match=r"dpo\.loss=sigmoid needs pairs, .*set dpo\.loss to kto"):
            config.validate(small.params({"data": data, "dpo.train": True}), "test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's pairs, and their responses as labels, each by itself."""
    monkeypatch.chdir(tmp_path)
    toy.write_given()
    Path("given/sft.jsonl").unlink()
    pairs = [json.loads(line) for line in Path("given/preferences.jsonl").read_text("utf-8").splitlines()]
    labels = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for i, row in enumerate(pairs)
        for side in (("chosen", "rejected"), ("chosen",), ("rejected",))[i % 3]
    ]
    jsonl(Path("labels/labels.jsonl"), *labels)
    toy.foreign("foreign/base", "llama")
    toy.foreign("foreign/other", "llama", seed=4, labels=1)


@pytest.mark.usefixtures("folder")
def test_a_policy_is_trained_and_judged_on_labels_alone() -> None:
    settings = toy.write_params(**ALONE | {"data": UNPAIRED | {"path": "labels"}})
    toy.run_stages(settings, "prepare", "base", "sft", "preferences", "reward")
    kept = read_table(Paths(), "comparisons", "train")
    assert 0 < len(kept.that_have("chosen")) < len(kept)
    assert len(kept.that_have("chosen", "rejected")) == 0
    tracker = NullTracker("dpo")
    toy.run("dpo", settings, tracker)
    losses = [row["train/loss"] for row in tracker.history() if "train/loss" in row]
    assert losses[0] == pytest.approx(0.5, abs=1e-3)
    assert losses[-1] < losses[0]
    assert 0 <= toy.run_stages(settings, "value", "ppo", "judge")["other/policy_vs_sft/win_rate"] <= 1


@pytest.mark.usefixtures("folder")
def test_reward_models_learn_from_pairs_alone(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ALONE | {"reward": {"train": True}, "judge": {"judges": [small.HELDOUT]}}
    labels = toy.write_params(**changes | {"data": UNPAIRED | {"path": "labels"}})
    toy.run_stages(labels, "prepare", "base", "sft")
    with pytest.raises(UserError, match=r"reward\.train: true needs pairs, and the data has \d+ unpaired"):
        toy.run("preferences", labels)
    sets = [{"name": "pairs", "path": "given"}, {"name": "labels", "path": "labels", **UNPAIRED}]
    mixed = toy.write_params(**changes | {"data": {"source": "mix", "mix": sets}})
    capsys.readouterr()
    toy.run_stages(mixed, "prepare", "base", "sft", "preferences")
    tables = {s: read_table(Paths(), "comparisons", s) for s in ("train", "test")}  # type: ignore[arg-type]
    num_pairs = {split: len(rows.that_have("chosen", "rejected")) for split, rows in tables.items()}
    assert f"train on {num_pairs['train']} pairs, and no unpaired label" in capsys.readouterr().out
    assert 0 < num_pairs["train"] < len(tables["train"])
    assert 0 <= toy.run("reward", mixed)["accuracy/given"] <= 1
    assert len(read_pairs(Paths())["given"]) == num_pairs["test"] < len(tables["test"])
    assert toy.run("dpo", mixed)["selected_step"] > 0
