"""Labels that people gave to pairs of responses, and how far judges agree with them. No torch.

The labels are JSON lines in a file that is only appended to. A label holds the texts themselves, so that it
stays true when the models change:

    {"prompt": …, "a": "policy", "b": "sft", "answer_a": …, "answer_b": …, "outcome": 1 | 0.5 | 0 | null}

`outcome` is 1 where the person prefers A, 0 where the person prefers B, ½ for a tie, and null for a skipped
pair. A label may also have `seed`, `by` and `when`.
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
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.results import HumanAgreement, Interval
from rlhf_tasks.project import atomic

OUTCOMES = (1.0, 0.5, 0.0, None)
TEXTS = ("prompt", "a", "b", "answer_a", "answer_b")


@dataclass(frozen=True)
class Pair:
    """Two responses to a prompt, and the contenders that gave them; the names are those of the file."""

    prompt: str
    a: str
    b: str
    answer_a: str
    answer_b: str

    @property
    def key(self) -> tuple[str, frozenset[str]]:
        """Equal for the same texts in either order."""
        return self.prompt, frozenset((self.answer_a, self.answer_b))


@dataclass(frozen=True)
class Label:
    pair: Pair
    outcome: float | None
    by: str = ""
    """Who gave it; empty if unknown."""
    when: str = ""
    """The time in ISO 8601, as `rlhf label` writes it; empty if unknown."""


def read(path: Path) -> list[Label]:
    """All labels of a file, in order; none where the file does not exist.

    A last line that a killed process has cut off is left out, with a message.

    Raises:
        UserError: naming a line that is not a label.
    """
    data = path.read_bytes() if path.exists() else b""
    torn = _torn(data)
    if torn:
        console.say(f"{path}: the last line is incomplete and is left out: {torn.decode(errors='replace')!r}")
    labels = []
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
                f"{path}:{number}: this line is not a label; it needs the texts {', '.join(TEXTS)}, and an "
                "`outcome` of 1 (A is better), 0.5, 0 or null"
            )
        outcome = None if row["outcome"] is None else float(row["outcome"])
        pair = Pair(*(row[name] for name in TEXTS))
        signature = (str(row.get(name) or "") for name in ("by", "when"))
        labels.append(Label(pair, outcome, *signature))
    return labels


def remove_incomplete_line(path: Path) -> None:
    """Cut off an incomplete last line: a label appended after it could not be read."""
    data = path.read_bytes() if path.exists() else b""
    if torn := _torn(data):
        os.truncate(path, len(data) - len(torn))


def _torn(data: bytes) -> bytes:
    """The incomplete line at the end of a file; empty where only the line's end is missing."""
    last = data.rpartition(b"\n")[2]
    try:
        json.loads(last)
    except ValueError:
        return last
    return b""


def add(path: Path, label: Label, **more: str | int) -> None:
    """Append one label, with further fields, and flush it to the disk."""
    row = {**asdict(label.pair), "outcome": label.outcome, **more}
    atomic.append_line(path, json.dumps(row, ensure_ascii=False))


def decided(labels: Sequence[Label]) -> list[Label]:
    """The labels without the skipped pairs."""
    return [label for label in labels if label.outcome is not None]


def agreement(labels: Sequence[Label], outcomes: statistics.Floats) -> HumanAgreement | None:
    """How far a judge agrees with the labels; None where the judge failed on all of them.

    `outcomes` (N,) are the judge's on the pairs of the N labels, NaN for a failure. The agreement leaves out
    labels that are ties; a tie of the judge counts half.
    """
    people = np.array([label.outcome for label in labels], dtype=np.float64)
    both = ~np.isnan(outcomes)
    if not both.any():
        return None
    kappa = statistics.kappa(people, outcomes)
    has_decision = bool((people[both] != 0.5).any())
    share = statistics.agreement(outcomes, people) if has_decision else None
    return HumanAgreement(kappa=Interval.of(kappa), agreement=None if share is None else Interval.of(share))
