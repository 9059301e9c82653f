"""Commands before a run: `rlhf preset`, `params`, `check-model`, `plan`."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import typer
from typer import Argument, Option

from rlhf_tasks import config, console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import packaged

GPUS = {"l4": 24.0, "l40s": 48.0, "a100": 80.0, "h100": 80.0, "h200": 141.0}
"""GB of memory, as published."""
FILE = Path("params.yaml")


def above_zero(value: float | None) -> float | None:
    """Check an option that is a finite number above 0, or is not given."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be above 0 (given: {value})")
    return value


def preset(
    names: list[str] | None = Argument(None, metavar="NAME", help="presets to apply; later ones override"),
    values: list[str] | None = Option(
        None, "--set", metavar="KEY=VALUE", help="a value, such as ppo.kl_coef=0.05"
    ),
) -> int:
    """Change params.yaml by presets or single values, and keep its comments. Alone, list all presets."""
    from rlhf_tasks import presets
    from rlhf_tasks.project import git

    given = [name for name in names or () if "=" not in name]
    changes = [*(values or ()), *(name for name in names or () if "=" in name)]
    if not given and not changes:
        console.table("presets", ["name", "what it is"], [[n, presets.summary(n)] for n in presets.names()])
        return 0
    if any(change.partition("=")[0].strip() == "preset" for change in changes):
        raise UserError("preset is what `rlhf preset NAME` writes; give the preset's name without --set")
    changed = presets.apply(given, FILE, changes)
    count = f"{len(changed)} value{'s' * (len(changed) != 1)}"
    console.say("\n  ".join([f"{FILE}: {count} changed", *changed]))
    if given:
        with suppress(UserError):  # there is no commit, or its file is not valid
            _, alone, _ = presets.combine(git.show(Path(), "HEAD", str(FILE)), given, changes)
            remaining = config.differences(config.in_force(alone), config.in_force(config.load(FILE)))
            again = "`git checkout params.yaml` first, if you do not want that"
            if remaining:
                title = f"Earlier changes since the last commit remain ({again}):"
                console.say("\n  ".join([title, *remaining]))
    return 0


def params() -> int:
    """Print all values in force, and whether each is from params.yaml or a default.

    What `auto` stands for is that of this machine.
    """
    from rlhf_tasks.training import auto

    given = config.parse(config.read_text(FILE), str(FILE))
    settings = config.validate(given, str(FILE))
    keys, here = auto.keys(settings), config.in_force(auto.resolve(settings, Path()))
    rows = []
    for key, value in here.items():
        source = str(FILE) if config.is_given(given, key) else "default"
        rows.append([key, config.in_yaml(value), f"{source}: auto" if key in keys else source])
    console.table("values in force", ["key", "value", "from"], rows)
    return 0


def check_model(
    model: str = Argument(
        ..., metavar="MODEL", help="a checkpoint folder, a GGUF file, or OWNER/NAME@COMMIT of the hub"
    ),
) -> int:
    """Check that sampling and training give the same log-probs on random prompts.

    Print a table, and end with status 2 if the model is not fit for PPO. Stage ppo makes the same check. For
    a reward model, compare its scores instead.
    """
    source, _, revision = model.partition("@") if not Path(model).exists() else (model, "", "")
    if not Path(packaged.locate(source)).exists() and not config.is_hub_id(source):
        raise UserError(
            f"{model}: there is no such folder or file, and it is not a hub model; give a checkpoint folder, "
            "a GGUF file or OWNER/NAME@COMMIT"
        )
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # saving imports DeepSpeed, which would look for a GPU
    from rlhf_tasks.training import signals

    with signals.listening("check-model"), console.part(f"checking {source}"):  # and says what it does
        from rlhf_tasks.data import positions
        from rlhf_tasks.models import checks
        from rlhf_tasks.models.load import load_config

        results = checks.check_source(source, revision or None)
    rows = [(r.name, r.deviation, r.tolerance, "passed" if r.passed else "FAILED") for r in results]
    console.table(source, ["check", "largest difference", "rounding allows", "result"], rows)
    failed = [result for result in results if not result.passed]
    for result in failed:
        console.say(str(result))
    bound = min(positions.batch_bounds(load_config(source, revision or None)), default=None)
    if bound is not None:
        console.say(
            f"above {bound} tokens of prompt plus response, a row's log-probs depend on the other rows; "
            "stage ppo refuses longer texts"
        )
    console.say(f"{source} is {'not fit' if failed else 'fit'} for PPO")
    return 2 if failed else 0


def plan(
    gpus: str = Option("1,8,16", metavar="N,…", help="numbers of GPUs, such as 1,8,16"),
    gpu: Literal["l4", "l40s", "a100", "h100", "h200"] = Option("h100", help="kind of GPU"),
    memory: float | None = Option(
        None, metavar="GB", callback=above_zero, help="memory of a GPU of another kind"
    ),
    machine_memory: float = Option(
        2000.0, metavar="GB", callback=above_zero, help="memory of a machine, for launch.offload"
    ),
    model: str | None = Option(
        None, help="plan for the model of this folder, GGUF file or hub id, in place of params.yaml's"
    ),
    as_json: bool = Option(False, "--json", help="print JSON instead of a table"),
) -> int:
    """Calculate the memory of PPO as params.yaml has it, and the first settings that fit; run nothing."""
    from rlhf_tasks.training import memory_plan

    settings = config.load()
    if not settings.ppo.train:
        raise UserError(
            "ppo.train is false, and `rlhf plan` calculates the memory of PPO only, not that of stage dpo; "
            "set ppo.train to true to plan PPO of this model"
        )
    if not re.fullmatch("[1-9][0-9]*(,[1-9][0-9]*)*", gpus):
        raise UserError(f"--gpus {gpus} is not a list of numbers above 0; give one such as 1,8,16")
    size = memory or GPUS[gpu]
    policy = memory_plan.sizes_of_config(memory_plan.config_of_params(settings, Path(), model))
    plans: dict[int, dict[str, Any]] = {}
    for number in map(int, gpus.split(",")):
        run = memory_plan.Run.of_params(settings, policy, number, size * memory_plan.GB)
        plans[number] = memory_plan.describe(run, size * memory_plan.GB, machine_memory * memory_plan.GB)
    if as_json:
        counts = {"parameters": policy.parameters, "trained, with the critic": run.trained}
        print(json.dumps({**counts, "memory_gb": size, "plans": plans}, indent=2))
        return 0

    def cell(value: Any) -> str:
        return (
            f"{value:,}" if isinstance(value, float) else {True: "yes", False: "no"}.get(value, value or "-")
        )

    rows = [[name, *(cell(one[name]) for one in plans.values())] for name in plans[number]]
    title = f"PPO of {policy.parameters:,} parameters, {run.trained:,} trained, on GPUs of {size:g} GB"
    console.table(title, ["GPUs", *map(str, plans)], rows)
    if settings.dpo.train:
        console.say("this is PPO only: stage dpo, which has no critic, is not planned")
    return 0
