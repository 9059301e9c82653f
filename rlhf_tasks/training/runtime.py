"""The runtime of a stage: device, processes, precision, and one optimiser step over micro-batches.

Only this package uses accelerate, DeepSpeed and FSDP2. Rank and world size come from
torch.distributed, because accelerate reports a world size of 1 under DeepSpeed on CPU.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlhf_tasks import console
from rlhf_tasks.config import Launch, Optimization, Ppo, Precision
from rlhf_tasks.data.batches import TokenBudget
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling.products import cpu_has_bf16, round_products, speed_up
from rlhf_tasks.modeling.workers import backward_beside, num_workers, run_beside
from rlhf_tasks.training import sharding
from rlhf_tasks.training.compiling import compile_layers, compiled_layers
from rlhf_tasks.training.launch import ending_orphans
from rlhf_tasks.training.layouts import DeepSpeed, Fsdp2, Layout, Parallel
from rlhf_tasks.training.state import Files

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

PATIENCE = timedelta(hours=2)  # processes wait so long for one with a slow judge; a dead one ends all at once
ROOM = 1.2  # memory that a whole model needs for a check of a few rows, to that of its weights
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


class Runtime:
    """One process of a stage, and its communication with the others."""

    def __init__(self, launch: Launch, seed: int) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault(
                "DS_ACCELERATOR", "cpu"
            )  # else DeepSpeed warns at import that it found no GPU
        keep_freed_memory()
        self.is_float32, self._compiles = not is_bf16(launch.precision), launch.compile
        keeps_float32 = launch.parallelism == "ddp" and not torch.cuda.is_available()
        self._rounds_products = keeps_float32 and not self.is_float32 and cpu_has_bf16()
        self._speeds_up = keeps_float32 and not launch.compile  # torch chooses the library where it compiles
        transformers.utils.logging.disable_progress_bar()  # of milliseconds, among our own bars
        with ending_orphans():
            self.accelerator = Accelerator(
                mixed_precision="no" if keeps_float32 or self.is_float32 else "bf16",
                kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
            )
        self.device: torch.device = self.accelerator.device
        self.is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.is_deepspeed:
            # models are created whole, and ZeRO-3 partitions them in `prepare`: into a model that
            # transformers creates in partitions, load_state_dict would load nothing without an error
            unset_hf_deepspeed_config()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        self._layout, self.shards = self._chosen(launch, is_distributed=distributed)
        self._models: WeakSet[nn.Module] = WeakSet()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def _chosen(self, launch: Launch, *, is_distributed: bool) -> tuple[Layout, bool]:
        """The layout, and whether a process holds only a part of the weights.

        A stage that runs in one process trains nothing, and has no layout.
        """
        self._offload, self._mesh, self._computes_in = launch.offload, None, None
        if self.is_deepspeed:
            layout = DeepSpeed(self.accelerator, self.sum, offload=launch.offload)
            self._mesh = init_device_mesh(self.device.type, (self.world_size,)) if layout.shards else None
            return layout, layout.shards
        if launch.parallelism == "fsdp2" and is_distributed:
            self._mesh = init_device_mesh(self.device.type, (self.world_size,))
            self._computes_in = None if self.is_float32 else torch.bfloat16
            return Fsdp2(self._mesh, self.sum, self.put), True
        return Parallel(self.accelerator), False

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def num_workers(self) -> int:
        """How many threads of this process compute micro-batches at once."""
        if self.world_size > 1 or self.is_deepspeed or self.shards or self._compiles:
            return 1
        return num_workers(self.device, *self._models)

    def generator(self, seed: int) -> torch.Generator:
        """A generator on this device, of the same state on all processes (see `generation.Share`)."""
        return torch.Generator(self.device).manual_seed(seed)

    # ------------------------------------------------------------------------- between processes

    def sum(self, x: Tensor) -> Tensor:
        """Σ over processes, on each of them."""
        if self.world_size == 1:
            return x
        total = x.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def max(self, number: int) -> int:
        if self.world_size == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return int(largest)

    def share(self, rows: Sequence[Any]) -> list[Any]:
        """This process's share of rows that all processes hold."""
        return list(rows[self.rank :: self.world_size])

    def each(self, value: T) -> list[T]:
        """The values of all processes by rank, on each process; they are pickled, with tensors on the CPU."""
        values = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def from_main(self, value: Any) -> Any:
        """The first process's value, on all processes."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()

    # ------------------------------------------------------------------------------------- models

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap for the layout; call the returned module instead of the given one.

        The model trains in eval mode: what is random in training, such as dropout, would make PPO's ratio
        differ from 1 before the first step.
        """
        model.eval()
        self._models.add(model)
        self._give_products(model)
        if self._compiles:
            compile_layers(model)
        return self._layout.prepare(model, optimizer, max_grad_norm)

    def place(self, model: M) -> M:
        """A model on this device. One that is to be sharded stays on the CPU until it is: the GPU need not
        hold all of it."""
        return model if self.shards else model.to(self.device)

    def put(self, model: nn.Module) -> None:
        """Put a model on this device, or shard it where the layout shards, if it is not. Collective."""
        self._models.add(model)
        if sharding.is_sharded(model):  # an offloaded part stays in the machine's memory
            return
        if self._mesh is None:
            model.to(self.device)
            if self._speeds_up:
                speed_up(model)
        else:
            sharding.shard(model, self._mesh, offload=self._offload, computes_in=self._computes_in)

    def freeze(self, model: nn.Module) -> None:
        """Make a model untrainable, in the precision of the trained model, and `put` it.

        DeepSpeed converts the trained model's weights to bf16; with a float32 reference, rounding alone
        would cause a KL.
        """
        model.requires_grad_(False)
        self._give_products(model)
        if self.is_deepspeed and self.accelerator.mixed_precision == "bf16":
            model.to(torch.bfloat16)
        self.put(model)

    def _give_products(self, model: nn.Module) -> None:
        """Let the linear layers multiply as this CPU and the precision allow."""
        if self._rounds_products:
            round_products(model)
        elif self._speeds_up:
            speed_up(model)

    @contextmanager
    def on_device(self, model: nn.Module) -> Iterator[bool]:
        """Within the block, a model that `place` left on the CPU is whole on this device, if there is room.

        Yields whether this process is to compute with it. Without room it stays on the CPU, and the first
        process computes alone: the others would only compete for the cores. After the block the model
        has its own tensors again: views of the checkpoint's file, which the processes of a machine share.
        """
        if not self.shards:
            model.to(self.device)
            yield True
        elif ROOM * sum(weight.nbytes for weight in model.parameters()) > free_memory(self.device):
            console.say(f"{type(model).__name__} is checked on the CPU: the GPU has no room for all of it")
            yield self.is_main
        else:
            with _moved(model, self.device):
                yield True

    @contextmanager
    def whole(self, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
        """Within the block, a model with all of its weights on this device, to sample from. Collective.

        Raises:
            UserError: if the memory does not suffice for these weights, or for what the block does.
        """
        try:
            with sharding.whole(model, self.device) as plain:
                yield plain
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"process {self.rank} is out of memory while it samples; lower ppo.sampler.batch_size, or "
                "let vLLM sample (ppo.sampler), on another GPU"
            ) from error

    def run_batches(
        self, budget: TokenBudget, rows: Sequence[int], compute: Callable[[list[int]], None]
    ) -> None:
        """Call `compute` with every micro-batch of this process's rows; `rows` are their tokens.

        Where the weights are sharded, the processes need each other for every pass. All of them then call
        `compute` equally often, some with an empty list, for which it must make a pass like any other. And
        out of memory ends the stage.

        Raises:
            UserError: if the memory does not suffice.
        """
        if not self.shards:
            run_beside(budget, rows, compute, self.num_workers)
            return
        waiting = budget.cut(rows)
        count = self.max(len(waiting))
        try:
            for group in [*waiting, *[[]] * (count - len(waiting))]:
                compute(group)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(budget) from error

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes, of rollouts too."""
        if self._computes_in is not None:  # FSDP2 gathers weights of this type
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Callable[[], Sequence[Sequence[Callable[[], tuple[Tensor, T]]]]],
        max_grad_norm: float | None,
        budget: TokenBudget,
    ) -> tuple[float, list[T]]:
        """One optimiser step on the **sum** of the micro-batches' losses over all processes.

        `losses` cuts the batch under the `budget`, for each of this process's workers. Each function that it
        returns runs one forward pass and returns its part of the global loss, already divided by the global
        count, and what it measured. So the step does not depend on the cut into micro-batches. All processes
        must give the same number of losses. Returns the gradient norm before clipping, and the measurements
        in order.

        A process that is out of memory lowers the budget and begins the step again.

        Raises:
            NonFiniteError: on all processes. The weights are unchanged, except where only the gradient is
                not finite under DeepSpeed: it has then changed them.
            UserError: if the memory does not suffice for one row, or for a step on several processes.
        """
        measured = self.within_memory(
            budget, lambda: self._backward(model, losses()), lambda: optimizer.zero_grad(set_to_none=True)
        )
        return self._layout.step(model, optimizer, max_grad_norm), measured

    def within_memory(
        self, budget: TokenBudget, compute: Callable[[], T], forget: Callable[[], None] = lambda: None
    ) -> T:
        """What `compute` returns, which cuts its rows under the `budget`.

        A process that is out of memory calls `forget`, lowers the budget, and computes again.

        Raises:
            UserError: if the memory does not suffice for one row, or on several processes.
        """
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                if self.world_size > 1 or self.is_deepspeed:  # the others wait within `compute`
                    raise self._out_of_memory(budget) from error
            forget()
            torch.cuda.empty_cache()
            budget.lower()

    def _out_of_memory(self, budget: TokenBudget) -> UserError:
        """The message where processes wait for each other, so that none can cut smaller alone."""
        return UserError(
            f"process {self.rank} is out of memory; only a run on one GPU makes micro-batches smaller by "
            f"itself: set this stage's micro_batch_tokens to {budget.half()}"
        )

    def _backward(
        self, model: nn.Module, work: Sequence[Sequence[Callable[[], tuple[Tensor, T]]]]
    ) -> list[T]:
        """Add up the gradients of all parts; returns what the parts measured."""
        if len(work) > 1:
            return backward_beside(list(model.parameters()), work)
        measured, parts = list[T](), work[0]
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1
            compiled = compiled_layers() if self._compiles else nullcontext()
            with compiled, self._layout.accumulating(model, is_last=is_last):
                loss, stats = part()
                # gradients are averaged over processes; the loss is a part of a sum, hence × world
                self._layout.backward(model, loss * self.world_size, is_last=is_last)
            measured.append(stats)
        return measured

    # --------------------------------------------------------------------------------- snapshots

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | Files:
        """Weights and optimiser of what `prepare` returned, for a snapshot; equal on all processes."""
        return self._layout.training_state(model, optimizer)

    def load_training_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any] | Path
    ) -> None:
        """Restore a `training_state` from a snapshot; that of `Files` is the path of their folder."""
        self._layout.load_training_state(model, optimizer, state)

    def rng_state(self) -> dict[str, Any]:
        """This process's generators of torch (CPU and its GPU), numpy and Python, in plain types."""
        name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)],
            "python": random.getstate(),
        }

    def set_rng_state(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)
        np.random.set_state(tuple(state["numpy"]))
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))


