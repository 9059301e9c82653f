"""Speed beside TRL's trainers: `python -m benchmarks.speed --peer PYTHON --parts ppo rloo sft reward`.

PYTHON is the interpreter of another environment with `trl==1.12.0`, the last release that has PPO; its
versions of torch and transformers should equal ours. Both train random models of one shape, on the same rows
and with the same number of epochs and optimizer steps. They alternate, in a process each. Our micro-batches
have the shipped 4,096 tokens, TRL's the rows that its users set (`Shape.micro`); in shape S both have four
rows in PPO. RLOO has one epoch, and eight responses to each prompt of a rollout of 32 or more. PPO and RLOO
count episodes per second; SFT and reward training count real tokens, without padding, per second. All is on
a CPU, without gradient checkpointing, in the shape's precision or in `--precision`. A figure is the median
over updates without the first, and over the turns; the ratio is of figures of one run. Without --peer only
ours is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import shapes
from benchmarks.shapes import EOS, PAD, SHAPES, Shape

EPOCHS = 4
GROUP = 8  # responses to a prompt in RLOO
SMALLEST_ROLLOUT = 32  # of RLOO
KL_COEF = 0.05
UNITS = {"ppo": "episodes/s", "rloo": "episodes/s", "sft": "tokens/s", "reward": "tokens/s"}
CPU_SHAPES = ("A", "B", "C")


class Figures(NamedTuple):
    """One process's units per second, and its peak memory in GB."""

    speed: float
    memory_gb: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", type=Path, metavar="PYTHON", help="the interpreter of an environment with trl 1.12.0"
    )
    parser.add_argument("--parts", nargs="+", choices=UNITS, default=["ppo"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(CPU_SHAPES))
    parser.add_argument("--updates", type=int, default=4, help="time so many updates per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="not the shape's: bf16 is autocast")
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train, shape = SIDES[options.side, options.parts[0]], of_part(options.parts[0], options.shapes[0])
        shape = replace(shape, precision=options.precision or shape.precision)
        marks = train(shape, options.updates + 1)
        seconds = [after - before for before, after in itertools.pairwise(marks)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        print(json.dumps({"seconds of each update": seconds, "GB at the peak": peak}))
        return
    for part in options.parts:
        print(f"\n| {part}, {UNITS[part]} | ours | peak GB | TRL 1.12.0 | peak GB | ratio |")
        print("|---|---|---|---|---|---|")
        for shape in options.shapes:
            found = measure(part, shape, options)
            print(line(shape, found), flush=True)


def of_part(part: str, name: str) -> Shape:
    """A named shape, with the rollout that a part has."""
    shape = SHAPES[name]
    return replace(shape, batch=max(shape.batch, SMALLEST_ROLLOUT)) if part == "rloo" else shape


def measure(part: str, shape: str, options: argparse.Namespace) -> dict[str, list[Figures]]:
    """The figures of all turns of each side, `ours` and, with an interpreter, `peer`."""
    pythons = {"ours": Path(sys.executable)} | ({"peer": options.peer} if options.peer else {})
    found: dict[str, list[Figures]] = {side: [] for side in pythons}
    for _ in range(options.turns):
        for side, python in pythons.items():
            found[side].append(_turn(python, side, part, shape, options))
    return found


def line(shape: str, found: Mapping[str, Sequence[Figures]]) -> str:
    cells, medians = [shape], list[float]()
    for turns in found.values():
        speeds = [turn.speed for turn in turns]
        medians.append(statistics.median(speeds))
        cells.append(f"{medians[-1]:,.2f} ({min(speeds):,.2f}–{max(speeds):,.2f})")
        cells.append(f"{max(turn.memory_gb for turn in turns):.2f}")
    if "peer" in found:
        cells.append(f"{medians[0] / medians[1]:.2f}")
    return f"| {' | '.join(cells)} |"


def _turn(python: Path, side: str, part: str, shape: str, options: argparse.Namespace) -> Figures:
    words = ["-m", "benchmarks.speed", "--side", side, "--parts", part, "--shapes", shape]
    words += ["--precision", options.precision] if options.precision else []
    command = [str(python), *words, "--updates", str(options.updates)]
    own = {"PYTHONPATH": str(Path.cwd()), "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result, sizes = json.loads(done.stdout.splitlines()[-1]), of_part(part, shape)
    is_rollout = UNITS[part] == "episodes/s"
    per_update = sizes.batch if is_rollout else num_tokens(part, sizes, options.updates + 1)
    speed = per_update / statistics.median(result["seconds of each update"][1:])
    return Figures(speed, result["GB at the peak"])


# --------------------------------------------------------------------------------- the input of both


class Rows(NamedTuple):
    """Token ids: queries, and two responses to each that end with EOS; SFT reads the first one."""

    queries: list[list[int]]
    chosen: list[list[int]]
    rejected: list[list[int]]


def rows(shape: Shape, updates: int) -> Rows:
    count = shape.batch * updates
    queries = shapes.random_rows(count, shape.query_min, shape.query, shape.vocab)
    chosen, rejected = (
        shapes.random_rows(count, shape.response // 4, shape.response - 1, shape.vocab, seed=seed)
        for seed in (2, 3)
    )
    return Rows(queries, [[*ids, EOS] for ids in chosen], [[*ids, EOS] for ids in rejected])


def num_tokens(part: str, shape: Shape, updates: int) -> float:
    """Real tokens of an update, on average: those of query and response, in reward training of two such."""
    data = rows(shape, updates)
    count = sum(map(len, data.queries)) + sum(map(len, data.chosen))
    if part == "reward":
        count += sum(map(len, data.queries)) + sum(map(len, data.rejected))
    return count / updates


# ------------------------------------------------------------------------------------- our side


def _rollouts_ours(shape: Shape, updates: int, epochs: int = EPOCHS, **settings: Any) -> list[float]:
    from benchmarks import workloads
    from tests import small

    dist = small.distributed(shape.precision)
    work = workloads.of_shape(dist, small.ppo(**settings), shape, updates)
    work = replace(work, settings=work.settings.model_copy(update={"num_ppo_epochs": epochs}))
    marks = [time.perf_counter()]
    for _ in work.updates():
        marks.append(time.perf_counter())
    return marks


def _sft_ours(shape: Shape, updates: int) -> list[float]:
    from rlhf_tasks.training.tasks import LanguageModeling

    data = rows(shape, updates)
    task = LanguageModeling(data.queries, data.chosen, PAD)
    return _train(shapes.models(shape).policy, task, shape)


def _reward_ours(shape: Shape, updates: int) -> list[float]:
    from rlhf_tasks.models.heads import TokenScores, supports_shared_prefix
    from rlhf_tasks.training.tasks import PreferencePairs, RewardLearner

    data, model = rows(shape, updates), shapes.models(shape).reward
    shares_prefix = supports_shared_prefix(model)  # as the stage does
    pairs = PreferencePairs(data.queries, data.chosen, data.rejected, PAD, shares_prefix=shares_prefix)
    return _train(RewardLearner(TokenScores(model), None), pairs, shape)


def _train(model: Any, task: Any, shape: Shape) -> list[float]:
    from rlhf_tasks.tracking import NullTracker
    from rlhf_tasks.training.checkpoint import Snapshots
    from rlhf_tasks.training.supervised import train
    from tests import small

    marks = [time.perf_counter()]

    class Marks(Snapshots):
        def due(self) -> bool:  # after each step
            marks.append(time.perf_counter())
            return False

    train(
        small.distributed(shape.precision),
        model,
        task,
        small.optimization(batch_size=shape.batch, learning_rate=3e-6, micro_batch_tokens=shape.micro_tokens),
        seed=1,
        name="speed",
        tracker=NullTracker("sft"),
        snapshots=Marks(),
    )
    return marks


# ------------------------------------------------------------------------------------ TRL's side


def _ppo_peers(shape: Shape, updates: int) -> list[float]:
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    made = shapes.models(shape)
    count = shape.batch * (updates + 1)
    queries = shapes.random_rows(count, shape.query_min, shape.query, shape.vocab)
    data = Dataset.from_dict({"input_ids": queries})
    config = {
        "num_sample_generations": 0,
        "local_rollout_forward_batch_size": shape.batch,
        "total_episodes": shape.batch * updates,
        "num_ppo_epochs": EPOCHS,
        "num_mini_batches": 1,
        "response_length": shape.response,
        "temperature": 0.7,
        "stop_token": "eos",
        "missing_eos_penalty": 1.0,
    }
    given = {
        "model": made.policy,
        "ref_model": made.reference,
        "reward_model": made.reward,
        "value_model": made.value,
        "eval_dataset": data.select(range(shape.batch)),
    }
    return _peer_marks(PPOTrainer, PPOConfig, shape, data, config, given)


def _rloo_peers(shape: Shape, updates: int) -> list[float]:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    made, words = shapes.models(shape), shapes.tokenizer(shape.vocab)
    count = shape.batch // GROUP * (updates + 1)
    queries = shapes.random_rows(count, shape.query_min, shape.query, shape.vocab)
    data = Dataset.from_dict({"prompt": [" ".join(f"t{i}" for i in ids) for ids in queries]})
    config = {
        "num_generations": GROUP,
        "num_iterations": 1,
        "max_steps": updates,
        "max_completion_length": shape.response,
        "temperature": 0.7,
        "beta": KL_COEF,
    }
    with tempfile.TemporaryDirectory() as folder:  # from which the trainer reads its reference
        made.policy.save_pretrained(folder)
        words.save_pretrained(folder)
        for model in (made.policy, made.reward):
            model.config._name_or_path = folder
        given = {
            "model": made.policy,
            "reward_funcs": [made.reward],
            "reward_processing_classes": [words],
        }
        return _peer_marks(RLOOTrainer, RLOOConfig, shape, data, config, given)


def _sft_peers(shape: Shape, updates: int) -> list[float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = rows(shape, updates)
    pairs = list(zip(data.queries, data.chosen, strict=True))
    table = Dataset.from_dict(
        {
            "input_ids": [query + response for query, response in pairs],
            "completion_mask": [[0] * len(query) + [1] * len(response) for query, response in pairs],
        }
    )
    config = {"completion_only_loss": True, "num_train_epochs": 1}
    return _peer_marks(SFTTrainer, SFTConfig, shape, table, config, {"model": shapes.models(shape).policy})


def _reward_peers(shape: Shape, updates: int) -> list[float]:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    data = rows(shape, updates)
    table = Dataset.from_dict(
        {
            name: [query + response for query, response in zip(data.queries, responses, strict=True)]
            for name, responses in {"chosen_ids": data.chosen, "rejected_ids": data.rejected}.items()
        }
    )
    config, model = {"num_train_epochs": 1}, shapes.models(shape).reward
    return _peer_marks(RewardTrainer, RewardConfig, shape, table, config, {"model": model})


def _peer_marks(
    trainer: Any, config: Any, shape: Shape, data: Any, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> list[float]:
    """Train by a trainer of TRL; the times at which its steps end."""
    from transformers import TrainerCallback

    marks: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as out:
        made = trainer(
            args=config(
                output_dir=out,
                use_cpu=True,
                bf16=shape.precision == "bf16",
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1,
                gradient_checkpointing=False,
                learning_rate=3e-6,
                per_device_train_batch_size=shape.micro,
                gradient_accumulation_steps=shape.batch // shape.micro,
                **settings,
            ),
            processing_class=shapes.tokenizer(shape.vocab),
            train_dataset=data,
            callbacks=[Marks()],
            **given,
        )
        marks.append(time.perf_counter())
        made.train()
    return marks


RLOO: Mapping[str, Any] = {
    "advantages": {"kind": "rloo", "samples_per_prompt": GROUP},
    "whiten_advantages": False,
}
SIDES: Mapping[tuple[str, str], Callable[..., list[float]]] = {
    ("ours", "ppo"): _rollouts_ours,
    ("ours", "rloo"): partial(_rollouts_ours, epochs=1, kl_coef=KL_COEF, **RLOO),
    ("ours", "sft"): _sft_ours,
    ("ours", "reward"): _reward_ours,
    ("peer", "ppo"): _ppo_peers,
    ("peer", "rloo"): _rloo_peers,
    ("peer", "sft"): _sft_peers,
    ("peer", "reward"): _reward_peers,
}

if __name__ == "__main__":
    main()
