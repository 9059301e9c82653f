"""The supervised loop of base, SFT and reward training: epochs, evaluation, and the best weights.

A run that was stopped between two steps is resumed to the same bytes: see `resume`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Optimization, Split, StageView
from rlhf_tasks.data.batches import (
    Batch,
    Ids,
    TokenBudget,
    collate,
    encode,
    encode_answers,
    epoch_batches,
    read_table,
    sizes,
)
from rlhf_tasks.modeling.head import TokenStats, token_stats
from rlhf_tasks.modeling.workers import compute_beside
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import resume, sharding
from rlhf_tasks.training.runtime import Runtime, adamw, learning_rate, set_learning_rate
from rlhf_tasks.training.state import State

Sums = dict[str, Tensor]
SHOWN = ("loss", "accuracy")  # on the progress bar, where a task has them


class Task(Protocol):
    """A training task: the sizes of its rows, and the sums of one forward pass over some rows."""

    sizes: list[int]

    def weight(self, rows: Sequence[int]) -> float:
        """The number of tokens or pairs that the loss of these rows is averaged over."""

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        """`loss` and other metrics, **summed** over the tokens or pairs that `weight` counts."""


@dataclass
class LanguageModelling:
    """Predicts the response tokens of (query, response) rows, EOS included."""

    queries: list[Ids]
    responses: list[Ids]
    pad: int

    def __post_init__(self) -> None:
        self.sizes = sizes(self.queries, self.responses)

    def weight(self, rows: Sequence[int]) -> float:
        return sum(len(self.responses[i]) for i in rows)

    def batch(self, rows: Sequence[int]) -> Batch:
        return collate([self.queries[i] for i in rows], [self.responses[i] for i in rows], self.pad)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        batch = self.batch(rows).to(device)
        return lm_sums(token_stats(model, batch, loss=lm_loss))


def demonstrations(paths: Paths, tokenizer: PreTrainedTokenizerBase, split: Split) -> LanguageModelling:
    """The demonstrations of data/sft."""
    rows = read_table(paths, "sft", split)
    return LanguageModelling(
        encode(tokenizer, [row["prompt"] for row in rows]),
        encode_answers(tokenizer, [row["completion"] for row in rows]),
        tokenizer.pad_token_id,
    )


def plain(texts: Sequence[Ids], pad: int) -> LanguageModelling:
    """Text without a query: the first token is given, all others are predicted."""
    return LanguageModelling([ids[:1] for ids in texts], [ids[1:] for ids in texts], pad)


def lm_loss(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
    """Σ of −log p: the `loss` that language modelling gives to `token_stats`."""
    return -logprobs.sum()


def lm_sums(stats: TokenStats) -> Sums:
    """`lm_loss` and the number of correct predictions of the real response tokens."""
    return {"loss": stats.loss, "token_accuracy": stats.likeliest.sum()}


@dataclass(frozen=True)
class Step:
    """One optimiser step: its number from 1, the number of all steps, its metrics (global means)."""

    number: int
    num_steps: int
    metrics: dict[str, float]


class Fit:
    """Trains `model` in place for `num_epochs`; each iteration is one optimiser step.

    The loss of a step is the sum over the whole batch of all processes, divided by `weight`. It does not
    depend on the cut into micro-batches or the number of processes. `state_dict` holds the whole state
    between two steps.
    """

    def __init__(self, rt: Runtime, model: nn.Module, task: Task, settings: Optimization, seed: int) -> None:
        self.rt, self.task, self.settings = rt, task, settings
        self.model, self.optimizer = rt.prepare(model, adamw(model, settings), settings.max_grad_norm)
        self.steps_per_epoch = math.ceil(len(task.sizes) / settings.batch_size)
        self.num_steps = math.ceil(self.steps_per_epoch * settings.num_epochs)
        self.number = 0  # of steps taken
        self.budget = TokenBudget(settings.micro_batch_tokens)
        self._order = torch.Generator().manual_seed(seed)
        self._drawn_from = self._order.get_state()  # the generator's state before this epoch's batches
        self._batches: list[list[int]] = []  # of this epoch

    def __iter__(self) -> Iterator[Step]:
        while self.number < self.num_steps:
            yield self.step()

    @property
    def epochs(self) -> float:
        """The number of finished epochs, with fractions."""
        return self.settings.num_epochs * self.number / self.num_steps

    def step(self) -> Step:
        rows = self._next_rows()
        rate = learning_rate(self.settings, self.number, self.num_steps)
        set_learning_rate(self.optimizer, rate)
        sums, norm = self._optimise(rows)
        self.number += 1
        weight = self.task.weight(rows)
        means = {f"train/{key}": value / weight for key, value in sums.items()}
        means |= {"train/grad_norm": norm, "lr": rate} | lowered(self.budget)
        return Step(self.number, self.num_steps, means)

    def _next_rows(self) -> list[int]:
        done = self.number % self.steps_per_epoch
        if done == 0:
            self._drawn_from = self._order.get_state()
            self._batches = self._draw()
        return self._batches[done]

    def _draw(self) -> list[list[int]]:
        return list(epoch_batches(self.task.sizes, self.settings.batch_size, self._order))

    def _optimise(self, rows: list[int]) -> tuple[dict[str, float], float]:
        """The sums of a batch, and the norm of its gradient."""
        own, norm = self.rt.share(rows), self.settings.max_grad_norm

        def losses() -> list[list[Callable[[], tuple[Tensor, Sums]]]]:
            cut = groups(self.rt, self.task.sizes, own, self.budget)
            return [[partial(self._loss, group, rows) for group in part] for part in cut]

        norm, sums = self.rt.step(self.model, self.optimizer, losses, norm, self.budget)
        return total(self.rt, sums), norm

    def _loss(self, group: list[int], rows: list[int]) -> tuple[Tensor, Sums]:
        """The part of the batch's mean loss that a micro-batch has, and its sums."""
        sums = _sums(self.rt, self.model, self.task, group, rows)
        return sums["loss"] / self.task.weight(rows), {key: value.detach() for key, value in sums.items()}

    def state_dict(self) -> State:
        """Weights, optimiser and position in the data; equal on all processes."""
        between_epochs = self.number % self.steps_per_epoch == 0
        return {
            "training": self.rt.training_state(self.model, self.optimizer),
            "number": self.number,
            "budget": self.budget.state_dict(),
            "order": self._order.get_state() if between_epochs else self._drawn_from,
        }

    def load_state_dict(self, state: State) -> None:
        self.rt.load_training_state(self.model, self.optimizer, state["training"])
        self.number = state["number"]
        self.budget.load_state_dict(state["budget"])
        self._order.set_state(state["order"])
        if self.number % self.steps_per_epoch:
            self._drawn_from = state["order"]
            self._batches = self._draw()


