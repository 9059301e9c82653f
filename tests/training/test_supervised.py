"""The loop of base, SFT and reward: what is averaged, what a step is, which weights are kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import Batch
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training import supervised
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.optim import adamw, learning_rate
from rlhf_tasks.training.supervised import TrainState, evaluate, train
from rlhf_tasks.training.tasks import LanguageModeling, Sums, Task, plain_text
from tests import small
from tests.small import EOS, FAMILIES, PAD, Family

QUERIES, RESPONSES = small.rows(12, longest=7)
Row = dict[str, float]


class Stopped(Exception):
    """What ends a run after its snapshot, as a signal does."""


class Memory(Snapshots):
    """Snapshots in memory: one after so many steps, which ends the run."""

    def __init__(self, last: int = 0) -> None:
        self.last, self.steps, self.state = last, 0, dict[str, Any]()

    def load(self) -> dict[str, Any] | None:
        return copy.deepcopy(self.state) or None

    def due(self) -> bool:
        self.steps += 1
        return self.steps == self.last

    def save(self, step: int, state: dict[str, Any]) -> None:
        assert step == self.last
        self.state = copy.deepcopy(state)
        raise Stopped


def task(pad: int = PAD) -> LanguageModeling:
    return LanguageModeling(QUERIES, RESPONSES, pad)


def fit(
    model: nn.Module,
    data: Task,
    seed: int = 1,
    snapshots: Memory | None = None,
    dist: Distributed | None = None,
    validation: Task | None = None,
    num_evaluations: float = 1,
    patience: int | None = None,
    **changes: Any,
) -> tuple[TrainState, list[Row]]:
    """The state at the end of a training, and the metrics of its steps."""
    tracker, settings = NullTracker("sft"), small.optimization(**changes)
    how: dict[str, Any] = {"validation": validation, "num_evaluations": num_evaluations, "patience": patience}
    how |= {"seed": seed, "name": "test", "tracker": tracker, "snapshots": snapshots or Memory()}
    return train(dist or small.distributed(), model, data, settings, **how), tracker.history()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_hand(model: nn.Module) -> tuple[float, float]:
    """Mean −log p of completion tokens, and the share of them that were the likeliest, from single rows."""
    losses, right = [], []
    for query, response in zip(QUERIES, RESPONSES, strict=True):
        logits = small.logits_alone(model, query, response)  # type: ignore[arg-type]
        for t, token in enumerate(response):
            losses.append(-logits[t].log_softmax(-1)[token].item())
            right.append(logits[t].argmax().item() == token)
    return sum(losses) / len(losses), sum(right) / len(right)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("pad", "micro_batch_tokens"), [(PAD, 16384), (EOS, 16384), (PAD, 30), (PAD, 1)])
def test_the_loss_is_the_mean_over_completion_tokens_only(
    family: Family, pad: int, micro_batch_tokens: int
) -> None:
    model = small.causal(family)
    loss, accuracy = by_hand(model)
    found = evaluate(small.distributed(), model, task(pad), TokenBudget(micro_batch_tokens))
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["token_accuracy"] == pytest.approx(accuracy)


def test_one_batch_equals_the_same_batch_accumulated() -> None:
    first, second = small.causal(), small.causal()
    (_, (whole,)), (_, (cut,)) = (
        fit(model, task(), batch_size=12, micro_batch_tokens=most)
        for model, most in ((first, 16384), (second, 20))
    )
    torch.testing.assert_close(weights(first), weights(second), atol=2e-5, rtol=0)
    assert whole == pytest.approx(cut, rel=1e-4)
    assert whole["train/loss"] == pytest.approx(by_hand(small.causal())[0], abs=1e-5)


@pytest.mark.parametrize("taken", [1, 3, 4, 7])
def test_resumed_training_equals_uninterrupted_training(taken: int) -> None:
    """Three steps an epoch, two and a half epochs, an evaluation every other step."""
    how: dict[str, Any] = {"batch_size": 4, "num_epochs": 2.5, "schedule": "cosine"}
    how |= {"validation": task(), "num_evaluations": 4, "patience": 100}
    models, memory = [small.causal(), small.causal(), small.causal(seed=5)], Memory(taken)
    whole, steps = fit(models[0], task(), **how)
    with pytest.raises(Stopped):
        fit(models[1], task(), snapshots=memory, **how)
    resumed, found = fit(models[2], task(), seed=5, snapshots=memory, **how)
    assert found == steps
    assert torch.equal(weights(models[0]), weights(models[2]))
    assert (resumed.best_loss, resumed.best_step) == (whole.best_loss, whole.best_step)


# --------------------------------------------------------------------------------- out of memory


@dataclass
class Hungry(LanguageModeling):
    """Its passes are out of memory above so many padded tokens."""

    most: int = 10**9
    passes: list[int] = field(default_factory=list)

    def batch(self, rows: Sequence[int]) -> Batch:
        batch = super().batch(rows)
        self.passes.append(batch.query_response.numel())
        if self.passes[-1] > self.most:
            raise torch.OutOfMemoryError("planted")
        return batch


LARGE: dict[str, Any] = {"batch_size": 12, "micro_batch_tokens": 10**6, "num_epochs": 3.0}


def hungry(most: int) -> Hungry:
    return Hungry(*small.rows(12, seed=4), PAD, most=most)


def test_out_of_memory_halves_the_micro_batch_and_changes_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole batch is one pass; two halvings are needed, and no third one in the later steps."""
    models, tasks = [small.causal(), small.causal()], [hungry(10**9), hungry(60)]
    (_, expected), (state, steps) = (
        fit(model, data, **LARGE) for model, data in zip(models, tasks, strict=True)
    )
    assert len(tasks[0].passes) == 3
    failed = [number for number, tokens in enumerate(tasks[1].passes) if tokens > 60]
    most = state.budget.max_tokens
    assert 1 <= len(failed) <= 3
    assert failed[-1] < len(tasks[1].passes) / 2, "only the first step is repeated"
    assert most <= 60
    for one, other in zip(steps, expected, strict=True):
        assert one.pop("train/micro_batch_tokens") == most
        assert one == pytest.approx(other, rel=1e-3)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), atol=1e-4, rtol=0)
    assert f"a micro-batch now has at most {most} tokens" in capsys.readouterr().out


