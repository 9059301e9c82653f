"""PPO of models with a few thousand weights, and what the tests of PPO make of it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from rlhf_tasks.config import Ppo
from rlhf_tasks.config.training import Lora
from rlhf_tasks.data.batches import Ids, TokenBudget
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.modeling import models
from rlhf_tasks.ppo.advantages import ESTIMATORS, Estimator
from rlhf_tasks.ppo.engines.protocol import Answers, Engine
from rlhf_tasks.ppo.evaluate import Evaluator
from rlhf_tasks.ppo.losses import PolicyLoss, ppo_clip
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rollout import (
    ActorCritic,
    AdapterOff,
    FrozenCopy,
    NoCritic,
    Reference,
    Rollout,
    ValueHead,
    pad_rows,
    score_rollout,
)
from rlhf_tasks.ppo.sampler import PolicySampler, Sampler, VllmSampler
from rlhf_tasks.ppo.state import TrainState, begin
from rlhf_tasks.ppo.train import train
from rlhf_tasks.tracking import NullTracker, Tracker
from rlhf_tasks.training.resume.snapshots import Loop, Nothing
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import LanguageModeling
from tests import small
from tests.ppo import standin
from tests.small import EOS, PAD

QUERIES, _ = small.rows(16, longest=6)


ONE_STEP: dict[str, Any] = {"num_mini_batches": 1, "num_ppo_epochs": 1}


DEMONSTRATIONS = LanguageModeling(*small.rows(24, seed=5), pad=PAD)


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


class NoEvaluation(Evaluator):
    """Evaluates nothing, and keeps no weights."""

    def __init__(self) -> None:
        pass

    def evaluate(self, *_: Any, **__: Any) -> Metrics:
        return {}

    def show(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return []


ENGINE: dict[str, Any] = {
    "kind": "vllm", "url": "http://127.0.0.1:8000", "command": None, "weights_folder": None,
    "transfer": "folder", "ahead": 0, "importance_cap": 2.0, "max_logprob_diff": 1e-3,
    "start_seconds": 60.0, "timeout_seconds": 60.0,
}  # fmt: skip


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


@dataclass
class Toy:
    """A training that the tests look into between its updates."""

    rt: Runtime
    config: Ppo
    actor_critic: ActorCritic
    scorers: Planted
    tokenizer: Tokenizer
    state: TrainState
    ptx: LanguageModeling | None
    loss: PolicyLoss
    estimator: Estimator
    clock: Callable[[], float]
    evaluator: Evaluator
    tracker: Tracker
    snapshots: Loop
    faults: Path

    @property
    def updates(self) -> Iterator[Metrics]:
        """The updates that remain."""
        return train(
            self.rt, self.config, self.state, self.actor_critic,
            prompts=QUERIES, columns=NONE, scorers=self.scorers, loss=self.loss, estimator=self.estimator,
            evaluator=self.evaluator, ptx=self.ptx, stop=EOS, pad=PAD, tracker=self.tracker,
            snapshots=self.snapshots, faults=self.faults, clock=self.clock,
        )  # fmt: skip

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.actor_critic.parameters()])

    def sample(self) -> Rollout:
        """The scored responses to QUERIES, without advantages."""
        sampler = self.state.sampler
        sampler.submit(QUERIES[: len(QUERIES) // self.config.samples_per_prompt], 0)
        queries = QUERIES[: len(QUERIES) // self.config.samples_per_prompt] * self.config.samples_per_prompt
        return score_rollout(
            self.rt, self.config, self.actor_critic, self.state.reference, self.scorers, queries,
            sampler.collect(0), NONE, stop=EOS, pad=PAD, budget=TokenBudget(16384),
            is_on_policy=sampler.name is None,
        )  # fmt: skip


def toy(
    reward: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5,
    reference_seed: int = 0,
    actor_critic: ActorCritic | None = None,
    reference: Reference | None = None,
    text: LanguageModeling | None = None,
    rt: Runtime | None = None,
    tokenizer: Tokenizer | None = None,
    engine: Engine | None = None,
    engine_section: dict[str, Any] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    loss: PolicyLoss = ppo_clip,
    estimator: Estimator | None = None,
    evaluator: Evaluator | None = None,
    tracker: Tracker | None = None,
    snapshots: Loop | None = None,
    faults: Path = Path("faults"),
    seed: int = 1,
    **changes: Any,
) -> Toy:
    """A training with the same weights, prompts and random numbers each time."""
    rt, frozen = rt or small.runtime(), small.causal(seed=reference_seed)
    config = small.ppo(**changes, **({"engine": engine_section} if engine_section else {}))
    critic = small.scores(seed=3) if config.value_model else NoCritic()
    rt.freeze(frozen)
    actor_critic = actor_critic or ActorCritic(small.causal(), critic)

    def make_sampler(generator: torch.Generator) -> Sampler:
        if engine is None:
            return PolicySampler(rt, config, actor_critic.policy, generator, stop=EOS, pad=PAD)
        return VllmSampler(rt, config, actor_critic.policy, generator, engine, stop=EOS)

    reference = reference or FrozenCopy(frozen, moves="reference_sync" in changes)
    state = begin(
        rt, config, actor_critic, reference, make_sampler,
        num_prompts=len(QUERIES), num_demonstrations=len(text.queries) if text else 0, seed=seed,
    )  # fmt: skip
    return Toy(
        rt, config, actor_critic, Planted(reward), tokenizer or small.tokenizer(), state, text, loss,
        estimator or ESTIMATORS[config.advantages], clock, evaluator or NoEvaluation(),
        tracker or NullTracker("ppo"), snapshots or Nothing(), faults,
    )  # fmt: skip


def without_critic(advantages: str, num_samples: int = 4) -> dict[str, Any]:
    """The changes for an estimator that needs no critic; advantages are not whitened."""
    nulls = dict.fromkeys(("value_model", "critic_init", "cliprange_value", "vf_coef", "lam"))
    own = {"advantages": advantages, "samples_per_prompt": num_samples, "whiten_advantages": False}
    return own | nulls


def shared() -> ActorCritic:
    return ActorCritic(small.causal(), ValueHead(small.HIDDEN))


def with_lora(value: str | None = "separate") -> tuple[ActorCritic, AdapterOff]:
    policy = models.with_lora(small.causal(), Lora(r=16, alpha=64.0), seed=1)
    if value is None:
        return ActorCritic(policy, NoCritic()), AdapterOff(policy)
    critic = small.scores(seed=3) if value == "separate" else ValueHead(small.HIDDEN)
    return ActorCritic(policy, critic), AdapterOff(policy)


def hand_made_rollout() -> Rollout:
    """Two responses: 2 tokens with EOS, and 3 tokens without."""
    zeros = torch.zeros(2, 4)
    return Rollout(
        queries=[[4], [5, 6]],
        responses=[[7, EOS], [8, 9, 10]],
        ended=torch.tensor([True, False]),
        mask=torch.tensor([[True, True, False, False], [True, True, True, False]]),
        logprobs=pad_rows([torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -1.5, -3.0])], 4),
        ref_logprobs=pad_rows([torch.tensor([-2.0, -2.5]), torch.tensor([-1.5, -1.0, -4.0])], 4),
        values=zeros,
        bootstrap_values=torch.zeros(2),
        scores=torch.tensor([2.0, 6.0]),
        parts={"planted": torch.tensor([2.0, 6.0])},
        importance=torch.ones(2, 4),
        advantages=zeros,
        returns=zeros,
        pad=PAD,
    )