def lowered(budget: TokenBudget) -> dict[str, float]:
    """The metric of a budget that out of memory has lowered."""
    return {"train/micro_batch_tokens": budget.max_tokens} if budget.is_lowered else {}


def groups(
    rt: Runtime, sizes_of_all: Sequence[int], own: Sequence[int], budget: TokenBudget
) -> list[list[list[int]]]:
    """This process's own rows as micro-batches, for each of its workers.

    Every process gets the same number, some may be empty.
    """
    mine = [sizes_of_all[i] for i in own]
    if rt.world_size > 1:
        cut = [budget.cut(mine, count=rt.max(len(budget.cut(mine))))]
    else:
        cut = budget.deal(mine, rt.num_workers)
    return [[[own[i] for i in group] for group in part] for part in cut]


def _sums(rt: Runtime, model: nn.Module, task: Task, group: Sequence[int], rows: Sequence[int]) -> Sums:
    """The sums of a micro-batch; for an empty one, zeros from a pass over another row.

    All processes must call the model equally often, but some may have fewer rows.
    """
    with rt.autocast():
        sums = task.sums(model, group or rows[:1], rt.device)
    return sums if group else {key: 0 * value for key, value in sums.items()}


def total(rt: Runtime, parts: Sequence[Sums]) -> dict[str, float]:
    """The sums of all micro-batches of all processes."""
    keys = list(parts[0])
    stacked = rt.sum(torch.stack([torch.stack([part[key].double() for part in parts]).sum() for key in keys]))
    return dict(zip(keys, stacked.tolist(), strict=True))


