"""How well reward models order pairs: diagnostics of stage judge, and `rlhf judge MODEL --rows FILE`.

A reward model that is fit to be optimized orders two samples of one policy as the labels do. Its confidence
is calibrated if it orders right 80% of the pairs of which it is 80% sure. N pairs.

Rows of FILE have the shape of RewardBench 2 (arXiv 2506.01937): `prompt`, `chosen`, several
`rejected`, `subset`. A row is right if every chosen response scores higher than every rejected one; equal
scores are wrong. RewardBench computes the score of its subset Ties in another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import ArrayLike

from rlhf_tasks import console
from rlhf_tasks.data.batches import load_tokenizer, read_table, sizes
from rlhf_tasks.data.tokenizer import Ids, encode_rows, ready_rendering
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.results import Interval, RewardDiagnostic
from rlhf_tasks.judging.statistics import Estimate
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_reward
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring import reward_model
from rlhf_tasks.scoring.protocol import Responses, Scorer
from rlhf_tasks.scoring.retokenize import conversation_ids
from rlhf_tasks.scoring.reward_model import RewardModel

NUM_BINS = 10
MIN_IN_BIN = 20  # pairs, where there are enough for several bins
NUM_LENGTHS = 8  # bins of responses by length

CALIBRATION = pa.schema(
    dict.fromkeys(("model", "origin"), pa.string())
    | dict.fromkeys(("confidence", "right", "low", "high"), pa.float64())
    | {"pairs": pa.int64()}
)
LENGTHS = pa.schema(
    dict.fromkeys(("judge", "who"), pa.string())
    | dict.fromkeys(("length", "score", "low", "high"), pa.float64())
    | {"answers": pa.int64()}
)


@dataclass(frozen=True)
class Pairs:
    """Two responses to each of N prompts, by which is better."""

    prompts: list[str]
    better: list[str]
    worse: list[str]


Rewards = Mapping[str, Scorer]
Rows = list[dict[str, Any]]


def load_rewards(paths: Paths, device: torch.device) -> dict[str, Scorer]:
    """The reward models that this pipeline trained, by name; empty where it trained none."""
    folders = {"reward": paths.reward, "reward_heldout": paths.reward_heldout}
    return {
        name: reward_model.load(folder, device)
        for name, folder in folders.items()
        if contracts.has_model(folder)
    }


# ----------------------------------------------------------------------------------- labelled pairs


def labelled_pairs(paths: Paths) -> dict[str, Pairs]:
    """The test pairs of data/comparisons by origin: `given`, `sft_samples`."""
    by_origin: dict[str, Pairs] = {}
    for row in read_table(paths, "comparisons", "test"):
        pairs = by_origin.setdefault(row["origin"], Pairs([], [], []))
        pairs.prompts.append(row["prompt"])
        pairs.better.append(row["chosen"])
        pairs.worse.append(row["rejected"])
    return by_origin


def order_by(
    score: Callable[[Sequence[str], Sequence[str]], Sequence[float]],
    prompts: Sequence[str],
    first: Sequence[str],
    second: Sequence[str],
) -> Pairs:
    """Two samples of one policy per prompt, ordered by a score; equal scores are left out."""
    scores = zip(score(prompts, first), score(prompts, second), strict=True)
    pairs = Pairs([], [], [])
    for prompt, x, y, (a, b) in zip(prompts, first, second, scores, strict=True):
        if a != b:
            pairs.prompts.append(prompt)
            pairs.better.append(x if a > b else y)
            pairs.worse.append(y if a > b else x)
    return pairs


def leads(model: Scorer, pairs: Pairs) -> statistics.Floats:
    """(N,) score of the better response minus that of the worse one."""
    better, worse = (
        model(Responses.of_texts(pairs.prompts, texts)).tolist() for texts in (pairs.better, pairs.worse)
    )
    return np.subtract(better, worse)


# ---------------------------------------------------------------------------------------- measures


def agreement(lead: ArrayLike) -> statistics.Estimate:
    """Share of pairs that a model orders as labelled; equal scores count half."""
    leads = np.asarray(lead, dtype=np.float64)
    return statistics.rate(statistics.outcomes(leads, np.zeros_like(leads)))


def calibration(lead: ArrayLike) -> tuple[float, Rows]:
    """Expected calibration error of σ(|lead|), and its bins, from (N,) leads of the better responses.

    A pair is turned so that the model favours its first response. Of each bin, `confidence` is the mean
    σ(|lead|), and `right` the share of pairs whose favoured response is the better one, with Wilson's
    interval. Bins hold equal counts (± 1) by rising confidence. Pairs of equal scores are left out; if there
    are no others, the error is 0.
    """
    leads = np.asarray(lead, dtype=np.float64)
    leads = leads[leads != 0]
    if leads.size == 0:
        return 0.0, []
    count = max(1, min(NUM_BINS, leads.size // MIN_IN_BIN))
    bins: Rows = []
    for part in np.array_split(leads[np.argsort(np.abs(leads), kind="stable")], count):
        share = statistics.wilson(int((part > 0).sum()), part.size)
        confidence = float((1 / (1 + np.exp(-np.abs(part)))).mean())
        bins.append(
            {
                "confidence": confidence,
                "right": share.value,
                "low": share.low,
                "high": share.high,
                "pairs": part.size,
            }
        )
    return statistics.calibration_error(leads, np.ones_like(leads), count), bins


def diagnose(
    rewards: Rewards, labelled: Mapping[str, Pairs], samples: Mapping[str, Pairs]
) -> tuple[tuple[RewardDiagnostic, ...], Rows]:
    """Each reward model's diagnostics on each origin of pairs, and the bins of calibration.

    `labelled` and `samples` are pairs by origin. `samples` come from this evaluation, ordered by gold: they
    replace labelled pairs of the same origin, and only for them agreement is measured.
    """
    diagnostics: list[RewardDiagnostic] = []
    rows: Rows = []
    for origin, pairs in {**labelled, **samples}.items():
        if not pairs.prompts:  # a collapsed policy samples the same text twice
            continue
        for name, model in rewards.items():
            lead = leads(model, pairs)
            agreed = Interval.of(agreement(lead)) if origin in samples else None
            error, bins = calibration(lead)
            diagnostics.append(
                RewardDiagnostic(model=name, origin=origin, calibration_error=error, agreement=agreed)
            )
            rows += [{"model": name, "origin": origin, **part} for part in bins]
    return tuple(diagnostics), rows


def by_length(scores: Mapping[tuple[str, str], Sequence[float]], texts: Mapping[str, Sequence[str]]) -> Rows:
    """Mean score of responses of similar length, in characters, with its 95% interval (normal).

    `scores` are by judge and contender, NaN for a failure. Bins hold equal counts of responses.
    """
    rows = []
    for (judge, who), column in scores.items():
        values, lengths = np.asarray(column, dtype=np.float64), np.array([len(text) for text in texts[who]])
        whole = ~np.isnan(values)
        values, lengths = values[whole], lengths[whole]
        order = np.argsort(lengths, kind="stable")
        count = max(1, min(NUM_LENGTHS, values.size // MIN_IN_BIN))
        for part in np.array_split(order, count) if values.size else ():
            mean = float(values[part].mean())
            reach = 1.96 * float(values[part].std(ddof=1)) / part.size**0.5 if part.size > 1 else 0.0
            rows.append(
                {
                    "judge": judge,
                    "who": who,
                    "length": float(lengths[part].mean()),
                    "score": mean,
                    "low": mean - reach,
                    "high": mean + reach,
                    "answers": part.size,
                }
            )
    return rows


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


def measure_accuracy(folder: Path, file: Path, out: Path | None, device: torch.device) -> dict[str, Estimate]:
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
        UserError: as `measure_accuracy`.
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
    given = Responses.of_ids(prompts, *ids, tokenizer)
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