def free_memory(device: torch.device) -> float:
    """The free bytes of a GPU, with those that torch keeps for new tensors; infinite on a CPU."""
    if device.type != "cuda":
        return math.inf
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@contextmanager
def _moved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the block, a model is on another device; after it, it has the very tensors from before."""
    modules = list(model.modules())
    weights = [
        (own, name, w, w.data) for own in modules for name, w in own._parameters.items() if w is not None
    ]
    buffers = [(own, name, buffer) for own in modules for name, buffer in own._buffers.items()]
    try:
        model.to(device)
        yield
    finally:
        for owner, name, weight, value in weights:
            weight.data = value
            owner._parameters[name] = weight
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def is_bf16(precision: Precision) -> bool:
    """Whether `launch.precision` asks for bfloat16 on this machine."""
    if precision == "auto":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def keep_freed_memory() -> None:
    """Let glibc keep a freed tensor's pages for the next one, where the C library is glibc.

    By default it maps every block above some megabytes anew and returns it at once. The kernel then zeroes
    the pages of every large tensor at every operation.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 1)  # memory of a thread's own would be returned at once all the same
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def adamw(model: nn.Module, settings: Optimization | Ppo) -> torch.optim.AdamW:
    """AdamW with eps 1e-5 (arXiv 2403.17031); in supervised training betas .9/.98 (arXiv 1706.03762).

    Biases and norms have no weight decay; nothing has in PPO.
    """
    if isinstance(settings, Optimization):
        decay, betas = settings.weight_decay, (0.9, 0.98)
    else:
        decay, betas = 0.0, settings.adam_betas
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=1e-5, fused=True)


def learning_rate(settings: Optimization | Ppo, step: int, num_steps: int) -> float:
    """The rate of step 0 … num_steps − 1: linear warm-up, then constant, linear or cosine to zero."""
    warmup = math.ceil(settings.warmup_fraction * num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return settings.learning_rate * factor[settings.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups; a group with a `scale` gets that multiple."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
