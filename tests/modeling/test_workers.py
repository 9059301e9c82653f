"""Two threads that each compute a part of a batch change nothing but the time, and round alike every time."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import TokenBudget, dealt
from rlhf_tasks.modeling import models, workers
from rlhf_tasks.modeling.last_layer import forward_replaced
from rlhf_tasks.modeling.reward_scorer import RewardScorer
from rlhf_tasks.modeling.workers import compute_beside, num_workers
from rlhf_tasks.stages.reward import Learner, Pairs
from rlhf_tasks.training.supervised import Fit, LanguageModelling, evaluate
from tests import small
from tests.ppo import toy
from tests.small import FAMILIES, PAD, Family

CPU = torch.device("cpu")
QUERIES, RESPONSES = small.rows(24, seed=4)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    with small.threads(2):
        yield


def by_one_thread(compute: Callable[[], Any]) -> Any:
    with small.threads(1):
        return compute()


def close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-5, rtol=1e-4, msg=key)


# ------------------------------------------------------------------------------------- the threads


def test_results_come_in_the_order_of_the_work_and_from_two_threads() -> None:
    meeting = threading.Barrier(2, timeout=60)

    def meets(name: str) -> tuple[str, int]:
        meeting.wait()  # neither can end alone
        return name, threading.get_ident()

    found = compute_beside(
        [[lambda: meets("a"), lambda: meets("b")], [lambda: meets("c"), lambda: meets("d")]]
    )
    assert [name for name, _ in found] == ["a", "b", "c", "d"]
    assert len({thread for _, thread in found}) == 2
    assert threading.get_ident() not in {thread for _, thread in found}


def test_each_thread_has_its_part_of_torchs_threads_and_the_callers_gradient_mode() -> None:
    with torch.no_grad():
        found = compute_beside([[lambda: (torch.get_num_threads(), torch.is_grad_enabled())]] * 2)
    assert found == [(1, False), (1, False)]
    assert torch.get_num_threads() == 2
    assert compute_beside([[torch.is_grad_enabled]] * 2) == [True, True]


def test_the_first_failure_is_raised_when_no_thread_computes_any_more() -> None:
    ended, meeting = list[str](), threading.Barrier(2, timeout=60)

    def fails() -> None:
        meeting.wait()
        raise ArithmeticError("planted")

    def ends() -> None:
        meeting.wait()
        time.sleep(0.3)
        ended.append("other")

    with pytest.raises(ArithmeticError, match="planted"):
        compute_beside([[fails], [ends]])
    assert ended == ["other"]


def test_a_later_failure_waits_for_an_earlier_sequence_that_may_fail_too() -> None:
    later_has_failed = threading.Event()

    def fails(name: str) -> None:
        if name == "first":
            assert later_has_failed.wait(60)
        else:
            later_has_failed.set()
        raise ArithmeticError(name)

    with pytest.raises(ArithmeticError, match="first"):
        compute_beside([[lambda: None, lambda: fails("first")], [lambda: fails("second")]])


def test_after_an_interrupt_no_worker_begins_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, waits = list[int](), concurrent.futures.wait

    def interrupted(futures: Any) -> Any:
        monkeypatch.setattr(workers, "wait", waits)
        while len(begun) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    def one() -> None:
        begun.append(1)
        time.sleep(0.3)

    monkeypatch.setattr(workers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compute_beside([[one] * 50, [one] * 50])
    assert len(begun) < 50


def test_a_worker_computes_what_it_would_share_by_itself() -> None:
    def nested() -> list[int]:
        return compute_beside([[threading.get_ident], [threading.get_ident]])

    first, second = compute_beside([[nested], [nested]])
    assert len(set(first)) == len(set(second)) == 1


def test_gradients_that_share_a_tensor_are_added_to_each_weight_once() -> None:
    a, b = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    factor = torch.tensor([0.0, 1.0, 2.0])
    work = [[lambda: (((a + b) * factor).sum(), None)] * count for count in (2, 3)]
    workers.backward_beside([a, b], work)
    for weight in (a, b):
        assert weight.grad is not None
        assert weight.grad.tolist() == [0.0, 5.0, 10.0]


def test_rows_are_dealt_out_evenly_and_every_worker_has_its_share_of_the_bound() -> None:
    rows = [3, 9, 4, 8, 5, 7, 1]
    hands = dealt(rows, 2)
    assert sorted(hands[0] + hands[1]) == list(range(7))
    assert [[rows[i] for i in hand] for hand in hands] == [[1, 4, 7, 9], [3, 5, 8]]
    cut = TokenBudget(20).deal(rows, 2)
    assert [sorted(i for group in part for i in group) for part in cut] == [sorted(hand) for hand in hands]
    assert all(len(group) * max(rows[i] for i in group) <= 10 for part in cut for group in part)


def test_another_thread_calls_the_original_of_a_replaced_forward_function() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    plain = layer(x)
    with forward_replaced(layer, lambda original, y: original(y) + 1):
        assert torch.equal(layer(x), plain + 1)
        [inside, replaced] = compute_beside([[lambda: layer(x)], [lambda: replaced_here(layer, x)]])
        assert torch.equal(inside, plain)
        assert torch.equal(replaced, plain + 5)
        assert torch.equal(layer(x), plain + 1)
    assert torch.equal(layer(x), plain)
    assert "forward" not in vars(layer)


def replaced_here(layer: nn.Module, x: Tensor) -> Tensor:
    with forward_replaced(layer, lambda original, y: original(y) + 5):
        found: Tensor = layer(x)
    return found


# ------------------------------------------------------------------------------------- the models


def test_there_is_one_worker_where_two_would_be_wrong_or_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small.causal("gpt_neox")
    assert num_workers(CPU, plain, small.scores()) == workers.NUM_WORKERS == 2
    assert num_workers(torch.device("cuda"), plain) == 1
    assert by_one_thread(lambda: num_workers(CPU, plain)) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert num_workers(CPU, plain) == 1
    adapted = models.with_lora(small.causal("gpt_neox"), Lora(r=2, alpha=4.0), seed=1)
    assert num_workers(CPU, plain, adapted) == 1
    assert num_workers(CPU, small.other("gemma2")) == 1
    monkeypatch.setattr(workers, "MOST_WEIGHTS", 1000)
    assert num_workers(CPU, plain) == 1
    assert small.runtime(compiles=True).num_workers == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_supervised_training_takes_the_steps_of_one_thread(family: Family) -> None:
    def trained() -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, float]]:
        task = LanguageModelling(QUERIES, RESPONSES, PAD)
        fit = Fit(small.runtime(), small.causal(family), task, small.optimization(), seed=1)
        steps = [step.metrics for step in fit]
        return steps, fit.model.state_dict(), evaluate(fit.rt, fit.model, task, TokenBudget(4096))

    found, again, expected = trained(), trained(), by_one_thread(trained)
    for step, other, repeated in zip(found[0], expected[0], again[0], strict=True):
        close(step, other)
        assert step == repeated
    close(found[1], expected[1])
    close(found[2], expected[2])
    assert all(torch.equal(value, again[1][key]) for key, value in found[1].items())


def test_reward_models_take_the_steps_of_one_thread_and_give_the_same_scores() -> None:
    def trained() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rt, learner = small.runtime(), Learner(small.scores("gpt_neox"))
        pairs = Pairs(QUERIES, RESPONSES, RESPONSES[::-1], PAD, forked=True)
        list(Fit(rt, learner, pairs, small.optimization(), seed=1))
        scorer = RewardScorer(learner.scores, small.tokenizer(), 64, rt)
        return learner.state_dict(), {"scores": scorer(QUERIES, RESPONSES)}

    for found, expected in zip(trained(), by_one_thread(trained), strict=True):
        close(found, expected)


CASES: Mapping[str, dict[str, Any]] = {
    "shipped": {},
    "small micro-batches": {"micro_batch_tokens": 40},
    "entropy bonus": {"entropy_coef": 0.01},
    "PPO-penalty": {"kl_penalty": {"beta": 1.0, "target": 0.01}},
    "demonstrations": {"ptx": {"coef": 0.1, "text": None}},
    "without a critic": toy.without_critic("rloo"),
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ppo_takes_the_steps_of_one_thread(
    changes: dict[str, Any], precision: Literal["fp32", "bf16"]
) -> None:
    def trained() -> tuple[list[dict[str, float]], Tensor]:
        one = toy.trainer(
            rt=small.runtime(precision), clock=iter(range(1000)).__next__,
            demonstrations=toy.DEMONSTRATIONS if "ptx" in changes else None, **changes,
        )  # fmt: skip
        return [dict(metrics) for metrics in one.updates()][:2], toy.parameters(one)

    (found, weights), (again, same), (expected, others) = trained(), trained(), by_one_thread(trained)
    assert (found, weights.tolist()) == (again, same.tolist())
    # in bf16 the second update's responses may differ by a token
    atol, num_equal = (2e-4, 2) if precision == "fp32" else (2e-2, 1)
    for update, other in zip(found[:num_equal], expected[:num_equal], strict=True):
        assert update.keys() == other.keys()
        for key in update.keys() - {"time/padding_share"}:
            assert update[key] == pytest.approx(other[key], rel=20 * atol, abs=20 * atol), key
    torch.testing.assert_close(weights, others, atol=10 * atol, rtol=0)
