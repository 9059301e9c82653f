"""PPO of models with a few thousand weights, and what the tests of PPO make of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.workloads import NoEvaluator
from rlhf_tasks.config import Lora, Ppo
from rlhf_tasks.data.columns import NONE
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.heads import ActorCritic, NoCritic, ValueHead
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.sampling import Samples
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.ppo import train as loop
from rlhf_tasks.ppo.advantages import ESTIMATORS
from rlhf_tasks.ppo.losses import ppo_clip
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.rollout import (
    Prompts,
    Reference,
    Rollout,
    pad_rows,
)
from rlhf_tasks.ppo.state import PpoState, Setup, initial_state
from rlhf_tasks.ppo.train import score_rollout
from rlhf_tasks.ppo.vllm import VllmServer
from rlhf_tasks.scoring.build import WeightedSum
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.checkpoint import Snapshots, State
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.tasks import LanguageModeling
from tests import small
from tests.ppo import standin
from tests.small import EOS, PAD

QUERIES, _ = small.rows(16, longest=6)
PROMPTS = Prompts([f"prompt {i}" for i in range(len(QUERIES))], QUERIES, NONE)
ONE_STEP: dict[str, Any] = {"num_mini_batches": 1, "num_ppo_epochs": 1}
DEMONSTRATIONS = LanguageModeling(*small.rows(24, seed=5), pad=PAD)


def share_of_token_5(queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
    return torch.tensor([r.count(5) / len(r) for r in responses])


@dataclass
class Planted(WeightedSum):
    """A single scorer, which is a function of token ids."""

    score: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5

    def parts(self, rows: Responses) -> dict[str, Tensor]:
        return {"planted": self.score(*rows.given)}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["planted"]


VLLM_SAMPLER: dict[str, Any] = {
    "kind": "vllm",
    "url": "http://127.0.0.1:8000",
    "max_logprob_diff": 1e-3,
    "start_seconds": 60.0,
    "timeout_seconds": 60.0,
}


def started(*options: str, **changes: Any) -> dict[str, Any]:
    """The section of a server that the stage starts: the stand-in, with these options."""
    return VLLM_SAMPLER | {"url": None, "command": standin.command(*options), **changes}


class InMemory(VllmServer):
    """A server in this process: the same weights and seeds give the same responses."""

    def __init__(self) -> None:
        self.backend, self.loads = standin.Model(), list[dict[str, Tensor]]()
        self.name = "in memory"

    def load(self, weights: PreTrainedModel) -> None:
        self.backend.model = copy.deepcopy(weights)
        self.loads.append({name: x.detach().clone() for name, x in weights.state_dict().items()})

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Samples:
        shared = {"n": n, "max_tokens": 8, "temperature": 0.8, "stop_token_ids": [EOS]}
        bodies = [{"prompt": q, "seed": seed, **shared} for q, seed in zip(queries, seeds, strict=True)]
        groups = self.backend.answer(bodies)
        rows = [group[i] for i in range(n) for group in groups]
        return Samples([ids for ids, _ in rows], [torch.tensor(logprobs) for _, logprobs in rows])


class Memory(Snapshots):
    """Snapshots in memory, by their step; `load` gives the newest of those that it was made with."""

    def __init__(self, saved: dict[int, State] | None = None) -> None:
        self.saved = dict(saved or {})

    def load(self) -> State | None:
        return copy.deepcopy(self.saved[max(self.saved)]) if self.saved else None

    def due(self) -> bool:
        return True

    def save(self, step: int, state: State) -> None:
        self.saved[step] = copy.deepcopy(state)


class EstimateEnds(Exception):
    """StopTokens an update between its advantages and its epochs."""


@contextmanager
def given(rollout: Rollout) -> Iterator[None]:
    """Within the block every update has this rollout of all ranks, whatever was sampled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "score_rollout", lambda *_, **__: rollout)
        yield


