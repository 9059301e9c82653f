"""`rlhf check-model`: a table, and the exit status that a script can read."""

from __future__ import annotations

from pathlib import Path

from tests import families, small
from tests.conftest import Command


def test_a_right_model_ends_with_0(tmp_path: Path, rlhf: Command) -> None:
    small.causal().save_pretrained(tmp_path)
    shown = rlhf("check-model", tmp_path).out
    assert shown.count("| passed") == 6
    assert "is fit for PPO" in shown


def test_a_wrong_model_ends_with_2_and_its_likely_cause(tmp_path: Path, rlhf: Command) -> None:
    families.causal("recurrent_gemma").save_pretrained(tmp_path)
    shown = rlhf("check-model", tmp_path, status=2).out
    assert "ended rows do not change the others: off by" in shown
    assert "likely cause: the model's cache does not drop the rows that have ended" in shown
    assert "is not fit for PPO" in shown


def test_a_reward_model_is_checked_by_its_scores(tmp_path: Path, rlhf: Command) -> None:
    small.scores().model.save_pretrained(tmp_path)
    shown = rlhf("check-model", tmp_path).out
    assert "scores of a padded batch and of single rows agree" in shown


def test_positions_that_depend_on_the_batch_are_named_with_their_length(
    tmp_path: Path, rlhf: Command
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    families.causal("llama", max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    assert "above 64 tokens" in rlhf("check-model", tmp_path).out