def test_a_pass_that_fails_after_others_leaves_no_part_of_their_gradient() -> None:
    """8 rows of a loss 100 · (w + b) each, over a weight of 8; the second pass of two fails."""

    class Once(Counted):
        def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
            self.passes.append(len(rows))
            if len(self.passes) == 2:
                raise torch.OutOfMemoryError("planted")
            return super().sums(model, rows, device)

    once = Once([2] * 8)
    _, (step,) = fit(nn.Linear(1, 1), once, batch_size=8, micro_batch_tokens=8)
    assert once.passes == [4, 4, 2, 2, 2, 2]
    assert step["train/grad_norm"] == pytest.approx(math.hypot(100, 100))


def test_one_row_that_does_not_fit_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"one row at a time; lower the lengths \(data.max_prompt_tokens"):
        fit(small.causal(), hungry(2), **LARGE)


def test_an_evaluation_that_is_out_of_memory_is_cut_smaller() -> None:
    budget, model = TokenBudget(10**6), small.causal()
    found = evaluate(small.distributed(), model, hungry(60), budget)
    expected = evaluate(small.distributed(), model, hungry(10**9), TokenBudget(10**6))
    assert found == pytest.approx(expected, rel=1e-5)
    assert 30 <= budget.max_tokens <= 60


def test_a_lowered_bound_is_resumed() -> None:
    memory, model = Memory(2), small.causal()
    with pytest.raises(Stopped):
        fit(model, hungry(60), snapshots=memory, **LARGE)
    state, steps = fit(small.causal(seed=2), hungry(10**9), snapshots=memory, **LARGE)
    assert state.budget.is_lowered
    assert {step["train/micro_batch_tokens"] for step in steps} == {state.budget.max_tokens}
    assert state.budget.max_tokens <= 60


@pytest.mark.parametrize("has_single_rows", [False, True])
def test_on_several_ranks_out_of_memory_names_a_bound_that_is_small_enough(
    monkeypatch: pytest.MonkeyPatch, has_single_rows: bool
) -> None:
    """It is half of the largest micro-batch, however much the configured bound allows."""
    one_of_two, data = small.distributed(), hungry(2)
    monkeypatch.setattr(one_of_two, "max", lambda number: number)
    one_of_two.world_size = 2
    most = {"micro_batch_tokens": 1} if has_single_rows else {}
    with pytest.raises(UserError) as refused:
        fit(small.causal(), data, dist=one_of_two, **LARGE | most)
    half = f"set this stage's micro_batch_tokens to {max(data.passes) // 2}"
    assert ("one row at a time" if has_single_rows else half) in str(refused.value)


