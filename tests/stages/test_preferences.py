"""Pairs of SFT samples: who labels them, which labels err, and that no split leaks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.data.synthetic import gold
from rlhf_tasks.data.tokenizer import encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import score_gold
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.stages import preferences
from rlhf_tasks.stages.preferences import compare
from tests import small

PROMPT = "TITLE: a\nPOST: my boss stole my lamp . it was at the park . i feel sad . i want a refund .\nTL;DR:"
FILES: dict[str, Any] = {"data.source": "files", "judge.judges": [small.HELDOUT]}
SETTINGS = {"preferences.num_prompts": 12, "preferences.label_noise": 0.0}


def run(**changes: Any) -> tuple[dict[str, float], dict[str, list[dict[str, str]]]]:
    metrics = small.run("preferences", SETTINGS | changes)
    return metrics, {split: list(read_table(Paths(), "comparisons", split)) for split in SPLITS}


def test_the_better_sample_is_chosen_whichever_came_first_and_ties_are_left_out() -> None:
    good, bad, row = " my boss stole my lamp", " my aunt", {"prompt": PROMPT, "reference": ""}
    assert compare(score_gold, [row] * 3, [good, bad, bad], [bad, good, bad]) == [
        (good, bad),
        (good, bad),
        None,
    ]


def test_of_several_samples_the_best_and_the_worst_are_the_pair_and_nan_is_none_of_them() -> None:
    def length(rows: Responses) -> Tensor:
        return torch.tensor([math.nan if text == "?" else float(len(text)) for text in rows.texts])

    row = {"prompt": PROMPT, "reference": ""}
    columns = (["aa", "?", "?"], ["a", "?", "a"], ["aaaa", "aaa", "?"], ["aaa", "a", "?"])
    assert compare(length, [row] * 3, *columns) == [("aaaa", "a"), ("aaa", "a"), None]


@pytest.mark.parametrize("count", [2, 4, 6])
def test_all_samples_of_a_pair_are_of_its_prompt(
    models_here: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample is a part of its prompt here, the longer the later it is drawn."""
    lengths: dict[str, list[int]] = {}

    def sample(model: Any, tokenizer: Any, prompts: list[str], **_: Any) -> list[list[int]]:
        found = []
        for prompt, ids in zip(prompts, encode(tokenizer, prompts), strict=True):
            drawn = lengths.setdefault(prompt, [])
            drawn.append(8 + len(drawn))
            found.append(ids[5 : 5 + drawn[-1]])
        return found

    Path("own.py").write_text("def longer(prompts, responses):\n    return map(len, responses)\n")
    monkeypatch.setattr(preferences, "sample_responses", sample)
    of_function = {"preferences.function": "own:longer", "preferences.samples_per_pair": count}
    metrics, found = run(**FILES, **of_function)
    assert {len(drawn) for drawn in lengths.values()} == {count}
    sampled = [row for row in found["train"] if row["origin"] == "sft_samples"]
    assert metrics["pairs/train/sft_samples"] == len(sampled) == 12
    for row in sampled:
        words = " ".join(row["prompt"].split())
        assert all(" ".join(row[name].split()) in words for name in ("chosen", "rejected"))
        assert len(row["chosen"].split()) - len(row["rejected"].split()) == count - 1


def test_given_pairs_stay_and_samples_are_labelled_by_the_gold_judge(models_here: Path) -> None:
    metrics, found = run()
    for split in SPLITS:
        given = [row for row in found[split] if row["origin"] == "given"]
        assert [{k: row[k] for k in ("prompt", "chosen", "rejected", "source")} for row in given] == list(
            read_table(Paths(), "preferences", split)
        )
        for row in found[split]:
            assert gold(row["prompt"], row["chosen"]).score > gold(row["prompt"], row["rejected"]).score
        for origin in ("given", "sft_samples"):
            count = sum(row["origin"] == origin for row in found[split])
            assert metrics[f"pairs/{split}/{origin}"] == count
    assert metrics["pairs/train/sft_samples"] > 0
    assert metrics["flipped"] == 0


def test_only_training_labels_are_flipped_at_the_given_rate(models_here: Path) -> None:
    metrics, found = run(**{"preferences.label_noise": 0.25})

    def wrong(split: str) -> int:
        return sum(
            gold(r["prompt"], r["chosen"]).score < gold(r["prompt"], r["rejected"]).score
            for r in found[split]
        )

    assert wrong("validation") == wrong("test") == 0
    assert wrong("train") == metrics["flipped"]
    assert 0.1 < wrong("train") / len(found["train"]) < 0.45


