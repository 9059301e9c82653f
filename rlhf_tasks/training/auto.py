"""What `auto` stands for on this machine: `launch.precision` and `micro_batch_tokens`. No torch at import.

It depends on the machine and on the model's shape, and never on a timing: the same ones give the same value.
A stage takes what inputs/STAGE.json records of it.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from rlhf_tasks import config, console
from rlhf_tasks.config import VIEWS, Config, Stage
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.config.types import AUTO
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, inputs, packaged
from rlhf_tasks.project.paths import Paths

TRAINED: tuple[Stage, ...] = ("base", "sft", "reward", "dpo", "value", "ppo")
"""The stages that train, which may have several processes: the `micro_batch_tokens` of each may be `auto`."""
KEYS = (PRECISION, *(f"{section}.micro_batch_tokens" for section in TRAINED))
AMPERE = 8  # the first compute capability whose matrix units compute in bfloat16
CPUINFO, AMX = Path("/proc/cpuinfo"), "amx_bf16"  # the flag of a CPU that has such units
LEAST_WIDTH = 512  # of a model that gains by AMX: its passes take 0.7 of the time of float32, those of 64 1.1
MOST_TOKENS = {"cpu": 4096, "cuda": 65_536}  # beyond these a pass gets no faster
LEAST_TOKENS = 256
LARGE = (4096, 32, 14_336)  # of a model whose shape is not known: Llama 3 8B's
ACTIVATIONS_SHARE = 1 / 8  # of the device's memory; weights, moments and caches need the rest
SHARDED_SHARE = 1 / 4  # where GPUs share the weights: each pass exchanges all of them …
MANY_SHARDS = 4  # … and so many leave room
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


# ---------------------------------------------------------------------------------------- the parameters


def keys(settings: Config) -> list[str]:
    """The parameters that are `auto`."""
    values = config.in_force(settings)
    return [key for key in KEYS if values[key] == "auto"]


def resolve(
    settings: Config, root: Path, recorded: Mapping[str, Any] | None = None, needed: Collection[str] = KEYS
) -> Config:
    """The parameters with what `auto` stands for: values `recorded` by dotted key, else this machine's.

    Only those `needed`: where a machine has GPUs, to ask for them takes as long as loading torch.
    """
    known, launch, changed = recorded or {}, settings.launch, dict[str, Any]()
    if launch.precision == "auto" and PRECISION in needed:
        number_format = known.get(PRECISION) or choose_precision(settings, root)
        changed["launch"] = launch = launch.model_copy(update={"precision": number_format})
    for name in TRAINED:
        section, key = getattr(settings, name), f"{name}.micro_batch_tokens"
        if section.micro_batch_tokens == AUTO and key in needed:
            if (tokens := known.get(key)) is None:
                is_known = launch.precision != "auto"  # not in stage report, which computes nothing itself
                number_format = launch.precision if is_known else choose_precision(settings, root)
                tokens = choose_tokens(settings, root, number_format, name)
            changed[name] = section.model_copy(update={"micro_batch_tokens": tokens})
    return settings.model_copy(update=changed)


def write_inputs(paths: Paths, settings: Config) -> None:
    """Write inputs/STAGE.json of every stage, with what `auto` stands for; errors as in `inputs.write`."""
    sizes = {key for key in keys(settings) if key != PRECISION}
    inputs.write(paths, resolve(settings, paths.root), sizes)


def resolve_for(paths: Paths, stage: Stage, settings: Config, *, check: bool = True) -> Config:
    """The parameters with what inputs/STAGE.json records for `auto`; without the file, what it is here.

    `check`: whether the file must hold what the stage would read now. So a stage and its record agree.

    Raises:
        UserError: if something has changed since the file was written.
    """
    record = inputs.read_record(paths, stage)
    needed = VIEWS[stage].of(settings).declared
    values = resolve(settings, paths.root, None if record is None else record.values, needed)
    if record is None or not check:
        return values
    now = inputs.collect(paths, stage, VIEWS[stage].of(values).declared)
    if now != record:
        raise UserError(
            f"{inputs.differences(record.flat(), now.flat())} changed since "
            f"{paths.relative(paths.inputs(stage))} was written, and the stage's record would be wrong; run "
            f"`dvc repro`, or `rlhf inputs` before `rlhf {stage}`"
        )
    return values


def choose_precision(settings: Config, root: Path) -> Literal["fp32", "bf16"]:
    """What `launch.precision: auto` stands for: bf16 where the machine has units for it, and fp32 elsewhere.

    All GPUs that this process may use must have them, or without a GPU the CPU. On a CPU the model must also
    be wide enough to gain (one of the hub counts as wide), and not sharded: shards would have weights in 16
    bits, and not only matmuls.
    """
    if found := gpus():
        return "bf16" if min(gpu.major for gpu in found) >= AMPERE else "fp32"
    if settings.launch.parallelism != "ddp" or not cpu_has_amx():
        return "fp32"
    width, *_ = _shape(settings, root, "sft") or LARGE
    return "bf16" if width >= LEAST_WIDTH else "fp32"


def choose_tokens(settings: Config, root: Path, number_format: str, section: str = "sft") -> int:
    """What `micro_batch_tokens: auto` stands for here in a section of params.yaml, by its model.

    A hub id counts as a model of eight billion parameters: nothing is fetched here, and the value must not
    change once the model is in the cache.
    """
    memory = min((gpu.total_memory for gpu in gpus()), default=None)
    hidden, layers, intermediate = _shape(settings, root, section) or LARGE
    width = 2 if number_format == "bf16" else 4
    a_token = width * layers * (9 * hidden + 3 * intermediate)  # in and out of all linear layers, at most
    if memory is None:
        return fit_tokens(machine_memory(), a_token, MOST_TOKENS["cpu"])
    if section in ("value", "ppo") and settings.ppo.gradient_checkpointing:
        a_token = checkpointed_bytes(a_token, hidden, layers)
    return fit_tokens(memory, a_token, is_sharded=settings.launch.num_shards >= MANY_SHARDS)


def checkpointed_bytes(of_token: int, hidden: int, layers: int) -> int:
    """A token's activations where layers keep their float32 input alone, and one at a time all of its own."""
    return 4 * layers * hidden + of_token // layers


