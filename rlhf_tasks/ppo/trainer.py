"""PPO: rollout, rewards, advantages, epochs of clipped updates. The arithmetic is in the modules beside.

One update is `collect` → `teach` → `optimise`; README gives each metric's formula.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.collect import Collector, Scorers
from rlhf_tasks.ppo.lesson import Lesson, Teacher
from rlhf_tasks.ppo.optimise import Optimiser, Queue
from rlhf_tasks.ppo.reference import Reference
from rlhf_tasks.ppo.rollout import ActorCritic
from rlhf_tasks.training.runtime import Runtime, adamw, learning_rate, set_learning_rate
from rlhf_tasks.training.supervised import LanguageModelling

Metrics = dict[str, float]


class Trainer:
    """Policy, critic, reference and scorers, and the state that goes from update to update."""

    def __init__(
        self,
        rt: Runtime,
        settings: Ppo,
        actor_critic: ActorCritic,
        reference: Reference,
        scorers: Scorers,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[Ids],
        *,
        seed: int,
        demonstrations: LanguageModelling | None = None,
    ) -> None:
        """`demonstrations` are PPO-ptx's, and none without it."""
        self.rt, self.settings, self.reference, self.prompts = rt, settings, reference, prompts
        self.actor_critic = actor_critic
        pad = tokenizer.pad_token_id
        optimizer, self._num_policy_groups = _optimizer(actor_critic, settings)
        self._model, self._optimizer = rt.prepare(actor_critic, optimizer, settings.max_grad_norm)
        self._shuffling = torch.Generator().manual_seed(seed)
        self._queue = Queue(len(prompts), self._shuffling)
        self.collect = Collector(
            rt, settings, actor_critic, reference, scorers, stop=stop_token(settings, tokenizer), pad=pad,
            seed=seed,
        )  # fmt: skip
        self.teach = Teacher(settings, lambda x: rt.sum(x.to(rt.device)).to(x.device))
        self.optimise = Optimiser(
            rt, settings, self._model, self._optimizer, pad=pad, shuffling=self._shuffling,
            demonstrations=demonstrations,
        )  # fmt: skip
        self.num_updates = settings.total_episodes // settings.rollout_batch_size
        self.update = 0
        self.warmup_losses: list[float] = []
        """The critic's, an update each."""

    def updates(self) -> Iterator[Metrics]:
        """All updates that are left, the critic's warm-up first; each gives its metrics, of all processes.

        Between two of them `state_dict` holds all there is to go on from.
        """
        while self.update < self.num_updates:
            yield self._one_update() if self.is_warm else self._warm_up()

    def _one_update(self) -> Metrics:
        settings = self.settings
        if self.update == 0 and self.warmup_losses:
            forget(self._optimizer, self._num_policy_groups)
        rate = learning_rate(settings, self.update, self.num_updates)
        set_learning_rate(self._optimizer, rate)
        started = time.perf_counter()
        episodes, times = self.collect(self._next_queries())
        lesson, metrics = self.teach(episodes)
        check(metrics, lesson)
        training = time.perf_counter()
        metrics |= self.optimise(lesson)
        check(metrics, lesson)
        self.teach.kl.update(metrics["objective/kl_k1"], settings.rollout_batch_size)
        self.update += 1
        sync = settings.reference_sync
        if sync is not None and self.update % sync.every == 0:
            self.reference.follow(self.actor_critic.policy, sync.alpha)
        ended = time.perf_counter()
        num_tokens = metrics["val/response_length"] * settings.rollout_batch_size
        return metrics | times | {
            "time/train_seconds": ended - training,
            "time/tokens_per_second": num_tokens / (ended - started),
            "eps": settings.rollout_batch_size / (ended - started),
            "episode": self.update * settings.rollout_batch_size,
            "lr": rate,
        }  # fmt: skip

    # ---------------------------------------------------------------------------- critic warm-up

    @property
    def is_warm(self) -> bool:
        """The critic's loss has settled, or there is no warm-up: PPO-max, arXiv 2307.04964, section 5.3.4."""
        warmup, losses = self.settings.critic_warmup, self.warmup_losses
        if warmup is None or len(losses) >= warmup.max_updates:
            return True
        return len(losses) > 2 and min(losses[-2:]) > (1 - warmup.settled) * min(losses[:-2])

    def _warm_up(self) -> Metrics:
        set_learning_rate(self._optimizer, self.settings.learning_rate)
        episodes, _ = self.collect(self._next_queries())
        lesson, objective = self.teach(episodes)
        check(objective, lesson)
        found = self.optimise(lesson, critic_only=True)
        check(found, lesson)
        self.warmup_losses.append(found["loss/value_avg"])
        return {
            "warmup/value_loss": found["loss/value_avg"],
            "warmup/explained_variance": objective["val/explained_variance"],
            "episode": len(self.warmup_losses) * self.settings.rollout_batch_size,
        }

    def _next_queries(self) -> list[Ids]:
        """This process's share of the next prompts."""
        return [self.prompts[i] for i in self.rt.share(self._queue.take(self.settings.rollout_batch_size))]

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all processes; each one's own is `collect.generator`."""
        return {
            "update": self.update,
            "warmup_losses": list(self.warmup_losses),
            "training": self.rt.training_state(self._model, self._optimizer),
            "reference": self.reference.state_dict(),
            "teacher": self.teach.state_dict(),
            "optimiser": self.optimise.state_dict(),
            "queue": list(self._queue.waiting),
            "shuffling": self._shuffling.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update, self.warmup_losses = state["update"], list(state["warmup_losses"])
        self.rt.load_training_state(self._model, self._optimizer, state["training"])
        self.reference.load_state_dict(state["reference"])
        self.teach.load_state_dict(state["teacher"])
        self.optimise.load_state_dict(state["optimiser"])
        self._queue.waiting = list(state["queue"])
        self._shuffling.set_state(state["shuffling"])


def check(metrics: Metrics, lesson: Lesson) -> None:
    """Refuse metrics, the same on all processes, that are no numbers: sums overflow where nothing else does.

    Raises:
        NonFiniteError: naming them; the lesson is its `batch`.
    """
    wrong = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(", ".join(wrong), lesson.content())


def stop_token(settings: Ppo, tokenizer: PreTrainedTokenizerBase) -> int:
    return int(tokenizer.eos_token_id) if settings.stop_token == "eos" else settings.stop_token


def _optimizer(actor_critic: ActorCritic, settings: Ppo) -> tuple[torch.optim.Optimizer, int]:
    """One AdamW for both, and how many of its groups, the first ones, are the policy's.

    The critic's have a rate of their own if `value_learning_rate` says so.
    """
    optimizer = adamw(actor_critic.policy, settings)
    num_policy_groups = len(optimizer.param_groups)
    scale = (settings.value_learning_rate or settings.learning_rate) / settings.learning_rate
    for group in adamw(actor_critic.value, settings).param_groups:
        optimizer.add_param_group({"params": group["params"], "weight_decay": 0.0, "scale": scale})
    return optimizer, num_policy_groups


def forget(optimizer: torch.optim.Optimizer, num_groups: int) -> None:
    """Make the first groups of an AdamW new again: their moments, and the steps that these are corrected by.

    While the critic warms up, alone, the policy has gradients of zero (data parallelism wants some). Counted
    as steps they would make the policy's first real ones too small, or, with slow moments, too large.
    """
    for group in optimizer.param_groups[:num_groups]:
        for weights in group["params"]:
            for moment in optimizer.state.get(weights, {}).values():
                moment.zero_()
