"""Runs side by side: settings by the parameters that differ, and seeds as one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_tasks.cli import main
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import comparison, page
from rlhf_tasks.report import comparison_page as compared
from rlhf_tasks.report.comparison import Result
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
    result("second", 2, "0.03", [3.0, 4.0]),
    result("third", 1, "0.1", [0.5, 0.5], **{"reward.margin": "1.0"}),
]


def test_a_setting_is_the_parameters_that_differ() -> None:
    """A parameter that a run does not have is not compared."""
    settings = [one.setting for one in comparison.with_settings(RUNS)]
    assert settings == ["ppo.kl_coef=0.03", "ppo.kl_coef=0.03", "ppo.kl_coef=0.1"]
    assert [one.setting for one in comparison.with_settings(RUNS[:2])] == ["all", "all"]


def test_runs_that_differ_only_in_their_verdict_count_once() -> None:
    """Two gates over one training are not two seeds."""
    other = replace(RUNS[0], experiment="other gate", metrics={**RUNS[0].metrics, "verdict/passed": 0.0})
    assert [one.experiment for one in comparison.with_settings([*RUNS, other])] == [
        "other gate",
        "second",
        "third",
    ]
    unlike = replace(RUNS[0], experiment="unlike", metrics={**RUNS[0].metrics, "judge/gold/win_rate": 0.8})
    assert len(comparison.with_settings([*RUNS, unlike])) == 4


def test_seeds_are_one_line_with_a_band_and_a_single_run_has_its_interval() -> None:
    context = compared.context(comparison.with_settings(RUNS))
    assert context["groups"] == ["A: ppo.kl_coef=0.03", "B: ppo.kl_coef=0.1"]
    assert context["parameters"] == [("ppo.kl_coef", ["0.03", "0.1"])]
    assert dict(context["headlines"]) == {
        "judge/gold/policy_vs_sft/win_rate": ["0.6 ± 0", "0.6 (0.5 to 0.7)"],
        "ppo/objective/kl": ["3 ± 1.4", "0.5"],
    }
    (figure,) = context["figures_drawn"]
    assert figure.title == "KL from the reference"
    assert figure.svg.count("<polyline") == 2
    assert figure.svg.count("<polygon") == 1, "one run has no band"
    assert "A from 2 to 3" in figure.svg


def test_the_page_says_which_runs_it_compares() -> None:
    facts = {"Run": "third", "Seed": "1", "Preset": "over_optimised", "Date": "2 May 2026"}
    runs = [*RUNS[:2], replace(RUNS[2], facts=facts)]
    variables = compared.context(comparison.with_settings(runs))
    assert variables["titles"] == ["Run", "Seed", "Preset", "Date"]
    assert [order for order, _ in variables["runs"]] == [0, 0, 1]
    text = Document(page.document("comparison.html", variables)).text
    assert "A: ppo.kl_coef=0.03 second 2 – –" in text
    assert "B: ppo.kl_coef=0.1 third 1 over_optimised 2 May 2026" in text
    assert "Policy against SFT by the gold judge: win rate" in text


def test_the_page_is_complete_and_loads_nothing() -> None:
    html = page.document("comparison.html", compared.context(comparison.with_settings(RUNS)))
    document = Document(html)
    assert "3 runs of 2 settings" in document.text
    assert all(a.get("scope") for a in document.of("th"))
    sources = [a[key] for _, a in document.tags for key in ("src", "href") if key in a]
    assert [s for s in sources if not (s or "").startswith(("#", "data:"))] == []
    hostile = page.document("comparison.html", compared.context(comparison.with_settings(
        [result("<script>", 1, "<b>", [1.0]), result("b", 1, "0.1", [1.0])]
    )))  # fmt: skip
    assert Document(hostile).of("script") == []


def test_more_settings_than_a_figure_can_show_are_a_user_error() -> None:
    many = [result(str(i), 1, str(i), [1.0]) for i in range(7)]
    with pytest.raises(UserError, match="7 different settings, and a figure shows 6 at most"):
        compared.context(comparison.with_settings(many))


def folder(root: Path, seed: int, kl: float) -> Path:
    for name, text in {
        "params.yaml": f"seed: {seed}\nppo: {{kl_coef: 0.03}}\nservice: {{retries: {seed}}}\n",
        "metrics/ppo.json": json.dumps({"objective/kl": kl}),
        "plots/ppo.csv": f"episode,objective/kl\n64,{kl}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_folders_of_two_seeds_are_one_setting(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = folder(project / "one", 1, 1.0), folder(project / "two", 2, 3.0)
    assert main.main(["compare", str(one), str(two), str(one), "--out", "both.html"]) == 0
    assert "2 run(s), 1 setting(s)" in capsys.readouterr().out
    text = Document(Path("both.html").read_text(encoding="utf-8")).text
    assert "KL of the rollouts ppo 2 ± 1.4" in text


def test_an_unknown_run_is_one_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compare", "no-such-run"]) == 2
    message = capsys.readouterr().err
    assert "no-such-run is not a run that MLflow or git has here; give an MLflow run's id" in message
    assert message.count("\n") == 1
    assert not Path("comparison.html").exists()


def test_a_run_without_a_parameter_in_which_others_differ_is_a_setting_of_its_own() -> None:
    silent = Result("", 1, "cached", {}, {}, {"ppo.advantages.lam": "0.95"})
    settings = [one.setting for one in comparison.with_settings([*RUNS, silent])]
    assert settings == ["ppo.kl_coef=0.03", "ppo.kl_coef=0.03", "ppo.kl_coef=0.1", "ppo.kl_coef=?"]
    context = compared.context(comparison.with_settings([*RUNS, silent]))
    assert context["parameters"] == [("ppo.kl_coef", ["0.03", "0.1", "?"])]


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    values = {"a": 0.5, "b": float("nan"), "c": 1.5}
    runs = [comparison._result(name, {"ppo/x": v}, {}, {}, name) for name, v in values.items()]
    assert comparison.cell(runs, "ppo/x") == "1 ± 0.71 (2 of 3)"
    assert comparison._rows("episode,x,y\n1,inf,2\n2,nan,3\n") == [
        {"episode": 1.0, "y": 2.0},
        {"episode": 2.0, "y": 3.0},
    ]


def test_a_number_is_the_same_value_from_yaml_and_mlflow() -> None:
    """YAML has 12; MLflow has the text of the validated value, "12.0"."""
    pairs = [(12, "12.0"), (0.03, "0.03"), ([0.9, 1], "[0.9, 1.0]"), (None, "null"), ("gpt_neox", "gpt_neox")]
    for yaml, mlflow in pairs:
        texts = [comparison._result("x", {}, {}, {"k": v}, "").parameters["k"] for v in (yaml, mlflow)]
        assert texts[0] == texts[1]


def test_a_run_that_is_given_twice_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/ppo.json").write_text(json.dumps({"objective/kl": 1.0}), encoding="utf-8")
    compared.run(Paths(tmp_path), [str(tmp_path), f"{tmp_path}/."], tmp_path / "out.html")
    assert "1 run(s)" in capsys.readouterr().out
