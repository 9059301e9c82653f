"""The evaluator: responses to selection prompts, their scores, their KL, and the weights that are kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rlhf_tasks.config import Lora
from rlhf_tasks.config.judge import Selection
from rlhf_tasks.data.batches import Batch
from rlhf_tasks.data.tokenizer import Ids, encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.sampling import sample_responses
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.evaluate import EvaluationState, Evaluator, WinRate, selection_judge
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.reporting import rollout_rows
from rlhf_tasks.ppo.rollout import Prompts, Reference, Rollout, interleave
from rlhf_tasks.ppo.sampler import LocalSampler
from rlhf_tasks.ppo.state import PpoState, Setup
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.training.distributed import Distributed
from tests import small
from tests.ppo.ranks import run_ranks
from tests.ppo.toy import Planted, log_p_alone, rollout_of
from tests.small import EOS

PROMPTS = [" ".join(small.WORDS[i : i + 2 + i % 3]) for i in range(9)]


def length(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    return torch.tensor([float(len(response)) for response in responses])


class Recorder(Planted):
    """A scorer by length that records the responses it was called with."""

    def __init__(self) -> None:
        self.calls = list[list[Ids]]()

    def parts(self, rows: Responses) -> dict[str, Tensor]:
        self.calls.append(list(rows.given[1]))
        return {"planted": length(*rows.given)}


class Falling:
    """A held-out model whose mean score is 4, 3, 2, …: every evaluation is worse than the one before."""

    def __init__(self) -> None:
        self._next = 5.0

    def __call__(self, rows: Responses) -> Tensor:
        self._next -= 1
        return torch.full((len(rows),), self._next)


class Evaluations:
    """An evaluator with the state and the sampler that the loop gives it."""

    def __init__(
        self,
        policy: Any = None,
        reference: Reference | None = None,
        *,
        dist: Distributed | None = None,
        scorer: Planted | None = None,
        heldout: Any = None,
        judge: Callable[[Distributed], WinRate] | None = None,
        **changes: Any,
    ) -> None:
        self.config = config = small.ppo(num_selection_prompts=len(PROMPTS), **changes)
        self.dist = dist = dist or small.distributed()
        self.policy, self.state = policy or small.causal(), EvaluationState()
        self.budget, tokenizer = TokenBudget(config.micro_batch_tokens), small.tokenizer()
        ends = ends_of(self.policy, tokenizer, [config.stop_token])
        self._sampler = LocalSampler(
            dist,
            self.policy,
            torch.Generator(),
            num_samples=1,
            batch_size=None,
            max_new_tokens=config.response_length,
            temperature=config.temperature,
            ends=ends,
            pad=tokenizer.pad_token_id,
        )
        self.evaluator = Evaluator(
            dist=dist,
            config=config,
            policy=self.policy,
            reference=reference or copy_of(7),
            tokenizer=tokenizer,
            ends=ends,
            prompts=Prompts(PROMPTS, encode(tokenizer, PROMPTS), {}),
            references=["w1 w2"] * len(PROMPTS),
            scorers=scorer or Planted(length),
            heldout=heldout,
            win_rate=judge and judge(dist),
            seed=1,
        )

    def evaluate(self, episode: int) -> Metrics:
        return self.evaluator.evaluate(self.state, self._sampler, self.budget, episode=episode, update=0)

    def show(self, episode: int) -> list[dict[str, Any]]:
        return self.evaluator.show(self.state, self._sampler, episode=episode, update=0)

    def rollout_rows(self, rollout: Rollout, texts: list[str], kl: Tensor) -> list[dict[str, Any]]:
        setup, state = SimpleNamespace(**vars(self)), SimpleNamespace(update=1, evaluation=self.state)
        prompts = Prompts(texts, rollout.queries, {})
        return rollout_rows(cast(Setup, setup), cast(PpoState, state), rollout, prompts, kl)


def copy_of(seed: int) -> Reference:
    return Reference(small.causal(seed=seed))


def kl_of_rows(policy: Any, reference: Any, responses: Sequence[Ids]) -> list[float]:
    """Σ log π − log π_ref of each response, each row alone in the models."""
    result = []
    for query, response in zip(encode(small.tokenizer(), PROMPTS), responses, strict=True):
        new, old = (log_p_alone(model, query, response).detach() for model in (policy, reference))
        result.append(float((new - old)[range(len(response)), response].double().sum()))
    return result


# ------------------------------------------------------------------------------------------- the KL


def test_the_kl_is_the_mean_over_prompts_of_the_summed_log_ratios() -> None:
    """Its standard error is the deviation of the responses' KL over the root of their number."""
    policy, scorers = small.causal(), Recorder()
    one = Evaluations(policy, scorer=scorers)
    metrics = one.evaluate(16)
    (responses,) = scorers.calls
    expected = kl_of_rows(policy, small.causal(seed=7), responses)
    assert max(expected) - min(expected) > 0.1, "the responses differ in their KL"
    assert metrics["eval/kl"] == pytest.approx(statistics.fmean(expected), abs=1e-4)
    assert one.state.metrics == {
        "selected_episode": 16,
        "selected_kl": metrics["eval/kl"],
        "selected_kl_standard_error": pytest.approx(
            statistics.pstdev(expected) / math.sqrt(len(expected)), abs=1e-4
        ),
    }


