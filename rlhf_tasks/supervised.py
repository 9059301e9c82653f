"""What base, SFT and reward training share: epochs of optimiser steps, evaluations, the best kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rlhf_tasks.config import Optimisation
from rlhf_tasks.data.batches import Batch, Ids, Size, collate, epoch_batches, micro_batches, sizes
from rlhf_tasks.models import response_logits
from rlhf_tasks.runtime import Runtime, adamw, learning_rate, set_learning_rate
from rlhf_tasks.tensors import gather_logprobs, masked_sum

Sums = dict[str, Tensor]


class Task(Protocol):
    """What is learned: rows, how wide they are when padded, and the sums of one forward pass over some."""

    sizes: list[Size]

    def weight(self, rows: Sequence[int]) -> float:
        """What the loss of these rows is averaged over (tokens, or pairs)."""

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        """`loss` and other metrics, **summed** over what `weight` counts."""


@dataclass
class LanguageModelling:
    """Predict the response tokens of (query, response) rows, EOS among them."""

    queries: list[Ids]
    responses: list[Ids]
    pad: int

    def __post_init__(self) -> None:
        self.sizes = sizes(self.queries, self.responses)

    def weight(self, rows: Sequence[int]) -> float:
        return sum(len(self.responses[i]) for i in rows)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        batch = collate([self.queries[i] for i in rows], [self.responses[i] for i in rows], self.pad).to(
            device
        )
        return lm_sums(response_logits(model, batch), batch)


def lm_sums(logits: Tensor, batch: Batch) -> Sums:
    """Σ of −log p and of right guesses over the real response tokens; logits (B, R, V)."""
    right = (logits.argmax(-1) == batch.responses) & batch.response_mask
    nll = -masked_sum(gather_logprobs(logits, batch.responses), batch.response_mask)
    return {"loss": nll, "token_accuracy": right.sum().float()}


@dataclass(frozen=True)
class Step:
    """One optimiser step: its number from 1, how many there will be, its metrics (global means)."""

    number: int
    num_steps: int
    metrics: dict[str, float]


def fit(rt: Runtime, model: nn.Module, task: Task, settings: Optimisation, seed: int) -> Iterator[Step]:
    """Train `model` in place for `num_epochs`, yielding after every optimiser step.

    The loss of a step is its sum over the whole batch of all processes, over `weight`: it is the same
    however the batch is cut into micro-batches or shared among processes.
    """
    wrapped, optimizer = rt.prepare(model, adamw(model, settings), settings.max_grad_norm)
    order = torch.Generator().manual_seed(seed)
    per_epoch = math.ceil(len(task.sizes) / settings.batch_size)
    num_steps = math.ceil(per_epoch * settings.num_epochs)
    number = 0
    while number < num_steps:
        for rows in epoch_batches(task.sizes, settings.batch_size, order):
            if number == num_steps:
                break
            rate = learning_rate(settings, number, num_steps)
            set_learning_rate(optimizer, rate)
            sums, norm = _step(rt, wrapped, optimizer, task, rows, settings)
            number += 1
            weight = task.weight(rows)
            means = {f"train/{key}": value / weight for key, value in sums.items()}
            yield Step(number, num_steps, means | {"train/grad_norm": norm, "lr": rate})


def _step(
    rt: Runtime,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    task: Task,
    rows: list[int],
    settings: Optimisation,
) -> tuple[dict[str, float], float]:
    weight = task.weight(rows)
    parts: list[Sums] = []

    def loss_of(group: list[int]) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            sums = _sums(rt, wrapped, task, group, rows)
            parts.append({key: value.detach() for key, value in sums.items()})
            return sums["loss"] / weight

        return compute

    wrapped.train()
    norm = rt.step(
        wrapped,
        optimizer,
        [loss_of(g) for g in groups(rt, task, rows, settings.micro_batch_tokens)],
        settings.max_grad_norm,
    )
    return total(rt, parts), norm


def groups(rt: Runtime, task: Task, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """This process's rows as micro-batches; every process gets as many, if need be empty ones."""
    own = rt.share(rows)
    mine = [task.sizes[i] for i in own]
    cut = micro_batches(mine, max_tokens)
    if rt.world_size > 1:
        cut = micro_batches(mine, max_tokens, count=rt.max(len(cut)))
    return [[own[i] for i in group] for group in cut]


def _sums(rt: Runtime, model: nn.Module, task: Task, group: Sequence[int], rows: Sequence[int]) -> Sums:
    """The sums of a micro-batch; of an empty one, zeros by a pass over some other row.

    All processes must call the model equally often, and one of them may have a row less.
    """
    with rt.autocast():
        sums = task.sums(model, group or rows[:1], rt.device)
    return sums if group else {key: 0 * value for key, value in sums.items()}


def total(rt: Runtime, parts: Sequence[Sums]) -> dict[str, float]:
    """Micro-batches' sums, added up over all processes."""
    keys = list(parts[0])
    stacked = rt.sum(torch.stack([torch.stack([part[key].double() for part in parts]).sum() for key in keys]))
    return dict(zip(keys, stacked.tolist(), strict=True))


@torch.no_grad()
def evaluate(rt: Runtime, model: nn.Module, task: Task, max_tokens: int) -> dict[str, float]:
    """Means of a task's metrics over all of its rows, over all processes."""
    model.eval()
    parts = []
    for group in groups(rt, task, range(len(task.sizes)), max_tokens):
        parts.append(_sums(rt, model, task, group, range(len(task.sizes))))
    weight = task.weight(range(len(task.sizes)))
    return {key: value / weight for key, value in total(rt, parts).items()}


class Best:
    """The weights with the lowest validation loss so far, kept on the CPU."""

    def __init__(self, patience: int) -> None:
        self.loss, self.step, self._patience, self._worse = math.inf, 0, patience, 0
        self._weights: dict[str, Tensor] = {}

    def offer(self, model: nn.Module, loss: float, step: int) -> None:
        if loss < self.loss:
            self.loss, self.step, self._worse = loss, step, 0
            self._weights = {key: value.detach().cpu().clone() for key, value in model.state_dict().items()}
        else:
            self._worse += 1

    @property
    def exhausted(self) -> bool:
        return self._worse >= self._patience

    def restore(self, model: nn.Module) -> None:
        if self._weights:
            model.load_state_dict(self._weights)
