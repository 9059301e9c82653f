"""How well reward models order pairs: diagnostics of stage judge.

A reward model that is fit to be optimized orders two samples of one policy as the labels do. Its confidence
is calibrated if it orders right 80% of the pairs of which it is 80% sure. N pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import ArrayLike

from rlhf_tasks import console
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.results import RewardDiagnostic
from rlhf_tasks.models import contracts
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring import reward_model
from rlhf_tasks.scoring.protocol import Responses, Scorer

NUM_BINS = 10
MIN_IN_BIN = 20  # pairs, where there are enough for several bins

CALIBRATION = pa.schema(
    dict.fromkeys(("model", "origin"), pa.string())
    | dict.fromkeys(("confidence", "right", "low", "high"), pa.float64())
    | {"pairs": pa.int64()}
)


OrderedPairs = list[tuple[str, str, str]]
"""N prompts, each with the better one of two responses and the worse one."""
Bins = list[dict[str, Any]]


def load_rewards(paths: Paths, device: torch.device) -> dict[str, Scorer]:
    """The reward models that this pipeline trained, by name; empty where it trained none."""
    folders = {"reward": paths.reward, "reward_heldout": paths.reward_heldout}
    ready = {name: folder for name, folder in folders.items() if contracts.has_model(folder)}
    return {name: reward_model.load(folder, device) for name, folder in ready.items()}


def read_pairs(paths: Paths) -> dict[str, OrderedPairs]:
    """The test pairs of data/comparisons by origin: `given`, `sft_samples`."""
    by_origin: dict[str, OrderedPairs] = {}
    for row in read_table(paths, "comparisons", "test").that_have("chosen", "rejected"):
        by_origin.setdefault(row["origin"], []).append((row["prompt"], row["chosen"], row["rejected"]))
    return by_origin


def order_by(
    score: Callable[[Sequence[str], Sequence[str]], Sequence[float]],
    prompts: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
) -> OrderedPairs:
    """Two samples of one policy per prompt, ordered by a score; equal scores are left out."""
    scored = zip(prompts, first, second, score(prompts, first), score(prompts, second), strict=True)
    return [(prompt, x, y) if a > b else (prompt, y, x) for prompt, x, y, a, b in scored if a != b]


def score_leads(model: Scorer, pairs: OrderedPairs) -> statistics.Floats:
    """(N,) score of the better response minus that of the worse one."""
    prompts, better, worse = (list(texts) for texts in zip(*pairs, strict=True))
    high, low = (model(Responses.of_texts(prompts, texts)).tolist() for texts in (better, worse))
    return np.subtract(high, low)


def calibration(lead: ArrayLike) -> tuple[float, Bins]:
    """Expected calibration error of σ(|lead|), and its bins, from (N,) leads of the better responses.

    The bins are those of `statistics.calibration_bins`, `right` with Wilson's interval. Pairs of equal scores
    are left out; if there are no others, the error is 0.
    """
    leads = np.asarray(lead, dtype=np.float64)
    leads = leads[leads != 0]
    if leads.size == 0:
        return 0.0, []
    num_bins = max(1, min(NUM_BINS, leads.size // MIN_IN_BIN))
    bins: Bins = []
    for confidence, right, count in statistics.calibration_bins(leads, num_bins):
        share = statistics.wilson(round(right * count), count)
        numbers = {"confidence": confidence, "right": share.value, "low": share.low, "high": share.high}
        bins.append({**numbers, "pairs": count})
    return statistics.calibration_error(leads, num_bins), bins


def diagnose(
    rewards: Mapping[str, Scorer], labeled: Mapping[str, OrderedPairs], samples: Mapping[str, OrderedPairs]
) -> tuple[tuple[RewardDiagnostic, ...], Bins]:
    """Each reward model's diagnostics on each origin of pairs, and the bins of calibration.

    `labeled` and `samples` are pairs by origin. `samples` come from this evaluation, ordered by gold: they
    replace labeled pairs of the same origin, and only for them agreement is measured.
    """
    diagnostics: list[RewardDiagnostic] = []
    rows: Bins = []
    for origin, pairs in {**labeled, **samples}.items():
        if not pairs:  # a collapsed policy samples the same text twice
            continue
        for name, model in rewards.items():
            with console.part(f"pairs of {origin} by {name}"):
                lead = score_leads(model, pairs)
            agreed = statistics.rate(statistics.outcomes(lead, 0 * lead)) if origin in samples else None
            error, bins = calibration(lead)
            one = RewardDiagnostic(model=name, origin=origin, calibration_error=error, agreement=agreed)
            diagnostics.append(one)
            rows += [{"model": name, "origin": origin, **part} for part in bins]
    return tuple(diagnostics), rows
