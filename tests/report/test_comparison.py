"""Means and bands against worked examples; equal results give equal pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import comparison
from rlhf_tasks.report.comparison import Result
from tests.flows import toy


def result(setting: str, seed: int, values: list[float], accuracy: float) -> Result:
    curves = [{"episode": 64.0 * (i + 1), "objective/kl": value} for i, value in enumerate(values)]
    return Result(setting, seed, f"{setting}-{seed}", {"reward/accuracy": accuracy}, {"ppo": curves})


RESULTS = [
    result("a", 1, [1.0, 2.0], 0.5),
    result("a", 2, [3.0, 6.0, 7.0], 0.7),
    result("b", 1, [1.0], 0.9),
]


def test_the_band_is_the_mean_and_sample_deviation_where_all_seeds_have_points() -> None:
    xs, means, deviations = comparison.band(RESULTS[:2], "objective/kl")
    assert xs == [64.0, 128.0]
    assert means == [2.0, 4.0]
    assert deviations == pytest.approx([2**0.5, 8**0.5])
    assert comparison.band(RESULTS[2:], "objective/kl") == ([64.0], [1.0], [0.0])
    assert comparison.band(RESULTS, "no/such") == ([], [], [])


def test_the_table_has_a_row_per_setting() -> None:
    rows = comparison.table(RESULTS, ["reward/accuracy", "no/such"])
    assert rows == [
        {"setting": "a", "seeds": 2, "reward/accuracy": "0.6 ± 0.14", "no/such": "–"},
        {"setting": "b", "seeds": 1, "reward/accuracy": "0.9 ± 0", "no/such": "–"},
    ]


def test_the_same_results_give_the_same_figure(tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        comparison.draw(RESULTS, ["objective/kl"], "sweep", tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()


@pytest.mark.parametrize(
    ("path", "content", "problem"),
    [
        ("metrics/judge.json", "{", "metrics/judge.json of . cannot be read"),
        ("metrics/judge.json", '{"rate": "much"}', "metrics/judge.json of . cannot be read .*'much'"),
        ("plots/ppo.csv", "episode,kl\n64,high\n", "plots/ppo.csv of . cannot be read .*'high'"),
        ("params.yaml", "seed: [", "params.yaml of . cannot be read"),
        ("metrics/judge.json", None, r"\./metrics is empty"),
    ],
)
def test_a_broken_file_of_a_run_is_named(
    tmp_path: Path, path: str, content: str | None, problem: str
) -> None:
    for name, text in {"metrics/judge.json": '{"rate": 1}', path: content}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / name).write_text(text, encoding="utf-8")
        else:
            (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match=problem):
        comparison.find(Paths(tmp_path), ".", [])


def test_an_experiment_is_read_without_checking_it_out(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    for path in ("metrics/first.json", "plots/ppo.csv"):
        (root / path).parent.mkdir()
    (root / "metrics/first.json").write_text('{"x": {"y": 2}}', encoding="utf-8")
    (root / "plots/ppo.csv").write_text("episode,objective/kl,lr\n64,0.5,\n", encoding="utf-8")
    toy.commit(root)
    toy.git(root, "update-ref", f"refs/exps/00/{'0' * 38}/mine", "HEAD")
    toy.git(root, "rm", "-q", "-r", "metrics")
    run = comparison.read(root, "a", 1, "mine")
    assert run.metrics == {"first/x.y": 2}
    assert run.curves == {"ppo": [{"episode": 64.0, "objective/kl": 0.5}]}
    assert git.find_experiment(root, "ine") is None, "whole names only"
    with pytest.raises(UserError, match="no experiment 'other'"):
        comparison.read(root, "a", 1, "other")