# ------------------------------------------------------------------------------- steps and rates


@dataclass
class Counted(Task):
    """A task of one weight a row that records the rows of each call: 100 · (w + b) each."""

    sizes: list[int]
    seen: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    sets: list[str] = field(default_factory=list)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        self.seen += rows
        return {"loss": model(torch.ones(len(rows), 1)).sum() * 100}


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 6), (1.5, 5), (0.5, 2)])
def test_an_epoch_takes_every_row_once(epochs: float, steps: int) -> None:
    counted = Counted([3] * 10)
    state, rows = fit(nn.Linear(1, 1), counted, batch_size=4, num_epochs=epochs)
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert state.step == steps
    if epochs >= 1:
        assert sorted(counted.seen[:10]) == list(range(10))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ],
)
def test_rates_by_hand(schedule: str, expected: list[float]) -> None:
    settings = small.optimization(learning_rate=1.0, schedule=schedule, warmup_fraction=0.3)  # 2 of 6 steps
    assert [learning_rate(settings, step, 6) for step in range(6)] == pytest.approx(expected)


def test_the_reported_rate_is_the_rate_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = adamw(model, small.optimization())
    monkeypatch.setattr(supervised, "adamw", lambda *_: optimizer)
    how: dict[str, Any] = {"batch_size": 5, "num_epochs": 2.0, "schedule": "linear", "learning_rate": 1.0}
    _, steps = fit(model, Counted([1] * 10), **how)
    assert [step["lr"] for step in steps] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert {group["lr"] for group in optimizer.param_groups} == {steps[-1]["lr"]}


def test_a_loss_that_is_not_finite_changes_no_weight() -> None:
    class Infinite(Counted):
        def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
            return {"loss": super().sums(model, rows, device)["loss"] * math.inf}

    layer = nn.Linear(1, 1)
    before = weights(layer).clone()
    with pytest.raises(NonFiniteError):
        fit(layer, Infinite([1] * 4))
    assert torch.equal(weights(layer), before)


def test_only_matrices_have_weight_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    groups = adamw(model, small.optimization(weight_decay=0.1)).param_groups
    found = {(p.ndim, group["weight_decay"], group["eps"]) for group in groups for p in group["params"]}
    assert found == {(2, 0.1, 1e-5), (1, 0.0, 1e-5)}


# ------------------------------------------------------------------------------------- the best


@dataclass
class Told(Counted):
    """Its losses are given, one for each evaluation; the weights at each of them are kept."""

    losses: Sequence[float] = ()
    found: list[Tensor] = field(default_factory=list)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        self.found.append(weights(model))
        return {"loss": torch.tensor(self.losses[len(self.found) - 1])}


@pytest.mark.parametrize(
    ("losses", "num_steps", "best"),
    [([3.0, 1.0, 2.0, 4.0], 4, 2), ([3.0, 4.0, 2.0, 2.0, 5.0, 1.0], 5, 3)],
)
def test_the_weights_of_the_lowest_loss_are_kept_and_patience_counts_evaluations_in_a_row_without_a_lower_one(
    losses: list[float], num_steps: int, best: int
) -> None:
    told, layer = Told([1], losses=losses), nn.Linear(1, 1)
    state, _ = fit(layer, Counted([1] * 9), batch_size=1, validation=told, num_evaluations=9, patience=2)
    assert (state.step, state.best_step, state.best_loss) == (num_steps, best, losses[best - 1])
    assert len(told.found) == num_steps
    assert torch.equal(weights(layer), told.found[best - 1])
    assert not torch.equal(told.found[best - 1], told.found[best])


def test_with_adapters_the_kept_weights_and_a_snapshot_are_those_of_the_adapters() -> None:
    model, dist = add_lora(small.causal(), Lora(r=2), seed=1), small.distributed()
    state = TrainState(torch.Generator(), TokenBudget(100))
    state.offer(1.0, model)
    saved = dist.training_state(model, adamw(model, small.optimization()))
    assert isinstance(saved, dict)
    for held in (state.best_weights, saved["model"]):
        assert held
        assert all("lora_" in name for name in held)


def test_a_text_of_one_token_has_nothing_to_predict() -> None:
    task = plain_text([[3], [3, 4, 5], [4]], PAD, ["a", "b", "c"])
    assert (task.sizes, task.sets) == ([3], ["b"])
