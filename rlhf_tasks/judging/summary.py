"""Comparisons → typed results, tables for people, the curve of PPO's win rate, and verifiers' accuracy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import Judging
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import Comparisons, Judge, check_failures, list_required_judges
from rlhf_tasks.judging.results import Accuracy, ComparisonResult, Cost, JudgeKappa
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.verifier import Verifier
from rlhf_tasks.tracking import Tracker


class Key(NamedTuple):
    """What identifies the comparisons of two models by one judge."""

    judge: str
    a: str
    b: str


MAX_NAME = 80  # letters of a column's value in a metric's name, of which MLflow takes 250
ByKey = Mapping[Key, Comparisons]
Mask = npt.NDArray[np.bool_]


def compare(
    judge: Judge,
    pairs: Sequence[tuple[str, str]],
    prompts: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    max_failure_share: float,
    columns: Columns = NONE,
) -> dict[Key, Comparisons]:
    """One judge's comparisons of each pair of models; `texts` are the responses by model.
    `columns` are those of the prompts' rows.

    Raises:
        UserError: if the judge cannot work, or fails too often.
    """
    compared = {}
    for a, b in pairs:
        with console.part(f"judge {judge.name}: {a} against {b}"):
            comparisons = judge.compare(prompts, texts[a], texts[b], columns)
        check_failures(judge.name, comparisons, max_failure_share)
        compared[Key(judge.name, a, b)] = comparisons
    return compared


def summarize(
    compared: ByKey, texts: Mapping[str, Sequence[str]], sets: Sequence[str] = ()
) -> tuple[ComparisonResult, ...]:
    """The results of all comparisons; `texts` are the responses by model, `sets` those of the prompts.

    Lengths, for the rate at equal length, are in characters. Only a pairwise judge has position bias and
    cost.
    """
    results = []
    for (judge, a, b), comparisons in compared.items():
        wins, ties, losses = statistics.counts(comparisons.outcomes)
        lengths = ([len(text) for text in texts[who]] for who in (a, b))
        flips = first_share = cost = None
        if comparisons.orders is not None:
            flips, first_share = statistics.position_bias(*comparisons.orders)
            cost = Cost(replies=comparisons.num_replies, tokens=comparisons.num_tokens)
        by_set = {name: comparisons.outcomes[np.array(sets) == name] for name in dict.fromkeys(sets)}
        result = ComparisonResult(
            judge=judge,
            a=a,
            b=b,
            win_rate=statistics.rate(comparisons.outcomes),
            in_set={n: statistics.rate(own) for n, own in by_set.items() if not np.isnan(own).all()},
            decisive=statistics.wilson(wins, wins + losses),
            length_controlled=statistics.length_controlled(comparisons.outcomes, *lengths),
            p_value=statistics.sign_test(wins, losses),
            ties=ties,
            examples=wins + ties + losses,
            failures=int(np.isnan(comparisons.outcomes).sum()),
            position_bias=flips,
            first_share=first_share,
            cost=cost,
        )
        results.append(result)
    return tuple(results)


def measure_kappas(compared: ByKey) -> tuple[JudgeKappa, ...]:
    """Cohen's kappa of every two judges, over all comparisons that both made."""
    result = []
    for x, y in itertools.combinations(dict.fromkeys(key.judge for key in compared), 2):
        pairs = [(a, b) for judge, a, b in compared if judge == x and Key(y, a, b) in compared]
        first, second = (
            np.stack([compared[Key(judge, a, b)].outcomes for a, b in pairs], axis=1) for judge in (x, y)
        )
        if not np.isnan(first + second).all():
            result.append(JudgeKappa(first=x, second=y, kappa=statistics.kappa(first, second)))
    return tuple(result)


NUMBERS = {
    name: pa.float64() for name in ("outcome", "score_a", "score_b", "a_shown_first", "a_shown_second")
}
TEXTS = {name: pa.string() for name in ("prompt", "response_a", "response_b")}
COMPARISONS = pa.schema(
    {"judge": pa.string(), "a": pa.string(), "b": pa.string(), "index": pa.int64()}
    | NUMBERS
    | {"failure": pa.string()}
    | TEXTS
)


def comparison_table(
    compared: ByKey, prompts: Sequence[str], texts: Mapping[str, Sequence[str]], kept: Columns = NONE
) -> pa.Table:
    """One row per comparison; null where a judge has no such number, and for the outcome of a failure.

    `texts` are the responses by model. `kept` are columns of the prompts' rows, shown as `column/NAME`.
    """
    rows = []
    for (judge, a, b), c in compared.items():
        nothing = [None] * len(prompts)
        scores, orders = c.scores or (nothing, nothing), c.orders or (nothing, nothing)
        for i, values in enumerate(zip(c.outcomes, *scores, *orders, strict=True)):
            numbers = (None if value is None or math.isnan(value) else float(value) for value in values)
            rows.append(
                {"judge": judge, "a": a, "b": b, "index": i, **dict(zip(NUMBERS, numbers, strict=True))}
                | {"failure": c.failures.get(i), "prompt": prompts[i]}
                | {"response_a": texts[a][i], "response_b": texts[b][i]}
                | columns.shown(columns.of_row(kept, i))
            )
    shown = (pa.field(f"column/{name}", pa.string()) for name in kept)
    return pa.Table.from_pylist(rows, pa.schema([*COMPARISONS, *shown]))


