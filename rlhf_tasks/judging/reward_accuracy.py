"""`rlhf judge MODEL --rows FILE`: how often a reward model prefers the right response, by subset.

Rows have the shape of RewardBench 2 (arXiv 2506.01937): `prompt`, `chosen`, several `rejected`, `subset`. A
row is right if every chosen response scores higher than every rejected one; equal scores are wrong.
RewardBench computes the score of its subset Ties in another way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlhf_tasks import console
from rlhf_tasks.data.batches import load_tokenizer, sizes
from rlhf_tasks.data.tokenizer import Ids, encode_rows, ready_rendering
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.statistics import Estimate
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_reward
from rlhf_tasks.project import atomic
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.scoring.retokenize import conversation_ids
from rlhf_tasks.scoring.reward_model import RewardModel

ALL = "all"
MAX_SHOWN = 10  # problems of a file
SHAPE = (
    "give `prompt` (text), `chosen` and `rejected` (a text or a list of texts each), and `subset` (text "
    "other than 'all')"
)


@dataclass(frozen=True)
class Row:
    """One prompt, its right and its wrong responses."""

    prompt: str
    chosen: tuple[str, ...]
    rejected: tuple[str, ...]
    subset: str

    @property
    def responses(self) -> tuple[str, ...]:
        return (*self.chosen, *self.rejected)


def measure(folder: Path, file: Path, out: Path | None, device: torch.device) -> dict[str, Estimate]:
    """Print and return the accuracy by subset, and over all rows; `out` is a JSON file for them.

    Raises:
        UserError: for a row of another form, a folder without a trained reward model, or a row that is longer
            than the model can read.
    """
    rows = read(file)
    scores = score(folder, rows, device)
    found = accuracies(
        [row.subset for row in rows], [is_right(r, s) for r, s in zip(rows, scores, strict=True)]
    )
    shown = [
        [name, f"{one.value:.1%}", f"{one.low:.1%}", f"{one.high:.1%}", one.count]
        for name, one in found.items()
    ]
    console.table(f"accuracy of {folder} on {file}", ["subset", "accuracy", "low", "high", "rows"], shown)
    if out is not None:
        atomic.write_json(out, {name: asdict(one) for name, one in found.items()})
        console.say(f"wrote {out}")
    return found


def accuracies(subsets: Sequence[str], right: Sequence[bool]) -> dict[str, Estimate]:
    """The share of right rows by subset in the order of the file, then of all, with Wilson's 95% interval."""
    groups = {name: [r for s, r in zip(subsets, right, strict=True) if s == name] for name in subsets}
    return {name: statistics.wilson(sum(x), len(x)) for name, x in (groups | {ALL: list(right)}).items()}


def is_right(row: Row, scores: Sequence[float]) -> bool:
    """Whether every chosen response scores higher than every rejected one; scores are in their order."""
    return min(scores[: len(row.chosen)]) > max(scores[len(row.chosen) :])


def score(folder: Path, rows: Sequence[Row], device: torch.device) -> list[list[float]]:
    """The score of each response of each row, in the order of `Row.responses`.

    A model with a chat template reads the prompt as a message of the user, and the response as its answer.

    Raises:
        UserError: as `measure`.
    """
    tokenizer, model = load_tokenizer(folder), load_reward(folder)
    contracts.check_fits(model.model, tokenizer, str(folder))
    prompts = [row.prompt for row in rows for _ in row.responses]
    answers = [answer for row in rows for answer in row.responses]
    reads = ready_rendering(tokenizer, str(folder))
    if reads.chat is None:
        bare = [p if p.startswith(reads.bos) else reads.bos + p for p in prompts]
        ids = encode_rows(tokenizer, bare, answers)
    else:
        turns = [
            [{"role": "user", "content": p}, {"role": "assistant", "content": a}]
            for p, a in zip(prompts, answers, strict=True)
        ]
        ids = conversation_ids(tokenizer, [reads.chat(conversation, False) for conversation in turns])
    _check_lengths(ids, getattr(model.model.config, "max_position_embeddings", None), folder, prompts)
    given = Responses.of_ids(*ids, tokenizer)
    scores = iter(RewardModel(model.to(device), tokenizer)(given).tolist())
    return [[next(scores) for _ in row.responses] for row in rows]


def _check_lengths(
    ids: tuple[list[Ids], list[Ids]], longest: int | None, folder: Path, prompts: Sequence[str]
) -> None:
    lengths = sizes(*ids)
    over = [number for number, length in enumerate(lengths) if longest is not None and length > longest]
    if over:
        raise UserError(
            f"{folder} can read {longest} tokens, and {len(over)} of {len(lengths)} responses are longer "
            f"with their prompt, the first one to {prompts[over[0]][:60]!r} ({lengths[over[0]]} tokens); "
            "remove those rows"
        )


# ---------------------------------------------------------------------------------------- the file


def read(file: Path) -> list[Row]:
    """The rows of a .jsonl or .parquet file.

    Raises:
        UserError: if it cannot be read, or naming the rows that have another form.
    """
    rows, problems = [], []
    for number, values in enumerate(_values(file), start=1):
        if values is None:  # an empty line
            continue
        row = _row(values)
        if row is None:
            problems.append(f"{file}:{number}: {SHAPE}")
        else:
            rows.append(row)
    if problems:
        more = f"\n… and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise UserError("\n".join(problems[:MAX_SHOWN]) + more)
    if not rows:
        raise UserError(f"{file} has no row; {SHAPE}")
    return rows


def _values(file: Path) -> list[Any]:
    try:
        if file.suffix == ".parquet":
            table: list[Any] = pq.read_table(file).to_pylist()
            return table
        if file.suffix == ".jsonl":
            text = file.read_text(encoding="utf-8")
            return [_json(line, f"{file}:{number}") for number, line in enumerate(text.split("\n"), start=1)]
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    raise UserError(f"{file}: give a file whose name ends with .jsonl or .parquet")


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line) if line.strip() else None
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.colno}"
        raise UserError(f"{where}: this line is not JSON ({reason}); {SHAPE}") from None


def _row(values: Any) -> Row | None:
    if not isinstance(values, Mapping):
        return None
    prompt, subset = values.get("prompt"), values.get("subset")
    chosen, rejected = (_texts(values.get(name)) for name in ("chosen", "rejected"))
    if not (isinstance(prompt, str) and isinstance(subset, str) and chosen and rejected):
        return None
    return None if subset == ALL else Row(prompt, chosen, rejected, subset)


def _texts(value: Any) -> tuple[str, ...]:
    """The texts of a column; empty for anything else."""
    given = [value] if isinstance(value, str) else value
    is_list = isinstance(given, list) and all(isinstance(text, str) for text in given)
    return tuple(given) if is_list else ()
