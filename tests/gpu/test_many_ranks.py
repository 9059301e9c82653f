"""One rank of 8 and of 64 makes an update of PPO under FSDP2 and HSDP, in one process.

The other ranks are torch's `fake` process group, and do what this rank does: what is gathered is its own part
again and again. So the numbers mean nothing; shapes, shards and the number of exchanges are those of a rank.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_tasks.config import Launch
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed
from tests.gpu.conftest import Child
from tests.ppo import toy


class Case(NamedTuple):
    rank: int
    world_size: int
    precision: Literal["fp32", "bf16"] = "fp32"
    offload: bool = False
    parallelism: Literal["fsdp2", "hsdp"] = "fsdp2"

    @property
    def num_shards(self) -> int:
        return 8 if self.parallelism == "hsdp" else self.world_size


CASES = (
    *(Case(0, 8), Case(7, 8), Case(0, 64), Case(63, 64), Case(0, 8, "bf16"), Case(7, 8, offload=True)),
    Case(63, 64, parallelism="hsdp"),  # one alone: torch keeps the groups of its mesh
)
EXCHANGES: Mapping[str, Mapping[str, int]] = {
    "fp32": {"_allgather_base_": 72, "_reduce_scatter_base_": 32, "allreduce_": 13, "allgather_": 8},
    "hsdp": {"_allgather_base_": 72, "_reduce_scatter_base_": 32, "allreduce_": 45, "allgather_": 8},
    "bf16": {"_allgather_base_": 88, "_reduce_scatter_base_": 32, "allreduce_": 15, "allgather_": 8},
}
"""Of an update with four steps of one micro-batch; `_reduce_scatter_base_` exchanges the gradients of a part
of a model, and policy and critic have four parts each. HSDP adds up the copies' as often."""


class Exchanges(TorchDispatchMode):
    """Counts what the ranks exchange, and makes up what is received: the fake group leaves it as it was."""

    def __init__(self, case: Case) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.case, self.count = case, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, name = func._schema.name.split("::")
        if space == "c10d":
            self.count[name] += 1
        if name == "_allgather_base_":
            args[0].copy_(args[1].repeat(self.case.num_shards, *[1] * (args[1].ndim - 1)))
        elif name == "_reduce_scatter_base_":
            args[0].copy_(args[1].chunk(self.case.num_shards)[self.case.rank % self.case.num_shards])
        return out


def measure() -> list[Any]:
    return [run(case) for case in CASES]


def run(case: Case) -> dict[str, Any]:
    """An update of one rank: what was exchanged, the shapes of weights and shards, and what can be saved."""
    known: dict[str, Any] = {"RANK": case.rank, "WORLD_SIZE": case.world_size, "LOCAL_RANK": case.rank % 8}
    known |= {"LOCAL_WORLD_SIZE": 8, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in known.items()}):
        distributed.init_process_group("fake", rank=case.rank, world_size=case.world_size, store=FakeStore())
        try:
            machines = {"num_processes": case.world_size, "num_machines": case.world_size // 8}
            how = {"parallelism": case.parallelism, "precision": case.precision, "offload": case.offload}
            return updated(case, Distributed(Launch.model_validate(machines | how), seed=1))
        finally:
            distributed.destroy_process_group()


def updated(case: Case, dist: Distributed) -> dict[str, Any]:
    rows = 2 * case.world_size
    with Exchanges(case) as exchanges:
        one = toy.toy(dist=dist, rollout_batch_size=rows, num_mini_batches=2, total_episodes=rows)
        exchanges.count.clear()
        next(one.updates)
        exchanged = dict(exchanges.count)
        model, optimizer = one.actor_critic, one.state.optimizer
        whole = {name: list(x.shape) for name, x in sharding.weights_of(model).items()}
    weights: dict[str, Any] = dict(model.named_parameters())
    shards = {name: weight.to_local().detach() for name, weight in weights.items()}
    before = {name: shard.clone() for name, shard in shards.items()}
    moments = [state["exp_avg"].to_local().shape for state in optimizer.state.values()]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "shards.pt"
        sharding.save_shards(model, optimizer, file)
        with torch.no_grad():
            for shard in shards.values():
                shard.zero_()
        sharding.load_shards(model, optimizer, file)
    return {
        "exchanged": exchanged,
        "whole": whole,
        "weights": {name: list(weight.shape) for name, weight in weights.items()},
        "shards": {name: list(shard.shape) for name, shard in shards.items()},
        "moments": sum(shape.numel() for shape in moments),
        "restored": all(torch.equal(shard, before[name]) for name, shard in shards.items()),
    }


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest, child: Child) -> tuple[Case, Any]:
    return request.param, child(measure)[CASES.index(request.param)]


def test_more_ranks_exchange_no_more_often(case: tuple[Case, Any]) -> None:
    kind = case[0].precision if case[0].parallelism == "fsdp2" else "hsdp"
    assert case[1]["exchanged"] == EXCHANGES[kind]


def test_a_rank_keeps_its_rows_of_each_weight_and_of_its_moments(case: tuple[Case, Any]) -> None:
    one, found = case
    rank = one.rank % one.num_shards
    for name, (rows, *others) in found["weights"].items():
        most = math.ceil(rows / one.num_shards)
        assert found["shards"][name] == [max(0, min(most, rows - rank * most)), *others]
    assert found["moments"] == sum(map(math.prod, found["shards"].values()))


def test_shards_are_read_again_from_their_file(case: tuple[Case, Any]) -> None:
    assert case[1]["restored"]


def test_the_first_rank_alone_gathers_the_weights(case: tuple[Case, Any]) -> None:
    (rank, *_), found = case
    assert found["whole"] == ({} if rank else found["weights"])
