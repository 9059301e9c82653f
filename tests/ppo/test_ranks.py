"""Two ranks learn what one does, from the policy's samples or a server's, and fail together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.sampling import Samples
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.audit import audit, trivial_responses
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rollout import Rollout, raise_on_all_ranks
from rlhf_tasks.ppo.vllm import VllmError
from tests import small
from tests.ppo.ranks import OneOfTwo, run_ranks
from tests.ppo.test_sampler import Counted
from tests.ppo.toy import QUERIES, VLLM_SAMPLER, InMemory, Memory, Toy, given, rollout_of, toy, without_critic
from tests.small import EOS

NUM_ROWS, WIDTH = 16, 8


def uneven_rollout() -> Rollout:
    """Every other response has one or two tokens, so that one rank has three times as many tokens."""
    queries, long = small.rows(NUM_ROWS, seed=4, longest=WIDTH - 1)
    responses = [[*r[:1], EOS][: 1 + i % 4 // 2] if i % 2 else (r + r)[:WIDTH] for i, r in enumerate(long)]
    mask = torch.arange(WIDTH) < torch.tensor([len(r) for r in responses])[:, None]
    random = torch.Generator().manual_seed(2)

    def numbers(mean: float, std: float) -> Tensor:
        return (mean + std * torch.randn(NUM_ROWS, WIDTH, generator=random)) * mask

    return rollout_of(
        queries,
        responses,
        WIDTH,
        scores=1.0 + 2.0 * torch.randn(NUM_ROWS, generator=random),
        logprobs=numbers(-3.0, 0.2),
        ref_logprobs=numbers(-3.0, 0.5),
        values=numbers(0.0, 1.0),
    )


UNEQUAL = (
    "eps",
    "sampler/load_seconds",
    "time/generate_seconds",
    "time/score_seconds",
    "time/train_seconds",
    "time/tokens_per_second",
    "time/padding_share",  # each rank cuts its own rows
    "val/first_ratio_error",
)


def assert_alike(found: Metrics, expected: Metrics, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in set(expected) - set(UNEQUAL):
        assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name


PENALTY = {"kl_penalty": {"beta": 1.0, "target": 1e-6}}


SUMS: dict[str, Any] = {"advantages__whiten_rewards": True, "entropy_coef": 0.1, "micro_batch_tokens": 20}
CASES: dict[str, dict[str, Any]] = {
    "one minibatch": {},
    "everything that sums": PENALTY | SUMS | {"score_scaling": {"subtract_mean": True, "clip": 1.0}},
    "four minibatches": {"num_mini_batches": 4, "loss_reduction": "response_mean"},
    "minibatches that leave one without": PENALTY | {"num_mini_batches": 16},
    "rloo": without_critic("rloo") | {"num_mini_batches": 4, "loss_reduction": {"constant": 8}},
    "group": without_critic("group", 8) | {"whiten_advantages": True, "micro_batch_tokens": 20},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_two_ranks_learn_what_one_does(changes: dict[str, Any]) -> None:
    """Moments, token means, minibatches and the loss's denominator are those of all ranks together."""

    def update(one: Toy) -> tuple[Metrics, Tensor]:
        return next(one.updates), one.weights

    settings = {"num_mini_batches": 1} | changes
    start = toy(**settings).weights
    with given(uneven_rollout()):
        metrics, weights = update(toy(**settings))
        for own_metrics, own_weights in run_ranks(lambda dist: toy(dist=dist, **settings), update):
            assert_alike(own_metrics, metrics, 1e-4)
            torch.testing.assert_close(own_weights, weights, atol=1e-5, rtol=0)
    assert (weights - start).abs().max() > 1e-3, "the epochs change the weights"


@pytest.mark.parametrize("changes", [{}, without_critic("rloo")], ids=["gae", "rloo"])
def test_two_ranks_sample_what_one_does(changes: dict[str, Any]) -> None:
    """The whole training: the prompts are shared out, and their samples stay together."""
    settings = changes | {"learning_rate": 1e-2}
    alone = toy(**settings)
    history = list(alone.updates)
    both = run_ranks(lambda dist: toy(dist=dist, **settings), lambda one: (list(one.updates), one.weights))
    for own_history, own_weights in both:
        torch.testing.assert_close(own_weights, alone.weights, atol=1e-4, rtol=0)
        for own, other in zip(own_history, history, strict=True):
            assert_alike(own, other, 1e-3)


