"""`rlhf plan`: whether PPO fits into GPUs that are not here, and with which settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_tasks import config, console
from rlhf_tasks.cli.arguments import Commands, add_command, positive_float, positive_int

if TYPE_CHECKING:
    from rlhf_tasks.benchmark.fit import Run

GB = 1e9
GPUS: Mapping[str, float] = {"l4": 24, "l40s": 48, "a100": 80, "h100": 80, "h200": 141}
"""GB of memory, as published."""


def add(commands: Commands) -> None:
    plan = add_command(
        commands, "plan", run, "calculate whether PPO fits into GPUs that are not here",
        "Calculate the memory of PPO with the values of params.yaml, and the first settings that fit. "
        "Nothing is run. On a machine that is here, `rlhf bench` measures speed and memory.",
    )  # fmt: skip
    add_option = plan.add_argument
    add_option(
        "--gpus", type=positive_int, nargs="+", default=[1, 8, 16], metavar="N", help="numbers of GPUs"
    )
    add_option("--gpu", choices=GPUS, default="h100", help="kind of GPU (default: h100)")
    add_option("--memory", type=positive_float, metavar="GB", help="memory of a GPU of another kind")
    add_option(
        "--machine-memory", type=positive_float, default=2000.0, metavar="GB",
        help="memory of a machine beside that of its GPUs, for launch.offload (default: 2000)",
    )  # fmt: skip
    add_option("--model", help="plan for the model of this folder or hub id, in place of params.yaml's")
    add_option("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks.benchmark import fit

    settings, gpu = config.load(), options.memory or GPUS[options.gpu]
    policy = fit.sizes_of_params(settings, Path(), options.model)
    found = {}
    for num_gpus in options.gpus:
        own = fit.Run(
            policy=policy,
            ppo=settings.ppo,
            longest=settings.data.max_prompt_tokens,
            num_gpus=num_gpus,
            is_bf16=settings.launch.precision != "fp32",
            has_reward_model=settings.reward.train,
            offload=settings.launch.offload,
        )
        found[num_gpus] = column(own, gpu * GB, options.machine_memory * GB)
    counts = {"parameters": policy.parameters, "trained, with the critic": own.trained}
    if options.json:
        print(json.dumps({**counts, "memory_gb": gpu, "plans": found}, indent=2))
        return 0
    rows = [[name, *(_cell(one[name]) for one in found.values())] for name in found[num_gpus]]
    title = f"PPO of {policy.parameters:,} parameters, {own.trained:,} trained, on GPUs of {gpu:g} GB"
    console.table(title, ["GPUs", *map(str, found)], rows)
    return 0


def column(run: Run, gpu: float, machine: float) -> dict[str, Any]:
    """The settings that fit, and GB by part; of the settings that need least where none fits."""
    from rlhf_tasks.benchmark import fit

    fitting, problem = fit.fitting(run, gpu, machine)
    shown = fitting or min(fit.candidates(run), key=lambda each: fit.memory(each)["peak"])
    parts = {f"GB of {name}": round(size / GB, 2) for name, size in fit.memory(shown).items()}
    return {
        "fits": fitting is not None,
        "problem": problem or None,
        "launch.layout": shown.layout,
        "launch.offload": shown.offload,
        "ppo.gradient_checkpointing": shown.ppo.gradient_checkpointing,
        **parts,
    }


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:,}" if isinstance(value, float) else str(value)
