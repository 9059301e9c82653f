"""Two threads of one process that each compute a part of a batch, on a CPU.

The operations of a small model are too short to be divided among threads. Two threads that each compute half
of the rows are up to twice as fast as one; two threads inside of every operation, 1.1 to 1.4 times. Python's
lock hardly matters, since torch gives it up within operations.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import TokenBudget
from rlhf_tasks.modeling.checks import find_rescaling_length
from rlhf_tasks.modeling.last_layer import LAYERS

T = TypeVar("T")
NUM_WORKERS = 2
MOST_WEIGHTS = 2**25
"""Two workers need three times the memory of the gradients, and the operations of larger models are long."""


def num_workers(device: torch.device, *models: nn.Module) -> int:
    """How many threads may compute with these models at once.

    One, unless torch has several on a CPU; and one under autocast, which is each thread's own. Also one if a
    model is large, or if a pass may change it. Passes of the families of `from_scratch` do not, without
    adapters and without rotary positions that a long row rescales.
    """
    if device.type != "cpu" or torch.get_num_threads() < NUM_WORKERS or torch.is_autocast_enabled("cpu"):
        return 1
    return NUM_WORKERS if all(map(_takes_workers, models)) else 1


def _takes_workers(model: nn.Module) -> bool:
    modules = list(model.modules())
    configs = [module.config for module in modules if isinstance(module, PreTrainedModel)]
    return (
        sum(weight.numel() for weight in model.parameters()) <= MOST_WEIGHTS
        and all(config.model_type in LAYERS and find_rescaling_length(config) is None for config in configs)
        and not any(hasattr(module, "lora_A") for module in modules)
    )


@dataclass
class _Stop:
    """Whether workers shall begin no function any more."""

    is_set: bool = False
    errors: dict[int, BaseException] = field(default_factory=dict)
    """What sequences have raised, by number."""

    def ends(self, number: int) -> bool:
        """Whether a sequence ends early: when an earlier one has failed. So the same error wins each time."""
        return self.is_set or any(failed < number for failed in self.errors)


_LOCAL = threading.local()


def compute_beside(work: Sequence[Sequence[Callable[[], T]]]) -> list[T]:
    """The results of all functions, in order: a thread of its own computes each sequence.

    A single sequence, or a call from within a worker, is computed by the caller. On an interrupt each worker
    ends after its present function.

    Raises:
        BaseException: what the first sequence that failed has raised, after all threads have stopped.
    """
    waiting = [functions for functions in work if functions]
    if len(waiting) < 2 or getattr(_LOCAL, "is_worker", False):
        return [function() for functions in waiting for function in functions]
    pool, stop = _pool(len(work), max(1, torch.get_num_threads() // len(work))), _Stop()
    futures: list[Future[list[T]]] = [
        pool.submit(
            contextvars.copy_context().run, _computed, functions, number, stop, torch.is_grad_enabled()
        )
        for number, functions in enumerate(waiting)
    ]
    try:
        wait(futures)
    except BaseException:
        stop.is_set = True
        wait(futures)
        raise
    for _, error in sorted(stop.errors.items()):
        raise error
    return [result for future in futures for result in future.result()]


def _computed(functions: Sequence[Callable[[], T]], number: int, stop: _Stop, has_gradients: bool) -> list[T]:
    results = list[T]()
    try:
        with torch.set_grad_enabled(has_gradients):  # a thread begins with gradients on
            for function in functions:
                if stop.ends(number):
                    break
                results.append(function())
    except BaseException as error:
        stop.errors[number] = error
    return results


@functools.cache
def _pool(size: int, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(size, thread_name_prefix="worker", initializer=_begin, initargs=(threads,))


def _begin(threads: int) -> None:
    _LOCAL.is_worker = True
    torch.get_num_threads()  # a thread's first call sets its number to the one that was set last anywhere
    torch.set_num_threads(threads)


def run_beside(
    budget: TokenBudget, rows: Sequence[int], compute: Callable[[list[int]], None], workers: int
) -> None:
    """`TokenBudget.each`, with the rows dealt out to so many workers."""
    if workers == 1:
        budget.each(rows, compute)
        return
    for_each = [
        [functools.partial(compute, group) for group in groups] for groups in budget.deal(rows, workers)
    ]
    compute_beside(for_each)


def backward_beside(
    parameters: Sequence[nn.Parameter], work: Sequence[Sequence[Callable[[], tuple[Tensor, T]]]]
) -> list[T]:
    """Run the functions of each worker, and add the gradients of all losses to the parameters' own.

    The first worker adds its gradients to the parameters' own, and those of the others follow at the end: so
    the sum does not depend on which thread is faster. Returns what the functions measured.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    totals: list[list[Tensor | None]] = [[None] * len(trained) for _ in work[1:]]

    def add_to_own(function: Callable[[], tuple[Tensor, T]]) -> T:
        loss, stats = function()
        loss.backward()
        return stats

    def add_to(total: list[Tensor | None], function: Callable[[], tuple[Tensor, T]]) -> T:
        loss, stats = function()
        _add(total, torch.autograd.grad(loss, trained, allow_unused=True))
        return stats

    first, *others = work
    adding: list[list[Callable[[], T]]] = [[functools.partial(add_to_own, function) for function in first]]
    for total, functions in zip(totals, others, strict=True):
        adding.append([functools.partial(add_to, total, function) for function in functions])
    measured = compute_beside(adding)
    for total in totals:
        own = [parameter.grad for parameter in trained]
        _add(own, total)
        for parameter, gradient in zip(trained, own, strict=True):
            parameter.grad = gradient
    return measured


def _add(total: list[Tensor | None], more: Sequence[Tensor | None]) -> None:
    """Add gradients to the total, in place; None is a gradient that does not exist."""
    both = [(a, b) for a, b in zip(total, more, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    owned = set[int]()
    for i, gradient in enumerate(more):
        if total[i] is None and gradient is not None:
            pointer = gradient.untyped_storage().data_ptr()
            is_own = gradient.is_contiguous() and pointer not in owned  # two weights may get the same tensor
            total[i] = gradient if is_own else gradient.clone()
            owned.add(pointer)
