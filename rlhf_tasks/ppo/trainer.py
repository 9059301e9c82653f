"""PPO, an update at a time: sample, score, estimate advantages, optimise, record.

Each step is a module beside this one: `collector`, `estimator` and `optimiser`; `losses` holds the loss.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids
from rlhf_tasks.data.columns import NONE, Columns, take
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.batch import PPOBatch
from rlhf_tasks.ppo.collector import Collector, Scorers, stop_token
from rlhf_tasks.ppo.engines.protocol import Engine, Limits
from rlhf_tasks.ppo.estimator import AdvantageEstimator
from rlhf_tasks.ppo.optimiser import Optimiser, Queue
from rlhf_tasks.ppo.reference import Reference
from rlhf_tasks.ppo.rollout import ActorCritic, NoCritic, Rollout
from rlhf_tasks.ppo.sources import EngineSource, OwnSource, Source
from rlhf_tasks.training.layouts import reset_moments
from rlhf_tasks.training.runtime import Runtime, adamw, learning_rate, set_learning_rate
from rlhf_tasks.training.supervised import LanguageModelling

Metrics = dict[str, float]


class Stopwatch:
    """The seconds of each part of an update."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self.seconds = clock, dict[str, float]()
        self._start = self._last = clock()

    def lap(self, part: str) -> None:
        """End the part that began with the last lap."""
        now = self._clock()
        self.seconds[part], self._last = now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._start