def test_the_kl_with_lora_is_to_the_policy_without_its_adapters() -> None:
    policy = add_lora(small.causal(), Lora(r=16, alpha=64.0), seed=1)
    with torch.no_grad():
        for name, weights in policy.named_parameters():
            if "lora_B" in name:
                weights.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    scorers = Recorder()
    metrics = Evaluations(policy, Reference(policy), scorer=scorers).evaluate(0)
    expected = kl_of_rows(policy, small.causal(), scorers.calls[0])
    assert metrics["eval/kl"] == pytest.approx(statistics.fmean(expected), abs=1e-4)
    assert metrics["eval/kl"] > 0.01
    assert {n.split(".")[-3] for n, p in policy.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_out_of_memory_makes_the_passes_of_later_evaluations_smaller_too() -> None:
    passes = list[int]()

    class Limited(Reference):
        def logprobs(self, batch: Batch, temperature: float) -> Tensor:
            passes.append(batch.query_response.numel())
            if passes[-1] > 60:
                raise torch.OutOfMemoryError
            return super().logprobs(batch, temperature)

    one = Evaluations(reference=Limited(small.causal(seed=7)), micro_batch_tokens=400)
    first = one.evaluate(0)
    assert one.budget.max_tokens < 100 < max(passes)
    passes.clear()
    assert one.evaluate(16) == first == pytest.approx(Evaluations().evaluate(0), abs=1e-5)
    assert max(passes) <= 60


def responses_alone() -> list[Ids]:
    """What one process samples."""
    settings: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.8, "seed": 1}
    return sample_responses(small.causal(), small.tokenizer(), PROMPTS, **settings)


def test_an_evaluation_draws_no_number_but_those_of_its_responses() -> None:
    scorers, expected = Recorder(), responses_alone()
    one, before = Evaluations(scorer=scorers), torch.get_rng_state()
    one.evaluate(0)
    assert torch.equal(torch.get_rng_state(), before)
    assert scorers.calls == [expected]


class Impossible(Reference):
    def logprobs(self, batch: Any, temperature: float) -> Tensor:
        return super().logprobs(batch, temperature).where(~batch.mask, -math.inf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda: {"reference": Impossible(small.causal())}, "the KL to the reference is NaN or"),
        (lambda: {"heldout": lambda rows: length(*rows.given) * math.nan}, "models/reward_heldout gave NaN"),
    ],
    ids=["kl", "heldout"],
)
def test_a_number_that_is_not_finite_is_an_error_with_the_responses(changes: Any, message: str) -> None:
    with pytest.raises(NonFiniteError, match=message) as caught:
        Evaluations(**changes()).evaluate(0)
    assert len(caught.value.batch["responses"]) == len(PROMPTS)


# ----------------------------------------------------------------------------------- which are kept


def changed(policy: Any, by: float) -> None:
    with torch.no_grad():
        for weights in policy.parameters():
            weights += by


def test_the_best_weights_are_kept_with_their_own_kl() -> None:
    """Each evaluation scores worse than the first one, whose weights are therefore restored."""
    policy = small.causal()
    one = Evaluations(policy, heldout=Falling(), truncation__kind="none")
    start = {name: p.clone() for name, p in policy.named_parameters()}
    first = one.evaluate(0)
    for episode in (16, 32):
        changed(policy, 0.05)
        metrics = one.evaluate(episode)
    assert metrics["eval/kl"] != first["eval/kl"]
    assert one.state.metrics["selected_episode"] == 0
    assert one.state.metrics["selected_heldout_score"] == 4
    assert one.state.metrics["selected_kl"] == first["eval/kl"]
    kept = one.state.weights
    assert all(torch.equal(kept[name], value) for name, value in start.items())


