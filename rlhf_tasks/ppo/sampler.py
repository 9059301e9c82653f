"""Where responses come from: the policy in training, on every rank, or a server of vLLM for all ranks.

B responses of all ranks · k responses to each prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_tasks.config.ppo import VllmSampler
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import OutsideFault, UserError
from rlhf_tasks.models.lora import adapted_layers, merge_adapter
from rlhf_tasks.models.sampling import BATCH_SIZE, Samples, Share, keep_casts, sample
from rlhf_tasks.ppo.losses import importance_weights
from rlhf_tasks.ppo.metrics import Metrics, sampler_metrics
from rlhf_tasks.ppo.rollout import Rollout, interleave, pad_rows, raise_on_all_ranks
from rlhf_tasks.ppo.vllm import VllmError, VllmServer
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed

T = TypeVar("T")
MAX_SEED = 2**62  # vLLM adds the number of the sample to a seed, and takes 64 bits


class Sampler(Protocol):
    """Samples the responses of all ranks. Every method is collective.

    `update` is the number of updates that the policy has seen.
    """

    name: str
    """The program that samples, with its version."""
    is_policy: bool
    """Whether the policy in training samples by itself: its log-probs are then exact."""

    def sample(self, queries: Sequence[Ids], update: int) -> Samples:
        """k responses to each query, all of them on all ranks.

        Raises:
            NonFiniteError: if the policy gives no distribution; the queries are its `batch`.
            VllmError: if the server gives no usable responses.
        """

    def correct(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """The scored rollout of all ranks with its importance weights, and metrics of the sampler.

        Raises:
            VllmError: if the log-probs of a server differ too much from the policy's own.
        """

    def respond(self, queries: Sequence[Ids], seed: int, update: int) -> list[Ids]:
        """A response to each query, all of them on all ranks, for an evaluation; errors as in `sample`."""


class LocalSampler:
    """Samples of the policy in training: exact."""

    name, is_policy = "the policy", True

    def __init__(
        self,
        dist: Distributed,
        policy: PreTrainedModel,
        generator: torch.Generator,
        *,
        num_samples: int,
        batch_size: int | None,
        **how: Any,
    ) -> None:
        """`generator` is on this device, and has the same state on all ranks; `how` is for `sample`."""
        self._dist, self._policy, self._generator = dist, policy, generator
        self._num_samples, self._batch_size, self._how = num_samples, batch_size, how

    def sample(self, queries: Sequence[Ids], update: int) -> Samples:
        return self._sample(queries, self._num_samples, self._generator, self._batch_size)

    def correct(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        return rollout, {}

    def respond(self, queries: Sequence[Ids], seed: int, update: int) -> list[Ids]:
        generator = torch.Generator(self._dist.device).manual_seed(seed)
        return self._sample(queries, 1, generator, min(self._batch_size or BATCH_SIZE, BATCH_SIZE)).responses

    @torch.no_grad()
    def _sample(
        self, queries: Sequence[Ids], n: int, generator: torch.Generator, batch_size: int | None
    ) -> Samples:
        """`n` responses to each query, of which each rank samples those to its share of the queries."""
        dist, local = self._dist, self._dist.shard_rows(queries)

        def lower(size: int) -> None:
            self._batch_size = size

        def sample_local() -> Samples:
            full = sharding.full_params(self._policy, dist.device)
            with full as policy, keep_casts(policy), dist.autocast():
                return sample(
                    policy,
                    local,
                    generator=generator,
                    batch_size=batch_size,
                    num_samples=n,
                    lower=lower,
                    share=Share(dist.rank, dist.world_size, n * len(queries)),
                    **self._how,
                )

        found = raise_on_all_ranks(dist, sample_local, {"queries": local})
        parts = dist.all_gather_object((found.responses, found.logprobs))
        responses, logprobs = (interleave(part) for part in zip(*parts, strict=True))
        return Samples(responses, logprobs)


class ServedSampler:
    """Samples of a server that has the policy's weights; the first rank alone talks to it."""

    is_policy = False

    def __init__(
        self,
        dist: Distributed,
        settings: VllmSampler,
        policy: PreTrainedModel,
        generator: torch.Generator,
        server: VllmServer | None,
        *,
        num_samples: int,
    ) -> None:
        """`generator`, of the same state on all ranks, draws the requests' seeds."""
        assert (server is not None) == dist.is_main
        self._dist, self._settings, self._policy, self._server = dist, settings, policy, server
        self._generator, self._num_samples = generator, num_samples
        self._loaded: int | None = None  # the updates that the server's weights have seen
        self._load_seconds = 0.0
        self._logprobs: list[Tensor] = []  # of the last rollout, by the server
        self.name = "vLLM"

    def sample(self, queries: Sequence[Ids], update: int) -> Samples:
        self._load(update)
        samples = self._sample(queries, self._num_samples, self._generator)
        self._logprobs = samples.logprobs
        return samples

    def correct(self, rollout: Rollout) -> tuple[Rollout, Metrics]:
        """π_old is the policy's own pass before the update."""
        cap = self._settings.importance_cap
        sampler_logprobs = pad_rows(self._logprobs, rollout.mask.shape[1])  # (B, R)
        metrics = sampler_metrics(rollout, sampler_logprobs, cap)
        difference, most = metrics["sampler/logprob_diff"], self._settings.max_logprob_diff
        if not difference <= most:
            raise VllmError(
                f"vLLM's log-probs differ from the policy's by {difference:.3g} nats per token, and "
                f"sampler.max_logprob_diff={most:g}: it has other weights, or samples at other settings; a "
                "server of your own needs --logprobs-mode processed_logprobs and --generation-config vllm"
            )
        metrics["sampler/load_seconds"] = self._load_seconds
        if cap is None:
            return rollout, metrics
        weights = importance_weights(rollout.logprobs, sampler_logprobs, cap)
        return replace(rollout, importance=torch.where(rollout.mask, weights, 0)), metrics

    def respond(self, queries: Sequence[Ids], seed: int, update: int) -> list[Ids]:
        self._load(update)
        return self._sample(queries, 1, torch.Generator().manual_seed(seed)).responses

    def _load(self, update: int) -> None:
        """Give the server the policy's weights after `update` updates, unless it has them.

        The first rank gathers sharded weights in the machine's memory.
        """
        if self._loaded == update:
            return
        start = time.perf_counter()
        # the server rounds matrices; adapters are merged in float32 before
        rounds = not self._dist.is_float32 and not adapted_layers(self._policy)
        with sharding.to_save(self._policy, torch.bfloat16 if rounds else None) as plain:

            def load(server: VllmServer) -> str:
                server.load(merge_adapter(plain))
                return server.name

            self.name = self._on_rank0(load)
        self._loaded, self._load_seconds = update, time.perf_counter() - start

    def _sample(self, queries: Sequence[Ids], n: int, generator: torch.Generator) -> Samples:
        """The responses of all ranks."""
        drawn = torch.randint(MAX_SEED, (len(queries),), generator=generator, device=generator.device)
        seeds: list[int] = drawn.tolist()
        return self._on_rank0(lambda server: server.sample(queries, n, seeds))

    def _on_rank0(self, call: Callable[[VllmServer], T]) -> T:
        """The result of a call to the server, which the first rank makes; on all ranks.

        Raises:
            OutsideFault, UserError: on all ranks, if it raises one. Any other error ends the first rank, and
                so all of them.
        """
        if self._settings.sleep:  # the server wakes up on this GPU, where torch keeps memory for new tensors
            torch.cuda.empty_cache()
        result: T | None = None
        failure: Exception | None = None
        if self._server is not None:
            try:
                result = call(self._server)
            except (OutsideFault, UserError) as error:
                failure = error
        result, failure = self._dist.broadcast_object((result, failure))
        if failure is not None:
            raise failure
        return cast(T, result)
