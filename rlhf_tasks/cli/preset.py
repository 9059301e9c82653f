"""`rlhf preset NAME …`: changes of params.yaml that are shipped."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.cli.arguments import Commands, add_command


def add(commands: Commands) -> None:
    preset = add_command(
        commands, "preset", run, "change params.yaml by presets or single values, and keep its comments"
    )
    preset.add_argument(
        "names", nargs="*", metavar="NAME", help="presets to apply; a later one overrides earlier ones"
    )
    preset.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="values to set by dotted key, such as ppo.kl_coef=0.05; they override the presets",
    )
    preset.add_argument(
        "--list", action="store_true", help="list all presets; `rlhf preset` alone does the same"
    )


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks import presets

    if options.list or not (options.names or options.set):
        rows = [[name, presets.summary(name)] for name in presets.names()]
        console.table("presets", ["name", "what it is"], rows)
        return 0
    changed = presets.apply(options.names, Path("params.yaml"), options.set)
    console.say("params.yaml: " + (", ".join(changed) if changed else "nothing to change"))
    return 0
