"""`rlhf label`: a person judges pairs of answers blind, a key each. No torch here.

The answers are those of the last judge stage. Which pairs come, in which order, and which answer is shown
first, are decided by a seed; whose an answer is is not shown. What was labelled is not asked again, and every
label is on the disk before the next pair is shown.
"""

from __future__ import annotations

import random
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console, presets
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import labels
from rlhf_tasks.evaluation.labels import Label, Pair
from rlhf_tasks.project import dvc_cli

ANSWERS = Path("evaluation/judge/answers.parquet")
FILE = Path("data/labels.jsonl")
CONTENDERS = ("policy", "sft", "reference")
DEFAULT = ("policy_vs_reference", "policy_vs_sft")
KEYS = "a: the first is better, b: the second, t: a tie, s: skip, q: quit"
FIRST, SECOND, TIE, SKIP, QUIT = "abtsq"


def run(names: Sequence[str], *, most: int | None, seed: int, by: str | None) -> int:
    """Ask until all pairs are labelled, `most` are now, or the person quits; how many were labelled now.

    A pair that is skipped is not labelled, and counts for nothing.

    Raises:
        UserError: if there are no answers, or a pair is none.
    """
    if not FILE.exists() and FILE.with_name(f"{FILE.name}.dvc").exists():
        raise UserError(f"{FILE} is not here, and DVC knows labels of it: `dvc pull {FILE}.dvc` first")
    known = labels.read(FILE)
    labels.mend(FILE)
    todo = unlabelled(pairs(names or DEFAULT), known, seed)
    console.say(f"{len(labels.decided(known))} labelled before, {len(todo)} pairs left; {KEYS}")
    count = 0
    with keys(sys.stdin) as next_key:
        for number, pair in enumerate(todo, start=1):
            if count == most:
                break
            key = _ask(pair, number, _swapped(pair, seed), next_key)
            if key == QUIT:
                break
            label = Label(pair, _outcome(key, swapped=_swapped(pair, seed)))
            known_by = {} if by is None else {"by": by, "when": datetime.now(UTC).isoformat("T", "seconds")}
            labels.add(FILE, label, seed=seed, **known_by)
            count += label.outcome is not None
    console.say(f"{count} pair(s) labelled, in {FILE}")
    return count


def keep() -> None:
    """Have DVC keep the labels, and the judge stage read them."""
    if not FILE.exists():
        return
    dvc_cli.run(Path.cwd(), "add", "--quiet", str(FILE))
    changed = presets.apply([], Path("params.yaml"), [f"judge.labels={FILE}"])
    told = ", params.yaml (judge.labels)" if changed else ""
    console.say(
        f"DVC keeps {FILE}: commit {FILE}.dvc, data/.gitignore{told}; `dvc repro` tells the judges' agreement"
    )


# ----------------------------------------------------------------------------------------- pairs


def pairs(names: Sequence[str]) -> list[Pair]:
    """The pairs `A_vs_B` of the judged answers; answers that look the same are left out.

    Raises:
        UserError: if there are no answers, or none that can be read, or a name is no pair.
    """
    if not ANSWERS.exists():
        raise UserError(f"{ANSWERS} is not there, and its answers are what is labelled; run `rlhf judge`")
    try:
        rows = pq.read_table(ANSWERS).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise UserError(f"{ANSWERS} is no table ({error}); run `rlhf judge` again") from None
    found = []
    for name in names:
        a, _, b = name.partition("_vs_")
        if a == b or not {a, b} <= set(CONTENDERS):
            raise UserError(
                f"--pairs {name} is no pair; give two of {', '.join(CONTENDERS)}, as {DEFAULT[0]}"
            )
        differ = (row for row in rows if row[a].strip() != row[b].strip())
        found += [Pair(row["prompt"], a, b, row[a], row[b]) for row in differ]
    return found


def unlabelled(found: Sequence[Pair], known: Sequence[Label], seed: int) -> list[Pair]:
    """In the seed's order, without what a label was given for, and each two texts once."""
    seen = {label.pair.key for label in known}
    rest = []
    for pair in random.Random(f"order-{seed}").sample(found, len(found)):
        if pair.key not in seen:
            seen.add(pair.key)
            rest.append(pair)
    return rest


def _swapped(pair: Pair, seed: int) -> bool:
    """Whether B is shown first."""
    return random.Random(f"sides-{seed}-{pair}").random() < 0.5


def _outcome(key: str, *, swapped: bool) -> float | None:
    if key in (TIE, SKIP):
        return 0.5 if key == TIE else None
    return float((key == FIRST) != swapped)


# -------------------------------------------------------------------------------------- terminal


def _ask(pair: Pair, number: int, swapped: bool, next_key: Callable[[], str]) -> str:
    first, second = (pair.answer_b, pair.answer_a) if swapped else (pair.answer_a, pair.answer_b)
    console.say(f"\n—— {number} ——\n{pair.prompt.strip()}\n\nA: {first.strip()}\n\nB: {second.strip()}\n")
    while (key := next_key().lower()) not in (FIRST, SECOND, TIE, SKIP, QUIT):
        console.say(f"{key!r} is no answer; {KEYS}")
    return key


@contextmanager
def keys(stream: TextIO) -> Iterator[Callable[[], str]]:
    """The next key each time it is called: at a terminal without Enter, else the next character.

    White space is passed over, and the end of a pipe is `q`.
    """

    def read() -> str:
        while (key := stream.read(1)).isspace():
            pass
        return key or QUIT

    if not stream.isatty():
        yield read
        return
    before = termios.tcgetattr(stream)
    try:
        tty.setcbreak(stream)
        yield read
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
