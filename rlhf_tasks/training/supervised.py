"""The supervised loop of all stages that train but PPO: epochs, evaluation, and the best weights.

`train` is the whole of it, from top to bottom. A task (`tasks`) gives the sums of a forward pass. A run that
was stopped is resumed to the same bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Optimization, Ready
from rlhf_tasks.data.batches import epoch_batches
from rlhf_tasks.models.load import moment_bytes, num_bytes, save_checkpoint
from rlhf_tasks.models.lora import merge_adapter
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.optim import adamw, learning_rate, set_learning_rate
from rlhf_tasks.training.tasks import EXPLAINED, Sums, Task
from rlhf_tasks.training.throughput import pass_flops, speed

Metrics = dict[str, float]
Measure = Callable[[int], tuple[Metrics, float | None]]
"""More metrics of an evaluation after so many steps, and what decides in place of the validation loss which
weights are kept: the lowest."""
SHOWN = ("loss", "accuracy", EXPLAINED)  # on the progress bar, where a task has them


@dataclass
class TrainState:
    """All that one step leaves to the next, but for weights and moments. A snapshot holds both."""

    order: torch.Generator
    """Draws the batches of an epoch."""
    budget: TokenBudget
    step: int = 0
    """Steps taken."""
    flops: float = 0.0
    """What they have cost, all ranks together."""
    epoch_start: Tensor = field(default_factory=lambda: torch.empty(0))
    """The state of `order` before this epoch's batches were drawn: a resumed run draws them again."""
    best_loss: float = math.inf
    best_step: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    """Those that train, on the CPU; of a sharded model only on the first rank."""
    evaluations_without_gain: int = 0

    def offer(self, loss: float, unwrapped: nn.Module) -> None:
        """Keep the weights if their validation loss, or what stands in its place, is the lowest so far."""
        # a tie keeps the earlier weights, and counts as an evaluation without gain
        self.evaluations_without_gain += 1
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.evaluations_without_gain = loss, self.step, 0
            self.best_weights = {}  # else both are in memory
            self.best_weights = sharding.weights_of(unwrapped, but=sharding.frozen_in(unwrapped))

    def state_dict(self) -> dict[str, Any]:
        """All but the weights in training and their optimizer; equal on all ranks."""
        return {
            "step": self.step,
            "flops": self.flops,
            "budget": self.budget.state_dict(),
            "order": self.order.get_state(),
            "epoch_start": self.epoch_start,
            "best": [self.best_loss, self.best_step, self.evaluations_without_gain],
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state: dict[str, Any], unwrapped: nn.Module) -> None:
        """Restore `state_dict`; `unwrapped` is the model whose weights were offered."""
        self.step, self.flops, self.epoch_start = state["step"], state["flops"], state["epoch_start"]
        self.order.set_state(state["order"])
        self.budget.load_state_dict(state["budget"])
        self.best_loss, self.best_step, self.evaluations_without_gain = state["best"]
        self.best_weights = sharding.keep_on_first_rank(unwrapped, state["best_weights"])


