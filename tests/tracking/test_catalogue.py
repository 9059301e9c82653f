"""The catalogue covers every logged metric once, and its figures are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.config.judge import RESERVED
from rlhf_tasks.tracking import catalogue, curves
from rlhf_tasks.tracking.catalogue import PLACEHOLDERS, Metric

ROOT = Path(__file__).parents[2]
METRICS = [metric for stage in STAGES for metric in catalogue.metrics(stage)]


def results(stage: Stage) -> list[str]:
    """The names in the committed metrics/STAGE.json."""
    path = ROOT / "metrics" / f"{stage}.json"
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def columns(stage: Stage) -> list[str]:
    """The curves in the committed plots/STAGE.csv, without the axis."""
    path = ROOT / "plots" / f"{stage}.csv"
    names = path.read_text(encoding="utf-8").partition("\n")[0].split(",") if path.exists() else []
    return [name for name in names if name != curves.axis(stage)]


def entries(stage: Stage, name: str) -> list[Metric]:
    """All entries that match a name; one without placeholders comes before a pattern."""
    own = [metric for metric in catalogue.metrics(stage) if metric.matches(name)]
    exact = [metric for metric in own if not metric.placeholders]
    return exact or own


@pytest.mark.parametrize("stage", STAGES)
def test_every_result_and_curve_has_exactly_one_entry(stage: Stage) -> None:
    counts = {name: len(entries(stage, name)) for name in [*results(stage), *columns(stage)]}
    assert {name: count for name, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("stage", curves.CURVES)
def test_every_column_of_plots_is_marked_as_a_curve(stage: Stage) -> None:
    marked = {name: catalogue.find(stage, name) for name in columns(stage)}
    assert [name for name, metric in marked.items() if metric is None or not metric.curve] == []


@pytest.mark.parametrize(
    ("stage", "name", "entry"),
    [
        *(("ppo", name, name) for name in ("selected_kl", "selected_kl_standard_error", "eval/kl")),
        *(("ppo", name, name) for name in ("loss/ptx_avg", "warmup/value_loss")),
        ("ppo", "objective/scores/reward_model", "objective/scores/SCORER"),
        ("judge", "gpt/policy_vs_sft/position_bias", "JUDGE/A_vs_B/position_bias"),
        ("judge", "gpt/policy_vs_sft/cost/tokens", "JUDGE/A_vs_B/cost/tokens"),
        ("judge", "gpt/policy_vs_sft/decisive/low", "JUDGE/A_vs_B/decisive"),
        ("judge", "human/gold/kappa/high", "human/JUDGE/kappa"),
        ("judge", "perplexity/general/base", "perplexity/TEXT/MODEL"),
        ("judge", "length/policy_over_sft", "length/policy_over_sft"),
        ("judge", "kappa/gold_and_reward_model", "kappa/JUDGE_and_OTHER"),
        ("judge", "gold/is_optimised_reward", "JUDGE/is_optimised_reward"),
    ],
)
def test_a_name_maps_to_its_entry_although_the_default_run_lacks_it(
    stage: Stage, name: str, entry: str
) -> None:
    metric = catalogue.find(stage, name)
    assert metric is not None
    assert metric.name == entry


def test_an_unknown_name_has_no_entry() -> None:
    assert catalogue.find("ppo", "objective/luck") is None
    assert catalogue.find("sft", "heldout/train/loss") is None
    assert catalogue.find("reward", "heldout/train/loss") is not None


def test_every_metric_has_a_formula_and_a_reading_in_plain_english() -> None:
    for metric in METRICS:
        assert metric.formula, metric.name
        assert not metric.formula.endswith("."), metric.name
        assert not metric.reading or metric.reading.endswith("."), metric.name


def test_every_name_that_ppo_logs_has_an_entry() -> None:
    pattern = r'"((?:objective|policy|val|loss|eval|warmup|time|train|guards)/[a-z0-9_]+|selected_[a-z_]+)"'
    files = [*(ROOT / "rlhf_tasks" / "ppo").glob("*.py"), ROOT / "rlhf_tasks" / "stages" / "ppo.py"]
    names = {name for file in files for name in re.findall(pattern, file.read_text(encoding="utf-8"))}
    assert "objective/kl" in names
    assert sorted(name for name in names if catalogue.find("ppo", name) is None) == []


def test_every_placeholder_is_explained_and_used() -> None:
    assert {word for metric in METRICS for word in metric.placeholders} == set(PLACEHOLDERS)


def test_judges_cannot_be_named_like_other_judge_metrics() -> None:
    own = [metric.name.partition("/")[0] for metric in catalogue.metrics("judge")]
    firsts = {first for first in own if not first.startswith("JUDGE")}
    assert {first for first in firsts if not first.startswith("rouge")} == set(RESERVED.split("|"))


def test_every_figure_shows_metrics_of_one_unit() -> None:
    for stage in STAGES:
        for panel in catalogue.panels(stage):
            assert len({metric.unit for metric in panel.metrics}) == 1, panel.title
            assert all(metric.curve for metric in panel.metrics), panel.title


@pytest.mark.parametrize(
    ("stage", "name", "words"),
    [
        ("judge", "gold/policy_vs_sft/win_rate", "Policy against SFT by the gold judge: win rate"),
        ("judge", "my_gpt/sft_vs_reference/ties", "SFT against reference by my gpt: ties"),
        ("judge", "choice/base/low", "Multiple-choice accuracy: base, low end of the interval"),
        ("reward", "heldout/margin", "Margin on test pairs (held-out reward model)"),
        ("ppo", "selected_kl", "KL of the kept checkpoint"),
        ("ppo", "objective/luck", "objective/luck"),
    ],
)
def test_a_name_is_shown_in_words(stage: Stage, name: str, words: str) -> None:
    assert catalogue.in_words(stage, name) == words


@pytest.mark.parametrize("stage", STAGES)
def test_no_two_names_of_a_stage_have_the_same_words(stage: Stage) -> None:
    """The curve of a metric and its final value share both."""
    words = [catalogue.in_words(stage, name) for name in {*results(stage), *columns(stage)}]
    assert sorted(word for word in words if words.count(word) > 1) == []
    assert [word for word in words if "/" in word or "_" in word] == []


def test_a_label_has_the_placeholders_of_its_name() -> None:
    for metric in METRICS:
        assert {*re.findall(r"\b[A-Z]+\b", metric.label)} >= {*metric.placeholders}, metric.name
