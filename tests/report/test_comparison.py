"""Runs side by side: settings by the parameters that differ, seeds as one line, worked means and bands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_tasks import config, presets
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import comparison, document
from rlhf_tasks.report.comparison import Result
from tests.conftest import Command
from tests.flows import toy
from tests.report import workspace
from tests.report.test_page import Document


def result(name: str, seed: int, kl_coef: str, values: list[float], **more: str) -> Result:
    curves = {"ppo": [{"episode": 64.0 * (i + 1), "objective/kl": v} for i, v in enumerate(values)]}
    rate = workspace.comparison("gold", "policy", "sft", workspace.interval(0.6, 0.5, 0.7))
    metrics = {
        f"judge/{key}": value for key, value in EvaluationResults(comparisons=(rate,)).metrics().items()
    }
    metrics |= {"ppo/objective/kl": values[-1], "judge/gold/win_rate": 0.9}
    return Result(
        "", seed, name, metrics, curves, {"ppo.kl_coef": kl_coef, "ppo.advantages.lam": "0.95", **more}
    )


RUNS = [
    result("first", 1, "0.03", [1.0, 2.0]),
    result("second", 2, "0.03", [3.0, 6.0, 7.0]),
    result("third", 1, "0.1", [0.5, 0.5], **{"reward.margin": "1.0"}),
]


def written(runs: list[Result]) -> str:
    return document.render("comparison.html", comparison.context(comparison.with_settings(runs)))


def test_the_band_is_the_mean_and_sample_deviation_where_all_seeds_have_points() -> None:
    curve = comparison.mean_curve("A", RUNS[:2], "ppo", "objective/kl")
    assert curve.x == [64.0, 128.0]
    assert curve.y == [2.0, 4.0]
    assert curve.low == pytest.approx([2 - 2**0.5, 4 - 8**0.5])
    assert curve.high == pytest.approx([2 + 2**0.5, 4 + 8**0.5])
    assert comparison.mean_curve("A", RUNS[2:], "ppo", "objective/kl").low == (), "one run has no band"
    assert comparison.mean_curve("A", RUNS, "ppo", "no/such").x == []


def test_the_table_of_a_sweep_has_a_row_per_setting() -> None:
    named = [replace(one, setting=setting) for one, setting in zip(RUNS, "aab", strict=True)]
    assert comparison.table(named, ["ppo/objective/kl", "no/such"]) == [
        {"setting": "a", "seeds": 2, "ppo/objective/kl": "4 ± 4", "no/such": "–"},
        {"setting": "b", "seeds": 1, "ppo/objective/kl": "0.500", "no/such": "–"},
    ]


def test_a_setting_is_the_parameters_that_differ() -> None:
    """Those of all runs; a run without such a parameter is a setting of its own."""
    silent = Result("", 1, "cached", {}, {}, {"ppo.advantages.lam": "0.95"})
    runs = comparison.with_settings([*RUNS, silent])
    same = "ppo.kl_coef=0.03"
    assert [one.setting for one in runs] == [same, same, "ppo.kl_coef=0.1", "ppo.kl_coef=?"]
    assert list(comparison.context(runs)["parameters"]["ppo.kl_coef"].values()) == ["0.03", "0.1", "?"]
    assert [one.setting for one in comparison.with_settings(RUNS[:2])] == ["all", "all"]


def test_a_setting_is_named_by_what_the_user_changed() -> None:
    committed = (toy.ROOT / "params.yaml").read_text(encoding="utf-8")
    for names, changes, title in (
        ([], [], "default"),
        (["smoke"], ["ppo.kl_coef=0.05"], "preset smoke, ppo.kl_coef=0.05"),
        ([], ["sft.micro_batch_tokens=512"], "default"),  # what `auto` stood for is no choice
    ):
        values = config.in_force(presets.combine(committed, names, changes)[1])
        assert comparison.name_setting(comparison.select_decisive(values), committed) == title


def test_runs_that_differ_only_in_their_verdict_count_once() -> None:
    """Two gates over one training are not two seeds."""
    other = replace(RUNS[0], experiment="other gate", metrics={**RUNS[0].metrics, "verdict/passed": 0.0})
    assert len(comparison.with_settings([*RUNS, other])) == 3
    unlike = replace(RUNS[0], experiment="unlike", metrics={**RUNS[0].metrics, "judge/gold/win_rate": 0.8})
    assert len(comparison.with_settings([*RUNS, unlike])) == 4


def test_seeds_are_one_line_with_a_band_and_a_single_run_has_its_interval() -> None:
    context = comparison.context(comparison.with_settings(RUNS))
    a, b = "A", "B"
    assert context["headlines"] == {
        "judge/gold/policy_vs_sft/win_rate": {a: "0.600", b: "0.60 (0.50 to 0.70)"},
    }
    assert context["others"]["ppo/objective/kl"] == {a: "4 ± 4", b: "0.500"}
    (figure,) = context["first_figures"]
    assert [(curve.name, bool(curve.low)) for curve in figure.curves] == [(a, True), (b, False)]
    assert "A from 2 to 4" in document.describe(figure)


def test_the_page_says_which_runs_it_compares_and_loads_nothing() -> None:
    page = Document(written([*RUNS[:2], replace(RUNS[2], code="abcdef0123")]))
    assert "3 runs of 2 settings" in page.text
    assert "A: default second 2 –" in page.text
    assert "B: ppo.kl_coef=0.1, reward.margin=1.0 third 1 abcdef0123" in page.text
    assert "Policy against SFT by the gold judge: win rate" in page.text
    assert all(a.get("scope") for a in page.of("th"))
    sources = [a[key] for _, a in page.tags for key in ("src", "href") if key in a]
    assert [s for s in sources if not (s or "").startswith(("#", "data:"))] == []
    hostile = written([result("<script>", 1, "<b>", [1.0]), result("b", 1, "0.1", [1.0])])
    assert len(Document(hostile).of("script")) == 1, "the page's own"


def test_more_settings_than_a_figure_can_show_are_a_user_error() -> None:
    many = [result(str(i), 1, str(i), [1.0]) for i in range(7)]
    with pytest.raises(UserError, match="7 different settings, and a figure shows 6 at most"):
        written(many)


def test_a_number_is_the_same_value_from_params_yaml_and_mlflow() -> None:
    """The file has 1; MLflow has the text of the validated value, "1.0"."""
    given = config.values({"ppo": {"kl_coef": 1}, "seed": 2}, "params.yaml")
    assert comparison.select_decisive(given)["ppo.kl_coef"] == "1.0"
    assert comparison.select_decisive({"ppo.kl_coef": "1.0", "seed": "2"}) == {"ppo.kl_coef": "1.0"}
    how = {"launch.precision": "bf16", "launch.offload": "true"}
    assert comparison.select_decisive(how) == {"launch.precision": "bf16"}


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("metrics/judge.json", "{", "metrics/judge.json of . cannot be read"),
        ("metrics/judge.json", '{"rate": "much"}', "metrics/judge.json of . cannot be read .*'much'"),
        ("plots/ppo.csv", "episode,kl\n64,high\n", "plots/ppo.csv of . cannot be read .*'high'"),
        ("params.yaml", "seed: [", "params.yaml of . cannot be read"),
        ("metrics/judge.json", None, "has no metrics: no stage has run there"),
    ],
)
def test_a_broken_file_of_a_run_is_named(tmp_path: Path, path: str, text: str | None, problem: str) -> None:
    workspace.put_text(tmp_path / "metrics/judge.json", '{"rate": 1}')
    if text is None:
        (tmp_path / path).unlink()
    else:
        workspace.put_text(tmp_path / path, text)
    with pytest.raises(UserError, match=problem):
        comparison.find(Paths(tmp_path), ".")


def test_an_experiment_is_read_without_checking_it_out(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    workspace.put_text(root / "metrics/first.json", '{"x": {"y": 2}}')
    workspace.put_text(root / "plots/ppo.csv", "episode,objective/kl,lr\n64,0.5,\n")
    workspace.put_text(root / "metrics/mine.json", '{"topic": "news", "count": 3}')  # of a user's own stage
    workspace.put_text(root / "plots/mine.csv", "word,count\nnews,3\n")
    (root / "plots/confusion.png").write_bytes(b"\x89PNG")
    toy.commit(root)
    toy.git(root, "update-ref", f"refs/exps/00/{'0' * 38}/mine", "HEAD")
    toy.git(root, "rm", "-q", "-r", "metrics")
    run = comparison.find(Paths(root), "mine")
    assert run.metrics == {"first/x.y": 2, "mine/count": 3}
    assert run.curves == {"ppo": [{"episode": 64.0, "objective/kl": 0.5}]}
    assert git.find_experiment(root, "ine") is None, "whole names only"


def test_folders_of_two_seeds_are_one_setting(project: Path, rlhf: Command) -> None:
    names = []
    for name, seed, kl in (("one", 1, 1.0), ("two", 2, 3.0)):
        params = f"seed: {seed}\nppo: {{kl_coef: 0.03}}\nservice: {{retries: {seed}}}\n"
        workspace.put_text(project / name / "params.yaml", params)
        workspace.put_text(project / name / "metrics/ppo.json", json.dumps({"objective/kl": kl}))
        workspace.put_text(project / name / "plots/ppo.csv", f"episode,objective/kl\n64,{kl}\n")
        names.append(str(project / name))
    printed = rlhf("compare --out both.html", *names, names[0]).out
    assert "1 of these runs count once with another" in printed, "it was given twice"
    assert "2 run(s), 1 setting(s)" in printed
    text = Document(Path("both.html").read_text(encoding="utf-8")).text
    assert "KL of the rollouts ppo ppo/ objective/ kl 2 ± 1" in text


def test_an_unknown_run_is_one_message(project: Path, rlhf: Command) -> None:
    message = rlhf("compare no-such-run", status=2).err
    assert "no-such-run is not a run that MLflow or git has here; give an MLflow run's id" in message
    assert message.count("\n") == 1
    assert not Path("comparison.html").exists()
