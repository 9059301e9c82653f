"""The loop of base, SFT and reward: what is averaged, what a step is, which weights are kept."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.data.batches import Batch, TokenBudget, padded_tokens
from rlhf_tasks.errors import UserError
from rlhf_tasks.training.runtime import adamw, learning_rate
from rlhf_tasks.training.supervised import Best, Fit, LanguageModelling, Step, Sums, evaluate
from tests import small
from tests.small import EOS, FAMILIES, PAD, Family

QUERIES, RESPONSES = small.rows(12, longest=7)


def task(pad: int = PAD) -> LanguageModelling:
    return LanguageModelling(QUERIES, RESPONSES, pad)


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
@pytest.mark.parametrize("pad", [PAD, EOS])
def test_the_loss_is_the_mean_over_completion_tokens_only(family: Family, pad: int) -> None:
    model = small.causal(family)
    loss, accuracy = by_hand(model)
    found = evaluate(small.runtime(), model, task(pad), TokenBudget(16384))
    assert found["loss"] == pytest.approx(loss, abs=1e-5)
    assert found["token_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize("max_tokens", [1, 30])
def test_micro_batches_change_no_evaluation(max_tokens: int) -> None:
    model = small.causal()
    whole, cut = (evaluate(small.runtime(), model, task(), TokenBudget(n)) for n in (16384, max_tokens))
    assert whole == pytest.approx(cut, abs=1e-5)


def test_one_batch_equals_the_same_batch_accumulated() -> None:
    def trained(max_tokens: int) -> tuple[dict[str, float], Tensor]:
        model = small.causal()
        (step,) = Fit(
            small.runtime(),
            model,
            task(),
            small.optimization(batch_size=12, micro_batch_tokens=max_tokens),
            1,
        )
        return step.metrics, torch.cat([p.detach().flatten() for p in model.parameters()])

    (whole, weights), (cut, accumulated) = trained(16384), trained(20)
    torch.testing.assert_close(weights, accumulated, atol=2e-5, rtol=0)
    assert whole == pytest.approx(cut, rel=1e-4)
    assert whole["train/loss"] == pytest.approx(by_hand(small.causal())[0], abs=1e-5)


def test_training_lowers_the_loss() -> None:
    model = small.causal()
    steps = list(Fit(small.runtime(), model, task(), small.optimization(num_epochs=15.0, batch_size=4), 1))
    assert steps[-1].metrics["train/loss"] < 0.5 * steps[0].metrics["train/loss"]


@pytest.mark.parametrize("taken", [1, 3, 4, 7])
def test_resumed_training_equals_uninterrupted_training(taken: int) -> None:
    """Three steps an epoch, two and a half epochs."""
    settings = small.optimization(batch_size=4, num_epochs=2.5, schedule="cosine")

    def begun(seed: int) -> Fit:
        return Fit(small.runtime(), small.causal(seed=seed), task(), settings, seed=seed)

    whole = begun(0)
    steps = list(whole)
    first, second = begun(0), begun(5)
    for _ in range(taken):
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert list(second) == steps[taken:]
    for key, value in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[key], value), key


# --------------------------------------------------------------------------------- out of memory


@dataclass
class Hungry(LanguageModelling):
    """Its passes are out of memory above so many padded tokens."""

    most: int = 10**9
    passes: list[int] = field(default_factory=list)

    def batch(self, rows: Sequence[int]) -> Batch:
        batch = super().batch(rows)
        self.passes.append(batch.query_response.numel())
        if self.passes[-1] > self.most:
            raise torch.OutOfMemoryError("planted")
        return batch


def steps_of(most: int) -> tuple[Fit, Hungry, list[Step]]:
    settings = small.optimization(batch_size=12, micro_batch_tokens=10**6, num_epochs=3.0)
    hungry = Hungry(*small.rows(12, seed=4), PAD, most=most)
    fit = Fit(small.runtime(), small.causal(), hungry, settings, seed=1)
    return fit, hungry, list(fit)


def test_out_of_memory_halves_the_micro_batch_and_changes_no_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole batch is one pass; two halvings are needed, and no third one in the later steps."""
    with small.threads(1):
        (whole, ample, expected), (fit, hungry, steps) = steps_of(10**9), steps_of(60)
    assert len(ample.passes) == 3
    failed = [tokens for tokens in hungry.passes if tokens > 60]
    assert failed == hungry.passes[: len(failed)], "only the first step is repeated"
    assert 1 <= len(failed) <= 3
    assert fit.budget.max_tokens <= 60
    for one, other in zip(steps, expected, strict=True):
        assert one.metrics.pop("train/micro_batch_tokens") == fit.budget.max_tokens
        assert one.metrics == pytest.approx(other.metrics, rel=1e-3)
    for key, value in whole.model.state_dict().items():
        torch.testing.assert_close(fit.model.state_dict()[key], value, atol=1e-4, rtol=0)
    assert f"a micro-batch now has at most {fit.budget.max_tokens} tokens" in capsys.readouterr().out


def test_a_pass_that_fails_after_others_leaves_no_part_of_their_gradient() -> None:
    layer, seen = nn.Linear(1, 1), list[int]()
    rt, budget = small.runtime(), TokenBudget(8)
    model, optimizer = rt.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0), None)

    def part(rows: list[int]) -> tuple[Tensor, None]:
        seen.append(len(rows))
        if len(seen) == 2:
            raise torch.OutOfMemoryError("planted")
        return layer(torch.ones(len(rows), 1)).sum(), None

    def losses() -> list[list[Callable[[], tuple[Tensor, None]]]]:
        return [[partial(part, rows) for rows in budget.cut([2] * 8)]]

    norm, _ = rt.step(model, optimizer, losses, None, budget)
    assert seen == [4, 4, 2, 2, 2, 2]
    assert norm == pytest.approx(math.sqrt(8**2 + 8**2))  # 8 rows, each with a gradient of 1 for w and b


