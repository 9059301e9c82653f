"""The comparison of two finished runs, on small folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"weights": b"others"}, "models/sft/model.safetensors: "),
        ({"metrics": {"loss": 0.1 + 0.2 - 0.2}}, "metrics/ppo.json loss: 0.1 → 0.10000000000000003"),
        ({"metrics": {"selected_kl": 1.5}}, "metrics/ppo.json selected_kl: absent → 1.5"),
    ],
)
def test_weights_and_the_last_digit_of_a_number_and_new_ones_are_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], line: str
) -> None:
    before, after = finished_run(tmp_path / "before"), finished_run(tmp_path / "after", **changes)
    assert identity.main([before, after]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith(line)
    assert last == "1 weight files and 1 numbers compared: 1 differ"


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="give a folder with a finished run"):
        identity.main([str(tmp_path), str(tmp_path)])
