"""One update of PPO by one process: `python -m tests.training.first_update LAYOUT PRECISION [MODEL]`.

Prints, as JSON: the largest |log π − log π_ref| of a pass of both and of the first rollout, the update's
`val/first_ratio_error`, and that of an update in other micro-batches than it was scored in. Without the
folder of a MODEL, the policy is a toy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_tasks.config import Launch
from rlhf_tasks.data.batches import collate
from rlhf_tasks.data.tokenizer import encode, load_tokenizer, read_plain
from rlhf_tasks.models.heads import ActorCritic, NoCritic
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.ppo.rollout import Reference
from rlhf_tasks.training.distributed import Distributed
from tests.ppo import toy

ROOT = Path(__file__).parents[2]
INSTRUCTIONS = [
    f"Write {n} sentences about {x}." for n in range(2, 10) for x in ("the sea", "a tiny village")
]


def join_alone(layout: str) -> None:
    """Make this process the only rank of a launch under a layout."""
    rank = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
    os.environ |= {key: str(value) for key, value in rank.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if layout.startswith("zero"):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(ROOT / f"infra/deepspeed/{layout}.json")


def main(layout: str, precision: Any, model: str | None = None) -> None:
    join_alone(layout)
    dist = Distributed(Launch(parallelism=layout, precision=precision), seed=1)  # type: ignore[arg-type]
    changes: dict[str, Any] = {"num_mini_batches": 4, "num_ppo_epochs": 1, "micro_batch_tokens": 40}
    if model is not None:
        frozen = load_causal(model)
        dist.freeze(frozen)
        tokenizer = load_tokenizer(Path(model))
        toy.QUERIES[:] = encode(tokenizer, read_plain(tokenizer, INSTRUCTIONS))
        changes |= {
            "actor_critic": ActorCritic(load_causal(model), NoCritic()),
            "reference": Reference(frozen),
            "tokenizer": tokenizer,
            "response_length": 64,
            "micro_batch_tokens": 1024,
            "temperature": 1.0,
            **toy.without_critic("rloo"),
        }
    one = toy.toy(dist=dist, **changes)
    rollout = one.sample()
    batch = collate(rollout.queries, rollout.responses, rollout.pad).to(dist.device)
    with torch.no_grad(), dist.autocast():
        logprobs = response_logprobs(one.actor_critic.policy, batch, one.config.temperature)
        ref_logprobs = one.state.reference.logprobs(batch, one.config.temperature)
    found: dict[str, Any] = {
        "pass": (logprobs - ref_logprobs).abs().max(),
        "rollout": (rollout.logprobs - rollout.ref_logprobs).abs().max(),
        "ratio_error": next(one.updates)["val/first_ratio_error"],
    }
    again = one.sample()
    one.state.budget.max_tokens = 1  # as after out-of-memory, every row is a micro-batch
    found["ratio_error_of_another_cut"] = one.learn(again)["val/first_ratio_error"]
    print(json.dumps({key: float(value) for key, value in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
