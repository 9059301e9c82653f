"""An update of the toy in the manner of a GPU: in bfloat16, and with a reward model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from rlhf_tasks.config.scorers import RewardModelScorer
from rlhf_tasks.ppo import sampler
from rlhf_tasks.ppo import train as loop
from rlhf_tasks.ppo.rollout import Rollout
from rlhf_tasks.scoring.build import WeightedSum, build
from rlhf_tasks.training.distributed import Distributed, MicroRows
from tests import small
from tests.gpu.pretend import Gpu
from tests.ppo import toy

PHASES = (
    ("sample", sampler, "sample"),
    ("score", loop, "score_rollout"),
    ("train", loop, "accumulate_gradients"),
    ("step", loop, "take_step"),
)


@contextmanager
def phases(gpu: Gpu) -> Iterator[None]:
    """Within the block PPO's phases have these names; what else an update does has none."""
    with ExitStack() as stack:
        for phase in PHASES:
            stack.enter_context(gpu.during(*phase))
        yield


def update(gpu: Gpu, **changes: Any) -> Counter[str]:
    """One update of one minibatch; the number of micro-batches in each phase.

    The GPU is asked to count from the update on. No response has an end, so that all are equally long.
    """
    with gpu.present(), phases(gpu):
        dist = small.distributed("bf16")
        settings: dict[str, Any] = {
            "num_mini_batches": 1,
            "total_episodes": 16,
            "ends": (small.VOCAB,),
        } | changes
        one = toy.toy(dist=dist, scorers=reward_model(dist), **settings)
        gpu.forget()
        own, count = Rollout.split, Counter[str]()

        def split(*given: Any) -> list[MicroRows]:
            found = own(*given)
            count[gpu.phase] += len(found)
            return found

        with mock.patch.object(Rollout, "split", split):
            list(one.updates)
    return count


def reward_model(dist: Distributed) -> WeightedSum:
    """The scorers where a reward model is the only one."""
    scores = small.scores(seed=5)
    dist.freeze(scores)
    return build(
        (RewardModelScorer(kind="reward_model", weight=1.0),),
        small.tokenizer(),
        reward_model=scores,
        max_tokens=4096,
        root=Path(),
        placement=dist,
    )