STOP = 9
"""A token that some responses of a random model draw."""


@pytest.mark.parametrize(
    ("truncation", "unfinished"),
    [
        ({"kind": "eos_trick_replace", "missing_eos_score": -1.5}, [-1.5, -1.5]),
        ({"kind": "bootstrap"}, [8.0, 4.0]),
    ],
)
def test_scores_are_under_the_eos_rule(truncation: dict[str, Any], unfinished: list[float]) -> None:
    """The optimized score is the length of a response, the held-out one is half of it."""
    scorers = Recorder()
    rule: dict[str, Any] = {"truncation": truncation, "stop_token": STOP}
    one = Evaluations(scorer=scorers, heldout=lambda rows: length(*rows.given) / 2, **rule)
    metrics, (responses,) = one.evaluate(16), scorers.calls
    ended = [len(response) for response in responses if response[-1] == small.EOS]
    closed = sum(response[-2:] == [STOP, small.EOS] for response in responses)  # EOS is added to these
    assert closed
    num_cut = len(responses) - len(ended)
    assert 0 < num_cut < len(responses), "some of both"
    expected = [
        (share * sum(ended) + num_cut * score) / len(responses)
        for share, score in zip((1, 0.5), unfinished, strict=True)
    ]
    assert metrics["eval/scores"] == pytest.approx(expected[0])
    assert metrics["eval/heldout_scores"] == pytest.approx(expected[1])
    assert metrics["eval/reward_gap"] == pytest.approx(expected[0] - expected[1])
    assert metrics["eval/response_length"] == pytest.approx(
        (sum(ended) - closed + 8 * num_cut) / len(responses)
    )


def test_scaled_scores_and_held_out_ones_are_raw_alike() -> None:
    """The rule's score is then in standard deviations, and would be no score of either model."""
    scorers = Recorder()
    rule: dict[str, Any] = {"truncation": {"kind": "eos_trick_replace", "missing_eos_score": -1.5}}
    one = Evaluations(scorer=scorers, heldout=lambda rows: length(*rows.given), score_scaling={}, **rule)
    metrics, (responses,) = one.evaluate(16), scorers.calls
    assert any(response[-1] != small.EOS for response in responses)
    mean = statistics.fmean(map(len, responses))
    assert [metrics["eval/scores"], metrics["eval/heldout_scores"]] == pytest.approx([mean, mean])


# ------------------------------------------------------------------------------------------- two ranks


def shorter(prompts: list[str], responses: list[str]) -> list[float]:
    JUDGED.append(len(prompts))
    return [-float(len(response)) for response in responses]


JUDGED: list[int] = []
FUNCTION = {"kind": "function", "name": "shorter", "function": f"{__name__}:shorter"}
SECTION = Selection.model_validate({"judge": FUNCTION, "max_failure_share": 0.5})


def test_two_ranks_share_the_prompts_and_agree_on_the_result() -> None:
    """The judge is called by the first rank alone."""
    JUDGED.clear()
    scorers = [Recorder(), Recorder()]

    def make(dist: Distributed) -> Evaluations:
        judge = lambda dist: selection_judge(dist, SECTION, Paths())  # noqa: E731
        return Evaluations(
            dist=dist,
            scorer=scorers[dist.rank],
            heldout=lambda rows: length(*rows.given),
            judge=judge,
        )

    def evaluate(one: Evaluations) -> tuple[Metrics, EvaluationState]:
        return one.evaluate(16), one.state

    (first, state), (second, other) = run_ranks(make, evaluate)
    assert first == second
    assert state.responses == other.responses
    assert state.metrics == other.metrics
    assert [row["prompt"] for row in state.responses] == PROMPTS
    everything = responses_alone()
    own = [everything[rank::2] for rank in range(2)]
    assert [one.calls for one in scorers] == [[own[0]], [own[1]]]
    kl = kl_of_rows(small.causal(), small.causal(seed=7), everything)
    assert first["eval/kl"] == pytest.approx(statistics.fmean(kl), abs=1e-4)
    assert [len(PROMPTS)] * 2 == JUDGED, "responses and references, once each"


# ------------------------------------------------------------------------------- the gap, and rollouts