def fit_tokens(
    memory: float, bytes_of_a_token: int, most: int = MOST_TOKENS["cuda"], *, is_sharded: bool = False
) -> int:
    """The tokens whose activations fill an eighth of the memory in bytes, or a quarter beside shards: a power
    of two, so that machines of about the same memory agree."""
    tokens = int((SHARDED_SHARE if is_sharded else ACTIVATIONS_SHARE) * memory / bytes_of_a_token)
    return max(LEAST_TOKENS, min(most, 1 << max(tokens.bit_length() - 1, 0)))


def _shape(settings: Config, root: Path, section: str) -> tuple[int, int, int] | None:
    """Width, layers and width of the MLP of the model of a section; None if no file tells them."""
    source, scratch = None if section == "base" else settings.sft.source, settings.model.scratch
    if source is None and scratch is not None:
        return scratch.hidden_size, scratch.num_layers, 4 * scratch.hidden_size
    source = settings.model.base if source is None else source
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


# ------------------------------------------------------------------------------------------- the machine


def cpu_has_amx() -> bool:
    """Whether the CPU has matrix units for bfloat16, by what Linux says of it; False on other systems."""
    with suppress(OSError):
        return AMX in CPUINFO.read_text(encoding="utf-8").split()
    return False


def gpus() -> list[Any]:
    """What torch says of each NVIDIA GPU that this process may use; it opens none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # torch takes seconds to load, and would find none without NVIDIA's driver
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0  # the driver may be too old
    return [torch.cuda.get_device_properties(number) for number in range(count)]


def unusable_gpus() -> str | None:
    """Why torch can use none of this machine's GPUs; None where it can, or where none is here or wanted."""
    is_wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
    if gpus() or not is_wanted or not any(Path("/dev").glob("nvidia[0-9]*")):
        return None
    import torch

    if torch.version.cuda is None:  # a build for CPUs was chosen
        return None
    return (
        f"torch {torch.__version__} can use no GPU of this machine: the driver may be too old (CUDA 13 needs "
        "580), or CUDA_VISIBLE_DEVICES names none. Update it, or install another build by `make TORCH=…`"
    )


def machine_memory() -> int:
    """The bytes of memory that this machine has, or its container may use."""
    limits = [int(psutil.virtual_memory().total)]
    for file in map(Path, CGROUP_LIMITS):
        with suppress(OSError, ValueError):  # no such file, or `max`
            limits.append(int(file.read_text(encoding="ascii")))
    return min(limits)


def free_memory() -> int:
    """The bytes of memory that this process can still take, in its container too."""
    left = machine_memory() - int(psutil.Process().memory_info().rss)
    return min(int(psutil.virtual_memory().available), left)
