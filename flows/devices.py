"""The GPUs of this machine that a run may give to its stages, by the names that CUDA knows. No torch here.

`nvidia-smi` lists them: a GPU by its UUID, and in place of a GPU in MIG mode its instances, since a process
uses one instance at most. UUIDs are unique among machines, and containers number their GPUs anew.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from rlhf_tasks.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE_HERE = (6, 9)  # exit statuses of nvidia-smi: no device is found, no driver is loaded
ANSWER_SECONDS = 120.0  # without a process on it, a GPU takes a while to wake up
GPU = re.compile(r"GPU \d+: .*\(UUID: (\S+)\)")
INSTANCE = re.compile(r"\s+MIG .*\(UUID: (\S+)\)")


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The devices that this process may use: those that exist, restricted by CUDA_VISIBLE_DEVICES.

    A device is a GPU or an instance of one. The list is empty where there is no `nvidia-smi`, or no GPU.

    Raises:
        UserError: if `nvidia-smi` does not answer.
    """
    chosen = environment.get(VISIBLE)
    if chosen == "":
        return []
    gpus = _listed()
    if chosen is None:
        return [device for gpu in gpus for device in gpu[1:] or gpu]
    found = list[str]()
    for entry in chosen.split(","):
        device = _named(entry.strip(), gpus)
        if device is None:
            break  # CUDA, too, ignores an unknown entry and all that follow
        found.append(device)
    return list(dict.fromkeys(found))


def _listed() -> list[list[str]]:
    """Per GPU, in the order of their indices: its UUID, and those of its MIG instances."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        words = [program, "-L"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`nvidia-smi -L` does not answer within {ANSWER_SECONDS:.0f} s, so that no GPU can be chosen; "
            "repair the driver, or set CUDA_VISIBLE_DEVICES to an empty text to work without GPUs"
        ) from None
    if done.returncode not in (0, *NONE_HERE):
        raise UserError(
            f"`nvidia-smi -L` fails with status {done.returncode}, so that no GPU can be chosen: "
            f"{(done.stdout + done.stderr).strip()[:200]}; repair the driver, or set CUDA_VISIBLE_DEVICES "
            "to an empty text to work without GPUs"
        )
    gpus = list[list[str]]()
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        if gpu := GPU.match(line):
            gpus.append([gpu[1]])
        elif instance := INSTANCE.match(line):
            gpus[-1].append(instance[1])
    return gpus


def _named(entry: str, gpus: Sequence[Sequence[str]]) -> str | None:
    """The device of an entry of CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID.

    For a GPU in MIG mode it is the first instance, which is the one that CUDA takes.
    """
    for index, (gpu, *instances) in enumerate(gpus):
        if entry == str(index) or (entry and gpu.startswith(entry)):
            return instances[0] if instances else gpu
        for device in instances:
            if entry and device.startswith(entry):
                return device
    return None