class Trainer:
    """Policy, critic, reference and scorers, and all state that one update leaves to the next."""

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
        columns: Columns = NONE,
        demonstrations: LanguageModelling | None = None,
        engine: Engine | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`columns` are those of the prompts; `demonstrations` are PPO-ptx's text, or None without it.

        An `engine` samples all responses, and the first process alone calls it; with None the policy
        itself samples, in each process.
        """
        self.rt, self.settings, self.reference, self.prompts = rt, settings, reference, prompts
        self.columns, self.actor_critic, self._clock = columns, actor_critic, clock
        pad = tokenizer.pad_token_id
        optimizer, self._num_policy_groups = _optimizer(actor_critic, settings)
        self._model, self._optimizer = rt.prepare(actor_critic, optimizer, settings.max_grad_norm)
        self._shuffling = torch.Generator().manual_seed(seed)
        self._queue = Queue(len(prompts), self._shuffling)
        self.collector = Collector(
            rt, settings, actor_critic, reference, scorers, stop=stop_token(settings, tokenizer), pad=pad,
            seed=seed, recomputes=engine is not None,
        )  # fmt: skip
        self.source = self._source(engine, Limits(
            stop=stop_token(settings, tokenizer), length=settings.response_length,
            vocab=int(actor_critic.policy.config.get_text_config().vocab_size),
        ))  # fmt: skip
        self.estimator = AdvantageEstimator(settings, lambda x: rt.sum(x.to(rt.device)).to(x.device))
        self.optimiser = Optimiser(
            rt, settings, self._model, self._optimizer, pad=pad, shuffling=self._shuffling,
            demonstrations=demonstrations,
        )  # fmt: skip
        self.num_updates = settings.total_episodes // settings.rollout_batch_size
        self.update = 0
        self.warmup_losses: list[float] = []
        """The critic's loss, one for each update of its warm-up."""

    def updates(self) -> Iterator[Metrics]:
        """All updates that remain, the critic's warm-up first; each gives its metrics, of all processes.

        Between two updates `state_dict` holds all that the next one depends on.

        Raises:
            NonFiniteError: if a number is NaN or infinite; no step was taken on it.
        """
        while self.update < self.num_updates:
            yield self._update() if self.is_warm else self._warm_up_critic()

    def _update(self) -> Metrics:
        timer, rate = Stopwatch(self._clock), self._begin_update()
        rollout, measured = self._rollout(has_next=self.update + 1 < self.num_updates, timer=timer)
        timer.lap("score")
        batch, objective = self.estimator.estimate(rollout)
        require_finite(objective, batch)
        timer.lap("estimate")
        training = self.optimiser.optimise(batch)
        require_finite(training, batch)
        return self._record(objective | training | measured, timer, rate)

    def _rollout(self, *, has_next: bool, timer: Stopwatch) -> tuple[Rollout, Metrics]:
        """The scored responses of this update, and what was measured of an engine's."""
        drawn = self.source.draw(self.update, has_next=has_next)
        timer.lap("generate")
        queries = [self.prompts[i] for i in drawn.rows]
        rollout = self.collector.score(queries, drawn.samples, take(self.columns, drawn.rows))
        return self.source.corrected(rollout, drawn)

    def respond(self, queries: Sequence[Ids], seed: int) -> list[Ids] | None:
        """An engine's responses to these queries, on all processes; None if the policy samples by itself."""
        return self.source.respond(self.update, queries, seed)

    def _source(self, engine: Engine | None, limits: Limits) -> Source:
        settings = self.settings
        if engine is None:
            return OwnSource(self.collector, self.prompts, self._next_rows)
        assert settings.sampler.kind == "vllm"
        return EngineSource(
            self.rt, engine, settings.sampler, self.actor_critic.policy, self.prompts, self._all_rows,
            self.collector.generator, num_samples=settings.samples_per_prompt, limits=limits,
        )  # fmt: skip

    def _begin_update(self) -> float:
        """The learning rate of this update, which is set."""
        if self.update == 0 and self.warmup_losses:
            # data parallelism has given the policy gradients of zero: counted as steps they would make its
            # first real ones too small, or too large where the moments are slow
            reset_moments(self._optimizer, self._num_policy_groups)
        rate = learning_rate(self.settings, self.update, self.num_updates)
        set_learning_rate(self._optimizer, rate)
        return rate

    def _record(self, metrics: Metrics, timer: Stopwatch, rate: float) -> Metrics:
        """Adapt kl_coef and the reference to a finished update, and complete its metrics."""
        settings = self.settings
        self.estimator.kl.update(metrics["objective/kl_k1"], settings.rollout_batch_size)
        self.update += 1
        sync = settings.reference_sync
        if sync is not None and self.update % sync.every == 0:
            self.reference.follow(self.actor_critic.policy, sync.alpha)
        timer.lap("train")
        num_tokens = metrics["val/response_length"] * settings.rollout_batch_size
        return metrics | {
            "time/generate_seconds": timer.seconds["generate"],
            "time/score_seconds": timer.seconds["score"],
            "time/train_seconds": timer.seconds["train"],
            "time/tokens_per_second": num_tokens / timer.total,
            "eps": settings.rollout_batch_size / timer.total,
            "episode": self.update * settings.rollout_batch_size,
            "lr": rate,
        }

    def _all_rows(self) -> list[int]:
        """The next prompts' rows of all processes: p_1 … p_n, again p_1 … p_n, and so on, for each sample."""
        num_samples = self.settings.samples_per_prompt
        return self._queue.take(self.settings.rollout_batch_size // num_samples) * num_samples

    def _next_rows(self) -> list[int]:
        """This process's share of `_all_rows`.

        As the processes divide n, each has all samples of its prompts, in the same layout.
        """
        return self.rt.share(self._all_rows())

    # ---------------------------------------------------------------------------- critic warm-up

    @property
    def is_warm(self) -> bool:
        """Whether the critic's loss has settled, or there is no warm-up: arXiv 2307.04964, section 5.3.4."""
        warmup, losses = getattr(self.settings.critic, "warmup", None), self.warmup_losses
        if warmup is None or len(losses) >= warmup.max_updates:
            return True
        return len(losses) > 2 and min(losses[-2:]) > (1 - warmup.settled) * min(losses[:-2])

    def _warm_up_critic(self) -> Metrics:
        """An update of the critic alone, on a rollout of the frozen policy."""
        set_learning_rate(self._optimizer, self.settings.learning_rate)
        rollout, _ = self._rollout(has_next=True, timer=Stopwatch(self._clock))
        batch, objective = self.estimator.estimate(rollout)
        require_finite(objective, batch)
        training = self.optimiser.optimise(batch, critic_only=True)
        require_finite(training, batch)
        self.warmup_losses.append(training["loss/value_avg"])
        return {
            "warmup/value_loss": training["loss/value_avg"],
            "warmup/explained_variance": objective["val/explained_variance"],
            "episode": len(self.warmup_losses) * self.settings.rollout_batch_size,
        }

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all processes; each one's own state is `collector.generator`."""
        return {
            "update": self.update,
            "warmup_losses": list(self.warmup_losses),
            "training": self.rt.training_state(self._model, self._optimizer),
            "reference": self.reference.state_dict(),
            "estimator": self.estimator.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "scoring": self.collector.budget.state_dict(),
            "source": self.source.state_dict(),
            "queue": list(self._queue.waiting),
            "shuffling": self._shuffling.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update, self.warmup_losses = state["update"], list(state["warmup_losses"])
        self.rt.load_training_state(self._model, self._optimizer, state["training"])
        self.reference.load_state_dict(state["reference"])
        self.estimator.load_state_dict(state["estimator"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.collector.budget.load_state_dict(state["scoring"])
        self.source.load_state_dict(state["source"])
        self._queue.waiting = list(state["queue"])
        self._shuffling.set_state(state["shuffling"])


def require_finite(metrics: Metrics, batch: PPOBatch) -> None:
    """Check metrics that are the same on all processes; their sums overflow where nothing else does.

    Raises:
        NonFiniteError: naming those that are NaN or infinite; the PPO batch is its `batch`.
    """
    wrong = [f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)]
    if wrong:
        raise NonFiniteError(", ".join(wrong), batch.content())


def _optimizer(actor_critic: ActorCritic, settings: Ppo) -> tuple[torch.optim.Optimizer, int]:
    """One AdamW for policy and critic, and the number of its groups, the first ones, that are the policy's.

    With a `learning_rate` of the critic its groups have a rate of their own.
    """
    optimizer = adamw(actor_critic.policy, settings)
    num_policy_groups = len(optimizer.param_groups)
    if isinstance(actor_critic.value, NoCritic):
        return optimizer, num_policy_groups
    own = getattr(settings.critic, "learning_rate", None) or settings.learning_rate
    scale = own / settings.learning_rate
    for group in adamw(actor_critic.value, settings).param_groups:
        optimizer.add_param_group({"params": group["params"], "weight_decay": 0.0, "scale": scale})
    return optimizer, num_policy_groups
