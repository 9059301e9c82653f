"""Where responses come from: each process samples its own, or an engine samples those of all processes.

The first process alone has the engine. It gives the others what the engine answers, or its failure.

B batch · R response.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_tasks.config.ppo import VllmSampler as Settings
from rlhf_tasks.data.batches import Ids
from rlhf_tasks.errors import OutsideFault, UserError
from rlhf_tasks.modeling.generation import Samples
from rlhf_tasks.modeling.models import merged
from rlhf_tasks.ppo.collector import Collector
from rlhf_tasks.ppo.engines.protocol import Answers, Engine, EngineError, Limits, check
from rlhf_tasks.ppo.losses import importance_weights
from rlhf_tasks.ppo.rollout import Rollout, pad_rows
from rlhf_tasks.ppo.rollout_metrics import engine_metrics
from rlhf_tasks.training import sharding
from rlhf_tasks.training.runtime import Runtime

T = TypeVar("T")
Metrics = dict[str, float]
MAX_SEED = 2**62  # vLLM adds the number of the sample to a seed, and takes 64 bits


class Drawn(NamedTuple):
    """This process's responses of one update, and the rows of the prompts that they answer."""

    rows: list[int]
    """p_1 … p_n, again p_1 … p_n, and so on, `samples_per_prompt` times."""
    samples: Samples
    lag: int = 0
    """Number of updates by which the weights were older that the responses were sampled from."""