def test_one_row_that_does_not_fit_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"one row at a time; lower the lengths \(data.max_prompt_tokens"):
        steps_of(2)


def test_an_evaluation_that_is_out_of_memory_is_cut_smaller() -> None:
    budget, model = TokenBudget(10**6), small.causal()
    hungry = Hungry(*small.rows(12, seed=4), PAD, most=60)
    with small.threads(1):
        found = evaluate(small.runtime(), model, hungry, budget)
        expected = evaluate(small.runtime(), model, replace(hungry, most=10**9), TokenBudget(10**6))
    assert found == pytest.approx(expected, rel=1e-5)
    assert 30 <= budget.max_tokens <= 60


def test_a_lowered_bound_is_resumed() -> None:
    fit, _, _ = steps_of(60)
    fresh = Fit(small.runtime(), small.causal(), task(), small.optimization(), seed=1)
    fresh.load_state_dict(fit.state_dict())
    assert (fresh.budget.max_tokens, fresh.budget.is_lowered) == (fit.budget.max_tokens, True)


@pytest.mark.parametrize("has_single_rows", [False, True])
def test_on_several_processes_out_of_memory_names_a_bound_that_is_small_enough(
    monkeypatch: pytest.MonkeyPatch, has_single_rows: bool
) -> None:
    """It is half of the largest micro-batch, however much the configured bound allows."""
    one_of_two, largest = small.runtime(), list[int]()
    one_of_two.world_size = 2
    monkeypatch.setattr(small, "runtime", lambda: one_of_two)

    def groups(
        rt: Any, sizes: Sequence[int], own: Sequence[int], budget: TokenBudget
    ) -> list[list[list[int]]]:
        rows = [sizes[i] for i in own]
        cut = budget.cut(rows, len(own) if has_single_rows else None)
        largest.append(max(padded_tokens(rows, group) for group in cut))
        return [cut]

    monkeypatch.setattr("rlhf_tasks.training.supervised.groups", groups)
    with pytest.raises(UserError) as refused:
        steps_of(2)
    half = f"set this stage's micro_batch_tokens to {largest[-1] // 2}"
    assert ("one row at a time" if has_single_rows else half) in str(refused.value)


# ------------------------------------------------------------------------------- steps and rates


@dataclass
class Counted:
    """A task of one weight that records the rows of each call."""

    sizes: list[int]
    seen: list[int] = field(default_factory=list)

    def weight(self, rows: Sequence[int]) -> float:
        return len(rows)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        self.seen += rows
        return {"loss": model(torch.ones(len(rows), 1)).sum() * 100}


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 6), (1.5, 5), (0.5, 2)])
def test_an_epoch_takes_every_row_once(epochs: float, steps: int) -> None:
    counted = Counted([3] * 10)
    settings = small.optimization(batch_size=4, num_epochs=epochs)
    found = list(Fit(small.runtime(), nn.Linear(1, 1), counted, settings, seed=1))
    assert [step.number for step in found] == list(range(1, steps + 1))
    assert {step.num_steps for step in found} == {steps}
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


def test_the_reported_rate_is_the_rate_in_use() -> None:
    settings = small.optimization(batch_size=5, num_epochs=2.0, schedule="linear", learning_rate=1.0)
    found = Fit(small.runtime(), nn.Linear(1, 1), Counted([1] * 10), settings, seed=1)
    assert [step.metrics["lr"] for step in found] == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_gradients_are_clipped_and_their_norm_before_clipping_is_returned() -> None:
    layer = nn.Linear(1, 1)  # loss 100·(w + b): the gradient is (100, 100)
    before = layer.weight.item(), layer.bias.item()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    rt = small.runtime()
    model, wrapped = rt.prepare(layer, optimizer, 1.0)
    losses = [[lambda: (layer(torch.ones(1, 1)).sum() * 100, None)]]
    norm, _ = rt.step(model, wrapped, lambda: losses, max_grad_norm=1.0, budget=TokenBudget(1))
    assert norm == pytest.approx(math.sqrt(20000))
    assert before[0] - layer.weight.item() == pytest.approx(0.5**0.5, rel=1e-4)
    assert before[1] - layer.bias.item() == pytest.approx(0.5**0.5, rel=1e-4)


def test_only_matrices_have_weight_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    groups = adamw(model, small.optimization(weight_decay=0.1)).param_groups
    assert {(p.ndim, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (2, 0.1),
        (1, 0.0),
    }
    assert {group["eps"] for group in groups} == {1e-5}


# ------------------------------------------------------------------------------------- the best


def test_the_weights_with_the_lowest_loss_are_kept() -> None:
    layer, best = nn.Linear(1, 1), Best(patience=2)
    kept: dict[str, Tensor] = {}
    for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
        with torch.no_grad():
            layer.weight.fill_(step)
        best.offer(layer, loss, step)
        if step == 2:
            kept = copy.deepcopy(layer.state_dict())
    best.restore(layer)
    assert layer.weight.item() == 2
    assert all(torch.equal(kept[key], value) for key, value in layer.state_dict().items())
    assert (best.loss, best.step) == (1.0, 2)


def test_patience_counts_consecutive_evaluations_without_a_new_minimum() -> None:
    best = Best(patience=2)
    seen = []
    for step, loss in enumerate([3.0, 4.0, 2.0, 2.0, 5.0]):
        best.offer(nn.Linear(1, 1), loss, step)
        seen.append(best.exhausted)
    assert seen == [False, False, False, False, True]
