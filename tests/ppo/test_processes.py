"""Two processes learn and evaluate what one does. The processes are threads that add their numbers up."""

from __future__ import annotations

import copy
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.data.batches import Ids, TokenBudget
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.batch import interleaved
from rlhf_tasks.ppo.collector import fail_together
from rlhf_tasks.ppo.engines.build import Elsewhere
from rlhf_tasks.ppo.engines.protocol import Answers, EngineError, EngineGone
from rlhf_tasks.ppo.rollout import Rollout, lengths_mask
from rlhf_tasks.ppo.trainer import Metrics, Trainer
from rlhf_tasks.training.runtime import Runtime
from tests import small
from tests.ppo.toy import ENGINE, QUERIES, InMemory, parameters, trainer, without_critic
from tests.small import EOS

T = TypeVar("T")

NUM_ROWS, WIDTH = 16, 8


class Meeting:
    """Two threads exchange values here, as processes do by all_gather."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._values: list[Any] = [None, None]

    def gathered(self, rank: int, x: Any) -> list[Any]:
        self._values[rank] = copy.deepcopy(x)
        self._barrier.wait()
        both = list(self._values)
        self._barrier.wait()
        return both

    def leave(self) -> None:
        """A thread that fails stops the wait of the other."""
        self._barrier.abort()


class OneOfTwo(Runtime):
    """A process as PPO uses it, in few lines: sums, the largest number, summed gradients."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        vars(self).update(vars(small.runtime()))
        self.rank, self.world_size, self._meeting = rank, 2, meeting

    def sum(self, x: Tensor) -> Tensor:
        first, second = self._meeting.gathered(self.rank, x.detach())
        total: Tensor = first + second
        return total

    def max(self, number: int) -> int:
        largest: int = max(self._meeting.gathered(self.rank, number))
        return largest

    def each(self, value: T) -> list[T]:
        return self._meeting.gathered(self.rank, value)

    def from_main(self, value: Any) -> Any:
        return self._meeting.gathered(self.rank, value)[0]

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, optimizer

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Callable[[], Sequence[Sequence[Callable[[], tuple[Tensor, T]]]]],
        max_grad_norm: float | None,
        budget: TokenBudget,
    ) -> tuple[float, list[T]]:
        optimizer.zero_grad()
        measured = []
        for part in itertools.chain(*losses()):
            loss, stats = part()
            loss.backward()
            measured.append(stats)
        trained = list(model.parameters())
        whole = self.sum(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
        for p, gradient in zip(trained, whole.split([p.numel() for p in trained]), strict=True):
            p.grad = gradient.view_as(p)
        norm = nn.utils.clip_grad_norm_(trained, max_grad_norm or math.inf)
        optimizer.step()
        return float(norm), measured


def uneven_rollout() -> Rollout:
    """Every other response has one or two tokens, so that one process has three times as many tokens."""
    queries, long = small.rows(NUM_ROWS, seed=4, longest=WIDTH - 1)
    responses = [[*r[:1], EOS][: 1 + i % 4 // 2] if i % 2 else (r + r)[:WIDTH] for i, r in enumerate(long)]
    random = torch.Generator().manual_seed(2)

    def numbers(mean: float, std: float, *shape: int) -> Tensor:
        return mean + std * torch.randn(*shape, generator=random)

    scores = numbers(1.0, 2.0, NUM_ROWS)
    return Rollout(
        queries=queries,
        responses=responses,
        ended=torch.tensor([r[-1] == EOS for r in responses]),
        mask=lengths_mask([len(r) for r in responses], WIDTH),
        logprobs=numbers(-3.0, 0.2, NUM_ROWS, WIDTH),
        ref_logprobs=numbers(-3.0, 0.5, NUM_ROWS, WIDTH),
        values=numbers(0.0, 1.0, NUM_ROWS, WIDTH),
        last_values=numbers(0.0, 1.0, NUM_ROWS),
        scores=scores,
        parts={"planted": scores},
    )


def dealt(rollout: Rollout, rt: Runtime) -> Rollout:
    rows = rt.share(range(NUM_ROWS))
    parts: dict[str, Any] = {}
    for name in (field.name for field in fields(Rollout)):
        value = getattr(rollout, name)
        if name == "parts":
            parts[name] = {key: part[rows] for key, part in value.items()}
        elif value is not None:
            parts[name] = value[rows] if isinstance(value, Tensor) else [value[i] for i in rows]
    return replace(rollout, **parts)


Learned = tuple[Tensor, Metrics, Tensor]
"""Advantages (B, R), all metrics, and the weights after the epochs."""


def learned(meeting: Meeting, runtimes: list[Runtime], **changes: Any) -> list[Learned]:
    """What each process has after the epochs on its share of the same rollout."""
    trainers = [trainer(rt=rt, **{"num_mini_batches": 1} | changes) for rt in runtimes]

    def learn(rank: int) -> Learned:
        one = trainers[rank]
        try:
            ppo_batch, objective = one.estimator.estimate(dealt(uneven_rollout(), runtimes[rank]))
            return ppo_batch.advantages, objective | one.optimiser.optimise(ppo_batch), parameters(one)
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(len(trainers)) as pool:
        return list(pool.map(learn, range(len(trainers))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "advantages.whiten_rewards": True, "score_scaling": {"subtract_mean": True, "clip": 1.0},
            "entropy_coef": 0.1, "kl_penalty": {"beta": 1.0, "target": 1e-6}, "micro_batch_tokens": 20,
        },
        {"num_mini_batches": 4},
        {"num_mini_batches": 16, "kl_penalty": {"beta": 1.0, "target": 1e-6}},
        without_critic("rloo") | {"num_mini_batches": 4},
        without_critic("group", 8) | {"whiten_advantages": True, "micro_batch_tokens": 20},
    ],
    ids=[
        "one minibatch", "everything that sums", "four minibatches", "minibatches that leave one without",
        "rloo", "group",
    ],
)  # fmt: skip
def test_two_processes_learn_what_one_does(changes: dict[str, Any]) -> None:
    """Moments, token means, minibatches and the loss's denominator are those of all processes together."""
    meeting = Meeting()
    ((advantages, metrics, weights),) = learned(meeting, [small.runtime()], **changes)
    runtimes: list[Runtime] = [OneOfTwo(rank, meeting) for rank in range(2)]
    both = learned(meeting, runtimes, **changes)
    for rank, (own_advantages, own_metrics, own_weights) in enumerate(both):
        torch.testing.assert_close(own_advantages, advantages[rank::2], atol=1e-5, rtol=0)
        assert own_metrics.keys() == metrics.keys()
        for key, value in metrics.items():
            if key == "time/padding_share":
                continue  # each process cuts its own rows
            assert own_metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
        torch.testing.assert_close(own_weights, weights, atol=1e-5, rtol=0)
    start = parameters(trainer(**changes))
    assert (weights - start).abs().max() > 1e-3, "the epochs change the weights"


def test_nan_on_one_process_stops_both() -> None:
    meeting = Meeting()

    def message(rank: int) -> str:
        def compute() -> int:
            if rank:
                raise NonFiniteError("a scorer gave nan")
            return 1

        with pytest.raises(NonFiniteError) as caught:
            fail_together(OneOfTwo(rank, meeting), compute, {"prompts": ["p"]})
        assert caught.value.batch == {"prompts": ["p"]}
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(message, range(2))) == ["NaN on another process", "a scorer gave nan"]
    assert fail_together(small.runtime(), lambda: 7, {}) == 7


def test_each_process_has_equally_many_rows_of_every_minibatch() -> None:
    meeting = Meeting()
    taken: list[list[int]] = [[], []]

    class Counting(OneOfTwo):
        def share(self, rows: Sequence[Any]) -> list[Any]:
            own = super().share(rows)
            taken[self.rank].append(len(own))
            return own

    learned(meeting, [Counting(rank, meeting) for rank in range(2)], num_mini_batches=4)
    epochs = taken[0][-4 * 2 :]
    assert epochs == [NUM_ROWS // 4 // 2] * 8
    assert taken[1][-8:] == epochs


# ------------------------------------------------------------------------------ an engine for two


class Counted(InMemory):
    """Two processes: the first has this engine, which fails in rollout `fails_in`."""

    def __init__(self, fails_in: int = 0) -> None:
        super().__init__()
        self.num_queries, self._fails_in = list[int](), fails_in

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        self.num_queries.append(len(queries))
        if len(self.num_queries) == self._fails_in:
            raise EngineGone("the engine has gone")
        return super().sample(queries, n, seeds)


def together(run: Callable[[Trainer], T], engine: InMemory, **changes: Any) -> list[T]:
    """What `run` returns in each of two processes, of which the first has the engine."""
    meeting = Meeting()
    trainers = [
        trainer(rt=OneOfTwo(rank, meeting), engine=Elsewhere() if rank else engine, **changes)
        for rank in range(2)
    ]

    def one(rank: int) -> T:
        try:
            return run(trainers[rank])
        except BaseException:
            meeting.leave()
            raise

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def history(one: Trainer) -> tuple[list[Metrics], list[Ids] | None, dict[str, Any], Tensor]:
    """All metrics, the responses to an evaluation after the first update, the last state, and the weights."""
    updates, found = one.updates(), list[Metrics]()
    found.append(next(updates))
    responses = one.respond(QUERIES[:5], 3)
    found += updates
    return found, responses, one.source.state_dict(), parameters(one)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("changes", [{}, without_critic("rloo") | {"total_episodes": 64}])
def test_two_processes_with_an_engine_learn_what_one_does(ahead: int, changes: dict[str, Any]) -> None:
    """The engine samples the same requests, once, however many processes share its answers."""
    given: dict[str, Any] = {"engine_section": ENGINE | {"ahead": ahead}, "learning_rate": 1e-2} | changes
    alone, engine = Counted(), Counted()
    metrics, responses, state, weights = history(trainer(engine=alone, **given))
    for own_metrics, own_responses, own_state, own_weights in together(history, engine, **given):
        assert own_responses == responses
        assert own_state == state
        torch.testing.assert_close(own_weights, weights, atol=1e-4, rtol=0)
        for one, other in zip(own_metrics, metrics, strict=True):
            assert one.keys() == other.keys()
            for name in set(one) - UNEQUAL:
                assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-3), name
    assert (weights - parameters(trainer(**given))).abs().max() > 1e-2, "the updates change the weights"
    assert engine.num_queries == alone.num_queries
    assert len(engine.loads) == len(alone.loads)


UNEQUAL = {
    "eps", "engine/load_seconds", "time/generate_seconds", "time/score_seconds", "time/train_seconds",
    "time/tokens_per_second", "time/padding_share", "val/first_ratio_error",
}  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_failure_of_the_engine_is_the_same_error_on_both(ahead: int) -> None:
    def failed(one: Trainer) -> str:
        with pytest.raises(EngineGone) as caught:
            list(one.updates())
        return f"update {one.update}: {caught.value}"

    found = together(failed, Counted(fails_in=2), engine_section=ENGINE | {"ahead": ahead})
    assert found == ["update 1: the engine has gone"] * 2


def test_a_snapshot_beside_a_failed_rollout_is_the_same_on_both() -> None:
    def state(one: Trainer) -> dict[str, Any]:
        next(one.updates())
        return one.source.state_dict()

    first, second = together(state, Counted(fails_in=2), engine_section=ENGINE | {"ahead": 1})
    assert first == second
    assert first["next"] is None
    assert len(first["again"]) == 16, "the rows of both"


def test_log_probs_that_are_wrong_on_one_process_end_both() -> None:
    """Those of the second row, which the second process has; the mean is that of all 16."""

    class Wrong(InMemory):
        def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
            answers = super().sample(queries, n, seeds)
            answers.logprobs[1] = [x - 1.0 for x in answers.logprobs[1]]
            return answers

    def failed(one: Trainer) -> str:
        with pytest.raises(EngineError, match="log-probs differ from the policy's by") as caught:
            list(one.updates())
        return str(caught.value)

    first, second = together(failed, Wrong(), engine_section=ENGINE)
    assert first == second


def test_each_process_samples_whole_groups() -> None:
    """Both together have the prompts that one process has, in the order that `merged` restores."""
    meeting = Meeting()
    changes = without_critic("rloo") | {"total_episodes": 16}

    def rows(rank: int) -> list[int]:
        return trainer(rt=OneOfTwo(rank, meeting), **changes)._next_rows()

    alone = trainer(**changes)._next_rows()
    both = [rows(rank) for rank in range(2)]
    assert interleaved(both) == alone
    assert [own == own[:2] * 4 for own in both] == [True, True]
