"""How the win rate went while PPO trained, told afterwards from answers that it kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.verdicts import Judge
from rlhf_tasks.tracking import Tracker

ANSWERS = Path("evaluation/ppo/answers.parquet")


def log(panel: Sequence[Judge], tracker: Tracker) -> None:
    """`JUDGE/win_rate`, `/low` and `/high` over the references at each look that PPO took, by episode.

    These are answers to validation prompts, those that the checkpoint was chosen by. The rate has no point
    where every verdict failed.
    """
    rows = pq.read_table(ANSWERS).to_pylist()
    for episode, group in itertools.groupby(rows, key=lambda row: row["episode"]):
        looked_at = list(group)
        prompts, answers, references = (
            [row[column] for row in looked_at] for column in ("prompt", "response", "reference")
        )
        for judge in panel:
            verdicts = judge.compare(prompts, answers, references)
            if len(verdicts.failures) == len(prompts):
                continue
            rate = statistics.rate(verdicts.outcomes)
            point = {"win_rate": rate.value, "low": rate.low, "high": rate.high}
            tracker.metrics({f"{judge.name}/{key}": value for key, value in point.items()}, step=episode)
