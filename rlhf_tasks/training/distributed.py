"""One rank of a stage: device, precision, the exchange between ranks, and one training step.

`launch.parallelism` says how ranks share a step. Only this package knows which of these it is:

    one process, ddp   accelerate; every rank has the whole model
    zero2, zero3       accelerate starts DeepSpeed, whose engine stands for the model from `prepare` on
    fsdp2, hsdp        PyTorch's `fully_shard` itself: accelerate 1.15 starts it on GPUs only

Rank and world size come from torch.distributed: accelerate reports 1 under DeepSpeed on a CPU.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlhf_tasks import console
from rlhf_tasks.config import Launch
from rlhf_tasks.data.batches import micro_batches
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.fast_cpu import accelerate
from rlhf_tasks.models.load import copy_to, round_layers
from rlhf_tasks.models.passes import TokenBudget, attempts
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.training import sharding
from rlhf_tasks.training.launch import without_worker

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

PATIENCE = timedelta(hours=2)  # ranks wait so long for one with a slow judge; a dead one ends all at once
ENGINE = "engine"  # the name of DeepSpeed's checkpoint in its folder
REMEDY = "lower the learning rate, or look for extreme values in the data and the scores"
ROOM = 1.2  # memory that a whole model needs for a check of a few rows, to that of its weights
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


class MicroRows(NamedTuple):
    """Row numbers of one forward pass, and by what its loss and metrics are multiplied."""

    groups: list[list[int]]
    """Those of a group may share a row of the batch."""
    scale: float
    """1, or 0 for a mere pass."""

    @property
    def rows(self) -> list[int]:
        """The row numbers of all groups, in their order."""
        return [row for group in self.groups for row in group]


class Distributed:
    """One process of a stage, and its communication with the others."""

    @console.part("meeting the other processes")
    def __init__(self, launch: Launch, seed: int) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
            if launch.parallelism in ("ddp", "fsdp2", "hsdp"):  # by gloo; DeepSpeed finds this out itself
                os.environ.setdefault("ACCELERATE_USE_CPU", "true")
        if launch.parallelism in ("zero2", "zero3"):
            show_build_locks()
        tune_malloc()
        join_gpus()
        self.is_float32 = launch.precision != "bf16"
        # a gradient is a view of what DDP exchanges, not a copy; buffers, such as frequencies, never change
        ddp = DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)
        self.accelerator = Accelerator(
            mixed_precision="no" if self.is_float32 else "bf16",
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE), ddp],
        )
        self.device: torch.device = self.accelerator.device
        self._has_cpu_kernels = launch.parallelism == "ddp" and self.device.type == "cpu"
        self.is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.is_deepspeed:
            # ZeRO-3 partitions whole models in `prepare`: into one that transformers creates in partitions,
            # load_state_dict would load nothing without an error
            unset_hf_deepspeed_config()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        by_pytorch = launch.parallelism in ("fsdp2", "hsdp")
        self._is_fsdp2 = by_pytorch and distributed  # else the stage trains nothing
        is_zero3 = self.is_deepspeed and self.accelerator.state.deepspeed_plugin.zero_stage == 3
        self.shards: bool = self._is_fsdp2 or is_zero3
        """Whether a rank holds only a part of the weights."""
        self.rounds_weights: bool = not self.is_float32 and (self.is_deepspeed or self._is_fsdp2)
        """Whether passes read weights of 16 bits, and not float32 ones under autocast."""
        self._mesh = None
        if self.shards:
            per_copy = launch.num_shards if launch.parallelism == "hsdp" else self.world_size
            self._mesh = self._make_mesh(per_copy)
        self._computes_in = torch.bfloat16 if self._is_fsdp2 and not self.is_float32 else None
        self._offload = launch.offload
        self._loss = torch.zeros((), device=self.device)  # of this step, under DeepSpeed
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    @property
    def is_main(self) -> bool:
        """Whether this is the first rank: the one that writes files, judges and reports."""
        return self.rank == 0

    # ----------------------------------------------------------------------------- between ranks

    def sum(self, x: Tensor) -> Tensor:
        """Σ over all ranks, on each of them."""
        if self.world_size == 1:
            return x
        total = x.detach().clone()
        torch.distributed.all_reduce(total)
        return total

    def max(self, number: int) -> int:
        """The largest of all ranks' numbers, on each of them."""
        if self.world_size == 1:
            return number
        largest = torch.tensor(number, device=self.device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        return int(largest)

    def shard_rows(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's share of rows that all ranks hold: every n-th, so that `interleave` restores the order.

        Where the order is by length or by prompt, ranks get alike rows.
        """
        return list(rows[self.rank :: self.world_size])

    def slice_rows(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's share of rows that all ranks hold: rows side by side, which may belong together."""
        start, stop = (len(rows) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return list(rows[start:stop])

    def all_gather_object(self, value: T) -> list[T]:
        """The values of all ranks, on each of them; they are pickled, with tensors on the CPU."""
        values = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """The first rank's value, on all ranks."""
        if self.world_size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait until all ranks are here; their GPUs are free meanwhile."""
        self.all_gather_object(None)

    def _make_mesh(self, per_copy: int) -> DeviceMesh:
        """The ranks that share a model; with fewer than all `per_copy`, those that have copies of it too.

        The ranks of a machine, which have numbers side by side, share one.
        """
        if per_copy == self.world_size:
            return init_device_mesh(self.device.type, (self.world_size,))
        ranks = torch.arange(self.world_size).view(-1, per_copy)
        groups = [  # of all ranks, as each has to make them: those of the same shard, and those of a copy
            [torch.distributed.new_group(some.tolist(), timeout=PATIENCE) for some in parts]
            for parts in (ranks.T, ranks)
        ]
        own = [groups[0][self.rank % per_copy], groups[1][self.rank // per_copy]]
        return DeviceMesh.from_group(own, self.device.type, mesh=ranks, mesh_dim_names=("copy", "shard"))

    # ------------------------------------------------------------------------------------- models

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, Optimizer]:
        """Share a model and its new optimizer; call the returned module instead of the given one.

        The model trains in eval mode: what is random in training, such as dropout, would make PPO's ratio
        differ from 1 before the first step.
        """
        model.eval()
        if self._has_cpu_kernels:
            accelerate(model)
        self.accelerator.free_memory()  # of an earlier training, as in stage reward
        gc.collect()  # sharded, wrapped and checkpointed models are in cycles
        if self._is_fsdp2:  # the optimizer gets the sharded weights in place of the whole ones
            names = {weight: name for name, weight in model.named_parameters()}
            own = [[names[weight] for weight in group["params"]] for group in optimizer.param_groups]
            names.clear()  # a whole weight that anything holds would stay on the GPU beside the shards
            for group in optimizer.param_groups:
                group["params"] = []
            self.put(model)
            sharded = dict(model.named_parameters())
            for group, params in zip(optimizer.param_groups, own, strict=True):
                group["params"] = [sharded[name] for name in params]
            return model, optimizer
        if self.is_deepspeed:
            self._configure_deepspeed(max_grad_norm)
        if self.shards:
            sharding.keep_structure(model)
        buffers = [(module, dict(module._buffers)) for module in model.modules()]
        # Texts give a vision tower no gradient, which DDP would wait for.
        handler: Any = self.accelerator.ddp_handler
        handler.find_unused_parameters = any(
            one.config.get_text_config() is not one.config for one in sharding.pretrained_in(model)
        )
        prepared, wrapped = self.accelerator.prepare(model, optimizer)
        for module, known in buffers if self.is_deepspeed else ():
            for name, buffer in known.items():  # older DeepSpeed rounds buffers as it does weights
                module._buffers[name] = None if buffer is None else buffer.to(self.device)
        return prepared, wrapped

    def _configure_deepspeed(self, max_grad_norm: float | None) -> None:
        """Add to the settings in infra/deepspeed what params.yaml says."""
        settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_clipping"] = max_grad_norm or 0.0  # DeepSpeed clips within its own step
        zero = settings["zero_optimization"]
        if self.shards:
            # weights that are fetched ahead and then not used, as by a pass of the critic alone, are an
            # error of DeepSpeed: "still have inflight params" (its issue 5828)
            zero["stage3_prefetch_bucket_size"] = 0
        if self._offload:
            settings["zero_force_ds_cpu_optimizer"] = False  # AdamW stays torch's own
            for part in ("optimizer", "param") if self.shards else ("optimizer",):
                zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}

    def put(self, model: nn.Module, *, moves: bool = False) -> None:
        """Put a model on this device, or shard it where the layout shards, if it is not. Collective.

        Until then, or until `prepare`, it stays on the CPU: a GPU need not hold all of a sharded one. Under
        autocast on a GPU, layers of one that neither trains nor `moves` keep their weights in 16 bits alone.
        """
        if sharding.is_sharded(model):  # an offloaded part stays in the machine's memory
            return
        if self._mesh is None:
            is_frozen = not (moves or any(weight.requires_grad for weight in model.parameters()))
            if is_frozen and self.device.type == "cuda" and not (self.is_float32 or self.is_deepspeed):
                round_layers(model, torch.bfloat16)
            model.to(self.device)
            if self._has_cpu_kernels:
                accelerate(model)
        else:
            sharding.shard(model, self._mesh, offload=self._offload, computes_in=self._computes_in)

    def freeze(self, model: nn.Module, *, moves: bool = False) -> None:
        """Make a model untrainable, in the precision of the trained model, and `put` it.

        DeepSpeed converts the trained model's parameters to bf16; its buffers, such as rotary frequencies,
        stay as they are. Any other rounding would cause a KL between equal models.
        """
        model.requires_grad_(False)
        if self.is_deepspeed and not self.is_float32:
            for weight in model.parameters():
                weight.data = weight.data.to(torch.bfloat16)
        self.put(model, moves=moves)

    def to_check(self, model: M) -> M | None:
        """A model, whole and on this device, to check it; of one that is to be sharded, a copy.

        Without room on the GPU, the first rank gets the model on the CPU, and the others None: they would
        only compete for the cores. The model itself keeps its tensors: views of the checkpoint's file, which
        the ranks of a machine share.
        """
        if not self.shards:
            return model.to(self.device)
        free = math.inf
        if self.device.type == "cuda":  # torch keeps some for new tensors
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        if ROOM * sum(weight.nbytes for weight in model.parameters()) <= free:
            return copy_to(model, self.device).to(self.device)
        console.say(f"{type(model).__name__} is checked on the CPU: the GPU has no room for all of it")
        return model if self.is_main else None

    def run_batches(
        self, budget: TokenBudget, rows: Sequence[int], compute: Callable[[list[int]], None]
    ) -> None:
        """Call `compute` with every micro-batch of this rank's rows; `rows` are their tokens.

        Where the weights are sharded, the ranks need each other for every pass. All of them then call
        `compute` equally often, some with an empty list, for which it must make a pass like any other. And
        out of memory ends the stage.

        Raises:
            UserError: if the memory does not suffice.
        """
        if not self.shards:
            budget.each(rows, compute)
            return
        waiting = budget.cut(rows)
        count = self.max(len(waiting))
        try:
            with console.part("reading", count, "micro-batches") as meter:
                for group in [*waiting, *[[]] * (count - len(waiting))]:
                    compute(group)
                    meter.advance()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(budget) from error

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes, of rollouts too."""
        if self._computes_in is not None:  # FSDP2 gathers weights of this type
            return nullcontext()
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    # ------------------------------------------------------------------------------ one optimizer step

    def split(
        self, sizes: Sequence[int], groups: Sequence[Sequence[int]], budget: TokenBudget
    ) -> list[MicroRows]:
        """This rank's `groups` of rows as micro-batches; `sizes` are the tokens of each group.

        Every rank gets the same number, since the ranks need each other for every pass. Where a rank has
        fewer, the pass over some other row counts for nothing: its `scale` is 0.
        """
        count = None
        if self.world_size > 1:
            count = self.max(len(micro_batches(sizes, budget.max_tokens)))
        parts = [[list(groups[i]) for i in part] for part in budget.cut(sizes, count)]
        return [MicroRows(part or [[0]], scale=float(bool(part))) for part in parts]

    def passes(self, model: nn.Module, work: Sequence[T]) -> Iterator[T]:
        """Each piece of work, for one pass that trains a prepared model.

        Gradients add up over the passes. DDP and DeepSpeed exchange them after the last one; FSDP2 does so
        after each, so that a rank never holds a whole gradient, and HSDP's machines after the last one.
        """
        with console.part("gradients", len(work), "micro-batches") as meter:
            for number, piece in enumerate(work):
                is_last = number == len(work) - 1
                exchange: AbstractContextManager[Any] = nullcontext()
                if self.is_deepspeed:
                    model.set_gradient_accumulation_boundary(is_boundary=is_last)  # type: ignore[operator]
                elif self._is_fsdp2:
                    sharding.exchange_copies(model, is_last)
                elif not is_last:
                    exchange = self.accelerator.no_sync(model)
                with exchange:
                    yield piece
                meter.advance()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss, which is its part of the **sum** over all ranks."""
        loss = loss * self.world_size  # because gradients are averaged over ranks
        if self.is_deepspeed:  # accelerate's `backward` would take the step too
            self._loss += loss.detach()
            model.backward(loss)  # type: ignore[operator]
        else:
            self.accelerator.backward(loss)

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        max_grad_norm: float | None,
        apart: Sequence[tuple[nn.Module, float | None]] = (),
    ) -> float:
        """Clip the gradient, and take an optimizer step; returns the gradient's norm before clipping.

        `apart`: the parts of the model that are clipped each by a norm of its own, not under DeepSpeed.

        Raises:
            NonFiniteError: on all ranks. The weights are unchanged, except where only the gradient is not
                finite under DeepSpeed: it has then changed them.
        """
        if self.is_deepspeed:
            return self._step_deepspeed(model)
        norms = list[float]()
        for part, most in apart or [(model, max_grad_norm)]:
            if all(weight.grad is None for weight in part.parameters()):
                continue  # the policy, in a step of the critic alone
            if self._is_fsdp2:
                norms.append(sharding.clip_gradients(part, most, self.sum))
            else:
                norms.append(float(self.accelerator.clip_grad_norm_(part.parameters(), most or math.inf)))
        norm = math.hypot(*norms)
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient is NaN or infinite; {REMEDY}")
        return norm

    def _step_deepspeed(self, model: Any) -> float:
        is_finite = bool(self.sum(self._loss).isfinite())
        self._loss = torch.zeros_like(self._loss)
        if not is_finite:
            model.zero_grad()
            raise NonFiniteError(f"the loss is NaN or infinite; {REMEDY}")
        model.step()
        norm = float(model.get_global_grad_norm() or 0.0)  # which the step has computed
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"the gradient is NaN or infinite, and DeepSpeed has changed the weights by it; {REMEDY}"
            )
        return norm

    def attempts(
        self, budget: TokenBudget, optimizer: Optimizer | None = None
    ) -> Iterator[AbstractContextManager[None]]:
        """`passes.attempts` under a budget, which is halved after out-of-memory; the gradients are dropped.

        Raises:
            UserError: if the memory does not suffice for one row, or on several ranks.
        """

        def shrink() -> None:
            if self.world_size > 1 or self.is_deepspeed:  # the other ranks wait within the block
                raise self._out_of_memory(budget)
            if optimizer is not None:
                optimizer.zero_grad(set_to_none=True)
            budget.lower()

        return attempts(shrink)

    def _out_of_memory(self, budget: TokenBudget) -> UserError:
        """The message where ranks wait for each other, so that none can cut smaller alone."""
        return UserError(
            f"rank {self.rank} is out of memory; only a run on one GPU makes micro-batches smaller by "
            f"itself: set this stage's micro_batch_tokens to {budget.half()}"
        )

    # --------------------------------------------------------------------------------- snapshots

    def training_state(self, model: Any, optimizer: Optimizer) -> dict[str, Any] | Callable[[Path], object]:
        """Weights and optimizer of what `prepare` returned, for a snapshot; equal on all ranks.

        Where ranks have different parts of them, it is a function with which each writes its own to a folder.
        """
        if self.is_deepspeed:
            return lambda folder: model.save_checkpoint(str(folder), tag=ENGINE, save_latest=False)
        if self._is_fsdp2:
            return lambda folder: sharding.save_shards(model, optimizer, self._shards_in(folder))
        inner = self.accelerator.unwrap_model(model)
        frozen = sharding.frozen_in(inner)
        weights = {name: value for name, value in inner.state_dict().items() if name not in frozen}
        return {"model": weights, "optimizer": optimizer.state_dict()}

    def load_training_state(self, model: Any, optimizer: Optimizer, state: dict[str, Any] | Path) -> None:
        """Restore a `training_state` from a snapshot; that of a function is the path of the folder."""
        if isinstance(state, dict):
            self.accelerator.unwrap_model(model).load_state_dict(state["model"], strict=False)
            optimizer.load_state_dict(state["optimizer"])
        elif self.is_deepspeed:
            model.load_checkpoint(str(state), tag=ENGINE)
        else:
            sharding.load_shards(model, optimizer, self._shards_in(state))

    def _shards_in(self, folder: Path) -> Path:
        return folder / f"part-{self.rank}.pt"

    def rng_state(self) -> dict[str, Any]:
        """This rank's generators of torch (CPU and its GPU), numpy and Python, in plain types."""
        numpy: Any = np.random.get_state(legacy=False)
        numpy["state"]["key"] = numpy["state"]["key"].tolist()
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {"torch": torch.get_rng_state(), "cuda": cuda, "numpy": numpy, "python": random.getstate()}

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore `rng_state`: this rank draws the numbers that it would have drawn next."""
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], self.device)
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])


def alone(launch: Launch, seed: int) -> Distributed:
    """This worker as if the launch had no others: for work that each of them does by itself."""
    known = dict(os.environ)
    try:
        for name in known.keys() - without_worker(known).keys():
            del os.environ[name]
        return Distributed(launch, seed)
    finally:
        os.environ.update(known)


def join_gpus() -> None:
    """Let the workers on GPUs meet: tensors travel by NCCL, and objects by gloo.

    A rank that waits by NCCL, as for a judge, keeps its GPU busy, which a server of vLLM may share.
    accelerate and DeepSpeed take the process group that they find.
    """
    worker = os.environ.get("LOCAL_RANK")
    if worker is None or not torch.cuda.is_available() or torch.distributed.is_initialized():
        return
    torch.cuda.set_device(int(worker))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)


def show_build_locks() -> None:
    """Name the locks for which DeepSpeed waits: for ever if the process that compiled was killed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))  # of torch, where it compiles
    for lock in Path(os.environ.get("TORCH_EXTENSIONS_DIR", cache / "torch_extensions")).glob("**/lock"):
        console.say(f"DeepSpeed waits while another process compiles for it; if none does, remove {lock}")


def tune_malloc() -> None:
    """Let glibc keep a freed tensor's pages for the next one, where the C library is glibc.

    By default it maps every block above some megabytes anew and returns it at once. The kernel then zeroes
    the pages of every large tensor at every operation.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, 1)  # memory of a thread's own would be returned at once all the same
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
