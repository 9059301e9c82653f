"""The benchmarks' own arithmetic, on made-up rows and tiny shapes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks import config
from rlhf_tasks.benchmark.shapes import Shape
from rlhf_tasks.data.synthetic import generate
from tests.benchmarks import ensembles, estimators, growth, layouts, ledger, speed, verifier
from tests.benchmarks.speed import Figures

TINY = Shape(vocab=40, query_min=4, query=4, response=8, batch=8, micro=4, layers=1, hidden=16, heads=2)


def finished_run(root: Path, seed: int, rate: float) -> Path:
    (root / "metrics").mkdir(parents=True)
    (root / "params.yaml").write_text(f"seed: {seed}\n", encoding="utf-8")
    values = {"win_rate": rate, "low": rate - 0.02, "high": rate + 0.02}
    judge = {f"{pair}/{key}": value for pair in ledger.RATES.values() for key, value in values.items()}
    (root / "metrics/judge.json").write_text(json.dumps(judge), encoding="utf-8")
    (root / "metrics/ppo.json").write_text(json.dumps({"selected_kl": 1.234}), encoding="utf-8")
    return root


def test_a_commit_has_one_row_and_keeps_what_a_later_call_does_not_measure(tmp_path: Path) -> None:
    file = tmp_path / "ledger.csv"
    ledger.add({"commit": "aaa", "run_seconds": "500"}, file)
    ledger.add({"commit": "bbb", "run_seconds": "300"}, file)
    ledger.add({"commit": "bbb", "ratio_A": "1.40"}, file)
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["commit"], row["run_seconds"], row["ratio_A"]) for row in rows] == [
        ("aaa", "500", ""),
        ("bbb", "300", "1.40"),
    ]


def test_a_finished_run_fills_the_columns_of_its_seed(tmp_path: Path) -> None:
    row = ledger.of_run(finished_run(tmp_path / "run", seed=2, rate=0.75))
    assert row["seed2_vs_reference"] == "0.750"
    assert (row["seed2_vs_sft_low"], row["seed2_vs_sft_high"]) == ("0.730", "0.770")
    assert row["seed2_kl"] == "1.23"
    assert set(row) < set(ledger.COLUMNS)
    with pytest.raises(SystemExit, match="its seed is 9"):
        ledger.of_run(finished_run(tmp_path / "other", seed=9, rate=0.5))


def test_the_ledger_refuses_a_run_of_another_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_git", lambda *_, at: "abcdef0")
    ledger.check_commit(tmp_path, "abcdef0")
    with pytest.raises(SystemExit, match="commit abcdef0, and not of 0123456; remove it"):
        ledger.check_commit(tmp_path, "0123456")


def test_the_ledgers_ratio_is_our_median_by_the_peers() -> None:
    ours, peer = Figures([10.0, 30.0, 20.0], 1.0), Figures([8.0, 8.0, 9.0], 2.0)
    assert ledger.of_speed({"A": {"ours": ours, "peer": peer}}) == {
        "episodes_A": "20.00", "ratio_A": "2.50", "memory_ratio_A": "0.50",
    }  # fmt: skip
    assert ledger.of_speed({"B": {"ours": ours}}) == {"episodes_B": "20.00"}
    assert speed.line("A", {"ours": ours, "peer": peer}).endswith("| 2.50 |")


def test_the_ledger_is_drawn_with_gaps(tmp_path: Path) -> None:
    rows = [{"commit": "aaa", "run_seconds": "500"}, {"commit": "bbb", "ratio_A": "1.4"}]
    rows[1] |= {
        "seed1_vs_reference": "0.7",
        "seed1_vs_reference_low": "0.6",
        "seed1_vs_reference_high": "0.8",
    }
    ledger.draw(rows, tmp_path / "ledger.png")
    assert (tmp_path / "ledger.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_of_an_update_count_the_prompt_of_each_response() -> None:
    data = speed.rows(TINY, 1)
    answers = [sum(map(len, part)) for part in (data.chosen, data.rejected)]
    assert speed.num_tokens("sft", TINY, 1) == 8 * 4 + answers[0]
    assert speed.num_tokens("reward", TINY, 1) == 2 * 8 * 4 + sum(answers)
    assert all(row[-1] == 1 and 2 < len(row) <= 8 for row in data.chosen)


@pytest.mark.parametrize("part", ["sft", "reward"])
def test_our_side_takes_one_step_per_update(part: str) -> None:
    assert len(speed.SIDES["ours", part](TINY, 2)) == 3


def test_growth_is_measured_and_drawn(tmp_path: Path) -> None:
    found = growth.measure(TINY, {"batch": (4,)}, updates=1)
    assert found["batch"][4].episodes_per_second > 0
    growth.draw(found, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


def test_the_estimators_table_has_each_seeds_rate_and_the_means() -> None:
    result = {
        "win_rate": 0.7, "low": 0.68, "high": 0.72, "kl": 1.0, "seconds": 60.0, "weights": 480_960.0,
        "episodes": 8192.0, "posts": 1000.0,
    }  # fmt: skip
    other = result | {"win_rate": 0.8, "low": 0.78, "high": 0.82, "kl": 2.0, "seconds": 70.0}
    page = estimators.page({"gae": [result, other], "rloo": [other, other]}, [1, 2])
    assert "python -m tests.benchmarks.estimators 1 2\n" in page
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


def test_the_outcome_of_a_run_is_the_gold_win_rate_of_its_best_its_kept_and_its_last_policy(
    tmp_path: Path,
) -> None:
    """The reference itself is a tie, ½, and an empty answer loses."""
    made = generate(1, num_prompts=4, num_sft=4, num_preferences=4, num_validation=4, num_test=4)
    rows = [
        row | {"episode": episode, "response": row["reference"] if number < ties else " "}
        for episode, ties in ((0, 2), (64, 4), (128, 3), (192, 0))
        for number, row in enumerate(made["prompts"]["validation"])
    ]
    (tmp_path / "evaluation/ppo").mkdir(parents=True)
    (tmp_path / "metrics").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "evaluation/ppo/answers.parquet")
    metrics = {"selected_episode": 128.0, "objective/kl": 21.96}
    (tmp_path / "metrics/ppo.json").write_text(json.dumps(metrics), encoding="utf-8")
    found = ensembles.outcome(tmp_path)
    assert (found.best.value, found.kept.value, found.end.value) == (0.5, 0.375, 0.0)
    assert "| one | 50.0% | 37.5% | 0.0% | 22.0 | 0.0% (0.0%–0.0%) |" in ensembles.table(
        {"one": [found]}, [1]
    )


@pytest.mark.parametrize("name", ensembles.VARIANTS)
def test_every_variant_of_the_ensembles_is_a_valid_params_yaml(name: str, tmp_path: Path) -> None:
    ensembles.workspace(tmp_path / "a", 7, ["ppo.num_selection_prompts=500"], ensembles.VARIANTS[name])
    made = config.load(tmp_path / "a/params.yaml")
    assert (made.seed, made.ppo.kl_coef, made.ppo.num_selection_prompts) == (7, 0.0, 500)
    assert len(made.ppo.scorers) == (1 if name == "one reward model" else 3)


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
