"""Before a stage trains, what a later one needs is tried: functions of params.yaml, keys, and the harness.

Functions are imported, and called on a few rows, in a process of their own, which is thrown away: whatever a
module or a call does, it ends there. No torch here, but in that process where a function is called.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf_tasks import config, console
from rlhf_tasks.config import Config, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import harness
from rlhf_tasks.project import atomic, hashing, inputs, processes
from rlhf_tasks.project.imports import load_function
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.keys import read_key
from rlhf_tasks.training import auto, launch

BEFORE: Mapping[Stage, tuple[str, ...]] = {
    "prepare": ("data.",),
    "preferences": (),
    "judge": (),
    **dict.fromkeys(auto.TRAINED, ("preferences.", "dpo.", "ppo.", "judge.")),
}
"""What is tried before which stages: functions before those that train long before a later one calls them."""
NOT_CALLED = "data."
"""Functions of rows of the user's files, which are not at hand."""
OF_TENSORS = "dpo.loss", "ppo.loss", "ppo.advantages.function"
NUM_ROWS = 4
TRIED = (
    "tried on {}, before anything trains; launch.try_functions: false leaves this out, for a function that "
    "needs what is not made yet"
)
OF_RANK_0 = {"RANK": "0", "LOCAL_RANK": "0"}
"""What a function may read where a launcher will have started its process."""


class Function(NamedTuple):
    """A function that params.yaml names, with the names of the kept columns."""

    key: str
    name: str
    columns: Sequence[str]
    is_pairwise: bool
    is_called: bool


def check(stage: Stage, settings: Config, paths: Paths) -> None:
    """Import what the stage or a later one calls; call on little what was not yet called as it is now.

    Raises:
        UserError: for the first function that cannot be imported, fails, or ends the process; for a key or a
            harness that is not there.
    """
    if stage not in BEFORE:
        return
    if settings.judge.retention is not None:
        harness.check(settings.judge.retention.tasks, paths.root)
    values, record = config.in_force(settings), paths.home / "tried.json"
    tried: dict[str, str] = json.loads(record.read_text("utf-8")) if record.exists() else {}
    functions, flat = list[Function](), inputs.flatten(values)
    for key, variable in flat.items() if settings.launch.try_functions else ():
        is_used = key.startswith(BEFORE[stage]) and (settings.ppo.train or not key.startswith("ppo."))
        if is_used and key.endswith(".key_variable") and variable is not None:
            try:
                read_key(variable, key)
            except UserError as error:
                raise UserError(
                    f"{error}; launch.try_functions: false lets the stage that uses it ask"
                ) from None
    for key, name in inputs.functions_named(values):
        if not key.startswith(BEFORE[stage]):
            continue
        is_pairwise, is_called = bool(flat.get(key.removesuffix("function") + "pairwise")), False
        if settings.launch.try_functions and not key.startswith(NOT_CALLED):
            try:
                code, _ = inputs.code_of(paths.root, name.partition(":")[0], ())
            except UserError as error:
                raise UserError(f"{key}: {error}") from None
            digest = hashing.json_sha256([key, name, settings.data.columns.keep, is_pairwise, code])
            is_called = digest not in tried
            tried[digest] = name
        functions.append(Function(key, name, settings.data.columns.keep, is_pairwise, is_called))
    if functions:
        with console.part("trying the functions of params.yaml"):
            _run(functions, paths.root, OF_RANK_0 if launch.is_needed("ppo", settings.launch) else {})
        atomic.write_json(record, tried)


