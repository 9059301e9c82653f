"""Before a stage trains, the functions that params.yaml names are imported, and called on a few rows.

They run in a process of their own, which is thrown away: whatever a module or a call does, it ends there. No
torch here, but in that process where a function is called.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rlhf_tasks import config, console
from rlhf_tasks.config import Config, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, hashing, inputs
from rlhf_tasks.project.imports import load_function
from rlhf_tasks.project.paths import Paths

BEFORE: Mapping[Stage, tuple[str, ...]] = {
    "prepare": ("data.",),
    **dict.fromkeys(("sft", "reward", "ppo"), ("preferences.", "ppo.", "judge.")),
}
"""What is checked before which stages: those that train long before a later one calls a function."""
NOT_CALLED = ("data.", "ppo.loss", "ppo.advantages.")
"""Functions of rows of the user's files and of tensors: neither is at hand."""
NUM_ROWS = 4


class Function(NamedTuple):
    """A function that params.yaml names, with the names of the kept columns."""

    key: str
    name: str
    columns: Sequence[str] = ()
    is_pairwise: bool = False
    is_called: bool = False


def check(stage: Stage, settings: Config, paths: Paths) -> None:
    """Import what the stage or a later one calls; call on four rows what was not yet called as it is now.

    Raises:
        UserError: for the first function that cannot be imported, fails, or ends the process.
    """
    values, record = config.in_force(settings), paths.home / "tried.json"
    tried: Mapping[str, str] = json.loads(record.read_text("utf-8")) if record.exists() else {}
    functions, new, flat = list[Function](), dict[str, str](), inputs.flatten(values)
    for key, name in inputs.functions_named(values):
        if not key.startswith(BEFORE[stage]):
            continue
        is_pairwise = bool(flat.get(key.removesuffix("function") + "pairwise"))
        one = Function(key, name, settings.data.columns.keep, is_pairwise)
        if settings.launch.try_functions and not key.startswith(NOT_CALLED):
            module, _, function = name.partition(":")
            try:
                digest = hashing.json_sha256([*one, inputs.code_of(paths.root, module, function, ())[0]])
            except UserError as error:
                raise UserError(f"{key}: {error}") from None
            if digest not in tried:
                new[digest], one = name, one._replace(is_called=True)
        functions.append(one)
    if functions:
        with console.part(f"{'trying' if new else 'importing'} the functions of params.yaml"):
            run(functions, paths.root)
        atomic.write_json(record, {**tried, **new})


def run(functions: Sequence[Function], root: Path) -> None:
    """Import and call functions in a process of their own.

    Raises:
        UserError: as `check`.
    """
    with tempfile.TemporaryDirectory() as folder, Path(folder, "errors").open("w+") as errors:
        result = Path(folder, "result.json")
        words = [sys.executable, "-P", "-m", __spec__.name, str(root), str(result), json.dumps(functions)]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            status = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what a function has left running
        found = json.loads(result.read_text("utf-8")) if result.exists() else {"doing": "Python"}
        if "failure" in found:
            raise UserError(found["failure"])
        if "doing" in found:
            errors.seek(0)
            last = "".join(f": {line}" for line in errors.read().splitlines()[-1:])
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            raise UserError(f"{found['doing']} ended its process ({how}){last}")


def _run_here(root: Path, result: Path, functions: Sequence[Function]) -> None:
    """The program of that process; `result` has what it does, why it failed, or at the end nothing."""
    found = {}
    try:
        for one in functions:
            atomic.write_json(result, {"doing": f"{one.key}: importing {one.name}"})
            load_function(one.name, one.key, root)
            if one.is_called:
                atomic.write_json(result, {"doing": f"{one.key}: a call of {one.name}"})
                _call(one, root)
    except UserError as error:
        found = {"failure": str(error)}
    atomic.write_json(result, found)
    os._exit(0)  # whatever a function has left running


def _call(function: Function, root: Path) -> None:
    """Call a function on the first rows of data/prompts, with their references, or prompts, as responses."""
    from rlhf_tasks.data import columns
    from rlhf_tasks.data.batches import read_table
    from rlhf_tasks.judging.judges.build import FunctionComparer
    from rlhf_tasks.judging.judges.comparisons import Question
    from rlhf_tasks.scoring.function import FunctionScorer
    from rlhf_tasks.scoring.protocol import Responses

    table = read_table(Paths(root), "prompts", "train")
    rows = [table[i] for i in range(min(NUM_ROWS, len(table)))]
    prompts, kept = [row["prompt"] for row in rows], columns.of_rows(rows)
    responses = [row["reference"] or row["prompt"] for row in rows]
    where = function.name, function.key, root, function.columns
    try:
        if function.is_pairwise:
            questions = [Question(*one) for one in zip(prompts, responses, responses[::-1], strict=True)]
            FunctionComparer(*where)(questions, 1.0, kept)
        else:
            FunctionScorer(*where)(Responses.of_texts(prompts, responses, kept))
    except UserError as error:
        raise UserError(
            f"{error} (tried on {len(rows)} rows of data/prompts, before anything trains; "
            "launch.try_functions: false leaves this out, for a function that needs what is not made yet)"
        ) from None


if __name__ == "__main__":
    _run_here(Path(sys.argv[1]), Path(sys.argv[2]), [Function(*one) for one in json.loads(sys.argv[3])])
