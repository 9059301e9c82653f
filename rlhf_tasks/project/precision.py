"""What `auto` stands for on this machine: `launch.precision` and `micro_batch_tokens`. No torch here.

It depends on the machine and on the model's shape, and never on a timing: the same ones give the same value.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from rlhf_tasks import console
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, packaged
from rlhf_tasks.project.paths import Paths

DRIVER = "libcuda.so.1"  # NVIDIA's driver, which sees the devices of CUDA_VISIBLE_DEVICES only
CAPABILITY_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
AMPERE = 8  # the first compute capability whose matrix units compute in bfloat16
CPUINFO, AMX = Path("/proc/cpuinfo"), "amx_bf16"  # the flag of a CPU that has such units
LEAST_WIDTH = 512  # of a model that gains by AMX: its passes take 0.7 of the time of float32, those of 64 1.1
MOST_TOKENS = {"cpu": 4096, "cuda": 65_536}  # beyond these a pass gets no faster
LEAST_TOKENS = 256
LARGE = (4096, 32, 14_336)  # of a model whose shape is not known: Llama 3 8B's
ACTIVATIONS_SHARE = 1 / 8  # of the device's memory; weights, moments and caches need the rest
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def resolve(config: Config, root: Path) -> Literal["fp32", "bf16"]:
    """`launch.precision`; `auto` is bf16 where the machine computes in it, and fp32 elsewhere.

    On a CPU the model must also be wide enough to gain (one of the hub counts as wide), and not sharded:
    shards would have weights in 16 bits, and not only matmuls.
    """
    if config.launch.precision != "auto":
        return config.launch.precision
    if not computes_in_bf16():
        return "fp32"
    is_ddp, (width, *_) = config.launch.parallelism == "ddp", _shape(config, root, "sft") or LARGE
    return "bf16" if gpu_capabilities() or (is_ddp and width >= LEAST_WIDTH) else "fp32"


def computes_in_bf16() -> bool:
    """Whether all GPUs that this process may use have units for bfloat16, or without a GPU the CPU."""
    return min(gpu_capabilities(), default=AMPERE if cpu_has_amx() else 0) >= AMPERE


def micro_batch_tokens(
    config: Config, root: Path, number_format: Literal["fp32", "bf16"], section: str = "sft"
) -> int:
    """What `micro_batch_tokens: auto` stands for here in a section of params.yaml, by its model.

    A hub id counts as a model of eight billion parameters: nothing is fetched here, and the value must not
    change once the model is in the cache.
    """
    gpus = gpu_memories()
    most = MOST_TOKENS["cuda" if gpus else "cpu"]
    hidden, layers, intermediate = _shape(config, root, section) or LARGE
    numbers = layers * (9 * hidden + 3 * intermediate)  # in and out of all linear layers, at most
    a_token = numbers * (2 if number_format == "bf16" else 4)
    return tokens_that_fit(min(gpus) if gpus else machine_memory(), a_token, most)


def tokens_that_fit(memory: float, bytes_of_a_token: int, most: int = MOST_TOKENS["cuda"]) -> int:
    """The tokens whose activations fill an eighth of the memory in bytes: a power of two, so that machines
    of about the same memory agree."""
    tokens = int(ACTIVATIONS_SHARE * memory / bytes_of_a_token)
    return max(LEAST_TOKENS, min(most, 1 << max(tokens.bit_length() - 1, 0)))


def _shape(config: Config, root: Path, section: str) -> tuple[int, int, int] | None:
    """Width, layers and width of the MLP of the model of a section; None if no file tells them."""
    source, scratch = None if section == "base" else config.sft.source, config.model.scratch
    if source is None and scratch is not None:
        return scratch.hidden_size, scratch.num_layers, 4 * scratch.hidden_size
    source = config.model.base if source is None else source
    # Whoever loads the model says what is wrong with it, also that the package gguf is missing.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, UserError):
        if source.endswith(".gguf"):
            return _shape_of_gguf(root / packaged.locate(source), Paths(root).home / "gguf.json")
        file = root / source / "config.json"
        known: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        known = known.get("text_config", known)
        hidden = known.get("hidden_size") or known["n_embd"]
        intermediate = known.get("intermediate_size") or known.get("n_inner") or 4 * hidden
        return int(hidden), int(known.get("num_hidden_layers") or known["n_layer"]), int(intermediate)
    return None


def _shape_of_gguf(file: Path, cache: Path) -> tuple[int, int, int]:
    """`_shape` of a GGUF file, kept in the file `cache`: its reader takes seconds for the vocabulary."""
    stat = file.stat()
    name = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    known: dict[str, list[int]] = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    if name not in known:
        with console.part(f"reading {file.name}"):
            from gguf import GGUFReader

            fields = GGUFReader(file).fields
        family = fields["general.architecture"].contents()
        keys = ("embedding_length", "block_count", "feed_forward_length")
        known[name] = [int(fields[f"{family}.{key}"].contents()) for key in keys]
        atomic.write_json(cache, known)
    hidden, layers, intermediate = known[name]
    return hidden, layers, intermediate


def machine_memory() -> int:
    """The bytes of memory that this machine has, or its container may use."""
    found = [int(psutil.virtual_memory().total)]
    for file in map(Path, CGROUP_LIMITS):
        with suppress(OSError, ValueError):  # no such file, or `max`
            found.append(int(file.read_text(encoding="ascii")))
    return min(found)


def free_memory() -> int:
    """The bytes of memory that this process can still take, in its container too."""
    own = machine_memory() - int(psutil.Process().memory_info().rss)
    return min(int(psutil.virtual_memory().available), own)


def cpu_has_amx() -> bool:
    """Whether the CPU has matrix units for bfloat16, by what Linux says of it; False on other systems."""
    with suppress(OSError):
        return AMX in CPUINFO.read_text(encoding="utf-8").split()
    return False


def gpu_memories() -> list[int]:
    """The bytes of memory of each NVIDIA GPU that torch may use in this process; empty without one."""
    size, gpus = ctypes.c_size_t(), _gpus()
    return [size.value for driver, gpu in gpus if not driver.cuDeviceTotalMem_v2(ctypes.byref(size), gpu)]


def gpu_capabilities() -> list[int]:
    """The major compute capability of each NVIDIA GPU that torch may use in this process."""
    found = []
    for driver, device in _gpus():
        major = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device)
        found.append(major.value)
    return found


def _gpus() -> list[tuple[ctypes.CDLL, ctypes.c_int]]:
    """NVIDIA's driver with each GPU that torch may use in this process."""
    if not _torch_has_cuda():
        return []
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return []
    count, found = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for number in range(count.value):
        device = ctypes.c_int()
        if not driver.cuDeviceGet(ctypes.byref(device), number):
            found.append((driver, device))
    return found


def _torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, by its file version.py; torch itself takes seconds."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders if (file := Path(folder, "version.py")).is_file()]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return any(re.search(r"^cuda\b[^=]*= *['\"]", text, re.MULTILINE) for text in texts)
