"""Where responses come from: the policy in training, on every rank, or a server of vLLM for all ranks.

The loop gives a sampler the prompts (`submit`) and takes its responses (`collect`). A server may sample the
next rollout while the policy learns from this one.

B responses of all ranks · k responses to each prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids
from rlhf_tasks.errors import OutsideFault, UserError
from rlhf_tasks.modeling.load import merge_adapter
from rlhf_tasks.modeling.sampling import Samples, Share, sample
from rlhf_tasks.ppo.engines.protocol import Answers, Engine, EngineError, Limits, check
from rlhf_tasks.ppo.losses import importance_weights
from rlhf_tasks.ppo.metrics import Metrics, sampler_metrics
from rlhf_tasks.ppo.rollout import Rollout, pad_rows, raise_on_all_ranks
from rlhf_tasks.training import sharding
from rlhf_tasks.training.runtime import Runtime

T = TypeVar("T")
MAX_SEED = 2**62  # vLLM adds the number of the sample to a seed, and takes 64 bits


class Sampler(Protocol):
    """Samples the responses of all ranks. Every method is collective."""

    name: str | None
    """The program that samples, with its version; None: the policy itself."""
    ahead: bool
    """Whether the next rollout is to be submitted before the policy learns from this one."""

    @property
    def is_busy(self) -> bool:
        """Whether a rollout was submitted and not collected."""

    def submit(self, queries: Sequence[Ids], update: int) -> None:
        """Begin to sample k responses to each of these prompts, with the policy after `update` updates."""

    def collect(self, update: int) -> Samples:
        """This rank's share of the responses p_1 … p_n, again p_1 … p_n, and so on, k times."""

    def correct(self, rollout: Rollout, samples: Samples) -> tuple[Rollout, Metrics]:
        """The scored rollout with its importance weights, and what was measured of the responses."""

    def respond(self, queries: Sequence[Ids], seed: int, update: int) -> list[Ids] | None:
        """A response to each query, on all ranks, for an evaluation; None: each rank samples its own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PolicySampler:
    """Samples of the policy in training: exact, and never older than the policy."""

    name: str | None = None
    ahead = False

    def __init__(
        self,
        rt: Runtime,
        config: Ppo,
        policy: PreTrainedModel,
        generator: torch.Generator,
        *,
        stop: int,
        pad: int,
    ) -> None:
        """`generator` is on this rank's device, and has the same state on all ranks."""
        self._rt, self._config, self._policy, self._generator = rt, config, policy, generator
        self._stop, self._pad = stop, pad
        self._queries: Sequence[Ids] = ()

    @property
    def is_busy(self) -> bool:
        return bool(self._queries)

    def submit(self, queries: Sequence[Ids], update: int) -> None:
        self._queries = queries

    def collect(self, update: int) -> Samples:
        """As the Protocol says.

        Raises:
            NonFiniteError: if the policy gives no distribution; the queries are its `batch`.
        """
        own, self._queries = self._rt.share(self._queries), ()
        return raise_on_all_ranks(self._rt, lambda: self._sample(own), {"queries": own})

    @torch.no_grad()
    def _sample(self, queries: list[Ids]) -> Samples:
        config, rt = self._config, self._rt
        with rt.whole(self._policy) as policy, rt.autocast():
            return sample(
                policy,
                queries,
                max_new_tokens=config.response_length,
                temperature=config.temperature,
                stop=self._stop,
                pad=self._pad,
                generator=self._generator,
                batch_size=config.sampler.batch_size if config.sampler.kind == "policy" else None,
                num_samples=config.samples_per_prompt,
                share=Share(rt.rank, rt.world_size, config.rollout_batch_size),
            )

    def correct(self, rollout: Rollout, samples: Samples) -> tuple[Rollout, Metrics]:
        return rollout, {}

    def respond(self, queries: Sequence[Ids], seed: int, update: int) -> list[Ids] | None:
        return None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class VllmSampler:
    """Samples of a server, with the policy's weights of this update or, one ahead, of the one before.

    The first rank alone has the server. It gives the others what the server returns, or its failure.
    """

    def __init__(
        self,
        rt: Runtime,
        config: Ppo,
        policy: PreTrainedModel,
        generator: torch.Generator,
        engine: Engine,
        *,
        stop: int,
    ) -> None:
        """`generator`, of the same state on all ranks, draws the requests' seeds."""
        assert config.sampler.kind == "vllm"
        self._rt, self._config, self._settings = rt, config, config.sampler
        self._policy, self._generator, self._engine = policy, generator, engine
        vocab = int(policy.config.get_text_config().vocab_size)
        self._limits = Limits(stop=stop, length=config.response_length, vocab=vocab)
        self._version = 0
        self._loaded: int | None = None  # the updates that the server's weights have seen
        self._load_seconds, self._lag = 0.0, 0
        self._wait: Callable[[], Answers] | None = None  # for what was submitted; it may be called again
        self._submitted_at = 0  # the update after which it was
        self.name: str | None = engine.name
        self.ahead = bool(self._settings.ahead)

    @property
    def is_busy(self) -> bool:
        return self._wait is not None

    def submit(self, queries: Sequence[Ids], update: int) -> None:
        seeds = self._seeds(len(queries), self._generator)
        self._load(update)
        self._wait = self._begin(queries, self._config.samples_per_prompt, seeds)
        self._submitted_at = update

    def collect(self, update: int) -> Samples:
        """As the Protocol says.

        Raises:
            EngineError: if the server gives no usable responses, or they come from weights that are too old.
        """
        assert self._wait is not None
        wait, self._wait = self._wait, None
        answers = wait()
        self._lag = update - self._submitted_at
        if not 0 <= self._lag <= self._settings.ahead:
            raise EngineError(
                f"a rollout for update {update} was sampled after update {self._submitted_at}: it is stale; "
                f"sampler.ahead={self._settings.ahead} is allowed"
            )
        logprobs = [torch.tensor(row) for row in self._rt.share(answers.logprobs)]
        return Samples(self._rt.share(answers.responses), logprobs)

    def correct(self, rollout: Rollout, samples: Samples) -> tuple[Rollout, Metrics]:
        """As the Protocol says; π_old is the policy's own pass before the update.

        Raises:
            EngineError: if the log-probs of a server that has the very weights in training differ too much.
        """
        rt, cap = self._rt, self._settings.importance_cap
        sampler_logprobs = pad_rows(samples.logprobs, rollout.mask.shape[1])  # (B, R)
        metrics = sampler_metrics(
            rollout,
            sampler_logprobs,
            cap,
            reduce=lambda x: rt.sum(x.to(rt.device)).to(x.device),
            largest=lambda x: max(rt.each(x)),
        )
        difference, most = metrics["engine/logprob_diff"], self._settings.max_logprob_diff
        if self._lag == 0 and not difference <= most:
            raise EngineError(
                f"the engine's log-probs differ from the policy's by {difference:.3g} nats per token, and "
                f"sampler.max_logprob_diff={most:g}: it has other weights, or samples at other settings; a "
                "server of your own needs --logprobs-mode processed_logprobs and --generation-config vllm"
            )
        metrics |= {"engine/lag": float(self._lag), "engine/load_seconds": self._load_seconds}
        if cap is None:
            return rollout, metrics
        weights = importance_weights(rollout.logprobs, sampler_logprobs, cap)
        return replace(rollout, importance=torch.where(rollout.mask, weights, 0)), metrics

    def respond(self, queries: Sequence[Ids], seed: int, update: int) -> list[Ids]:
        """As the Protocol says. A rollout that is being sampled is waited for: the weights have one version.

        Raises:
            EngineError: as `collect`.
        """
        if self._wait is not None:
            self._wait()
        self._load(update)
        seeds = self._seeds(len(queries), torch.Generator().manual_seed(seed))
        return self._begin(queries, 1, seeds)().responses

    def _load(self, update: int) -> None:
        """Give the server the policy's weights after `update` updates, unless it has them.

        The first rank gathers sharded weights in the machine's memory.
        """
        if self._loaded == update:
            return
        start = time.perf_counter()
        self._version += 1
        with sharding.to_save(self._policy) as plain:

            def load() -> str:
                self._engine.load(merge_adapter(plain), self._version)
                return self._engine.name

            self.name = on_rank0(self._rt, load)
        self._loaded, self._load_seconds = update, time.perf_counter() - start

    def _begin(self, queries: Sequence[Ids], n: int, seeds: list[int]) -> Callable[[], Answers]:
        """Let the server begin to sample; the returned function waits for its responses."""
        version, future = self._version, Future[Answers]()

        def run() -> None:
            try:
                answers = self._engine.sample(queries, n, seeds)
                check(answers, n * len(queries), version, self._limits)
                future.set_result(answers)
            except BaseException as error:  # it is raised again where the result is waited for
                future.set_exception(error)

        if self._rt.is_main:  # as a daemon: a server that hangs must not keep the process alive
            Thread(target=run, daemon=True).start()
        return lambda: on_rank0(self._rt, future.result)

    @staticmethod
    def _seeds(count: int, generator: torch.Generator) -> list[int]:
        drawn: Tensor = torch.randint(MAX_SEED, (count,), generator=generator, device=generator.device)
        seeds: list[int] = drawn.tolist()
        return seeds

    def state_dict(self) -> dict[str, Any]:
        """The version, and the responses of a rollout that is being sampled, which is waited for.

        If that fails, so will `collect`; what was learned so far is saved without it, and a resumed run
        submits the same prompts again.
        """
        state: dict[str, Any] = {"version": self._version, "name": self.name, "answers": None}
        if self._wait is not None:
            with suppress(EngineError):
                state |= {"answers": dict(vars(self._wait())), "submitted_at": self._submitted_at}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._wait is not None:
            with suppress(EngineError):  # its responses are not wanted any more
                self._wait()  # the server cannot take weights while it samples
        self._version, self._loaded, self._wait = max(self._version, state["version"]), None, None
        self.name = state["name"]
        if state["answers"] is not None:
            answers = Answers(**state["answers"])
            self._wait, self._submitted_at = lambda: answers, state["submitted_at"]


def on_rank0(rt: Runtime, compute: Callable[[], T]) -> T:
    """What `compute` returns on the first rank, which alone runs it; on all ranks.

    Raises:
        OutsideFault, UserError: on all ranks, if it raises one there. Any other error ends the first rank,
            and so all of them.
    """
    outcome: tuple[Any, Exception | None] = None, None
    if rt.is_main:
        try:
            outcome = compute(), None
        except (OutsideFault, UserError) as error:
            outcome = None, error
    result, failure = rt.from_main(outcome)
    if failure is not None:
        raise failure
    return cast(T, result)