def train(
    dist: Distributed,
    model: nn.Module,
    task: Task,
    settings: Optimization,
    *,
    seed: int,
    name: str,
    tracker: Tracker,
    snapshots: Snapshots,
    validation: Task | None = None,
    num_evaluations: float = 1,
    patience: int | None = None,
    prefix: str = "",
    measure: Measure | None = None,
) -> TrainState:
    """Train `model` in place, and return the state at the end.

    The loss of a step is the sum over the whole batch of all ranks, divided by `Task.num_targets`. It depends
    neither on the cut into micro-batches nor on the number of ranks. `validation` is evaluated about
    `num_evaluations` times, evenly spaced, and after the last step. With a `patience`, the weights of the
    lowest validation loss are kept, and training ends after that many evaluations without a lower one.
    `prefix` begins the names of the metrics. `measure` is called at each evaluation.

    Raises:
        NonFiniteError: if a loss or a gradient is NaN or infinite.
        UserError: if the memory does not suffice for one row.
    """
    # `trained` is the model as DDP, ZeRO or FSDP2 wraps it: all passes go through it.
    trained, optimizer = dist.prepare(model, adamw(model, settings), settings.max_grad_norm)
    flops_of_token, forward_flops = pass_flops(model, gradients=True), pass_flops(model)  # for a token
    # a snapshot that does not fit on the disk is found now, and not when the first one is due
    snapshots.reserve(num_bytes(model), num_bytes(model) * (2 if patience else 1) + moment_bytes(model))
    order = torch.Generator().manual_seed(seed)
    state = TrainState(order, TokenBudget(settings.micro_batch_tokens))
    steps_per_epoch = math.ceil(len(task.sizes) / settings.batch_size)
    # the last epoch may be a part of one, and the spacing of evaluations never falls below one step
    num_steps = math.ceil(steps_per_epoch * settings.num_epochs)
    evaluate_every = max(1, round(num_steps / num_evaluations))
    batches: list[list[int]] = []  # of this epoch

    with console.progress(name, settings.num_epochs, unit="epochs") as bar:
        # A run that was stopped goes on after its last snapshot, with the same random numbers: it ends with
        # the same bytes as one that was never stopped.
        if (snapshot := snapshots.load()) is not None:
            dist.load_training_state(trained, optimizer, snapshot["training"])
            state.load_state_dict(snapshot["shared"], model)
            tracker.load_state_dict(snapshot["tracker"])
            dist.set_rng_state(snapshot["rng"])
            bar.skip(settings.num_epochs * state.step / num_steps)
            del snapshot

        while state.step < num_steps and not (patience and state.evaluations_without_gain >= patience):
            # 1. The rows of this step, of all ranks. Every epoch draws its batches anew.
            number = state.step % steps_per_epoch
            if number == 0:
                state.epoch_start = order.get_state()
            if number == 0 or not batches:  # a run that is resumed within an epoch draws its batches again
                order.set_state(state.epoch_start)
                batches = list(epoch_batches(task.sizes, settings.batch_size, order))
            rows, start = batches[number], time.perf_counter()
            num_targets = task.num_targets(rows)
            task.prepare(dist, trained, rows, state.budget)
            rate = learning_rate(settings, state.step, num_steps)
            set_learning_rate(optimizer, rate)

            # 2. Gradients are added up over micro-batches; after out-of-memory, over smaller ones. All ranks
            # make the same number of passes; a rank that has no rows left repeats one with scale 0. The
            # division by the number of all ranks' targets makes their sum the mean over the whole batch.
            for attempt in dist.attempts(state.budget, optimizer):
                with attempt:
                    parts: list[Sums] = []
                    sums: Sums = {}  # drops the graph of an attempt that failed
                    share = dist.shard_rows(rows)
                    work = dist.split([task.sizes[i] for i in share], [[i] for i in share], state.budget)
                    for micro in dist.passes(trained, work):
                        with dist.autocast():
                            sums = task.sums(trained, micro.rows, dist.device)
                        dist.backward(trained, micro.scale * sums["loss"] / num_targets)
                        parts.append({key: micro.scale * value.detach() for key, value in sums.items()})

            # 3. The optimizer step, with the norm of the gradient clipped. A rank knows the sums of its own
            # rows only: the metrics are means over those of all ranks.
            grad_norm = dist.step(trained, optimizer, settings.max_grad_norm)
            state.step += 1
            metrics = {f"train/{key}": value / num_targets for key, value in add_up(dist, parts).items()}
            metrics |= {"train/grad_norm": grad_norm, "lr": rate} | budget_metrics(state.budget)
            num_tokens = task.num_tokens(rows)
            flops = flops_of_token * num_tokens + forward_flops * task.num_prepared(rows)
            state.flops += flops
            metrics |= {"compute/tflop": 1e-12 * state.flops}
            metrics |= speed(dist, num_tokens, flops, time.perf_counter() - start)
            tracker.metrics({prefix + key: value for key, value in metrics.items()}, step=state.step)

            # 4. Validation, which decides what weights are kept. The last step has one too, whatever the
            # spacing: else the weights at the end would never be a candidate.
            is_due = state.step % evaluate_every == 0 or state.step == num_steps
            has_rows = validation is not None and bool(validation.sizes)
            if is_due and (has_rows or measure is not None):
                result = evaluate(dist, model, validation, state.budget) if validation and has_rows else {}
                criterion = result.get("loss")
                if measure is not None:
                    measured, decisive = measure(state.step)
                    result |= measured
                    criterion = criterion if decisive is None else decisive
                named = {f"{prefix}eval/{key}": value for key, value in result.items()}
                tracker.metrics(named, step=state.step)
                if patience and criterion is not None:
                    state.offer(criterion, model)

            # 5. The progress bar, and a snapshot when one is due. It has what one step leaves to the next:
            # weights and moments, of a sharded model those of each rank; the state; the tracker's curves; and
            # the random numbers, each rank's own.
            shown = {key: metrics[f"train/{key}"] for key in SHOWN if f"train/{key}" in metrics}
            bar.advance(settings.num_epochs / num_steps, **shown)
            if snapshots.due():  # by the time, or because a signal ends the stage: then `save` raises
                training = dist.training_state(trained, optimizer)
                own = {"tracker": tracker.state_dict(), "rng": dist.rng_state()}
                snapshots.save(state.step, {"training": training, "shared": state.state_dict(), **own})

    # 6. With a patience, the weights of the lowest validation loss replace the last ones.
    if math.isfinite(state.best_loss):
        sharding.load_weights(model, state.best_weights)
        state.best_weights = {}
    return state