class Rising(Recorder):
    """A scorer by length whose scores are multiplied by 1, 3, 3, …"""

    def parts(self, rows: Responses) -> dict[str, Tensor]:
        factor = 3 if self.calls else 1
        return {name: factor * x for name, x in super().parts(rows).items()}


def test_evaluations_measure_the_gap_from_the_first_one() -> None:
    one = Evaluations(scorer=Rising(), heldout=lambda rows: -length(*rows.given), truncation__kind="none")
    assert one.evaluate(0)["eval/standardized_gap"] == pytest.approx(0, abs=1e-12)
    mean, deviation = one.state.start[0]
    assert deviation > 0
    gap = one.evaluate(16)["eval/standardized_gap"]
    assert gap == pytest.approx(2 * mean / deviation), (
        "the scores are three times as high, the others as before"
    )


def test_scores_without_spread_have_no_gap_and_a_guard_of_it_is_an_error() -> None:
    flat: Any = {"scorer": Planted(lambda queries, responses: torch.ones(len(queries)))}
    heldout: Any = {"heldout": lambda rows: length(*rows.given), "truncation__kind": "none"}
    assert "eval/standardized_gap" not in Evaluations(**flat, **heldout).evaluate(0)
    with pytest.raises(UserError, match=r"ppo\.guards\.gap_max=1 is in standard deviations"):
        Evaluations(**flat, **heldout, guards={"gap_max": 1.0}).evaluate(0)


def test_rollouts_are_kept_by_prompt_with_what_ppo_learned() -> None:
    """Two prompts with two responses each; rows 0 and 2 are of the first prompt. Worked by hand."""
    rollout = rollout_of(
        [[4], [5], [4], [5]],
        [[7, EOS], [8, 9, 10], [7, 8, EOS], [8, EOS]],
        3,
        torch.tensor([1.0, 2.0, 3.0, 4.0]),
        advantages=torch.tensor([[1.0, 3.0, 0.0], [1.0, 1.0, 4.0], [-1.0, -1.0, -1.0], [0.0, 0.0, 0.0]]),
        returns=torch.tensor([[5.0, 5.0, 0.0], [6.0, 6.0, 6.0], [5.0, 5.0, 5.0], [8.0, 8.0, 0.0]]),
    )
    one = Evaluations(
        heldout=lambda rows: length(*rows.given),
        advantages={"kind": "rloo", "samples_per_prompt": 2},
        truncation={"kind": "eos_trick_replace", "missing_eos_score": -1.5},
    )
    one.state.start = [[1.0, 2.0], [0.0, 1.0]]
    kl = torch.tensor([[0.5, 1.0, 9.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.25], [0.0, 0.0, 9.0]])
    before = torch.get_rng_state()
    rows = one.rollout_rows(rollout, ["a", "b", "a", "b"], kl)
    assert torch.equal(torch.get_rng_state(), before), "training draws the same numbers with and without"
    assert [row["prompt"] for row in rows] == ["a", "a", "b", "b"]
    texts = [small.tokenizer().decode(ids) for ids in ([7], [7, 8], [8, 9, 10], [8])]
    assert [row["response"] for row in rows] == texts
    assert [row["score"] for row in rows] == [1.0, 3.0, -1.5, 4.0]
    assert [row["scorer/planted"] for row in rows] == [1.0, 3.0, 2.0, 4.0], "as the scorer gave it"
    assert [row["heldout"] for row in rows] == [2.0, 3.0, -1.5, 2.0]
    assert [row["gap"] for row in rows] == [0 - 2, 1 - 3, -1.25 + 1.5, 1.5 - 2]
    assert [row["kl"] for row in rows] == [1.5, 0.25, 3.0, 0.0]
    assert [row["advantage"] for row in rows] == [2.0, -1.0, 2.0, 0.0]
    assert [row["length"] for row in rows] == [2, 3, 3, 2]
    same = "all responses to the prompt have the same return, so that none has an advantage"
    cut = "no end within 3 tokens: missing_eos_score replaces its score"
    assert [row["notes"] for row in rows] == [same, same, cut, ""]
    many = replace(
        rollout,
        **{
            field.name: interleave([getattr(rollout, field.name)] * 20)
            for field in fields(rollout)
            if field.name not in ("pad", "shares_queries")
        },
    )
    assert len(one.rollout_rows(many, ["a"] * 80, kl.repeat(20, 1))) == 32