def test_nan_on_one_rank_stops_both(tmp_path: Path) -> None:
    def message(dist: OneOfTwo) -> str:
        def compute() -> int:
            if dist.rank:
                raise NonFiniteError("a scorer gave nan")
            return 1

        with pytest.raises(NonFiniteError) as caught:
            raise_on_all_ranks(dist, compute, {"prompts": ["p"]})
        assert caught.value.batch == {"prompts": ["p"]}
        return str(caught.value)

    assert run_ranks(lambda dist: dist, message) == ["a scorer gave nan"] * 2
    assert raise_on_all_ranks(small.distributed(), lambda: 7, {}) == 7
    sharded: Any = SimpleNamespace(shards=True)  # without a call that another rank would have to answer

    def full() -> int:
        raise UserError("out of memory")

    with pytest.raises(UserError, match="out of memory"):
        raise_on_all_ranks(sharded, full, {})

    def score(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        return torch.tensor([float("nan") if query == QUERIES[1] else 0.0 for query in queries])

    def trip(one: Toy) -> str:
        with pytest.raises(Exception, match="PPO was stopped at update 0 by the guard non_finite") as caught:
            next(one.updates)
        return str(caught.value)

    first, second = run_ranks(lambda dist: toy(score, dist=dist, faults=tmp_path / str(dist.rank)), trip)
    assert "infinite scores" in first
    assert "infinite scores" in second


# ------------------------------------------------------------------------------- a server for two ranks


def test_a_kind_that_a_scorer_of_one_rank_refuses_is_left_out_on_both() -> None:
    end, queries = EOS, [[3, 4], [5, 6]]
    kinds = trivial_responses(queries, [[7, end], [8, end]], end=end, response_length=4, seed=1)

    def audited(dist: OneOfTwo) -> set[str]:
        def score(responses: list[Ids]) -> Tensor:
            def compute() -> Tensor:
                if dist.is_main and [end] in responses:
                    raise UserError("no score")
                return torch.ones(len(responses))

            return raise_on_all_ranks(dist, compute, {})

        return set(audit(kinds, score))

    first, second = run_ranks(lambda dist: dist, audited)
    assert first == second == {*kinds} - {"empty"}


def with_server(server: InMemory, **changes: Any) -> Any:
    """What makes the training of a rank, of which the first has the server."""

    def make(dist: OneOfTwo) -> Toy:
        own = None if dist.rank else server
        return toy(dist=dist, server=own, sampler=VLLM_SAMPLER, snapshots=Memory(), **changes)

    return make


def history(one: Toy) -> tuple[list[Metrics], list[Ids], Tensor]:
    """All metrics, the responses to an evaluation after the first update, and the weights."""
    updates, found = one.updates, list[Metrics]()
    found.append(next(updates))
    responses = one.state.sampler.respond(QUERIES[:5], 3, one.state.update)
    found += updates
    return found, responses, one.weights


@pytest.mark.parametrize("changes", [{}, without_critic("rloo")], ids=["gae", "rloo"])
def test_two_ranks_with_a_server_learn_what_one_does(changes: dict[str, Any]) -> None:
    """The server samples the same requests, once, however many ranks share its responses."""
    settings: dict[str, Any] = {"learning_rate": 1e-2} | changes
    alone, server = Counted(), Counted()
    metrics, responses, weights = history(toy(server=alone, **settings))
    for own_metrics, own_responses, own_weights in run_ranks(with_server(server, **settings), history):
        assert own_responses == responses
        torch.testing.assert_close(own_weights, weights, atol=1e-4, rtol=0)
        for own, other in zip(own_metrics, metrics, strict=True):
            assert_alike(own, other, 1e-3)
    assert server.asked == alone.asked
    assert len(server.loads) == len(alone.loads)


def test_a_failure_of_the_server_is_the_same_error_on_both() -> None:
    def failure(one: Toy) -> str:
        with pytest.raises(VllmError) as caught:
            list(one.updates)
        return f"update {one.state.update}: {caught.value}"

    found = run_ranks(with_server(Counted(fails_in=2)), failure)
    assert found == ["update 1: vLLM has failed"] * 2


def test_log_probs_that_are_wrong_on_one_rank_end_both() -> None:
    """Those of the second row, which the second rank has; the mean is that of all 16."""

    class Wrong(InMemory):
        def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Samples:
            samples = super().sample(queries, n, seeds)
            return replace(samples, logprobs=[x - float(i == 1) for i, x in enumerate(samples.logprobs)])

    def failure(one: Toy) -> str:
        with pytest.raises(VllmError, match="log-probs differ from the policy's by") as caught:
            list(one.updates)
        return str(caught.value)

    first, second = run_ranks(with_server(Wrong()), failure)
    assert first == second