@dataclass
class Toy:
    """A training that the tests look into between its updates."""

    setup: Setup
    state: PpoState

    @property
    def dist(self) -> Distributed:
        return self.setup.dist

    @property
    def config(self) -> Ppo:
        return self.setup.config

    @property
    def updates(self) -> Iterator[Metrics]:
        """The updates that remain."""
        return loop.train(self.setup, self.state)

    @property
    def actor_critic(self) -> ActorCritic:
        return self.state.actor_critic

    @property
    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.actor_critic.parameters()])

    def sample(self) -> Rollout:
        """The scored responses to QUERIES, without advantages."""
        prompts = PROMPTS.take(range(len(QUERIES) // self.config.samples_per_prompt))
        samples = self.state.sampler.sample(prompts.queries, 0)
        budget, self.state.budget = self.state.budget, TokenBudget(self.config.micro_batch_tokens)
        minibatches = [range(len(QUERIES))]
        rollout = score_rollout(
            self.setup, self.state, prompts.repeat(self.config.samples_per_prompt), samples, minibatches
        )
        self.state.budget = budget
        return rollout

    def estimate(self, rollout: Rollout | None = None) -> tuple[Rollout, Metrics]:
        """A rollout (by default `sample`) with its advantages, and what an update measures of it.

        No weight changes.
        """
        found = list[tuple[Rollout, Metrics]]()

        def end(metrics: Metrics, rollout: Rollout) -> None:
            found.append((rollout, metrics))
            raise EstimateEnds

        rollout = rollout or self.sample()
        with given(rollout), pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "require_finite", end)
            with pytest.raises(EstimateEnds):
                next(self._for(rollout).updates)
        return found[0]

    def learn(self, rollout: Rollout, **changes: Any) -> Metrics:
        """One update on a rollout, by its own advantages and returns."""
        one = self._for(rollout, {"whiten_advantages": False, "advantage_clip": None} | changes)
        setup = replace(one.setup, estimator=lambda rewards, given, config: (given.advantages, given.returns))
        with given(rollout):
            return next(replace(one, setup=setup).updates)

    def _for(self, rollout: Rollout, changes: dict[str, Any] | None = None) -> Toy:
        """This training, with updates of so many episodes and at least one more of them."""
        size = len(rollout.queries)
        episodes = max(self.config.total_episodes, size * (self.state.update + 1))
        sizes = {"rollout_batch_size": size, "total_episodes": episodes}
        config = self.config.model_copy(update=sizes | (changes or {}))
        return replace(self, setup=replace(self.setup, config=config))


def toy(
    reward: Callable[[Sequence[Ids], Sequence[Ids]], Tensor] = share_of_token_5,
    reference_seed: int = 0,
    actor_critic: ActorCritic | None = None,
    reference: Reference | None = None,
    text: LanguageModeling | None = None,
    dist: Distributed | None = None,
    pad: int = PAD,
    server: VllmServer | None = None,
    seed: int = 1,
    **changes: Any,
) -> Toy:
    """A training with the same weights, prompts and random numbers each time.

    `changes` are what the loop is given in place of its inputs here, and changes of the parameters.
    """
    dist, frozen = dist or small.distributed(), small.causal(seed=reference_seed)
    dist.freeze(frozen)
    tokenizer = copy.deepcopy(small.tokenizer())
    tokenizer.pad_token_id = pad
    names = {field.name for field in fields(Setup)} & changes.keys() - {"ptx", "prompts"}
    own = {name: changes.pop(name) for name in names}
    config = small.ppo(**({"sampler": VLLM_SAMPLER} if server else {}) | changes)
    inputs: dict[str, Any] = {
        "prompts": PROMPTS,
        "scorers": Planted(reward),
        "loss": ppo_clip,
        "estimator": ESTIMATORS.get(config.advantages.kind),
        "evaluator": NoEvaluator(),
        "tokenizer": tokenizer,
        "ends": ends_of(frozen, tokenizer, [config.stop_token]),
        "tracker": NullTracker("ppo"),
        "snapshots": Snapshots(),
        "faults": Path("faults"),
    }
    setup = Setup(dist=dist, config=config, ptx=text, **inputs | own)
    critic = small.scores(seed=3) if config.critic else NoCritic()
    state = initial_state(
        setup,
        actor_critic or ActorCritic(small.causal(), critic),
        reference or Reference(frozen, moves="reference_sync" in changes),
        server,
        seed=seed,
    )
    return Toy(setup, state)


def without_critic(advantages: str, num_samples: int = 4) -> dict[str, Any]:
    """The changes for an estimator that needs no critic; advantages are not whitened."""
    own = {"kind": "function", "function": advantages} if ":" in advantages else {"kind": advantages}
    return {"advantages": own | {"samples_per_prompt": num_samples}, "whiten_advantages": False}


def shared() -> ActorCritic:
    return ActorCritic(small.causal(), ValueHead(small.HIDDEN))


def with_lora(value: str | None = "separate") -> tuple[ActorCritic, Reference]:
    policy = add_lora(small.causal(), Lora(r=16, alpha=64.0), seed=1)
    if value is None:
        return ActorCritic(policy, NoCritic()), Reference(policy)
    critic = small.scores(seed=3) if value == "separate" else ValueHead(small.HIDDEN)
    return ActorCritic(policy, critic), Reference(policy)


def rollout_of(
    queries: list[Ids], responses: list[Ids], width: int, scores: Tensor, **known: Tensor
) -> Rollout:
    """A rollout with (B, width) tensors, of which those that are not `known` are zero."""
    mask = torch.arange(width) < torch.tensor([len(response) for response in responses])[:, None]
    names = ("logprobs", "ref_logprobs", "values", "advantages", "returns")
    return Rollout(
        queries=queries,
        responses=responses,
        ended=torch.tensor([response[-1] == EOS for response in responses]),
        mask=mask,
        bootstrap_values=torch.zeros(len(queries)),
        scores=scores,
        parts={"planted": scores},
        importance=torch.ones(mask.shape),
        pad=PAD,
        shares_queries=True,
        **{name: torch.zeros(mask.shape) for name in names} | known,
    )


def hand_made_rollout() -> Rollout:
    """Two responses: 2 tokens with EOS, and 3 tokens without."""
    logprobs = [torch.tensor([-1.0, -2.0]), torch.tensor([-0.5, -1.5, -3.0])]
    ref_logprobs = [torch.tensor([-2.0, -2.5]), torch.tensor([-1.5, -1.0, -4.0])]
    return rollout_of(
        [[4], [5, 6]],
        [[7, EOS], [8, 9, 10]],
        4,
        torch.tensor([2.0, 6.0]),
        logprobs=pad_rows(logprobs, 4),
        ref_logprobs=pad_rows(ref_logprobs, 4),
    )


def without_gains(rollout: Rollout) -> Rollout:
    """With advantages of zero and a critic that is right: only the other losses have a gradient."""
    return replace(rollout, advantages=torch.zeros_like(rollout.advantages), returns=rollout.values)


def log_p_alone(model: Any, query: Ids, response: Ids) -> Tensor:
    """(R, V) log-probs before each token of a response, at the toy's temperature; the row has no padding."""
    logits: Tensor = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1] / 0.8
    return logits.log_softmax(-1)


def untimed(history: Sequence[Metrics]) -> list[Metrics]:
    """Without what a clock has measured."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "eps")) and "seconds" not in k}
        for row in history
    ]
