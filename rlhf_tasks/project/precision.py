"""The number format that `launch.precision: auto` stands for on this machine. No torch here."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Literal

from rlhf_tasks.config import Precision

DRIVER = "libcuda.so.1"  # NVIDIA's driver, which sees the devices of CUDA_VISIBLE_DEVICES only
CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
AMPERE = 8  # the first compute capability whose matrix units compute in bfloat16


def resolve(precision: Precision) -> Literal["fp32", "bf16"]:
    """`auto` is bf16 if all GPUs that this process may use compute in it, and fp32 elsewhere."""
    if precision != "auto":
        return precision
    capabilities = gpu_capabilities() if _torch_has_cuda() else []
    return "bf16" if capabilities and min(capabilities) >= AMPERE else "fp32"


def gpu_capabilities() -> list[int]:
    """The major compute capability of each NVIDIA GPU that this process may use; empty without one."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for number in range(count.value):
        device, major = ctypes.c_int(), ctypes.c_int()
        if not driver.cuDeviceGet(ctypes.byref(device), number):
            driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
        found.append(major.value)
    return found


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, by its file version.py; torch itself takes seconds."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders if (file := Path(folder, "version.py")).is_file()]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return any(re.search(r"^cuda\b[^=]*= *['\"]", text, re.MULTILINE) for text in texts)
