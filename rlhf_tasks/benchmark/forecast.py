"""How fast PPO would be on GPUs that are not here, from arithmetic and memory traffic.

A pass over whole rows takes its FLOPs over the matrix rate. A step of sampling reads all weights and the
cache of all rows, and takes the longer of that and its FLOPs. No layer takes less than a fixed time. To this
come the bytes that GPUs exchange (arXiv 1910.02054, section 7): 2 bytes over the link for each byte of a
gradient, and under FSDP2 and ZeRO-3 all weights again in each pass.

Q query · R response · T = Q + R.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_tasks.benchmark.footprint import (
    FP32,
    LAYOUTS,
    SHARDING,
    Footprint,
    Layout,
    Networks,
    footprint,
)
from rlhf_tasks.benchmark.gpus import GB, Assumptions, Gpu

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The GPUs of a plan, and what is assumed of them."""

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

    @property
    def total(self) -> float:
        return self.generate + self.score + self.train


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model on one number of GPUs; `layout` is None where none fits, and `problem` names the reason."""

    parameters: int
    trained_parameters: int
    num_gpus: int
    layout: Layout | None
    memory: Footprint
    """Of the layout that fits; else of the one that needs least."""
    seconds: Seconds | None
    episodes_per_second: float | None
    cost_per_million_episodes: float | None
    problem: str | None
    least_gpus: int | None
    """The smallest number of GPUs that fits the models and divides the batch; None: no number does."""

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def plan(networks: Networks, machine: Machine, price: float) -> Plan:
    """The first layout that fits, with its speed and its cost; `price` is per GPU and hour."""
    layout = fitting(networks, machine)
    given: dict[str, Any] = {
        "parameters": networks.policy.parameters, "trained_parameters": networks.trained_parameters,
        "num_gpus": machine.num_gpus, "least_gpus": _least(networks, machine),
    }  # fmt: skip
    if layout is None:
        found = [footprint(networks, each, machine.num_gpus) for each in _candidates(networks, machine)]
        smallest = min(found or [footprint(networks, "ddp", 1)], key=lambda one: one.peak)
        return Plan(
            **given, layout=None, memory=smallest, seconds=None, episodes_per_second=None,
            cost_per_million_episodes=None, problem=_problem(networks, machine),
        )  # fmt: skip
    seconds = update_seconds(networks, machine, layout)
    speed = networks.settings.rollout_batch_size / seconds.total
    cost = machine.num_gpus * price * MILLION / speed / 3600
    return Plan(
        **given, layout=layout, problem=None, seconds=seconds,
        memory=footprint(networks, layout, machine.num_gpus), episodes_per_second=speed,
        cost_per_million_episodes=cost,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ layouts


def fitting(networks: Networks, machine: Machine) -> Layout | None:
    """The first layout that fits into the usable memory of each GPU."""
    for layout in _candidates(networks, machine):
        if footprint(networks, layout, machine.num_gpus).peak <= machine.usable:
            return layout
    return None


def _candidates(networks: Networks, machine: Machine) -> Iterator[Layout]:
    """The layouts of this number of GPUs; none if it does not divide the batches."""
    if _dividend(networks) % machine.num_gpus == 0:
        yield from (each for each in LAYOUTS if (each == "single") == (machine.num_gpus == 1))


def _batches(networks: Networks) -> tuple[int, int]:
    """The rows of an optimiser step, and the prompts of a rollout."""
    settings = networks.settings
    rows = settings.rollout_batch_size
    return rows // settings.num_mini_batches, rows // settings.samples_per_prompt


def _dividend(networks: Networks) -> int:
    """The greatest number that divides both batches; the number of GPUs must divide it."""
    return math.gcd(*_batches(networks))


def _least(networks: Networks, machine: Machine) -> int | None:
    whole = _dividend(networks)
    for count in (n for n in range(1, whole + 1) if whole % n == 0):
        fewer = Machine(gpu=machine.gpu, num_gpus=count, assumed=machine.assumed)
        if fitting(networks, fewer) is not None:
            return count
    return None


def _problem(networks: Networks, machine: Machine) -> str:
    (rows, prompts), n = _batches(networks), machine.num_gpus
    if rows % n:
        return f"{rows} rows of an optimiser step are not divisible by {n} GPUs"
    if prompts % n:
        return f"{prompts} prompts of a rollout are not divisible by {n} GPUs"
    return f"no layout fits into {machine.usable / 1e9:.0f} GB on {n} GPU{'s' if n > 1 else ''}"


# -------------------------------------------------------------------------------------------- speed


def update_seconds(networks: Networks, machine: Machine, layout: Layout) -> Seconds:
    """The seconds of one update."""
    gathered = networks.passes_width * networks.policy.parameters if layout in SHARDING else 0
    generate = _generate(networks, machine) + _exchange(gathered, machine)
    return Seconds(
        generate=generate, score=_score(networks, machine, layout),
        train=_train(networks, machine, layout),
    )  # fmt: skip


def _generate(networks: Networks, machine: Machine) -> float:
    """A pass over the queries, and one step for each further token of the responses."""
    policy, settings, width = networks.policy, networks.settings, networks.passes_width
    rows = settings.rollout_batch_size / machine.num_gpus
    rate, bandwidth = machine.rate(networks.is_bf16), machine.bandwidth
    query, response, batch = networks.longest, settings.response_length, settings.sampling_batch_size
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
    critics = int(settings.value_model == "separate")
    heads, trunks = 1 + networks.is_bf16, networks.num_scoring + critics
    passes = (heads + trunks) * _micro_batches(networks, machine)
    rows = settings.rollout_batch_size / machine.num_gpus
    seconds = rows * (heads * whole + trunks * trunk) / machine.rate(networks.is_bf16)
    gathers = passes if layout in SHARDING else 0
    return max(seconds, passes * policy.layers * machine.assumed.layer_seconds) + _exchange(
        gathers * networks.passes_width * policy.parameters, machine
    )


def _train(networks: Networks, machine: Machine, layout: Layout) -> float:
    """All epochs: three forward passes' arithmetic in each pass, four with recomputation."""
    settings, policy = networks.settings, networks.policy
    critics = int(settings.value_model == "separate")
    row = _flops(networks, logits=True) * (1 + (settings.ptx is not None))
    row += critics * _flops(networks, logits=False)
    times = (3 + settings.gradient_checkpointing) * settings.num_ppo_epochs
    rows = settings.rollout_batch_size / machine.num_gpus
    seconds = times * rows * row / machine.rate(networks.is_bf16)
    micro = settings.num_ppo_epochs * _micro_batches(networks, machine)
    least = 3 * micro * (1 + critics) * policy.layers * machine.assumed.layer_seconds
    steps = settings.num_ppo_epochs * settings.num_mini_batches
    optimiser = steps * _optimiser_bytes(networks, machine, layout) / machine.bandwidth
    return max(seconds, least) + optimiser + _train_exchange(networks, machine, layout, steps, micro)


def _train_exchange(networks: Networks, machine: Machine, layout: Layout, steps: int, micro: float) -> float:
    """DDP reduces gradients once a step, the others in each micro-batch, and FSDP2 in float32. Divided
    weights are gathered twice in each micro-batch. ZeRO-2 gathers the changed weights after a step."""
    if machine.num_gpus == 1:
        return 0.0
    both = networks.policy.parameters + networks.critic_parameters
    width = FP32 if layout in ("ddp", "fsdp2") else networks.passes_width
    if layout in SHARDING:
        gathers = 2 * networks.passes_width * both
        return _exchange(micro * (gathers + width * networks.trained_parameters), machine)
    times = micro + steps if layout == "zero2" else 2 * steps
    return _exchange(times * width * networks.trained_parameters, machine)


def _optimiser_bytes(networks: Networks, machine: Machine, layout: Layout) -> float:
    """AdamW reads weight, gradient and two moments, and writes three of them."""
    share = 1 if layout in ("single", "ddp") else machine.num_gpus
    return 7 * FP32 * networks.trained_parameters / share


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
