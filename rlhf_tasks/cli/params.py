"""`rlhf params`: the values in force, and an older params.yaml in the present shape."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.cli.arguments import Commands, add_command

FILE = Path("params.yaml")


def add(commands: Commands) -> None:
    params = add_command(
        commands, "params", run, "print all values in force, and where each is from: params.yaml or a default"
    )
    params.add_argument(
        "--upgrade", action="store_true", help="move the keys of an older params.yaml to their present places"
    )


def run(options: argparse.Namespace) -> int:
    from rlhf_tasks import config
    from rlhf_tasks.config import older
    from rlhf_tasks.project import atomic

    text = config.read_text(FILE)
    given = config.parse(text, str(FILE))
    if options.upgrade:
        tree = config.round_trip().load(text)
        moved = older.upgrade(tree)
        if moved:
            upgraded = config.written(tree)
            config.validate(config.parse(upgraded, f"{FILE}, upgraded,"), f"{FILE}, upgraded,")
            atomic.write_text(FILE, upgraded)
        console.say("\n".join(moved) if moved else f"{FILE} has the present shape: nothing to move")
        return 0
    rows = [
        [key, config.in_yaml(value), str(FILE) if config.is_given(given, key) else "default"]
        for key, value in config.in_force(config.validate(given, str(FILE))).items()
    ]
    console.table("values in force", ["key", "value", "from"], rows)
    return 0
