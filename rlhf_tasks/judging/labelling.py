"""`rlhf label`: a person judges pairs of responses without seeing whose they are, one key each. No torch.

The responses are those of the last run of stage judge. A seed decides the order of the pairs, and which
response is shown first. A labelled pair is not shown again, and every label is on the disk before the next
pair is shown.
"""

from __future__ import annotations

import random
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import config, console, presets
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import human_labels
from rlhf_tasks.judging.human_labels import Label, Pair
from rlhf_tasks.project import dvc_cli
from rlhf_tasks.project.paths import Paths

CONTENDERS = ("policy", "sft", "reference")
DEFAULT = ("policy_vs_reference", "policy_vs_sft")
KEYS = "a: the first is better, b: the second, t: a tie, s: skip, q: quit"
FIRST, SECOND, TIE, SKIP, QUIT = "abtsq"


def run(
    paths: Paths, names: Sequence[str], *, most: int | None, seed: int, by: str | None, stream: TextIO
) -> int:
    """Show pairs until all are labelled, `most` are labelled, or the person quits; the number of new labels.

    The keys come from `stream`. A skipped pair does not count as labelled.

    Raises:
        UserError: if there are no responses, or a name of `names` is not a pair.
    """
    file = paths.labels
    if not file.exists() and file.with_name(f"{file.name}.dvc").exists():
        raise UserError(f"{file} does not exist, but DVC has labels: run `dvc pull {file}.dvc` first")
    known = human_labels.read(file)
    human_labels.remove_incomplete_line(file)
    todo = unlabelled(pairs(paths, names or DEFAULT), known, seed)
    console.say(f"{len(human_labels.decided(known))} pairs have labels, {len(todo)} pairs are left; {KEYS}")
    count = 0
    with keys(stream) as next_key:
        for number, pair in enumerate(todo, start=1):
            if count == most:
                break
            swapped = is_swapped(pair, seed)
            key = _prompt_for_key(pair, number, swapped, next_key)
            if key == QUIT:
                break
            label = Label(pair, _outcome(key, swapped=swapped))
            signature = {} if by is None else {"by": by, "when": datetime.now(UTC).isoformat("T", "seconds")}
            human_labels.add(file, label, seed=seed, **signature)
            count += label.outcome is not None
    console.say(f"{count} pair(s) labelled, in {file}")
    return count


def keep(paths: Paths) -> None:
    """Add the labels to DVC, and to params.yaml as those of stage judge."""
    if not paths.labels.exists():
        return
    name = paths.relative(paths.labels)
    dvc_cli.run(paths.root, "add", "--quiet", name)
    before = config.load(paths.params).judge.labels
    changed = presets.apply([], paths.params, [f"judge.labels={name}"])
    if changed:
        undo = f"rlhf preset --set judge.labels={before or 'null'}"
        console.say(f"params.yaml has changed: {changed[0]}; `{undo}` undoes it")
    console.say(
        f"DVC tracks {name}: commit {name}.dvc, data/.gitignore{', params.yaml' if changed else ''}; `dvc "
        "repro` then measures how far the judges agree with the labels"
    )


# ----------------------------------------------------------------------------------------- pairs


def pairs(paths: Paths, names: Sequence[str]) -> list[Pair]:
    """The pairs `A_vs_B` of the judged responses, without those whose two texts are the same.

    Raises:
        UserError: if the responses do not exist or cannot be read, or a name is not a pair.
    """
    file = paths.judged_responses
    if not file.exists():
        raise UserError(f"{file} does not exist, and it holds the responses to label; run `rlhf judge`")
    try:
        rows = pq.read_table(file).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise UserError(f"{file} is not a table ({error}); run `rlhf judge` again") from None
    result = []
    for name in names:
        a, _, b = name.partition("_vs_")
        if a == b or not {a, b} <= set(CONTENDERS):
            raise UserError(
                f"--pairs {name} is not a pair; give two of {', '.join(CONTENDERS)}, as {DEFAULT[0]}"
            )
        differ = (row for row in rows if row[a].strip() != row[b].strip())
        result += [Pair(row["prompt"], a, b, row[a], row[b]) for row in differ]
    return result


def unlabelled(candidates: Sequence[Pair], known: Sequence[Label], seed: int) -> list[Pair]:
    """The pairs without a label in the seed's order, each two texts once."""
    seen = {label.pair.key for label in known}
    rest = []
    for pair in random.Random(f"order-{seed}").sample(candidates, len(candidates)):
        if pair.key not in seen:
            seen.add(pair.key)
            rest.append(pair)
    return rest


def is_swapped(pair: Pair, seed: int) -> bool:
    """Whether B is shown first."""
    return random.Random(f"sides-{seed}-{pair}").random() < 0.5


def _outcome(key: str, *, swapped: bool) -> float | None:
    if key in (TIE, SKIP):
        return 0.5 if key == TIE else None
    return float((key == FIRST) != swapped)


# -------------------------------------------------------------------------------------- terminal


def _prompt_for_key(pair: Pair, number: int, swapped: bool, next_key: Callable[[], str]) -> str:
    first, second = (pair.answer_b, pair.answer_a) if swapped else (pair.answer_a, pair.answer_b)
    console.say(f"\n—— {number} ——\n{pair.prompt.strip()}\n\nA: {first.strip()}\n\nB: {second.strip()}\n")
    while (key := next_key().lower()) not in (FIRST, SECOND, TIE, SKIP, QUIT):
        console.say(f"{key!r} is not one of the keys; {KEYS}")
    return key


@contextmanager
def keys(stream: TextIO) -> Iterator[Callable[[], str]]:
    """A function that returns the next key: at a terminal without Enter, else the next character.

    It skips white space, and returns `q` at the end of a pipe.
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
