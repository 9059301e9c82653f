"""The comparison of two finished runs, on small folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks import identity


def finished_run(root: Path, metrics: Mapping[str, float] | None = None, weights: bytes = b"weights") -> str:
    (root / "models/sft").mkdir(parents=True)
    (root / "models/sft/model.safetensors").write_bytes(weights)
    (root / "metrics").mkdir()
    values = {"loss": 0.1, "time/train_seconds": 3.0, **(metrics or {})}
    (root / "metrics/ppo.json").write_text(json.dumps(values), encoding="utf-8")
    return str(root)


def test_equal_weights_and_numbers_are_equal_whatever_the_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = finished_run(tmp_path / "before")
    after = finished_run(tmp_path / "after", {"time/train_seconds": 4.0})
    assert identity.main([before, after]) == 0
    assert capsys.readouterr().out == "1 weight files and 1 numbers compared: equal\n"


def test_changed_weights_are_a_difference_that_no_key_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = finished_run(tmp_path / "before")
    after = finished_run(tmp_path / "after", weights=b"others")
    assert identity.main([before, after, "--added", ""]) == 1
    assert capsys.readouterr().out.startswith("changed  models/sft/model.safetensors: ")


def test_a_number_that_differs_in_its_last_digit_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = finished_run(tmp_path / "before")
    after = finished_run(tmp_path / "after", {"loss": 0.1 + 0.2 - 0.2})
    assert identity.main([before, after]) == 1
    assert "changed  metrics/ppo.json loss: 0.1 → 0.10000000000000003" in capsys.readouterr().out


def test_an_added_number_is_listed_and_allowed_only_by_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = finished_run(tmp_path / "before", {"old": 1})
    after = finished_run(tmp_path / "after", {"selected_kl": 1.5})
    assert identity.main([before, after]) == 1
    assert identity.main([before, after, "--added", "selected_kl"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "added    metrics/ppo.json selected_kl: absent → 1.5" in lines
    assert "removed  metrics/ppo.json old: 1 → absent" in lines
    assert "allowed  metrics/ppo.json selected_kl: absent → 1.5" in lines
    assert identity.main([before, after, "--added", "selected_kl", "old"]) == 0


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give a folder with a finished run"):
        identity.main([str(tmp_path), str(tmp_path)])