def test_samples_of_a_split_are_for_prompts_of_that_split(models_here: Path) -> None:
    _, found = run()
    for split in SPLITS:
        prompts = {row["prompt"] for row in read_table(Paths(), "prompts", split)}
        assert {row["prompt"] for row in found[split] if row["origin"] == "sft_samples"} <= prompts


def test_without_labels_a_sample_is_rejected_against_the_reference(models_here: Path) -> None:
    metrics, found = run(**FILES)
    references = {row["prompt"]: row["reference"] for row in read_table(Paths(), "prompts", "train")}
    sampled = [row for row in found["train"] if row["origin"] == "sft_samples"]
    assert len(sampled) == 12
    assert all(row["chosen"] == references[row["prompt"]] != row["rejected"] for row in sampled)
    assert "flipped" not in metrics


def test_a_function_labels_samples_and_its_labels_alone_err(models_here: Path) -> None:
    Path("own.py").write_text("def longer(prompts, responses):\n    return map(len, responses)\n")
    changes = FILES | {"preferences.function": "own:longer"}
    for noise in (0.0, 0.5):
        metrics, found = run(**changes | {"preferences.label_noise": noise})
        given = [row for row in found["train"] if row["origin"] == "given"]
        names = ("prompt", "chosen", "rejected", "source")
        assert [{name: row[name] for name in names} for row in given] == list(
            read_table(Paths(), "preferences", "train")
        )
        for split in SPLITS:
            sampled = [row for row in found[split] if row["origin"] == "sft_samples"]
            wrong = sum(len(row["chosen"]) < len(row["rejected"]) for row in sampled)
            assert len(sampled) > 2
            assert wrong == (metrics["flipped"] if split == "train" else 0)
        assert (metrics["flipped"] > 0) == (noise > 0)


def test_scores_that_do_not_decide_make_no_pair_and_are_counted(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text(
        "def nothing(prompts, responses):\n"
        "    return [float('nan') if len(text) % 2 else 1.0 for text in responses]\n"
    )
    metrics, _ = run(**FILES, **{"preferences.function": "own:nothing"})
    assert metrics["pairs/train/sft_samples"] == 0
    assert "train: 12 of 12 pairs are left out: equal texts, equal scores or NaN" in capsys.readouterr().out


def test_the_same_seed_writes_the_same_pairs(models_here: Path) -> None:
    assert run() == run()
    assert run()[1] != run(seed=2)[1]


def test_no_pairs_are_an_error(models_here: Path) -> None:
    for split in SPLITS:
        file = models_here / f"data/preferences/{split}.parquet"
        pq.write_table(pq.read_table(file).slice(0, 0), file)
    with pytest.raises(UserError, match="no pair to train on"):
        run(**{"preferences.num_prompts": 0})
    assert len(run()[1]["train"]) > 0


def test_given_pairs_alone_load_no_model(models_here: Path) -> None:
    shutil.rmtree(Paths().sft)
    metrics, found = run(**FILES, **{"preferences.num_prompts": 0, "preferences.samples_per_pair": 4})
    assert [len(found[s]) for s in SPLITS] == [len(read_table(Paths(), "preferences", s)) for s in SPLITS]
    assert metrics["pairs/train/sft_samples"] == 0


def test_without_reward_training_nothing_is_sampled(models_here: Path) -> None:
    shutil.rmtree(Paths().sft)  # nothing loads it
    metrics, tables = run(**small.WITHOUT_REWARD)
    assert tables == {"train": [], "validation": [], "test": []}
    assert set(metrics.values()) == {0}
    columns = [pq.read_schema(Paths().rows("comparisons") / f"{split}.parquet").names for split in SPLITS]
    assert columns == [list(preferences.COLUMNS)] * 3


@pytest.mark.parametrize("where", ["generation config", "ppo.stop_token"])
def test_what_ends_a_sample_is_no_text_of_it(models_here: Path, where: str) -> None:
    words = small.tokenizer()
    changes: dict[str, Any] = {}
    if where == "ppo.stop_token":
        changes = {"ppo.stop_token": words.pad_token_id}
    else:
        file = Path("models/sft/generation_config.json")
        config = json.loads(file.read_text(encoding="utf-8"))
        ends = [words.eos_token_id, words.pad_token_id]
        file.write_text(json.dumps(config | {"eos_token_id": ends}), encoding="utf-8")
    changes |= FILES | {"preferences.num_prompts": 40, "preferences.temperature": 1.0}
    _, found = run(**changes)
    samples = [row["rejected"] for row in found["train"] if row["origin"] == "sft_samples"]
    assert samples
    assert not any(str(words.pad_token) in text for text in samples)
