"""The GPUs of this machine that a run may give to its stages, by the names that CUDA knows. No torch here.

`nvidia-smi` lists them: a GPU by its UUID, and in place of a GPU in MIG mode its instances, since a process
uses one instance at most. UUIDs are unique among machines, and containers number their GPUs anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping

from rlhf_tasks.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE_HERE = (6, 9)  # exit statuses of nvidia-smi: no device is found, no driver is loaded
ANSWER_SECONDS = 120.0  # without a process on it, a GPU takes a while to wake up
LINE = re.compile(r"(GPU \d+:|\s+MIG ).*\(UUID: (\S+)\)")


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The devices that this process may use: those that exist, restricted by CUDA_VISIBLE_DEVICES.

    A device is a GPU or an instance of one. The list is empty where there is no `nvidia-smi`, or no GPU.

    Raises:
        UserError: if `nvidia-smi` does not answer.
    """
    chosen = environment.get(VISIBLE)
    gpus = [] if chosen == "" else _listed()
    if chosen is None:
        return [device for gpu in gpus for device in gpu[1:] or gpu]
    # An entry is an index, or the beginning of a UUID. For a GPU in MIG mode CUDA takes its first instance.
    names = [(str(index), gpu[0], gpu[1] if gpu[1:] else gpu[0]) for index, gpu in enumerate(gpus)]
    names += [("", instance, instance) for gpu in gpus for instance in gpu[1:]]
    found = list[str]()
    for entry in filter(None, map(str.strip, chosen.split(","))):
        matching = [device for index, uuid, device in names if entry == index or uuid.startswith(entry)]
        if not matching:
            break  # CUDA, too, ignores an unknown entry and all that follow
        found.append(matching[0])
    return list(dict.fromkeys(found))


def _listed() -> list[list[str]]:
    """Per GPU, in the order of their indices: its UUID, and those of its MIG instances."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        words, seconds = [program, "-L"], ANSWER_SECONDS
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
        problem = f"fails with status {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}"
    except subprocess.TimeoutExpired:
        done, problem = None, f"does not answer within {ANSWER_SECONDS:.0f} s"
    if done is None or done.returncode not in (0, *NONE_HERE):
        raise UserError(
            f"`nvidia-smi -L` {problem}, so that no GPU can be chosen; repair the driver, or set "
            "CUDA_VISIBLE_DEVICES to an empty text to work without GPUs"
        )
    gpus = list[list[str]]()
    for found in filter(None, map(LINE.match, done.stdout.splitlines() if done.returncode == 0 else [])):
        if found[1].startswith("GPU"):
            gpus.append([found[2]])
        else:
            gpus[-1].append(found[2])
    return gpus
