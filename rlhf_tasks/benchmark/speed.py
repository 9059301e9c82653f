"""How fast PPO would be on GPUs that are not here, from arithmetic and memory traffic.

A pass over whole rows takes its FLOPs over the matrix rate. A step of sampling reads all weights and the
cache of all rows, and takes the longer of that and its FLOPs. No layer takes less than a fixed time. To this
come the bytes that GPUs exchange (arXiv 1910.02054, section 7): 2 bytes over the link for each byte of a
gradient, and under FSDP2 and ZeRO-3 all weights again in each pass. With `launch.offload` each process copies
its share of weights and gradients too, and the optimiser's traffic is that of the machine's memory.

Q query · R response · T = Q + R.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_tasks.benchmark.footprint import FP32, SHARDING, Layout, Networks, cache_of_row, stored_width
from rlhf_tasks.benchmark.gpus import GB, Assumptions, Gpu

ENGINE_ROOM = 1.25  # memory of an engine, to that of the weights and the cache of a rollout


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs that train, and what is assumed of them."""

    gpu: Gpu
    num_gpus: int
    assumed: Assumptions

    @property
    def usable(self) -> float:
        return self.gpu.memory * self.assumed.usable_memory

    @property
    def link(self) -> float:
        """Bytes per second and GPU to all others."""
        inside = self.num_gpus <= self.assumed.gpus_per_machine
        return self.gpu.link if inside else min(self.gpu.link, self.assumed.machine_link * GB)

    def rate(self, is_bf16: bool) -> float:
        return self.assumed.matrix_share * (self.gpu.bf16 if is_bf16 else self.gpu.fp32)

    @property
    def bandwidth(self) -> float:
        return self.assumed.bandwidth_share * self.gpu.bandwidth


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """The parts of an update."""

    generate: float
    score: float
    train: float
    renew: float = 0.0
    """To give an engine new weights."""
    is_ahead: bool = False
    """Whether an engine samples while the policy learns."""

    @property
    def total(self) -> float:
        learn = self.score + self.train
        return self.renew + (max(self.generate, learn) if self.is_ahead else self.generate + learn)


def engine_gpus(networks: Networks, machine: Machine) -> int:
    """The least power of two that holds the engine; 0 without one."""
    if not networks.has_engine:
        return 0
    cache = networks.settings.rollout_batch_size * cache_of_row(networks)
    whole = ENGINE_ROOM * (networks.passes_width * networks.policy.parameters + cache)
    return int(2 ** max(0, math.ceil(math.log2(whole / machine.usable))))


def update_seconds(networks: Networks, machine: Machine, layout: Layout) -> Seconds:
    """The seconds of one update."""
    score, train = _score(networks, machine, layout), _train(networks, machine, layout)
    sampler, more = networks.settings.sampler, engine_gpus(networks, machine)
    if sampler.kind == "policy":
        gathered = networks.passes_width * networks.policy.parameters if layout in SHARDING else 0
        generate = _generate(networks, machine, machine.num_gpus) + _exchange(gathered, machine)
        return Seconds(generate=generate, score=score, train=train)
    return Seconds(
        generate=_generate(networks, machine, 1, together=more), score=score, train=train,
        renew=_renew(networks, machine, layout), is_ahead=sampler.ahead == 1,
    )  # fmt: skip


def _renew(networks: Networks, machine: Machine, layout: Layout) -> float:
    """The policy is gathered where it is sharded, written as files, and read from them."""
    stored = stored_width(networks, layout) * networks.policy.parameters
    gathers = _exchange(stored, machine) if layout in SHARDING else 0.0
    return gathers + 2 * stored / (machine.assumed.folder_rate * GB)


def _generate(networks: Networks, machine: Machine, shares: int, together: int = 1) -> float:
    """A pass over the queries, and one step for each further token of the responses.

    The rows are divided into `shares`, and `together` GPUs compute a share, each with a part of every matrix.
    """
    policy, settings, width = networks.policy, networks.settings, networks.passes_width
    rows = settings.rollout_batch_size / shares
    rate, bandwidth = together * machine.rate(networks.is_bf16), together * machine.bandwidth
    query, response, batch = networks.longest, settings.response_length, networks.batch_size
    batches = 1 if batch is None else math.ceil(rows / batch)
    least = policy.layers * machine.assumed.layer_seconds
    prompts = rows / settings.samples_per_prompt
    prefill = max(batches * least, prompts * policy.forward_flops(query, 0, logits=False) / rate)
    weights = width * (policy.in_matrices + policy.vocab * policy.hidden)
    average = query + response / 2
    cache = rows / batches * average * policy.cache_per_token(width)
    flops = 2.0 * (policy.in_matrices + policy.vocab * policy.hidden)
    flops += 4.0 * policy.layers * policy.hidden * average
    step = max(least, (weights + cache) / bandwidth, rows / batches * flops / rate)
    return prefill + batches * response * step


