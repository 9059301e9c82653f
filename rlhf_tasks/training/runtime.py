"""Where a stage runs: device, processes, precision, and one optimiser step over micro-batches.

All of accelerate and DeepSpeed is met here. Rank and world are read from torch.distributed, since
accelerate reports a world of 1 under DeepSpeed on CPU.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlhf_tasks.config import Launch, Optimisation, Ppo
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.training.state import Files

T = TypeVar("T")

PATIENCE = timedelta(hours=2)  # of processes for one that asks a slow judge; a dead one ends them all at once
ENGINE = "engine"  # DeepSpeed's name for a checkpoint within its folder


class Runtime:
    """One process of a stage, and how it talks to the others."""

    def __init__(self, launch: Launch, seed: int) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault(
                "DS_ACCELERATOR", "cpu"
            )  # else DeepSpeed warns at import that it found no GPU
        transformers.utils.logging.disable_progress_bar()  # bars of milliseconds, between our own
        self.accelerator = Accelerator(
            mixed_precision=launch.mixed_precision,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
        )
        self.device: torch.device = self.accelerator.device
        self.is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.is_deepspeed:
            # models are put together whole, and ZeRO-3 takes them apart in `prepare`: into one that
            # transformers makes in parts, load_state_dict would load nothing, in silence
            unset_hf_deepspeed_config()
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def generator(self, seed: int) -> torch.Generator:
        """A generator on this device; ranks draw differently: seed + rank·100003, as lm-human-preferences."""
        return torch.Generator(self.device).manual_seed(seed + self.rank * 100003)

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
        """This process's part of rows that all of them hold."""
        return list(rows[self.rank :: self.world_size])

    def each(self, value: T) -> list[T]:
        """Every process's value, by rank, on all; of what can be pickled, tensors on the CPU."""
        values = [value] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(values, value)
        return values

    def from_main(self, value: Any) -> Any:
        """The first process's value, on all."""
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
        """Wrap for data parallelism or ZeRO; the module that comes back is the one to call."""
        if self.is_deepspeed:
            # DeepSpeed clips inside its own step, by its own setting
            self.accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = (
                max_grad_norm or 0.0
            )
        prepared, wrapped = self.accelerator.prepare(model, optimizer)
        return prepared, wrapped

    def gathered(self, model: nn.Module, *, write: bool = False) -> AbstractContextManager[Any]:
        """Whole weights on every process while it lasts, for reading or loading them; all must enter.

        ZeRO-3 keeps a part of each on each process; elsewhere nothing happens. With `write`, what the
        first process has put there is kept.
        """
        if not (self.is_deepspeed and self.accelerator.state.deepspeed_plugin.zero_stage == 3):
            return nullcontext()
        from deepspeed import zero

        context: AbstractContextManager[Any] = zero.GatheredParameters(
            list(model.parameters()), modifier_rank=0 if write else None
        )
        return context

    def freeze(self, model: nn.Module) -> None:
        """Not to be trained, and in the precision that the trained model is computed in.

        DeepSpeed turns the trained model's weights into bf16; a float32 reference would show a KL that
        is nothing but rounding.
        """
        model.requires_grad_(False)
        if self.is_deepspeed and self.accelerator.mixed_precision == "bf16":
            model.to(torch.bfloat16)

    def autocast(self) -> AbstractContextManager[Any]:
        """Rollouts and training run under the same precision, so that the first ratio is 1."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Iterable[Callable[[], Tensor]],
        max_grad_norm: float | None,
    ) -> float:
        """One optimiser step on the **sum** of the micro-batches' losses over all processes.

        Each element of `losses` runs one forward pass and returns its part of the global loss (already
        divided by the global count of what it averages over), so that the step is the same however the
        batch is cut. All processes give equally many. Returns the gradient norm before clipping.

        Raises:
            NonFiniteError: on all processes; the weights are as they were, but where DeepSpeed found only
                the gradient to be so: there they are spoilt.
        """
        parts = list(losses)
        total = torch.zeros((), device=self.device)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if self.is_deepspeed:
                loss = part() * self.world_size
                total += loss.detach()
                model.set_gradient_accumulation_boundary(is_boundary=last)  # type: ignore[operator]
                model.backward(loss)  # type: ignore[operator]
            else:
                # DDP and ZeRO average gradients over processes; the loss is a part of a sum, hence × world
                with nullcontext() if last else self.accelerator.no_sync(model):
                    self.accelerator.backward(part() * self.world_size)
        if self.is_deepspeed:
            if not bool(self.sum(total).isfinite()):
                model.zero_grad()
                raise NonFiniteError("the loss is NaN or infinite")
            model.step()  # type: ignore[operator]
            norm = float(model.get_global_grad_norm() or 0.0)  # type: ignore[operator]
            if not math.isfinite(norm):  # known only now: DeepSpeed puts it together within its step
                raise NonFiniteError("the gradient is NaN or infinite, and DeepSpeed has stepped on it")
            return norm
        norm = float(self.accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient is NaN or infinite")
        return norm

    # --------------------------------------------------------------------------------- snapshots

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | Files:
        """Weights and optimiser of what `prepare` gave, for a snapshot; the same on all processes.

        DeepSpeed writes files of its own, in which every process's part has its place.
        """
        if self.is_deepspeed:
            save: Callable[..., Any] = model.save_checkpoint  # type: ignore[assignment]
            return Files(lambda folder: save(str(folder), tag=ENGINE, save_latest=False))
        inner = self.accelerator.unwrap_model(model)
        return {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}

    def load_training_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any] | Path
    ) -> None:
        """Go back to a `training_state` as a snapshot holds it: DeepSpeed's by its folder."""
        if isinstance(state, Path):
            load: Callable[..., Any] = model.load_checkpoint  # type: ignore[assignment]
            load(str(state), tag=ENGINE)
            return
        self.accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

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


def adamw(model: nn.Module, settings: Optimisation | Ppo) -> torch.optim.AdamW:
    """AdamW with eps 1e-5 (arXiv 2403.17031); in supervised training betas .9/.98 (arXiv 1706.03762).

    Biases and norms do not decay; nothing does in PPO.
    """
    if isinstance(settings, Optimisation):
        decay, betas = settings.weight_decay, (0.9, 0.98)
    else:
        decay, betas = 0.0, settings.adam_betas
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=1e-5)


def learning_rate(settings: Optimisation | Ppo, step: int, num_steps: int) -> float:
    """The rate of step 0 … num_steps − 1: linear warm-up, then constant, linear or cosine to zero."""
    warmup = math.ceil(settings.warmup_fraction * num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return settings.learning_rate * factor[settings.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """A group with a `scale` learns at that multiple of the rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("scale", 1.0)
