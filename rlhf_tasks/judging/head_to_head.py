"""`rlhf judge MODEL`: one model against another on the test prompts, by the judges of params.yaml.

`compare_models` is also how promotion judges a policy that the pipeline has not judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView, is_hub_id
from rlhf_tasks.config.types import pinned_revision
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import prompt_key
from rlhf_tasks.data.tokenizer import load_tokenizer, read_plain
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import summary
from rlhf_tasks.judging.judges.build import build_judges
from rlhf_tasks.judging.judges.comparisons import Comparisons, find_optimized_judges, list_required_judges
from rlhf_tasks.judging.responses import Source, sample_alike
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.judging.rows import MAX_SHOWN, Row, read_rows
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths

REFERENCE: Literal["reference"] = "reference"


class Response(Row):
    """A response made elsewhere."""

    FORM: ClassVar[str] = "give objects with texts `prompt` and `completion`"
    prompt: str
    completion: str


ResponseFile = Mapping[str, str]
"""Responses by prompt key."""
Model = Source | ResponseFile | Literal["reference"]


def compare_models(
    config: JudgeView,
    model: str,
    against: str,
    *,
    paths: Paths,
    num_examples: int | None = None,
    names: Sequence[str] = (),
    out: Path | None = None,
) -> EvaluationResults:
    """Print and return the comparisons of `model` with `against` by each judge, or by those called `names`.

    Each model is a checkpoint folder, `OWNER/NAME@COMMIT`, a `.jsonl` file of responses, or `reference`;
    the results name it as given. `out` is a .jsonl file for every comparison with its texts.
    Relative paths and functions of judges are below `paths.root`.

    Raises:
        UserError: if a model, a judge or the data does not exist, `out` has another suffix, or a judge
            fails too often.
    """
    if out is not None and out.suffix != ".jsonl":
        raise UserError(f"--out {out}: give a file whose name ends with .jsonl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = {name: _resolve_model(name, paths) for name in (model, against)}
    checkpoints = {name: one for name, one in models.items() if isinstance(one, tuple)}
    files = [one for one in models.values() if isinstance(one, Mapping)]
    rows = _select_rows(paths, num_examples or config.judge.num_examples, files)
    summary.check_verifiers(config.judge, rows, names)
    kept = columns.of_rows(rows)
    judges = build_judges(config.judge, device, paths, names=names, columns=kept)
    optimized, required = dict[str, str](), list_required_judges(config.judge, names)
    for source, _ in checkpoints.values():
        for name, reward in find_optimized_judges(config.judge, Path(source), paths.root).items():
            if name in required:
                console.say(f"WARNING: judge {name} is a reward that PPO optimized for {source}")
                optimized[name] = reward
    prompts = [row["prompt"] for row in rows]
    sampled = sample_alike(config, paths, prompts, device, sources=checkpoints)
    texts = {name: responses.texts for name, responses in sampled.items()}
    for name, one in models.items():
        if isinstance(one, Mapping):
            texts[name] = [one[prompt_key(prompt)] for prompt in prompts]
        elif one == REFERENCE:  # rows with the same prompt each have their own reference
            texts[name] = [row["reference"] for row in rows]
            if None in texts[name]:
                raise UserError("data/prompts has prompts alone: compare with a model or a file of responses")
    compared: dict[summary.Key, Comparisons] = {}
    for judge in judges:
        compared |= summary.compare(
            judge, [(model, against)], prompts, texts, config.judge.max_failure_share, kept
        )
    results = EvaluationResults(
        comparisons=summary.summarize(compared, texts),
        judge_kappas=summary.measure_kappas(compared),
        optimised_judges=optimized,
    )
    summary.show_win_rates(results.comparisons, len(prompts))
    if out is not None:
        table = summary.comparison_table(compared, prompts, texts, kept)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        atomic.write_text(paths.root / out, "".join(lines))
        console.say(f"wrote {table.num_rows} comparisons to {out}")
    return results


def _resolve_model(name: str, paths: Paths) -> Model:
    if name == REFERENCE:
        return REFERENCE
    if name.endswith(".jsonl"):
        return _read_responses(paths.root / name, paths)
    if (folder := paths.root / name).is_dir():
        return str(folder), None
    source, _, revision = name.partition("@")
    if not is_hub_id(source):
        raise UserError(
            f"{name} is not a folder, a .jsonl file of responses or a hub id; give a checkpoint such as "
            "models/policy, OWNER/NAME@COMMIT, or a file of rows with `prompt` and `completion`"
        )
    if not revision:
        raise UserError(
            f"the folder {name} does not exist; for a hub model give the commit too, as {name}@COMMIT; "
            f"`git ls-remote https://huggingface.co/{name} HEAD` prints it"
        )
    try:
        return source, pinned_revision(revision)
    except ValueError as error:
        raise UserError(f"{error}; give it as {source}@COMMIT") from None


def _read_responses(file: Path, paths: Paths) -> ResponseFile:
    """Responses made elsewhere, one per prompt, which is read as the data's are."""
    responses: dict[str, str] = {}
    twice = []
    rows = read_rows(file, Response)
    prompts = read_plain(load_tokenizer(paths.tokenizer), [row.prompt for row in rows.values()])
    for (where, row), key in zip(rows.items(), map(prompt_key, prompts), strict=True):
        if key in responses:
            twice.append(f"{where}: an earlier row has a response to this prompt; keep one of them")
        responses[key] = row.completion
    if twice:
        raise UserError("\n".join(twice[:MAX_SHOWN]))
    return responses


def _select_rows(paths: Paths, most: int, files: Sequence[ResponseFile]) -> Sequence[Mapping[str, Any]]:
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