def show_win_rates(results: Sequence[ComparisonResult], num_prompts: int) -> list[dict[str, Any]]:
    """Print one row per result with its main numbers as text, without empty columns. Returns the rows."""
    rows = [
        {
            "judge": one.judge,
            "pair": f"{one.a} vs {one.b}",
            "win rate": f"{one.win_rate.value:.1%}",
            "low": f"{one.win_rate.low:.1%}",
            "high": f"{one.win_rate.high:.1%}",
            "at equal length": f"{one.length_controlled.value:.1%}",
            "flipped": "" if one.position_bias is None else f"{one.position_bias:.1%}",
            "replies": "" if one.cost is None else one.cost.replies,
            "tokens": "" if one.cost is None else one.cost.tokens,
            "ties": one.ties,
            "failed": one.failures,
            "p": f"{one.p_value:.2g}",
        }
        for one in results
    ]
    names = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    title = f"win rates on {num_prompts} test prompts (ties count half)"
    console.table(title, names, [[row[name] for name in names] for row in rows])
    return rows


def log_curve(paths: Paths, judges: Sequence[Judge], tracker: Tracker) -> None:
    """Log `JUDGE/win_rate`, `/low` and `/high` over the references, one point per evaluation of PPO.

    The responses are to validation prompts, by which PPO selects its checkpoint too. There is no point where
    every comparison failed, and no curve where the data has no references.
    """
    rows = columns.decoded(pq.read_table(paths.ppo_responses).to_pylist())
    for episode, group in itertools.groupby(rows, key=lambda row: row["episode"]):
        evaluation = list(group)
        texts, responses, references = (
            [row[column] for row in evaluation] for column in ("prompt", "response", "reference")
        )
        for judge in judges if None not in references else ():
            with console.part(f"judge {judge.name}: policy after {episode} episodes against reference"):
                comparisons = judge.compare(texts, responses, references, columns.of_rows(evaluation))
            if len(comparisons.failures) < len(texts):
                rate = statistics.rate(comparisons.outcomes)
                point = {"win_rate": rate.value, "low": rate.low, "high": rate.high}
                tracker.metrics({f"{judge.name}/{key}": value for key, value in point.items()}, step=episode)


def check_verifiers(settings: Judging, rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> None:
    """Check that the verifiers can use the columns of these rows of data/prompts.

    Only verifiers that the judges `names` need are checked, by default all.

    Raises:
        UserError: naming the judge, and the column or the rows.
    """
    required = list_required_judges(settings, names)
    for one in settings.judges:
        if one.kind == "verifier" and one.name in required:
            verifier = Verifier(one.checks, one.format)
            verifier.check(rows, columns.of_rows(rows), f"judge.judges: {one.name}")


def read_judged_rows(paths: Paths, num_examples: int, labeled: Collection[str]) -> list[dict[str, Any]]:
    """The rows of data/prompts whose columns the judges of stage judge get.

    They are the first test rows, the test rows of the prompts `labeled` by people, and the validation rows
    of the curve. Where `source` names no line of a file, it becomes the table and the row's number.
    """
    curve = set(pq.read_table(paths.ppo_responses, columns=["prompt"])["prompt"].to_pylist())
    rows = []
    for split in ("test", "validation"):
        for i, row in enumerate(read_table(paths, "prompts", split)):
            is_test = split == "test" and (i < num_examples or row["prompt"] in labeled)
            if is_test or (split == "validation" and row["prompt"] in curve):
                source = row.get("source", "")
                rows.append({**row, "source": source if ":" in source else f"data/prompts/{split}:{i + 1}"})
    return rows


def measure_accuracies(
    settings: Judging, texts: Mapping[str, Sequence[str]], kept: Columns
) -> dict[str, Accuracy]:
    """The accuracy of each model by each verifier, also by the values of the columns in its `by`.

    `texts` are the responses by model. The gain is of `policy` over `sft`. Accuracies have Wilson's
    interval. Outcomes of right against wrong average to (1 + gain) / 2, so that the gain's interval is that
    of the win rate, with ties as ½.
    """
    result = {}
    for one in (judge for judge in settings.judges if judge.kind == "verifier"):
        verifier, by = Verifier(one.checks, one.format), dict[str, Accuracy]()
        right = {who: np.array(verifier.correct(own, kept)) for who, own in texts.items()}
        forms = {
            who: np.array(verifier.match_format(own)) for who, own in texts.items() if verifier.has_format
        }
        for column in one.by:
            values = np.array([f"{column}.{value}" for value in kept[column]])
            for value in dict.fromkeys(values.tolist()):
                name = re.sub(r"[^\w.-]", "_", value)[:MAX_NAME]
                while name in by:  # such as `+` and `*`, which are both `_`
                    name += "_"
                by[name] = _measure_accuracy(right, forms, values == value)
        everything = np.ones(len(texts["policy"]), bool)
        result[one.name] = _measure_accuracy(right, forms, everything).model_copy(update={"by": by})
    return result


def _measure_accuracy(right: Mapping[str, Mask], formatted: Mapping[str, Mask], rows: Mask) -> Accuracy:
    """The accuracy on some of the rows; all are (N,), by model."""
    shares = [
        {who: statistics.wilson(int(values[rows].sum()), int(rows.sum())) for who, values in found.items()}
        for found in (right, formatted)
    ]
    rate = statistics.rate(statistics.outcomes(right["policy"][rows], right["sft"][rows]))
    gain = Interval(2 * rate.value - 1, 2 * rate.low - 1, 2 * rate.high - 1)
    return Accuracy(right=shares[0], formatted=shares[1], gain=gain)


def accuracy_table(accuracy: Accuracy) -> list[list[str]]:
    """A row for all prompts and for each value of a column: SFT, policy, and the gain with its interval."""
    return [
        [
            value,
            f"{one.right['sft'].value:.1%}",
            f"{one.right['policy'].value:.1%}",
            f"{100 * one.gain.value:+.1f} ({100 * one.gain.low:+.1f} to {100 * one.gain.high:+.1f})",
        ]
        for value, one in {"all": accuracy, **accuracy.by}.items()
    ]
