"""Responses that the report shows beside each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.report import charts, names
from rlhf_tasks.report.inputs import Inputs, Rows

NUM_SAMPLES = 5  # of each kind: won most, lost most
NUM_TRAINING_SAMPLES = 3  # of an episode, for the first, middle and last that were kept


@dataclass(frozen=True)
class Sample:
    """A judged prompt with the responses to it."""

    index: int
    prompt: str
    lead: float
    """How far the policy is ahead of the reference; negative if it is behind."""
    lead_text: str
    responses: Sequence[tuple[str, str, float | None]]
    """The model or `reference`, its response, and the score or None."""


def clearest(inputs: Inputs, judge: str) -> tuple[list[Sample], list[Sample]]:
    """Prompts on which the policy leads the reference most, and those on which it lags most."""
    responses = {row["index"]: row for row in inputs.responses}
    rows = {
        row["index"]: row
        for row in inputs.comparisons
        if (row["judge"], row["a"], row["b"]) == (judge, "policy", "reference") and row["index"] in responses
    }
    leads = [(lead, index) for index, row in rows.items() if (lead := _lead(row)) is not None]
    won = sorted((-lead, index) for lead, index in leads if lead > 0)[:NUM_SAMPLES]
    lost = sorted((lead, index) for lead, index in leads if lead < 0)[:NUM_SAMPLES]
    return (
        [_sample(responses[index], -lead, judge, rows[index]) for lead, index in won],
        [_sample(responses[index], lead, judge, rows[index]) for lead, index in lost],
    )


def of_training(rows: Rows) -> Rows:
    """A few samples of PPO's evaluations, at the first, the middle and the last of their episodes."""
    episodes = sorted({row["episode"] for row in rows})
    chosen = sorted({episodes[i] for i in (0, len(episodes) // 2, -1)}) if episodes else []
    return [row for at in chosen for row in [r for r in rows if r["episode"] == at][:NUM_TRAINING_SAMPLES]]


def _lead(row: Mapping[str, Any]) -> float | None:
    """How far A is ahead: by score; by its mean probability over both orders, less ½; by the bare outcome.

    None where the judge failed; 0 for a tie.
    """
    outcome = row["outcome"]
    if outcome is None or math.isnan(outcome):
        return None
    if row["score_a"] is not None and row["score_b"] is not None:
        return float(row["score_a"] - row["score_b"])
    if _orders(row) and outcome != 0.5:
        return sum(_orders(row)) / 2 - 0.5
    return float(outcome) - 0.5


def _orders(row: Mapping[str, Any]) -> list[float]:
    """Probability that A is better with A shown first, and second; empty for a judge that scores."""
    orders = [row.get(name) for name in ("a_shown_first", "a_shown_second")]
    return [] if None in orders else [float(p) for p in orders if p is not None]


def _lead_text(row: Mapping[str, Any], lead: float) -> str:
    side = "ahead" if lead > 0 else "behind"
    if row["score_a"] is not None and row["score_b"] is not None:
        return f"{side} by {charts.number(abs(lead))}"
    return f"{side} with {charts.percent(abs(lead) + 0.5)}" if _orders(row) else side


def _sample(row: Mapping[str, Any], lead: float, judge: str, comparison: Mapping[str, Any]) -> Sample:
    responses = [(who, row[who] or "", row.get(f"{judge}/{who}")) for who in names.RESPONDERS if who in row]
    return Sample(row["index"], row["prompt"], lead, _lead_text(comparison, lead), responses)
