"""PPO's episodes per second, compared with TRL's trainer: `python -m tests.benchmarks.speed --peer PYTHON`.

PYTHON is the interpreter of another environment with `trl==1.12.0`, the last release that has PPO; its
versions of torch and transformers should equal ours. Both train random GPT-NeoX models of one shape with the
same number of episodes, epochs and optimiser steps. They alternate, in a process each. Our micro-batches
have the shipped 16,384 tokens, TRL's have 16, 8 and 16 rows. A figure is the median over updates without the
first, and over the turns; the ratio is of figures of one run. Without --peer only ours is measured.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EPOCHS = 4
SHAPES: Mapping[str, Mapping[str, int]] = {
    "A": {"layers": 4, "vocab": 1024, "query_min": 64, "query": 64, "response": 32, "batch": 64, "micro": 16},
    "B": {
        "layers": 6,
        "vocab": 50304,
        "query_min": 128,
        "query": 128,
        "response": 53,
        "batch": 32,
        "micro": 8,
    },
    "C": {"layers": 4, "vocab": 32, "query_min": 16, "query": 64, "response": 64, "batch": 64, "micro": 16},
}
"""C: a random model over 32 tokens ends its responses at very different lengths."""
PAD, EOS = 0, 1
SECONDS = "seconds of each update: "
HEAD = """\
| shape | ours, episodes/s | peak GB | TRL 1.12.0, episodes/s | peak GB | ratio |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", type=Path, metavar="PYTHON", help="the interpreter of an environment with trl 1.12.0"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--updates", type=int, default=4, help="time so many updates per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--side", choices=("ours", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        train = _train_ours if options.side == "ours" else _train_peers
        train(SHAPES[options.shapes[0]], options.updates + 1)
        print(f"peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}")
        return
    print(HEAD)
    for shape in options.shapes:
        print(_line(shape, options), flush=True)


def _line(shape: str, options: argparse.Namespace) -> str:
    pythons = {"ours": Path(sys.executable)} | ({"peer": options.peer} if options.peer else {})
    turns = [
        {side: _turn(python, side, shape, options.updates) for side, python in pythons.items()}
        for _ in range(options.turns)
    ]
    cells, speeds = [shape], []
    for side in pythons:
        speed = [turn[side][0] for turn in turns]
        speeds.append(statistics.median(speed))
        cells += [f"{speeds[-1]:.1f} ({min(speed):.1f}–{max(speed):.1f})"]
        cells += [f"{max(turn[side][1] for turn in turns):.2f}"]
    if options.peer:
        cells.append(f"{speeds[0] / speeds[1]:.2f}")
    return f"| {' | '.join(cells)} |"


def _turn(python: Path, side: str, shape: str, updates: int) -> tuple[float, float]:
    """Episodes per second, and peak memory in GB, of one process."""
    command = [
        str(python),
        "-m",
        "tests.benchmarks.speed",
        "--side",
        side,
        "--shapes",
        shape,
        "--updates",
        str(updates),
    ]
    environment = os.environ | {
        "PYTHONPATH": str(Path.cwd()),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    *_, seconds, memory = done.stdout.splitlines()
    times = json.loads(seconds.removeprefix(SECONDS))
    batch = SHAPES[shape]["batch"]
    return batch / statistics.median(times[1:]), int(memory.rpartition(" ")[2]) * 1024 / 1e9


# --------------------------------------------------------------------------------- the input of both


def _tokenizer(shape: Mapping[str, int]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": PAD, "<eos>": EOS, "<unk>": 2} | {f"t{i}": i for i in range(3, shape["vocab"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def _models(shape: Mapping[str, int]) -> tuple[Any, Any, Any, Any]:
    """Policy, reference of the same weights, reward model, value model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=shape["vocab"], hidden_size=128, num_hidden_layers=shape["layers"], num_attention_heads=4,
        intermediate_size=512, max_position_embeddings=2048, pad_token_id=PAD, eos_token_id=EOS, 
        bos_token_id=EOS,
    )  # fmt: skip
    torch.manual_seed(0)
    policy, reference = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    reference.load_state_dict(policy.state_dict())
    config.num_labels = 1
    reward, value = (AutoModelForSequenceClassification.from_config(config) for _ in range(2))
    return policy, reference, reward, value


def _queries(shape: Mapping[str, int], updates: int) -> list[list[int]]:
    import torch

    generator, count = torch.Generator().manual_seed(1), shape["batch"] * (updates + 1)
    lengths = torch.randint(shape["query_min"], shape["query"] + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, shape["vocab"], (n,), generator=generator).tolist() for n in lengths]


# ------------------------------------------------------------------------------------- the two sides


def _train_ours(shape: Mapping[str, int], updates: int) -> None:
    from rlhf_tasks.modeling import scorers
    from rlhf_tasks.modeling.models import TokenScores
    from rlhf_tasks.ppo.reference import OwnModel
    from rlhf_tasks.ppo.rollout import ActorCritic
    from rlhf_tasks.ppo.trainer import Trainer
    from tests import small

    tokenizer, (policy, reference, reward, value) = _tokenizer(shape), _models(shape)
    settings = small.ppo(
        total_episodes=shape["batch"] * updates, rollout_batch_size=shape["batch"], num_mini_batches=1,
        num_ppo_epochs=EPOCHS, learning_rate=3e-6, response_length=shape["response"], temperature=0.7,
    )  # fmt: skip
    rt = small.runtime()
    for frozen in (reference, reward):
        rt.freeze(frozen)
    scorer = scorers.build(
        settings.scorers, tokenizer, reward_model=TokenScores(reward), max_tokens=settings.micro_batch_tokens,
        root=Path(),
    )  # fmt: skip
    trainer = Trainer(
        rt, settings, ActorCritic(policy, TokenScores(value)), OwnModel(reference, moves=False), scorer,
        tokenizer, _queries(shape, updates), seed=1,
    )  # fmt: skip
    marks = [time.perf_counter()]
    for _ in trainer.updates():
        marks.append(time.perf_counter())
    _print_seconds(marks)


def _train_peers(shape: Mapping[str, int], updates: int) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    marks: list[float] = []

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    policy, reference, reward, value = _models(shape)
    rows = Dataset.from_dict({"input_ids": _queries(shape, updates)})
    with tempfile.TemporaryDirectory() as out:
        config = PPOConfig(
            output_dir=out, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            logging_steps=1, num_sample_generations=0, gradient_checkpointing=False,
            per_device_train_batch_size=shape["micro"],
            gradient_accumulation_steps=shape["batch"] // shape["micro"],
            local_rollout_forward_batch_size=shape["batch"], total_episodes=shape["batch"] * updates,
            num_ppo_epochs=EPOCHS, num_mini_batches=1, learning_rate=3e-6, response_length=shape["response"],
            temperature=0.7, stop_token="eos", missing_eos_penalty=1.0,
        )  # fmt: skip
        trainer = PPOTrainer(
            args=config, processing_class=_tokenizer(shape), model=policy, ref_model=reference,
            reward_model=reward, value_model=value, train_dataset=rows,
            eval_dataset=rows.select(range(shape["batch"])), callbacks=[Marks()],
        )  # fmt: skip
        marks.append(time.perf_counter())
        trainer.train()
    _print_seconds(marks)


def _print_seconds(marks: list[float]) -> None:
    print(SECONDS + json.dumps([after - before for before, after in itertools.pairwise(marks)]))


if __name__ == "__main__":
    main()
