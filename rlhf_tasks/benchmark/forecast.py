"""A plan of PPO on GPUs that are not here: the first layout that fits, its speed and its cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_tasks.benchmark.footprint import LAYOUTS, Footprint, Layout, Networks, footprint
from rlhf_tasks.benchmark.gpus import GB
from rlhf_tasks.benchmark.speed import Machine, Seconds, engine_gpus, update_seconds

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model on one number of GPUs; `layout` is None where none fits, and `problem` names the reason."""

    parameters: int
    trained_parameters: int
    num_gpus: int
    """Those that train."""
    engine_gpus: int
    """Those that an engine has besides."""
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
    layout, more = fitting(networks, machine), engine_gpus(networks, machine)
    given: dict[str, Any] = {
        "parameters": networks.policy.parameters, "trained_parameters": networks.trained_parameters,
        "num_gpus": machine.num_gpus, "engine_gpus": more, "least_gpus": _least(networks, machine),
    }  # fmt: skip
    if layout is None:
        return Plan(
            **given, layout=None, memory=_smallest(networks, machine)[1], seconds=None,
            episodes_per_second=None, cost_per_million_episodes=None, problem=_problem(networks, machine),
        )  # fmt: skip
    seconds = update_seconds(networks, machine, layout)
    speed = networks.settings.rollout_batch_size / seconds.total
    cost = (machine.num_gpus + more) * price * MILLION / speed / 3600
    return Plan(
        **given, layout=layout, problem=None, seconds=seconds, memory=needs(networks, machine, layout),
        episodes_per_second=speed, cost_per_million_episodes=cost,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ layouts


def fitting(networks: Networks, machine: Machine) -> Layout | None:
    """The first layout that fits into the usable memory of each GPU, and into that of the machine."""
    if engine_gpus(networks, machine) > machine.assumed.gpus_per_machine:
        return None
    for layout in _candidates(networks, machine):
        found = needs(networks, machine, layout)
        if found.peak <= machine.usable and found.machine <= machine.assumed.machine_memory * GB:
            return layout
    return None


def needs(networks: Networks, machine: Machine, layout: Layout) -> Footprint:
    return footprint(networks, layout, machine.num_gpus, machine.assumed.gpus_per_machine)


def _candidates(networks: Networks, machine: Machine) -> Iterator[Layout]:
    """The layouts of this number of GPUs; none if it does not divide the batches."""
    if _dividend(networks) % machine.num_gpus:
        return
    for each in LAYOUTS:
        if networks.offload:  # one process has DeepSpeed's layouts too
            is_possible = each in ("zero2", "zero3") or (each == "fsdp2" and machine.num_gpus > 1)
        else:
            is_possible = (each == "single") == (machine.num_gpus == 1)
        if is_possible:
            yield each


def _smallest(networks: Networks, machine: Machine) -> tuple[Layout, Footprint]:
    """The layout that needs least memory of a GPU."""
    found = [(each, needs(networks, machine, each)) for each in _candidates(networks, machine)]
    none: tuple[Layout, Footprint] = ("ddp", footprint(networks, "ddp", 1))
    return min(found, key=lambda one: one[1].peak, default=none)


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
    more, most = engine_gpus(networks, machine), machine.assumed.gpus_per_machine
    if more > most:
        return f"the engine needs {more} GPUs of one machine, which has {most}"
    layout, found = _smallest(networks, machine)
    if found.peak <= machine.usable:
        return (
            f"{layout} needs {found.machine / GB:,.0f} GB of the machine's memory, which has "
            f"{machine.assumed.machine_memory:,.0f}"
        )
    gpus = f"{n} GPU{'s' if n > 1 else ''}"
    return (
        f"no layout fits into {machine.usable / GB:.0f} GB on {gpus}: {layout} needs {found.peak / GB:,.0f}"
    )
