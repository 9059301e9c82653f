"""`rlhf judge MODEL`: one contender against another on the test prompts, by the judges of params.yaml."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView, is_hub_id
from rlhf_tasks.config.types import check_source, pinned_revision
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import prompt_key
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import judges, summary
from rlhf_tasks.evaluation.answers import sample
from rlhf_tasks.evaluation.judges import making
from rlhf_tasks.evaluation.judges.verdicts import Verdicts, check_failures
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths

REFERENCE: Literal["reference"] = "reference"
FORMATS = (".jsonl", ".parquet")
MAX_SHOWN = 10  # problems of an answer file


@dataclass(frozen=True)
class Checkpoint:
    source: str
    revision: str | None


Given = Mapping[str, str]
"""Answers by prompt key."""
Contender = Checkpoint | Given | Literal["reference"]
Row = Mapping[str, str]


def run(
    config: JudgeView,
    model: str,
    against: str,
    *,
    num_examples: int | None,
    names: Sequence[str],
    out: Path | None = None,
) -> dict[str, float]:
    """Print the win rate of `model` over `against`, by each judge; the metrics come back.

    Either is a checkpoint folder, `HUB/ID@COMMIT`, a `.jsonl` file of answers, or `reference`. Every
    verdict, with prompt and answers, goes to `out`, a .jsonl or .parquet file.

    Raises:
        UserError: if a contender, a judge or the data is not there, `out` is of another kind, or a judge
            fails too often.
    """
    if out is not None:
        check_format(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = _contender(model), _contender(against)
    rows = _rows(num_examples or config.judge.num_examples, [x for x in (a, b) if isinstance(x, Mapping)])
    panel = making.build(config.judge, config.data_source, device, names)
    _warn(config, [x for x in (a, b) if isinstance(x, Checkpoint)], names)
    prompts = [row["prompt"] for row in rows]
    ours, theirs = (_answers(config, contender, rows, device) for contender in (a, b))
    found: dict[summary.Comparison, Verdicts] = {}
    metrics: dict[str, float] = {}
    for judge in panel:
        verdicts = judge.compare(prompts, ours, theirs)
        check_failures(judge.name, verdicts, config.judge.max_failure_share)
        found[judge.name, model, against] = verdicts
        metrics |= summary.metrics((judge.name, model, against), verdicts, ours, theirs)
    metrics |= summary.kappas(found)
    title = f"win rates on {len(prompts)} test prompts (ties count half)"
    summary.show(title, summary.table_rows(found, metrics))
    if out is not None:
        _write(out, summary.judged_table(found, prompts, {model: ours, against: theirs}))
    return metrics


def check_format(out: Path) -> None:
    """Raises UserError for a file of another kind than verdicts are written as."""
    if out.suffix not in FORMATS:
        raise UserError(f"--out {out}: verdicts are written as {' or '.join(FORMATS)}; name the file so")


def _write(out: Path, table: pa.Table) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".parquet":
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer)
        atomic.write_bytes(out, buffer.getvalue().to_pybytes())
    else:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        atomic.write_text(out, "".join(lines))
    console.say(f"wrote {table.num_rows} verdicts to {out}")


# ------------------------------------------------------------------------------------ contenders


def _contender(name: str) -> Contender:
    if name == REFERENCE:
        return REFERENCE
    if name.endswith(".jsonl"):
        return _given(Path(name))
    source, _, revision = name.partition("@") if not Path(name).exists() else (name, "", "")
    if not Path(source).is_dir() and not is_hub_id(source):
        raise UserError(
            f"{name} is no folder, no .jsonl file of answers and no hub id; give a checkpoint such as "
            "models/policy, HUB/ID@COMMIT, or a file of rows with `prompt` and `completion`"
        )
    if not Path(source).exists() and not revision:
        raise UserError(
            f"the folder {name} does not exist; of a hub model give the commit too, as {name}@COMMIT, that "
            f"`git ls-remote https://huggingface.co/{name} HEAD` tells"
        )
    try:
        check_source(source, pinned_revision(revision) if revision else None, "MODEL")
    except ValueError as error:
        raise UserError(f"{error}; give it as {source}@COMMIT") from None
    return Checkpoint(source, revision or None)


def _given(file: Path) -> Given:
    """Answers made elsewhere: a JSON object a line, with `prompt` and `completion`."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    found: dict[str, str] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, completion = row["prompt"], row["completion"]
            if not (isinstance(prompt, str) and isinstance(completion, str)):
                raise TypeError
        except (ValueError, LookupError, TypeError):
            problems.append(f"{file}:{number}: is no object with texts `prompt` and `completion`")
            continue
        if prompt_key(prompt) in found:
            problems.append(f"{file}:{number}: the prompt has an answer already")
        found[prompt_key(prompt)] = completion
    if problems:
        more = f"\n… and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise UserError("\n".join(problems[:MAX_SHOWN]) + more)
    return found


def _test_rows() -> Sequence[Row]:
    if not Path("data/prompts/test.parquet").exists():
        raise UserError("data/prompts is not there: run `rlhf prepare`, or `dvc checkout data/prompts`")
    return read_table(Paths(), "prompts", "test")


def _rows(most: int, given: Sequence[Given]) -> list[Row]:
    """The first test rows whose prompt every file answers."""
    rows = _test_rows()
    answered = [row for row in rows if all(prompt_key(row["prompt"]) in answers for answers in given)]
    if not answered:
        raise UserError(
            f"none of the {len(rows)} prompts of data/prompts/test.parquet is answered by that file; its "
            "prompts must be those, but for white space"
        )
    if len(answered) < min(most, len(rows)):
        console.say(
            f"{len(answered)} of the {len(rows)} test prompts are answered by all; the others are left out"
        )
    return answered[:most]


def _answers(config: JudgeView, contender: Contender, rows: Sequence[Row], device: torch.device) -> list[str]:
    """One to each row; of rows with the same prompt, each its own reference."""
    if contender == REFERENCE:
        return [row["reference"] for row in rows]
    prompts = [row["prompt"] for row in rows]
    if not isinstance(contender, Checkpoint):
        return [contender[prompt_key(prompt)] for prompt in prompts]
    return sample(
        contender.source, prompts, max_new_tokens=config.max_completion_tokens,
        temperature=config.judge.temperature, seed=config.seed, device=device, revision=contender.revision,
    ).texts  # fmt: skip


def _warn(config: JudgeView, checkpoints: Sequence[Checkpoint], names: Sequence[str]) -> None:
    for one in checkpoints:
        for name in judges.optimised(config.judge, Path(one.source), names):
            console.say(f"WARNING: judge {name} is the reward model that PPO optimised for {one.source}")
