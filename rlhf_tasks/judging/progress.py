"""The win rate over the course of PPO's training, measured from the responses that PPO's evaluations kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pyarrow.parquet as pq

from rlhf_tasks.data import columns
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import Judge
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker


def prompts(paths: Paths) -> set[str]:
    """The prompts of the responses that `log` compares."""
    return set(pq.read_table(paths.ppo_responses, columns=["prompt"])["prompt"].to_pylist())


def log(paths: Paths, judges: Sequence[Judge], tracker: Tracker) -> None:
    """Log `JUDGE/win_rate`, `/low` and `/high` over the references, one point per evaluation of PPO.

    The responses are to validation prompts, by which PPO selects its checkpoint too. There is no point where
    every comparison failed.
    """
    rows = columns.decoded(pq.read_table(paths.ppo_responses).to_pylist())
    for episode, group in itertools.groupby(rows, key=lambda row: row["episode"]):
        evaluation = list(group)
        texts, responses, references = (
            [row[column] for row in evaluation] for column in ("prompt", "response", "reference")
        )
        for judge in judges:
            comparisons = judge.compare(texts, responses, references, columns.of_rows(evaluation))
            if len(comparisons.failures) == len(texts):
                continue
            rate = statistics.rate(comparisons.outcomes)
            point = {"win_rate": rate.value, "low": rate.low, "high": rate.high}
            tracker.metrics({f"{judge.name}/{key}": value for key, value in point.items()}, step=episode)
