"""`rlhf check-model`: a table, and the exit status that a script can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks.cli import main
from tests import families, small


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = main.main(["check-model", str(folder)])
    return status, capsys.readouterr().out


def test_a_right_model_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.causal().save_pretrained(tmp_path)
    status, shown = check(tmp_path, capsys)
    assert status == 0
    assert shown.count("| passed") == 6
    assert "is fit for PPO" in shown


def test_a_wrong_model_ends_with_2_and_its_likely_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    families.causal("recurrent_gemma").save_pretrained(tmp_path)
    status, shown = check(tmp_path, capsys)
    assert status == 2
    assert "ended rows do not change the others: off by" in shown
    assert "likely cause: the model's cache does not drop the rows that have ended" in shown
    assert "is not fit for PPO" in shown


def test_a_reward_model_is_checked_by_its_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small.scores().model.save_pretrained(tmp_path)
    status, shown = check(tmp_path, capsys)
    assert status == 0
    assert "scores of a padded batch and of single rows agree" in shown


def test_positions_that_depend_on_the_batch_are_named_with_their_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    families.causal("llama", max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    status, shown = check(tmp_path, capsys)
    assert (status, "above 64 tokens" in shown) == (0, True)


@pytest.mark.parametrize("given", ["nowhere", "models/nowhere/at/all"])
def test_what_is_no_model_is_one_message(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["check-model", given]) == 2
    assert f"{given}: there is no such folder, and it is not a hub model" in capsys.readouterr().err
