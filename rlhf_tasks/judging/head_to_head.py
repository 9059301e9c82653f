"""`rlhf judge MODEL`: one contender against another on the test prompts, by the judges of params.yaml.

`compare_models` is also how promotion judges a policy that the pipeline has not judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView, is_hub_id
from rlhf_tasks.config.types import check_source, pinned_revision
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import prompt_key
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import summary
from rlhf_tasks.judging.judges.build import build_judges
from rlhf_tasks.judging.judges.comparisons import Comparisons, optimised_judges
from rlhf_tasks.judging.responses import ends_of_all, sample
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.models.ends import Ends
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths

REFERENCE: Literal["reference"] = "reference"
FORMATS = (".jsonl", ".parquet")
MAX_SHOWN = 10  # problems of a file of responses


@dataclass(frozen=True)
class Checkpoint:
    source: str
    revision: str | None


ResponseFile = Mapping[str, str]
"""Responses by prompt key."""
Contender = Checkpoint | ResponseFile | Literal["reference"]
Row = Mapping[str, Any]


def compare_models(
    config: JudgeView,
    model: str,
    against: str,
    *,
    paths: Paths,
    num_examples: int | None = None,
    names: Sequence[str] = (),
    out: Path | None = None,
    alpaca_eval: Path | None = None,
    functions_root: Path | None = None,
) -> EvaluationResults:
    """Print and return the comparisons of `model` with `against` by each judge, or by those called `names`.

    Each contender is a checkpoint folder, `OWNER/NAME@COMMIT`, a `.jsonl` file of responses, or `reference`;
    the results name it as given. `out` is a .jsonl or .parquet file for every comparison with its texts.
    `alpaca_eval` is a folder for the responses of both, as AlpacaEval reads them.
    Relative paths are below `paths.root`. Functions of judges are files below `functions_root`, by default
    `paths.root`.

    The results hold comparisons, judge kappas and optimised judges.

    Raises:
        UserError: if a contender, a judge or the data does not exist, `out` has another suffix, or a judge
            fails too often.
    """
    if out is not None:
        check_format(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = _contender(model, paths), _contender(against, paths)
    files = [x for x in (a, b) if isinstance(x, Mapping)]
    rows = _rows(paths, num_examples or config.judge.num_examples, files)
    summary.check_verifiers(config.judge, rows, names)
    kept = columns.of_rows(rows)
    judges = build_judges(
        config.judge,
        config.data_source,
        device,
        paths,
        names=names,
        functions_root=functions_root,
        columns=kept,
    )
    optimised = _warn(config, paths, [x for x in (a, b) if isinstance(x, Checkpoint)], names)
    prompts = [row["prompt"] for row in rows]
    ends = ends_of_all((x.source, x.revision) for x in (a, b) if isinstance(x, Checkpoint))
    texts = {
        name: _responses(config, contender, rows, device, paths, ends)
        for name, contender in ((model, a), (against, b))
    }
    if alpaca_eval is not None:
        _write_outputs(paths.root / alpaca_eval / "outputs.json", model, prompts, texts[model])
        _write_outputs(paths.root / alpaca_eval / "reference_outputs.json", against, prompts, texts[against])
    compared: dict[summary.Key, Comparisons] = {}
    for judge in judges:
        compared |= summary.compare(
            judge, [(model, against)], prompts, texts, config.judge.max_failure_share, kept
        )
    results = EvaluationResults(
        comparisons=summary.summarise_all(compared, texts),
        judge_kappas=summary.kappas(compared),
        optimised_judges=optimised,
    )
    title = f"win rates on {len(prompts)} test prompts (ties count half)"
    summary.show_table(title, summary.win_rates(results.comparisons))
    if out is not None:
        _write(paths.root / out, summary.text_table(compared, prompts, texts, kept))
    return results


def check_format(out: Path) -> None:
    """Check the suffix of a file for comparisons.

    Raises:
        UserError: if it is not one of FORMATS.
    """
    if out.suffix not in FORMATS:
        raise UserError(f"--out {out}: give a file whose name ends with {' or '.join(FORMATS)}")


def _write_outputs(file: Path, name: str, prompts: Sequence[str], responses: Sequence[str]) -> None:
    """Write responses as `alpaca_eval` reads them, with --model_outputs or --reference_outputs."""
    rows = [
        {"instruction": prompt, "output": response, "generator": name}
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    atomic.write_text(file, json.dumps(rows, ensure_ascii=False, indent=2) + "\n")
    console.say(f"wrote {len(rows)} responses of {name} to {file}")


def _write(out: Path, table: pa.Table) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".parquet":
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer)
        atomic.write_bytes(out, buffer.getvalue().to_pybytes())
    else:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        atomic.write_text(out, "".join(lines))
    console.say(f"wrote {table.num_rows} comparisons to {out}")


# ------------------------------------------------------------------------------------ contenders


def _contender(name: str, paths: Paths) -> Contender:
    if name == REFERENCE:
        return REFERENCE
    if name.endswith(".jsonl"):
        return _response_file(paths.root / name)
    source, _, revision = name.partition("@") if not (paths.root / name).exists() else (name, "", "")
    folder = paths.root / source
    if not folder.is_dir() and not is_hub_id(source):
        raise UserError(
            f"{name} is not a folder, a .jsonl file of responses or a hub id; give a checkpoint such as "
            "models/policy, OWNER/NAME@COMMIT, or a file of rows with `prompt` and `completion`"
        )
    if not folder.exists() and not revision:
        raise UserError(
            f"the folder {name} does not exist; for a hub model give the commit too, as {name}@COMMIT; "
            f"`git ls-remote https://huggingface.co/{name} HEAD` prints it"
        )
    if folder.exists() and not revision:
        return Checkpoint(str(folder), None)
    try:
        for problem in check_source(source, pinned_revision(revision) if revision else None, "MODEL"):
            raise ValueError(problem)
    except ValueError as error:
        raise UserError(f"{error}; give it as {source}@COMMIT") from None
    return Checkpoint(source, revision or None)


def _response_file(file: Path) -> ResponseFile:
    """Responses made elsewhere: one JSON object per line, with `prompt` and `completion`."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines() cuts within JSON texts too
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    responses: dict[str, str] = {}
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
            problems.append(f"{file}:{number}: give an object with texts `prompt` and `completion`")
            continue
        if prompt_key(prompt) in responses:
            problems.append(f"{file}:{number}: an earlier line has a response to this prompt")
        responses[prompt_key(prompt)] = completion
    if problems:
        more = f"\n… and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise UserError("\n".join(problems[:MAX_SHOWN]) + more)
    return responses


