"""Stages base and sft in small: what they write, and that the validation minimum is kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import NullTracker
from tests import small

SFT = {"num_epochs": 4.0, "batch_size": 8, "evals_per_epoch": 1, "patience": 2, "schedule": "constant"}
SMALL = {
    **{"model.scratch.hidden_size": 16, "model.scratch.num_layers": 2, "model.scratch.num_heads": 2},
    **{"base.num_epochs": 1.0, "base.batch_size": 8},
    **{f"sft.{key}": value for key, value in SFT.items()},
}


def validation_loss(folder: Path) -> float:
    """Mean −log p of completion tokens, every row alone."""
    model, words = load_causal(folder), load_tokenizer(folder)
    losses: list[float] = []
    for row in read_table(Paths(), "sft", "validation"):
        query = words.encode(row["prompt"], add_special_tokens=False)
        answer = [*words.encode(row["completion"], add_special_tokens=False), words.eos_token_id]
        log_p = small.logits_alone(model, query, answer).log_softmax(-1)
        losses += [-log_p[t, token].item() for t, token in enumerate(answer)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_a_base_is_trained_from_scratch_on_prompts(family: small.Family, models_here: Path) -> None:
    before = contracts.fingerprint(Paths().base)
    metrics = small.run("base", SMALL | {"model.scratch.family": family})
    model = load_causal(Paths().base)
    assert model.config.model_type == family
    assert contracts.fingerprint(Paths().base) != before
    assert metrics["parameters"] == sum(p.numel() for p in model.parameters())
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))


def test_the_metrics_are_those_of_the_weights_written(models_here: Path) -> None:
    metrics = small.run("sft", SMALL)
    assert metrics["loss"] == pytest.approx(validation_loss(Paths().sft), rel=1e-4)
    assert metrics["loss"] < validation_loss(Paths().base)
    assert contracts.read_identity(Paths().sft)["parents"] == {"base": contracts.fingerprint(Paths().base)}


def test_sft_keeps_the_weights_with_the_lowest_validation_loss(models_here: Path) -> None:
    tracker = NullTracker("sft")
    settings = SMALL | {"sft.learning_rate": 0.05, "sft.num_epochs": 20.0}  # so fast that it overshoots
    metrics = small.run("sft", settings, tracker)
    tried = {row["step"]: row["eval/loss"] for row in tracker.history() if "eval/loss" in row}
    assert metrics["step_kept"] == min(tried, key=lambda step: tried[step])
    assert metrics["loss"] == pytest.approx(min(tried.values()), rel=1e-4)
    assert metrics["steps_trained"] == max(tried) > metrics["step_kept"]
    assert len([step for step in tried if step > metrics["step_kept"]]) == 2  # the patience
