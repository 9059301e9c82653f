"""Tables of what was measured of responses and models, and facts about the reward model."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.report import numbers
from rlhf_tasks.tracking import catalogue

Table = dict[str, dict[str, str]]
"""Measure → model → value."""


def responses(results: EvaluationResults) -> Table:
    """What was measured of the responses to the judged prompts, by model."""
    table: Table = {}
    for name, statistics in results.responses.items():
        for measure, value in statistics.model_dump().items():
            table.setdefault(_measure(f"{measure}/{name}"), {})[name] = numbers.number(value)
    for judge, responders in results.facets.items():
        for name, measures in responders.items():
            for measure, value in measures.items():
                title = _measure(f"{judge}/{name}/{measure}")
                table.setdefault(title, {})[name] = numbers.number(value)
    for judge, accuracy in results.accuracies.items():
        for measure, shares in (("accuracy", accuracy.right), ("format", accuracy.formatted)):
            for name, share in shares.items():
                title = _measure(f"{judge}/{measure}/{name}")
                table.setdefault(title, {})[name] = interval_text(share)
    return dict(sorted(table.items()))


def retention(results: EvaluationResults) -> Table:
    """Perplexities, multiple-choice accuracy and scores on tasks, by model."""
    table: Table = {}
    for name, one in results.retention.items():
        if one.multiple_choice is not None:
            title = _measure(f"choice/{name}")
            table.setdefault(title, {})[name] = interval_text(one.multiple_choice)
        for text, perplexity in one.perplexity.items():
            title = _measure(f"perplexity/{text}/{name}")
            table.setdefault(title, {})[name] = numbers.number(perplexity)
        for task, metric, score in one.scores():
            title = _measure(f"task/{task}/{metric}/{name}")
            table.setdefault(title, {})[name] = with_error(score.value, score.standard_error)
    for task, change in results.task_changes.items():
        title = catalogue.in_words("judge", f"task_drop/{task}")
        table[title] = {"policy": with_error(change.drop, change.standard_error)}
    return dict(sorted(table.items()))


def with_error(value: float, error: float | None) -> str:
    """A value as text, with its standard error if it has one."""
    return numbers.number(value) + ("" if error is None else f" ± {numbers.number(error)}")


def _measure(name: str) -> str:
    """The words for a metric of one model, without the model."""
    words = catalogue.in_words("judge", name)
    return words.rpartition(": ")[0] or words


def reward_facts(metrics: Mapping[str, float], results: EvaluationResults) -> list[tuple[str, str]]:
    """Numbers that show how far the reward model can be trusted, from its own stage and from the judge's."""
    own = [key for key in metrics if not is_interval_end(metrics, key)]
    facts = [(catalogue.in_words("reward", key), with_interval(metrics, key)) for key in own]
    judged = {
        f"agreement/{one.model}/{one.origin}": interval_text(one.agreement)
        for one in results.reward_diagnostics
        if one.agreement is not None
    }
    if (gaps := results.reward_gaps) is not None:
        rates = {"win_rate_by_reward": gaps.win_rate_by_reward, **dict(sorted(gaps.by_judge.items()))}
        judged |= {f"reward_gap/{name}": numbers.number(value) for name, value in rates.items()}
    return [*facts, *((catalogue.in_words("judge", key), text) for key, text in judged.items())]


def is_interval_end(metrics: Mapping[str, float], key: str) -> bool:
    """Whether the metric is the low or high end of another metric's interval."""
    stem, _, end = key.rpartition("/")
    return end in ("low", "high") and stem in metrics


def with_interval(metrics: Mapping[str, float], key: str) -> str:
    """A metric as text, with its interval if it has one."""
    if f"{key}/low" not in metrics or f"{key}/high" not in metrics:
        return numbers.number(metrics[key])
    return interval_text(Interval(value=metrics[key], low=metrics[f"{key}/low"], high=metrics[f"{key}/high"]))


def interval_text(one: Interval) -> str:
    return f"{numbers.number(one.value)} ({numbers.number(one.low)} to {numbers.number(one.high)})"