def _score(networks: Networks, machine: Machine, layout: Layout) -> float:
    """One pass of the reference, the critic and the reward models; below float32 of the policy too."""
    settings, policy = networks.settings, networks.policy
    whole, trunk = (_flops(networks, logits=logits) for logits in (True, False))
    critics = int(networks.has_separate_critic)
    heads, trunks = 1 + networks.is_bf16, networks.num_scoring + critics
    passes = (heads + trunks) * _micro_batches(networks, machine)
    rows = settings.rollout_batch_size / machine.num_gpus
    seconds = rows * (heads * whole + trunks * trunk) / machine.rate(networks.is_bf16)
    gathered = passes * policy.parameters if layout in SHARDING else 0
    return (
        max(seconds, passes * policy.layers * machine.assumed.layer_seconds)
        + _exchange(gathered * networks.passes_width, machine)
        + _copied(gathered * stored_width(networks, layout), networks, machine)
    )


def _train(networks: Networks, machine: Machine, layout: Layout) -> float:
    """All epochs: three forward passes' arithmetic in each pass, four with recomputation."""
    settings, policy = networks.settings, networks.policy
    critics = int(networks.has_separate_critic)
    row = _flops(networks, logits=True) * (1 + (settings.ptx is not None))
    row += critics * _flops(networks, logits=False)
    times = (3 + settings.gradient_checkpointing) * settings.num_ppo_epochs
    rows = settings.rollout_batch_size / machine.num_gpus
    seconds = times * rows * row / machine.rate(networks.is_bf16)
    micro = settings.num_ppo_epochs * _micro_batches(networks, machine)
    least = 3 * micro * (1 + critics) * policy.layers * machine.assumed.layer_seconds
    steps = settings.num_ppo_epochs * settings.num_mini_batches
    optimiser = steps * _optimiser_seconds(networks, machine, layout)
    copies = _copied(_offloaded_traffic(networks, layout, steps, micro), networks, machine)
    return max(seconds, least) + optimiser + copies + _train_exchange(networks, machine, layout, steps, micro)


def _train_exchange(networks: Networks, machine: Machine, layout: Layout, steps: int, micro: float) -> float:
    """DDP reduces gradients once a step, the others in each micro-batch, and FSDP2 in float32. Divided
    weights are gathered twice in each micro-batch. ZeRO-2 gathers the changed weights after a step."""
    if machine.num_gpus == 1:
        return 0.0
    width = FP32 if layout in ("ddp", "fsdp2") else networks.passes_width
    if layout in SHARDING:
        gathers = 2 * networks.passes_width * networks.both_parameters
        return _exchange(micro * (gathers + width * networks.trained_parameters), machine)
    times = micro + steps if layout == "zero2" else 2 * steps
    return _exchange(times * width * networks.trained_parameters, machine)


def _optimiser_seconds(networks: Networks, machine: Machine, layout: Layout) -> float:
    """AdamW reads weight, gradient and two moments, and writes three of them: on the GPU, or with
    `launch.offload` in the memory that a machine's processes share."""
    share = 1 if layout in ("single", "ddp") else machine.num_gpus
    traffic = 7 * FP32 * networks.trained_parameters / share
    if not networks.offload:
        return traffic / machine.bandwidth
    processes = min(machine.num_gpus, machine.assumed.gpus_per_machine)
    return processes * traffic / (machine.assumed.machine_bandwidth * GB)


def _offloaded_traffic(networks: Networks, layout: Layout, steps: int, micro: float) -> float:
    """Bytes of all processes between GPU and machine: gradients in each micro-batch, and weights twice in
    each where they are divided, else once a step."""
    width, trained = stored_width(networks, layout), networks.trained_parameters
    weights = 2 * micro * width * networks.both_parameters if layout in SHARDING else steps * width * trained
    return micro * width * trained + weights


def _copied(num_bytes: float, networks: Networks, machine: Machine) -> float:
    """Seconds in which each process copies its share of them between its GPU and the machine."""
    if not networks.offload:
        return 0.0
    return num_bytes / machine.num_gpus / (machine.assumed.host_link * GB)


def _exchange(num_bytes: float, machine: Machine) -> float:
    """Seconds to pass on bytes in a ring: each GPU sends all but its own share."""
    n = machine.num_gpus
    return num_bytes * (n - 1) / n / machine.link


def _flops(networks: Networks, *, logits: bool) -> float:
    return networks.policy.forward_flops(networks.longest, networks.settings.response_length, logits=logits)


def _micro_batches(networks: Networks, machine: Machine) -> int:
    """Passes over one GPU's rows of an update."""
    settings = networks.settings
    tokens = networks.longest + settings.response_length
    rows = settings.rollout_batch_size / machine.num_gpus
    steps = settings.num_mini_batches
    return steps * math.ceil(rows / steps / max(1, settings.micro_batch_tokens // tokens))