def _run(functions: Sequence[Function], root: Path, ranks: Mapping[str, str]) -> None:
    """Import and call functions in a process of their own, `_run_here`."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "errors").open("w+") as errors:
        words = [sys.executable, "-P", "-m", __spec__.name, str(root), folder, json.dumps(functions)]
        process = subprocess.Popen(
            processes.attached(words),  # which ends what a function has left running
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            env=os.environ | ranks,
        )
        status = processes.supervise(process, process.terminate)
        doing, failure = Path(folder, "doing"), Path(folder, "failure")
        if not failure.exists():
            errors.seek(0)
            last = "".join(f": {line}" for line in errors.read().splitlines()[-1:])
            how = signal.Signals(-status).name if status < 0 else f"status {status}"
            what = doing.read_text("utf-8") if doing.exists() else "Python"
            raise UserError(f"{what} ended its process ({how}){last}")
        if message := failure.read_text("utf-8"):
            raise UserError(message)


def _run_here(root: Path, folder: Path, functions: Sequence[Function]) -> None:
    """The program of that process: `folder` has what it does, and at its end why it failed, or nothing."""
    doing, failure = folder / "doing", ""
    try:
        for one in functions:
            doing.write_text(f"{one.key}: importing {one.name}", "utf-8")
            load_function(one.name, one.key, root)
            if one.is_called:
                doing.write_text(f"{one.key}: a call of {one.name}", "utf-8")
                (_call_on_tensors if one.key in OF_TENSORS else _call_on_texts)(one, root)
    except UserError as error:
        failure = str(error)
    (folder / "failure").write_text(failure, "utf-8")
    os._exit(0)  # whatever a function has left running


def _call_on_texts(function: Function, root: Path) -> None:
    """Call a function on the first rows of data/prompts, with their references, or prompts, as responses."""
    from rlhf_tasks.data import columns
    from rlhf_tasks.data.batches import read_table
    from rlhf_tasks.judging.judges.build import FunctionComparer
    from rlhf_tasks.judging.judges.comparisons import Question
    from rlhf_tasks.scoring.function import ImportedScorer
    from rlhf_tasks.scoring.protocol import Responses

    rows = list(itertools.islice(read_table(Paths(root), "prompts", "train"), NUM_ROWS))
    prompts, extra = [row["prompt"] for row in rows], columns.of_rows(rows)
    responses = [row["reference"] or row["prompt"] for row in rows]
    where = function.name, function.key, root, function.columns
    try:
        if function.is_pairwise:
            questions = [Question(*one) for one in zip(prompts, responses, responses[::-1], strict=True)]
            FunctionComparer(*where)(questions, 1.0, extra)
        else:
            scores = ImportedScorer(*where)(Responses.of_texts(prompts, responses, extra))
            if function.key.startswith("ppo.scorers") and not scores.isfinite().all():
                raise UserError(f"{function.key}: {function.name} gave {scores.tolist()}, not finite numbers")
    except UserError as error:
        raise UserError(f"{error} ({TRIED.format(f'{len(rows)} rows of data/prompts')})") from None


def _call_on_tensors(function: Function, root: Path) -> None:
    """Call a loss, or an estimator of advantages, on random numbers for responses of 1 to 4 tokens."""
    import torch

    from rlhf_tasks.ppo.advantages import call_user_estimator
    from rlhf_tasks.ppo.losses import MicroBatch, call_user_loss
    from rlhf_tasks.ppo.rollout import Rollout
    from rlhf_tasks.training.dpo import PairLogProbs, pair_loss_of

    settings = config.load(Paths(root).params)
    num_prompts, num_samples, length = NUM_ROWS, settings.ppo.samples_per_prompt, NUM_ROWS
    lengths = torch.arange(num_prompts * num_samples) % length + 1
    mask = torch.arange(length) < lengths[:, None]
    logprobs, old, ref, values, rewards, advantages = -torch.rand(6, *mask.shape) * mask
    logprobs.requires_grad_()
    batch = MicroBatch(mask, old, ref, values, advantages, rewards, mask.float())
    try:
        own = load_function(function.name, function.key, root)
        if function.key == "ppo.loss":
            losses = call_user_loss(own, f"ppo.loss: {function.name}", logprobs, batch, settings.ppo)[0]
        elif function.key == "dpo.loss":
            chosen, rejected, *others = (one.sum(1) for one in (logprobs, old, ref, values))
            pairs = PairLogProbs(chosen, rejected, others[0], others[1], lengths, lengths)
            losses = pair_loss_of(function.name, root)(pairs, settings.dpo)
        else:
            rollout = Rollout(
                queries=[[1, prompt] for prompt in range(num_prompts)] * num_samples,
                responses=[[3] * n for n in lengths.tolist()],
                ended=lengths < length,
                bootstrap_values=values[:, -1],
                scores=rewards.sum(1),
                parts={},
                pad=0,
                shares_queries=False,
                **batch._asdict(),
            )
            losses = torch.cat(
                call_user_estimator(own, f"ppo.advantages: {function.name}", rewards, rollout, settings.ppo)
            )
        if not losses.isfinite().all():
            raise UserError(f"{function.key}: {function.name} gave NaN or infinity")
    except UserError as error:
        raise UserError(f"{error} ({TRIED.format('random numbers')})") from None


if __name__ == "__main__":
    _run_here(Path(sys.argv[1]), Path(sys.argv[2]), [Function(*one) for one in json.loads(sys.argv[3])])
