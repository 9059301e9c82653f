"""Two ranks in one process: threads that exchange their numbers as processes do."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rlhf_tasks.training.distributed import Distributed
from tests import small

T = TypeVar("T")
U = TypeVar("U")


class Meeting:
    """Two threads exchange values here, as processes do by all_gather."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._values: list[Any] = [None, None]

    def gather(self, rank: int, x: Any) -> list[Any]:
        self._values[rank] = copy.deepcopy(x)
        self._barrier.wait()
        both = list(self._values)
        self._barrier.wait()
        return both

    def leave(self) -> None:
        """A thread that fails stops the wait of the other."""
        self._barrier.abort()


class OneOfTwo(Distributed):
    """A rank as PPO uses it, in few lines: sums, the largest number, summed gradients."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        vars(self).update(vars(small.distributed()))
        self.rank, self.world_size, self.meeting = rank, 2, meeting

    def sum(self, x: Tensor) -> Tensor:
        first, second = self.all_gather_object(x.detach())
        return first + second

    def max(self, number: int) -> int:
        return max(self.all_gather_object(number))

    def all_gather_object(self, value: T) -> list[T]:
        return self.meeting.gather(self.rank, value)

    def broadcast_object(self, value: Any) -> Any:
        return self.all_gather_object(value)[0]

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def passes(self, model: nn.Module, work: Sequence[T]) -> Iterator[T]:
        assert len(set(self.all_gather_object(len(work)))) == 1, "every rank makes equally many passes"
        return iter(work)

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        loss.backward()

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, *_: Any
    ) -> float:
        trained = [p for p in model.parameters() if p.grad is not None]
        whole = self.sum(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
        for p, gradient in zip(trained, whole.split([p.numel() for p in trained]), strict=True):
            p.grad = gradient.view_as(p)
        norm = float(nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf))
        optimizer.step()
        optimizer.zero_grad()
        return norm


def run_ranks(make: Callable[[OneOfTwo], U], run: Callable[[U], T]) -> list[T]:
    """`run(make(dist))` of each of two ranks; all that `make` draws or reads is done before one runs."""
    meeting = Meeting()
    made = [make(OneOfTwo(rank, meeting)) for rank in range(2)]

    def one(rank: int) -> T:
        try:
            return run(made[rank])
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))