@torch.no_grad()
def evaluate(dist: Distributed, model: nn.Module, task: Task, budget: TokenBudget) -> Metrics:
    """Means of a task's metrics over all of its rows, over all ranks; also by set, as `loss/in/NAME`.

    Raises:
        UserError: if the memory does not suffice for one row, or on several ranks.
    """
    # 1. The rows of each set, in the order in which the sets first come. Data of one set has no names.
    everything, sets = range(len(task.sizes)), task.sets or [""] * len(task.sizes)
    groups = {name: [i for i in everything if sets[i] == name] for name in dict.fromkeys(sets)}

    # 2. Passes over this rank's share of each set: a micro-batch has rows of one set, so that its sums are
    # that set's. After out-of-memory all of them are made again, smaller.
    task.prepare(dist, model, everything, budget)
    num_own = len(dist.shard_rows(everything))
    for attempt in dist.attempts(budget):
        with attempt, console.part("validation", num_own, "rows") as meter:
            parts: dict[str, list[Sums]] = {name: [] for name in groups}
            for name, rows in groups.items():
                share = dist.shard_rows(rows)
                work = dist.split([task.sizes[i] for i in share], [[i] for i in share], budget)
                for micro in work:
                    with dist.autocast():
                        sums = task.sums(model, micro.rows, dist.device)
                    parts[name].append({key: micro.scale * value for key, value in sums.items()})
                    meter.advance(micro.scale * len(micro.rows))

    # 3. The sums of all ranks become means over tokens or pairs: over all rows, whatever their set, and over
    # those of each set.
    totals = {name: add_up(dist, found) for name, found in parts.items()}
    keys, num_targets = next(iter(totals.values())).keys(), task.num_targets(everything)
    metrics = {key: sum(found[key] for found in totals.values()) / num_targets for key in keys}
    if task.sets:
        for name, rows in groups.items():
            num_targets = task.num_targets(rows)
            metrics |= {f"{key}/in/{name}": value / num_targets for key, value in totals[name].items()}
    return metrics


def add_up(dist: Distributed, parts: Sequence[Sums]) -> Metrics:
    """The sums of all micro-batches of all ranks."""
    keys = list(parts[0])
    # in float64, so that long sums keep their digits; one exchange for all of them
    total = dist.sum(torch.stack([torch.stack([part[key].double() for part in parts]).sum() for key in keys]))
    return dict(zip(keys, total.tolist(), strict=True))


def budget_metrics(budget: TokenBudget) -> Metrics:
    """The metric of a budget that out-of-memory has lowered."""
    return {"train/micro_batch_tokens": budget.max_tokens} if budget.is_lowered else {}


def save_nothing(dist: Distributed, out: Path, title: str, why: str) -> None:
    """Write a folder that holds a README alone, where no model is trained: `contracts.has_model` is False."""
    if dist.is_main:
        with whole(out) as folder:
            (folder / "README.md").write_text(f"# {title}\n\n{why}\n", encoding="utf-8")
    dist.barrier()


def save(
    dist: Distributed,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    identity: Mapping[str, Any],
    card: str,
    source: Ready | None = None,
    others: Iterable[int] = (),
) -> None:
    """Gather the weights and write them from the first process, adapters merged. Collective.

    Those of a `source` are only referred to, and `others` end responses too: see `save_checkpoint`.
    """
    with sharding.to_save(model) as plain:
        if dist.is_main:
            with whole(out) as folder:
                save_checkpoint(
                    merge_adapter(plain),
                    tokenizer,
                    folder,
                    identity=identity,
                    card=card,
                    others=others,
                    source=source,
                )
    dist.barrier()
