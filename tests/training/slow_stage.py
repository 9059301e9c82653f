"""Stage sft with phases that take long: `python slow_stage.py PHASE` prints `reached` when it is there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rlhf_tasks.cli import main
from rlhf_tasks.config import Launch, Stage, StageView
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training import launch as launching

PHASE = sys.argv[1]


def say_reached() -> None:
    if os.environ.get("RANK", "0") == "0":  # it prints the messages, too
        print("reached", flush=True)


def compute() -> None:
    """Minutes in one call of C, which no signal interrupts; it says so from within."""
    threading.Timer(0.5, say_reached).start()
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 2**31 - 1)


def run(view: StageView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    if PHASE != "loop":
        subprocess.Popen(["sleep", "600"])  # which is to be ended with the stage
    if PHASE.startswith("load"):
        if PHASE == "load-in-c":
            compute()
        say_reached()
        time.sleep(600)
    from tests import small

    dist = small.distributed()
    with checkpoint.open_snapshots(dist, paths, view, "sft") as snapshots:
        state = snapshots.load()
        begin = 0 if state is None else state["step"]
        for step in range(begin + 1, begin + 600):
            time.sleep(0.3)
            if step == begin + 3:
                if PHASE == "loop-in-c":
                    compute()
                say_reached()
            if snapshots.due() or step == begin + 1:
                snapshots.save(step, {"step": step})
    return {}


if __name__ == "__main__":
    begin = launching.command

    def command(paths: Paths, stage: Stage, launch: Launch, environment: Mapping[str, str]) -> list[str]:
        words = begin(paths, stage, launch, environment)
        return [*words[: words.index("--no_python")], str(Path(__file__).resolve()), PHASE]

    launching.command = command
    runner.module_of = lambda stage: "__main__"
    sys.exit(main.main(["sft"]))
