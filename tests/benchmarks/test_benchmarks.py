"""The benchmarks' own arithmetic, on made-up rows and tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import estimators, layouts, speed, verifier
from benchmarks.shapes import Shape
from benchmarks.speed import Figures
from rlhf_tasks import config

TINY = Shape(vocab=40, query_min=4, query=4, response=8, batch=8, micro=4, layers=1, hidden=16, heads=2)


def test_the_ratio_is_our_median_by_the_peers() -> None:
    ours, peer = Figures([10.0, 30.0, 20.0], 1.0), Figures([8.0, 8.0, 9.0], 2.0)
    assert speed.line("A", {"ours": ours, "peer": peer}).endswith("| 2.50 |")


def test_tokens_of_an_update_count_the_prompt_of_each_response() -> None:
    data = speed.rows(TINY, 1)
    answers = [sum(map(len, part)) for part in (data.chosen, data.rejected)]
    assert speed.num_tokens("sft", TINY, 1) == 8 * 4 + answers[0]
    assert speed.num_tokens("reward", TINY, 1) == 2 * 8 * 4 + sum(answers)
    assert all(row[-1] == 1 and 2 < len(row) <= 8 for row in data.chosen)


@pytest.mark.parametrize("part", ["ppo", "sft", "reward"])
def test_our_side_takes_one_step_per_update(part: str) -> None:
    assert len(speed.SIDES["ours", part](TINY, 2)) == 3


def test_the_estimators_table_has_each_seeds_rate_and_the_means() -> None:
    result = {
        "win_rate": 0.7, "low": 0.68, "high": 0.72, "kl": 1.0, "seconds": 60.0, "weights": 480_960.0,
        "episodes": 8192.0, "posts": 1000.0,
    }  # fmt: skip
    other = result | {"win_rate": 0.8, "low": 0.78, "high": 0.82, "kl": 2.0, "seconds": 70.0}
    page = estimators.page({"gae": [result, other], "rloo": [other, other]}, [1, 2])
    assert "python -m benchmarks.estimators 1 2\n" in page
    assert "with 8,192 episodes" in page
    rows = page.splitlines()[-2:]
    assert rows[0] == "| gae | 70.0% (68.0%–72.0%) | 80.0% (78.0%–82.0%) | 75.0% | 1.50 | 65 | 480,960 |"
    assert rows[1].startswith("| rloo | 80.0% ")


def test_an_estimators_workspace_has_the_models_of_its_seed_and_the_values_of_its_preset(
    tmp_path: Path,
) -> None:
    finished = tmp_path / "4"
    finished.mkdir()
    (finished / "params.yaml").write_text("seed: 4\n", encoding="utf-8")
    for name, preset in estimators.NAMES.items():
        estimators.prepare(tmp_path / name, finished, preset, ["ppo.total_episodes=512"])
        settings = config.load(tmp_path / name / "params.yaml")
        assert (settings.seed, settings.ppo.advantages.kind, settings.ppo.total_episodes) == (4, name, 512)
        assert (tmp_path / name / "models/sft").readlink() == finished / "models/sft"


def test_the_verifiers_table_has_a_row_for_each_seed(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    values = {"accuracy/sft": 0.5, "accuracy/policy": 0.75, "accuracy_gain": 0.25}
    values |= {"accuracy_gain/low": -0.01, "accuracy_gain/high": 0.4}
    metrics = {f"verifier/{name}": value for name, value in values.items()}
    (tmp_path / "metrics/judge.json").write_text(json.dumps(metrics), encoding="utf-8")
    (tmp_path / verifier.MINUTES).write_text("3.4\n", encoding="utf-8")
    lines = verifier.table([7], [tmp_path]).splitlines()
    assert lines[2:] == ["| 7 | 50.0% | 75.0% | +25.0 (-1.0 to +40.0) | 3.4 |"]


def test_layouts_are_compared_by_their_largest_differences_and_above_1_relative_to_them() -> None:
    def written(weight: float, loss: float, metric: float) -> layouts.Written:
        return layouts.Written({"policy/w": torch.tensor([0.5, weight])}, [0.25, loss], {"kl": metric})

    found = layouts.compared(written(-4.0, 1.0, 0.5), written(-4.5, 1.0, 0.25))
    assert (found.weights, found.losses, found.metrics) == (0.125, 0.0, 0.25)
    assert not found.is_rounding
    assert layouts.Difference(9e-5, 9e-5, 9e-4).is_rounding
    assert not layouts.Difference(0.0, 2e-4, 0.0).is_rounding
    row = layouts.table({"`zero3`": {"ppo": found}}).splitlines()[-1]
    assert row == "| `zero3` | ppo | 1e-01 | 0 | 2e-01 | **no** |"
    with pytest.raises(ValueError, match="different weights or metrics"):
        layouts.compared(written(0, 0, 0), layouts.Written({}, [0.0, 0.0], {"kl": 0.0}))
