"""Tables of what was measured of responses and models, and facts about the reward model."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_tasks.evaluation.results import EvaluationResults, Interval
from rlhf_tasks.report import charts, names

Table = dict[str, dict[str, str]]
"""Measure → model → value."""


def responses(results: EvaluationResults) -> Table:
    """What was measured of the responses to the judged prompts, by model."""
    table: Table = {}
    for name, statistics in results.responses.items():
        for measure, value in statistics.model_dump().items():
            table.setdefault(measure, {})[name] = charts.number(value)
    for judge, responders in results.facets.items():
        for name, measures in responders.items():
            for measure, value in measures.items():
                table.setdefault(f"{judge}/{measure}", {})[name] = charts.number(value)
    return dict(sorted(table.items()))


def retention(results: EvaluationResults) -> Table:
    """Perplexities and multiple-choice accuracy, by model."""
    table: Table = {}
    for name, one in results.retention.items():
        if one.multiple_choice is not None:
            table.setdefault("multiple-choice accuracy", {})[name] = interval_text(one.multiple_choice)
        for text, perplexity in one.perplexity.items():
            table.setdefault(f"perplexity/{text}", {})[name] = charts.number(perplexity)
    return dict(sorted(table.items()))


def reward_facts(metrics: Mapping[str, float], results: EvaluationResults) -> list[tuple[str, str]]:
    """Numbers that show how far the reward model can be trusted, from its own stage and from the judge's."""
    facts = [(key, with_interval(metrics, key)) for key in metrics if not is_interval_end(metrics, key)]
    for one in results.reward_diagnostics:
        if one.agreement is not None:
            title = (
                f"{one.model}: agreement with the gold judge on {names.ORIGINS.get(one.origin, one.origin)}"
            )
            facts.append((title, interval_text(one.agreement)))
    gaps = results.reward_gaps
    if gaps is not None:
        facts.append(("win rate over SFT by the optimised reward", charts.number(gaps.win_rate_by_reward)))
        title = "the same less the win rate by "
        facts += [(f"{title}{judge}", charts.number(gap)) for judge, gap in sorted(gaps.by_judge.items())]
    return facts


def is_interval_end(metrics: Mapping[str, float], key: str) -> bool:
    """Whether the metric is the low or high end of another metric's interval."""
    stem, _, end = key.rpartition("/")
    return end in ("low", "high") and stem in metrics


def with_interval(metrics: Mapping[str, float], key: str) -> str:
    """A metric as text, with its interval if it has one."""
    if f"{key}/low" not in metrics or f"{key}/high" not in metrics:
        return charts.number(metrics[key])
    return interval_text(Interval(value=metrics[key], low=metrics[f"{key}/low"], high=metrics[f"{key}/high"]))


def interval_text(one: Interval) -> str:
    return f"{charts.number(one.value)} ({charts.number(one.low)} to {charts.number(one.high)})"
