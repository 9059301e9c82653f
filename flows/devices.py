"""The GPUs of this machine that a run may give to its stages, as `nvidia-smi` lists them. No torch here.

Their names are UUIDs, which are unique among machines: containers renumber GPUs.
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
GPU = re.compile(r"^GPU (\d+):.*\(UUID: (\S+)\)", re.MULTILINE)
ANSWER_SECONDS = 120.0  # without a process on it, a GPU takes a while to wake up


def variables(gpus: Sequence[str]) -> dict[str, str]:
    """What lets a program see these GPUs alone; empty for none, so that it sees those of this process.

    They are given by their numbers, since vLLM takes no UUIDs (its issue 41848). Where a GPU is in MIG mode,
    CUDA counts otherwise, and they are given by UUID.
    """
    if not gpus:
        return {}
    listing = _listing()
    numbers = {uuid: number for number, uuid in GPU.findall(listing)}
    if "MIG" in listing or not numbers.keys() >= set(gpus):
        return {VISIBLE: ",".join(gpus)}
    return {VISIBLE: ",".join(numbers[gpu] for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def visible(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that this process may use: those that exist, restricted by CUDA_VISIBLE_DEVICES.

    The list is empty where there is no `nvidia-smi`, or no GPU. An instance of a GPU in MIG mode is one only
    if CUDA_VISIBLE_DEVICES names it.

    Raises UserError if `nvidia-smi` does not answer.
    """
    chosen = environment.get(VISIBLE)
    gpus = [] if chosen == "" else GPU.findall(_listing())
    if not chosen:
        return [uuid for _, uuid in gpus]
    found = list[str]()
    for entry in filter(None, map(str.strip, chosen.split(","))):  # an index, or the beginning of a UUID
        matching = [uuid for number, uuid in gpus if entry == number or uuid.startswith(entry)]
        if not matching and not entry.startswith("MIG-"):
            break  # CUDA, too, ignores an unknown entry and all that follow
        found.append(next(iter(matching), entry))
    return list(dict.fromkeys(found))


def _listing() -> str:
    """What `nvidia-smi -L` prints; empty where there is no such program. Errors as in `visible`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=False
        )
        problem = f"fails with status {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}"
    except subprocess.TimeoutExpired:
        done, problem = None, f"does not answer within {ANSWER_SECONDS:.0f} s"
    if done is None or done.returncode not in (0, *NONE_HERE):
        raise UserError(
            f"`nvidia-smi -L` {problem}, so that no GPU can be chosen; repair the driver, or set "
            "CUDA_VISIBLE_DEVICES to an empty text to work without GPUs"
        )
    return done.stdout
