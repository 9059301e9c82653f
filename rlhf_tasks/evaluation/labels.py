"""What people said of pairs of answers: JSON lines that only ever grow, and how far judges agree with them.

A label holds the texts that were judged, so that it stays true when the models change:

    {"prompt": …, "a": "policy", "b": "sft", "answer_a": …, "answer_b": …, "outcome": 1 | 0.5 | 0 | null}

`outcome` is 1 where A was called better, 0 where B was, ½ for a tie and null for a pair that was passed over.
`seed`, `by` and `when` may stand beside. No torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.project import atomic

OUTCOMES = (1.0, 0.5, 0.0, None)
TEXTS = ("prompt", "a", "b", "answer_a", "answer_b")


@dataclass(frozen=True)
class Pair:
    """Two answers to a prompt, and whose they are."""

    prompt: str
    a: str
    b: str
    answer_a: str
    answer_b: str

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """The same for the same texts, whichever way round."""
        return self.prompt, frozenset((self.answer_a, self.answer_b))


@dataclass(frozen=True)
class Label:
    pair: Pair
    outcome: float | None


def read(path: Path) -> list[Label]:
    """All labels of a file, in order; none where there is no file.

    A last line that a kill left half written is left out, and told.

    Raises:
        UserError: naming a line that is no label.
    """
    data = path.read_bytes() if path.exists() else b""
    torn = _torn(data)
    if torn:
        console.say(f"{path}: the last line is half written, and left out: {torn.decode(errors='replace')!r}")
    found = []
    for number, line in enumerate(data[: len(data) - len(torn)].split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if (
            not isinstance(row, dict)
            or not all(isinstance(row.get(name), str) for name in TEXTS)
            or row.get("outcome", "none") not in OUTCOMES
        ):
            raise UserError(
                f"{path}:{number}: is no label; it needs the texts {', '.join(TEXTS)}, and an `outcome` of 1 "
                "(A is better), 0.5, 0 or null"
            )
        outcome = None if row["outcome"] is None else float(row["outcome"])
        found.append(Label(Pair(*(row[name] for name in TEXTS)), outcome))
    return found


def mend(path: Path) -> None:
    """Cut off a last line that a kill left half written: behind another one it would be no label."""
    data = path.read_bytes() if path.exists() else b""
    if torn := _torn(data):
        os.truncate(path, len(data) - len(torn))


def _torn(data: bytes) -> bytes:
    """The end of a file that is no whole line; empty where only the line's end is lacking."""
    last = data.rpartition(b"\n")[2]
    try:
        json.loads(last)
    except ValueError:
        return last
    return b""


def add(path: Path, label: Label, **more: str | int) -> None:
    """Write one label down to the disk; what more is known of it stands beside."""
    row = {**asdict(label.pair), "outcome": label.outcome, **more}
    atomic.append_line(path, json.dumps(row, ensure_ascii=False))


def decided(labels: Sequence[Label]) -> list[Label]:
    """Without the pairs that were passed over."""
    return [label for label in labels if label.outcome is not None]


def agreement(judge: str, labels: Sequence[Label], outcomes: statistics.Floats) -> dict[str, float]:
    """`human/JUDGE/kappa`, and `human/JUDGE/agreement`: the share of people's decisions that it shares.

    `outcomes` (N,) are the judge's on the pairs of the N labels, NaN where it failed. Agreement leaves out
    the ties of people; a tie of the judge counts half. Empty where the judge failed on all.
    """
    people = np.array([label.outcome for label in labels], dtype=np.float64)
    both = ~np.isnan(outcomes)
    if not both.any():
        return {}
    kappa, key = statistics.kappa(people, outcomes), f"human/{judge}"
    found = {f"{key}/kappa": kappa.value, f"{key}/kappa/low": kappa.low, f"{key}/kappa/high": kappa.high}
    if (people[both] != 0.5).any():
        share = statistics.agreement(outcomes, people)
        found |= {
            f"{key}/agreement": share.value,
            f"{key}/agreement/low": share.low,
            f"{key}/agreement/high": share.high,
        }
    return found
