"""A PPO trainer of models with a few thousand weights, and what the tests of PPO make of it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_tasks.config import Lora
from rlhf_tasks.data.batches import Ids
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.modeling import models
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.engines.protocol import Answers, Engine
from rlhf_tasks.ppo.reference import AdapterOff, OwnModel, Reference
from rlhf_tasks.ppo.rollout import ActorCritic, NoCritic, Rollout, ValueHead, lengths_mask, pad_rows
from rlhf_tasks.ppo.trainer import Trainer
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModelling
from tests import small
from tests.ppo import standin
from tests.small import EOS, PAD

QUERIES, _ = small.rows(16, longest=6)


ONE_STEP: dict[str, Any] = {"num_mini_batches": 1, "num_ppo_epochs": 1}


DEMONSTRATIONS = LanguageModelling(*small.rows(24, seed=5), pad=PAD)


def share_of_token_5(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    return torch.tensor([r.count(5) / len(r) for r in responses])


@dataclass(frozen=True)
class Planted:
    """A single scorer, which is a function of token ids."""

    score: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5

    def parts(
        self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE
    ) -> dict[str, Tensor]:
        return {"planted": self.score(queries, responses)}

    def total(self, parts: dict[str, Tensor]) -> Tensor:
        return parts["planted"]


ENGINE: dict[str, Any] = {
    "kind": "vllm",
    "url": "http://127.0.0.1:8000",
    "max_logprob_diff": 1e-3,
    "start_seconds": 60.0,
    "timeout_seconds": 60.0,
}


class InMemory:
    """An engine in this process: the same weights and seeds give the same answers."""

    name = "in memory"

    def __init__(self) -> None:
        self.backend, self.version, self.loads = standin.Model(), 0, list[dict[str, Tensor]]()

    def load(self, weights: PreTrainedModel, version: int) -> None:
        self.backend.model, self.version = copy.deepcopy(weights), version
        self.loads.append({name: x.detach().clone() for name, x in weights.state_dict().items()})

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        shared = {"n": n, "max_tokens": 8, "temperature": 0.8, "stop_token_ids": [EOS]}
        bodies = [{"prompt": q, "seed": seed, **shared} for q, seed in zip(queries, seeds, strict=True)]
        groups = self.backend.answer(bodies)
        rows = [group[i] for i in range(n) for group in groups]
        return Answers([ids for ids, _ in rows], [logprobs for _, logprobs in rows], self.version)

    def close(self) -> None:
        pass


def trainer(
    reward: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5,
    reference_seed: int = 0,
    actor_critic: ActorCritic | None = None,
    reference: Reference | None = None,
    demonstrations: LanguageModelling | None = None,
    rt: Runtime | None = None,
    tokenizer: Tokenizer | None = None,
    engine: Engine | None = None,
    engine_section: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **changes: Any,
) -> Trainer:
    """A trainer with the same weights, prompts and random numbers each time."""
    rt, frozen = rt or small.runtime(), small.causal(seed=reference_seed)
    settings = small.ppo(**changes, **({"sampler": engine_section} if engine_section else {}))
    critic = small.scores(seed=3) if settings.critic else NoCritic()
    rt.freeze(frozen)
    return Trainer(
        rt, settings,
        actor_critic or ActorCritic(small.causal(), critic),
        reference or OwnModel(frozen, moves="reference_sync" in changes),
        Planted(reward), tokenizer or small.tokenizer(), QUERIES,
        seed=1, demonstrations=demonstrations, engine=engine, clock=clock,
    )  # fmt: skip


def without_critic(advantages: str, num_samples: int = 4) -> dict[str, Any]:
    """The changes for an estimator that needs no critic; advantages are not whitened."""
    return {
        "advantages": {"kind": advantages, "samples_per_prompt": num_samples},
        "whiten_advantages": False,
    }


def shared() -> ActorCritic:
    return ActorCritic(small.causal(), ValueHead(small.HIDDEN))


def with_lora(value: str | None = "separate") -> tuple[ActorCritic, AdapterOff]:
    policy = models.with_lora(small.causal(), Lora(r=16, alpha=64.0), seed=1)
    if value is None:
        return ActorCritic(policy, NoCritic()), AdapterOff(policy)
    critic = small.scores(seed=3) if value == "separate" else ValueHead(small.HIDDEN)
    return ActorCritic(policy, critic), AdapterOff(policy)


def parameters(one: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in one.actor_critic.parameters()])


def sampled_rollout(one: Trainer) -> Rollout:
    """The responses to QUERIES, scored."""
    return one.collector.score(QUERIES, one.collector.sample(QUERIES))


def sampled_batch(one: Trainer) -> PPOBatch:
    return one.estimator.estimate(sampled_rollout(one))[0]


def without_gains(ppo_batch: PPOBatch) -> PPOBatch:
    """The batch with advantages of zero and a critic that is right: only the other losses have a gradient."""
    zero = torch.zeros_like(ppo_batch.advantages)
    return PPOBatch(ppo_batch.rollout, zero, ppo_batch.rollout.values, ppo_batch.kl_coef)


def from_older_policy(ppo_batch: PPOBatch) -> PPOBatch:
    """The same batch as if an older policy and critic, farther away, had made it."""
    rollout = ppo_batch.rollout
    return replace(
        ppo_batch, rollout=replace(rollout, logprobs=rollout.ref_logprobs, values=rollout.values / 2)
    )


def hand_made_rollout() -> Rollout:
    """Two responses: 2 tokens with EOS, and 3 tokens without."""
    return Rollout(
        queries=[[4], [5, 6]],
        responses=[[7, EOS], [8, 9, 10]],
        ended=torch.tensor([True, False]),
        mask=lengths_mask([2, 3], 4),
        logprobs=pad_rows([torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -1.5, -3.0])], 4),
        ref_logprobs=pad_rows([torch.tensor([-2.0, -2.5]), torch.tensor([-1.5, -1.0, -4.0])], 4),
        values=torch.zeros(2, 4),
        last_values=torch.zeros(2),
        scores=torch.tensor([2.0, 6.0]),
        parts={"planted": torch.tensor([2.0, 6.0])},
    )