@torch.no_grad()
def evaluate(rt: Runtime, model: nn.Module, task: Task, budget: TokenBudget) -> dict[str, float]:
    """Means of a task's metrics over all of its rows, over all processes.

    Raises:
        UserError: if the memory does not suffice for one row, or on several processes.
    """
    rows = range(len(task.sizes))

    def parts_of_all() -> list[Sums]:
        cut = groups(rt, task.sizes, rt.share(rows), budget)
        return compute_beside(
            [[partial(_sums, rt, model, task, group, rows) for group in part] for part in cut]
        )

    parts = rt.within_memory(budget, parts_of_all)
    weight = task.weight(rows)
    return {key: value / weight for key, value in total(rt, parts).items()}


class Best:
    """The weights with the lowest validation loss so far, kept on the CPU."""

    def __init__(self, patience: int) -> None:
        self.loss, self.step, self._patience, self._worse = math.inf, 0, patience, 0
        self._weights: dict[str, Tensor] = {}

    def offer(self, model: nn.Module, loss: float, step: int) -> None:
        if loss < self.loss:
            self.loss, self.step, self._worse = loss, step, 0
            self._weights = sharding.weights_of(model)
        else:
            self._worse += 1

    @property
    def exhausted(self) -> bool:
        return self._worse >= self._patience

    def restore(self, model: nn.Module) -> None:
        if math.isfinite(self.loss):
            sharding.load_weights(model, self._weights)

    def state_dict(self) -> State:
        return {"loss": self.loss, "step": self.step, "worse": self._worse, "weights": self._weights}

    def load_state_dict(self, state: State, model: nn.Module) -> None:
        """`model` is the one that was offered."""
        self.loss, self.step = state["loss"], state["step"]
        self._worse, self._weights = state["worse"], sharding.kept(model, state["weights"])


# -------------------------------------------------------------------------------------- resuming


def resumed(
    paths: Paths, view: StageView, name: str, fit: Fit, tracker: Tracker, best: Best | None = None
) -> Iterator[Step]:
    """The steps of `fit` after its last snapshot, with a progress bar, until `best` is exhausted.

    The caller logs and evaluates each step before it takes the next: snapshots are saved in between.
    """
    rt = fit.rt
    with resume.open(rt, paths, view, name) as snapshots, _bar(name, fit) as bar:
        state = snapshots.load()
        if state is not None:
            fit.load_state_dict(state["shared"]["fit"])
            if best is not None:
                best.load_state_dict(state["shared"]["best"], fit.model)
            tracker.load_state_dict(state["tracker"])
            rt.set_rng_state(state["rng"])
            bar.skip(fit.epochs)
        while fit.number < fit.num_steps and not (best is not None and best.exhausted):
            step = fit.step()
            yield step
            bar.advance(fit.settings.num_epochs / step.num_steps, **_shown(step, best))
            if snapshots.due():
                shared = {"fit": fit.state_dict()} | ({"best": best.state_dict()} if best is not None else {})
                state = {"shared": shared, "tracker": tracker.state_dict(), "rng": rt.rng_state()}
                snapshots.save(step.number, state)


def _bar(name: str, fit: Fit) -> AbstractContextManager[console.Meter]:
    return console.progress(name, fit.settings.num_epochs, unit="epoch")


def _shown(step: Step, best: Best | None) -> dict[str, float]:
    found = {key: step.metrics[f"train/{key}"] for key in SHOWN if f"train/{key}" in step.metrics}
    return found if best is None else found | {"best": best.loss}