class Source(Protocol):
    """Gives each update its responses."""

    sampler: str | None
    """The program that samples, with its version; None: this process."""

    def draw(self, update: int, *, has_next: bool) -> Drawn:
        """The responses of an update; with `has_next` another one follows, and may be begun."""

    def respond(self, update: int, queries: Sequence[Ids], seed: int) -> list[Ids] | None:
        """A response to each query for an evaluation after `update` updates; None: each process samples."""

    def corrected(self, rollout: Rollout, drawn: Drawn) -> tuple[Rollout, Metrics]:
        """The scored rollout with its importance weights, and what was measured of the responses."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class OwnSource:
    """Samples of the policy in training, by the collector: exact, and never older than the policy."""

    def __init__(
        self, collector: Collector, prompts: Sequence[Ids], next_rows: Callable[[], list[int]]
    ) -> None:
        self._collector, self._prompts, self._next_rows = collector, prompts, next_rows
        self.sampler: str | None = None

    def draw(self, update: int, *, has_next: bool) -> Drawn:
        rows = self._next_rows()
        return Drawn(rows, self._collector.sample([self._prompts[i] for i in rows]))

    def respond(self, update: int, queries: Sequence[Ids], seed: int) -> list[Ids] | None:
        return None

    def corrected(self, rollout: Rollout, drawn: Drawn) -> tuple[Rollout, Metrics]:
        return rollout, {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Request:
    """A rollout of all processes that an engine samples, or has sampled."""

    rows: list[int]
    update: int
    """The number of updates that the weights had seen."""
    wait: Callable[[], Answers]
    """Waits for the answers; it may be called again. Collective."""


class EngineSource:
    """Samples of an engine, with the policy's weights of this update or, one ahead, of the one before.

    Each process takes its share of them. All methods but `corrected`'s arithmetic are collective.
    """

    def __init__(
        self,
        rt: Runtime,
        engine: Engine,
        settings: Settings,
        policy: PreTrainedModel,
        prompts: Sequence[Ids],
        next_rows: Callable[[], list[int]],
        generator: torch.Generator,
        *,
        num_samples: int,
        limits: Limits,
    ) -> None:
        """`next_rows` gives those of all processes; `generator`, the same on all, draws the requests' seeds.

        Only the first process calls the `engine`.
        """
        self._rt, self._engine, self._settings, self._policy = rt, engine, settings, policy
        self._limits = limits
        self._prompts, self._next_rows, self._generator = prompts, next_rows, generator
        self._num_samples, self._version = num_samples, 0
        self._loaded: int | None = None  # the number of updates that the engine's weights have seen
        self._load_seconds = 0.0
        self._next: Request | None = None
        self._again: list[int] = []  # rows whose rollout failed in the run that is resumed here
        self.sampler: str | None = engine.name

    def draw(self, update: int, *, has_next: bool) -> Drawn:
        """As the Protocol says.

        Raises:
            EngineError: if the engine gives no usable answers, or they come from weights that are too old.
        """
        request, self._next = self._next or self._begin(update), None
        answers = request.wait()
        lag = update - request.update
        if not 0 <= lag <= self._settings.ahead:
            raise EngineError(
                f"a rollout for update {update} was sampled after update {request.update}: it is stale; "
                f"sampler.ahead={self._settings.ahead} is allowed"
            )
        if self._settings.ahead and has_next:
            self._next = self._begin(update)
        own = self._rt.share
        logprobs = [torch.tensor(row) for row in own(answers.logprobs)]
        return Drawn(own(request.rows), Samples(own(answers.responses), logprobs), lag)

    def respond(self, update: int, queries: Sequence[Ids], seed: int) -> list[Ids]:
        """A response to each query, by the policy's weights after `update` updates; on all processes.

        A rollout that is being sampled is waited for: the engine has weights of one version.

        Raises:
            EngineError: as `draw`.
        """
        if self._next is not None:
            self._next.wait()
        self._load(update)
        seeds = self._seeds(len(queries), torch.Generator().manual_seed(seed))
        return self._sampling(queries, 1, seeds)().responses

    def corrected(self, rollout: Rollout, drawn: Drawn) -> tuple[Rollout, Metrics]:
        """As the Protocol says; π_old is the policy's own pass before the update.

        Raises:
            EngineError: if the log-probs of an engine that has the very weights in training differ too much.
        """
        engine_logprobs = pad_rows(drawn.samples.logprobs, rollout.mask.shape[1])
        rt = self._rt
        metrics = engine_metrics(
            rollout, engine_logprobs, self._settings.importance_cap,
            reduce=lambda x: rt.sum(x.to(rt.device)).to(x.device), largest=lambda x: max(rt.each(x)),
        )  # fmt: skip
        difference, most = metrics["engine/logprob_diff"], self._settings.max_logprob_diff
        if drawn.lag == 0 and not difference <= most:
            raise EngineError(
                f"the engine's log-probs differ from the policy's by {difference:.3g} nats per token, and "
                f"sampler.max_logprob_diff={most:g}: it has other weights, or samples at other settings; a "
                "server of your own needs --logprobs-mode processed_logprobs and --generation-config vllm"
            )
        metrics |= {"engine/lag": float(drawn.lag), "engine/load_seconds": self._load_seconds}
        return replace(rollout, importance=self._weights(rollout.logprobs, engine_logprobs)), metrics

    def _weights(self, logprobs: Tensor, engine_logprobs: Tensor) -> Tensor | None:
        cap = self._settings.importance_cap
        return None if cap is None else importance_weights(logprobs, engine_logprobs, cap)

    def _begin(self, update: int) -> Request:
        """Give the engine the policy's weights, and let it begin to sample the next rows."""
        rows, self._again = self._again or self._next_rows(), []
        queries = [self._prompts[i] for i in rows[: len(rows) // self._num_samples]]
        seeds = self._seeds(len(queries), self._generator)
        self._load(update)
        return Request(rows, update, self._sampling(queries, self._num_samples, seeds))

    def _load(self, update: int) -> None:
        """Give the engine the policy's weights, which have seen `update` updates, unless it has them.

        The first process gathers sharded weights in the machine's memory.
        """
        if self._loaded == update:
            return
        start = time.perf_counter()
        self._version += 1
        with sharding.to_save(self._policy) as plain:

            def load() -> str:
                self._engine.load(merged(plain), self._version)
                return self._engine.name

            self.sampler = by_first(self._rt, load)
        self._loaded, self._load_seconds = update, time.perf_counter() - start

    def _sampling(self, queries: Sequence[Ids], n: int, seeds: list[int]) -> Callable[[], Answers]:
        """Let the engine begin to sample; the returned function waits for its answers."""
        version = self._version

        def sampled() -> Answers:
            answers = self._engine.sample(queries, n, seeds)
            check(answers, n * len(queries), version, self._limits)
            return answers

        wait = in_background(sampled) if self._rt.is_main else not_here
        return lambda: by_first(self._rt, wait)

    @staticmethod
    def _seeds(count: int, generator: torch.Generator) -> list[int]:
        seeds: list[int] = torch.randint(
            MAX_SEED, (count,), generator=generator, device=generator.device
        ).tolist()
        return seeds

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The version, and the rollout that is being sampled, which is waited for.

        If that fails, so will `draw`; what was learned so far is saved without it.
        """
        own = {"version": self._version, "sampler": self.sampler, "again": self._again, "next": None}
        if self._next is None:
            return own
        try:
            answers = self._next.wait()
        except EngineError:
            return own | {"again": self._next.rows}
        return own | {
            "next": {"rows": self._next.rows, "update": self._next.update, "answers": dict(vars(answers))}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._next is not None:
            with suppress(EngineError):  # its answers are not wanted any more
                self._next.wait()  # the engine cannot take weights while it samples
        self._again = list(state["again"])
        self._version, self._loaded, self._next = max(self._version, state["version"]), None, None
        self.sampler = state["sampler"]
        if state["next"] is not None:
            answers = Answers(**state["next"]["answers"])
            self._next = Request(state["next"]["rows"], state["next"]["update"], lambda: answers)


def by_first(rt: Runtime, compute: Callable[[], T]) -> T:
    """What `compute` returns in the first process, which alone runs it; on all processes.

    Raises:
        OutsideFault, UserError: on all processes, if it raises one there. Any other error ends the first
            process, and so all of them.
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


def not_here() -> Answers:
    raise AssertionError("the first process alone waits for the engine")


def in_background(compute: Callable[[], Answers]) -> Callable[[], Answers]:
    """Run `compute` in a thread; the returned function waits for it, and raises what it raises."""
    results: list[Answers] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(compute())
        except BaseException as error:  # it is raised again where the result is waited for
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # an engine that hangs must not keep the process alive
    thread.start()

    def wait() -> Answers:
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    return wait
