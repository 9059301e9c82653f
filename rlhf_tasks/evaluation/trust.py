"""How far the reward models can be trusted at the end: agreement, calibration, and what length buys.

A reward model that is fit to be optimised orders two samples of one policy as the labels do, and means its
confidence: of the pairs it is 80% sure of, 80% are ordered right. N pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import ArrayLike

from rlhf_tasks.config.judge import HELDOUT, OPTIMISED
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.synthetic import gold_scores
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.scoring import RewardModel
from rlhf_tasks.modeling import contracts
from rlhf_tasks.project.paths import Paths

REWARDS = {"reward": Path(OPTIMISED), "reward_heldout": Path(HELDOUT)}
NUM_BINS = 10
MIN_IN_BIN = 20  # pairs, where there are enough for several bins
NUM_LENGTHS = 8  # bins of answers by length

CALIBRATION = pa.schema([
    ("model", pa.string()), ("origin", pa.string()), ("confidence", pa.float64()), ("right", pa.float64()),
    ("low", pa.float64()), ("high", pa.float64()), ("pairs", pa.int64()),
])  # fmt: skip
LENGTHS = pa.schema([
    ("judge", pa.string()), ("who", pa.string()), ("length", pa.float64()), ("score", pa.float64()),
    ("low", pa.float64()), ("high", pa.float64()), ("answers", pa.int64()),
])  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """Two answers to each of N prompts, and which is the better one."""

    prompts: list[str]
    better: list[str]
    worse: list[str]


Rewards = Mapping[str, RewardModel]
Bin = Mapping[str, Any]


def made(device: torch.device) -> dict[str, RewardModel]:
    """The reward models of this pipeline; empty where none was made."""
    return {name: RewardModel(path, device) for name, path in REWARDS.items() if contracts.is_made(path)}


# ----------------------------------------------------------------------------------- labelled pairs


def compared() -> dict[str, Pairs]:
    """The held-out pairs of data/comparisons by origin: `given`, `sft_samples`."""
    found: dict[str, Pairs] = {}
    for row in read_table(Paths(), "comparisons", "test"):
        pairs = found.setdefault(row["origin"], Pairs([], [], []))
        pairs.prompts.append(row["prompt"])
        pairs.better.append(row["chosen"])
        pairs.worse.append(row["rejected"])
    return found


def by_gold(prompts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> Pairs:
    """Two samples of one policy, ordered by the gold judge; its ties are left out."""
    scores = zip(gold_scores(prompts, first), gold_scores(prompts, second), strict=True)
    pairs = Pairs([], [], [])
    for prompt, x, y, (a, b) in zip(prompts, first, second, scores, strict=True):
        if a != b:
            pairs.prompts.append(prompt)
            pairs.better.append(x if a > b else y)
            pairs.worse.append(y if a > b else x)
    return pairs


def leads(model: RewardModel, pairs: Pairs) -> statistics.Floats:
    """(N,) score of the better answer, less that of the worse."""
    better, worse = (model.scores(pairs.prompts, texts) for texts in (pairs.better, pairs.worse))
    return np.subtract(better, worse)


# ------------------------------------------------------------------------------------ what is told


def agreement(lead: ArrayLike) -> statistics.Estimate:
    """Share of pairs that a model orders as labelled; equal scores count half."""
    given = np.asarray(lead, dtype=np.float64)
    return statistics.rate(statistics.outcomes(given, np.zeros_like(given)))


def calibration(lead: ArrayLike) -> tuple[float, list[Bin]]:
    """Expected calibration error of σ(|lead|), and its bins, from (N,) leads of the better answers.

    A pair is turned so that the model favours its first answer: `confidence` is the mean σ(|lead|) of a
    bin, `right` the share of its pairs whose favoured answer is the better one, with Wilson's interval.
    Bins hold equal counts (± 1) by rising confidence. A pair of equal scores favours neither answer, and is
    left out; without any other the error is 0.
    """
    given = np.asarray(lead, dtype=np.float64)
    given = given[given != 0]
    if given.size == 0:
        return 0.0, []
    count = max(1, min(NUM_BINS, given.size // MIN_IN_BIN))
    bins: list[Bin] = []
    for part in np.array_split(given[np.argsort(np.abs(given), kind="stable")], count):
        share = statistics.wilson(int((part > 0).sum()), part.size)
        confidence = float((1 / (1 + np.exp(-np.abs(part)))).mean())
        bins.append(
            {"confidence": confidence, "right": share.value, "low": share.low, "high": share.high,
             "pairs": part.size}
        )  # fmt: skip
    return statistics.calibration_error(given, np.ones_like(given), count), bins


def measured(rewards: Rewards, samples: Mapping[str, Pairs]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """`agreement/MODEL/ORIGIN` on samples of the policies, `calibration/MODEL/ORIGIN` on all pairs; the bins.

    `samples` are labelled by gold; where there are none of an origin, data/comparisons has the word.
    """
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for origin, pairs in (compared() | dict(samples)).items() if rewards else ():
        if not pairs.prompts:  # a policy that collapsed says the same twice: nothing to agree on
            continue
        for name, model in rewards.items():
            lead = leads(model, pairs)
            if origin in samples:
                agreed, key = agreement(lead), f"agreement/{name}/{origin}"
                metrics |= {key: agreed.value, f"{key}/low": agreed.low, f"{key}/high": agreed.high}
            error, bins = calibration(lead)
            metrics[f"calibration/{name}/{origin}"] = error
            rows += [{"model": name, "origin": origin, **part} for part in bins]
    return metrics, rows


def by_length(
    scores: Mapping[tuple[str, str], Sequence[float]], texts: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Mean score of answers of like length, in characters, with its 95% interval (normal).

    `scores` are by judge and contender, NaN where a judge failed; answers are put into bins of equal counts.
    """
    rows = []
    for (judge, who), given in scores.items():
        values, lengths = np.asarray(given, dtype=np.float64), np.array([len(text) for text in texts[who]])
        whole = ~np.isnan(values)
        values, lengths = values[whole], lengths[whole]
        order = np.argsort(lengths, kind="stable")
        count = max(1, min(NUM_LENGTHS, values.size // MIN_IN_BIN))
        for part in np.array_split(order, count) if values.size else ():
            mean = float(values[part].mean())
            reach = 1.96 * float(values[part].std(ddof=1)) / part.size**0.5 if part.size > 1 else 0.0
            rows.append(
                {"judge": judge, "who": who, "length": float(lengths[part].mean()), "score": mean,
                 "low": mean - reach, "high": mean + reach, "answers": part.size}
            )  # fmt: skip
    return rows