def _rows(paths: Paths, most: int, files: Sequence[ResponseFile]) -> Sequence[Row]:
    """The first test rows to whose prompt every file has a response."""
    if not paths.table("prompts", "test").exists():
        raise UserError("data/prompts does not exist: run `rlhf prepare`, or `dvc checkout data/prompts`")
    rows = read_table(paths, "prompts", "test")
    complete = [row for row in rows if all(prompt_key(row["prompt"]) in file for file in files)]
    if not complete:
        raise UserError(
            f"the file has a response to none of the {len(rows)} prompts of data/prompts/test.parquet; its "
            "prompts must be the same but for white space"
        )
    if len(complete) < min(most, len(rows)):
        console.say(
            f"{len(complete)} of the {len(rows)} test prompts have responses; the others are left out"
        )
    return complete[:most]


def _responses(
    config: JudgeView,
    contender: Contender,
    rows: Sequence[Row],
    device: torch.device,
    paths: Paths,
    ends: Ends,
) -> list[str]:
    """One response per row; rows with the same prompt each have their own reference."""
    if contender == REFERENCE:
        return [row["reference"] for row in rows]
    prompts = [row["prompt"] for row in rows]
    if not isinstance(contender, Checkpoint):
        return [contender[prompt_key(prompt)] for prompt in prompts]
    return sample(
        contender.source,
        prompts,
        paths=paths,
        max_new_tokens=config.max_completion_tokens,
        temperature=config.judge.temperature,
        seed=config.seed,
        device=device,
        revision=contender.revision,
        ends=ends,
    ).texts


def _warn(
    config: JudgeView, paths: Paths, checkpoints: Sequence[Checkpoint], names: Sequence[str]
) -> dict[str, str]:
    """Warn of the judges that PPO optimised for a contender; return them with their folders."""
    result: dict[str, str] = {}
    for one in checkpoints:
        optimised = optimised_judges(config.judge, Path(one.source), paths.root, names)
        for name in optimised:
            console.say(f"WARNING: judge {name} is the reward model that PPO optimised for {one.source}")
        result |= optimised
    return result
