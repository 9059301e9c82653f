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
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rlhf_tasks.config import Launch, Optimisation, Ppo


class Runtime:
    """One process of a stage, and how it talks to the others."""

    def __init__(self, launch: Launch, seed: int) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault(
                "DS_ACCELERATOR", "cpu"
            )  # else DeepSpeed warns at import that it found no GPU
        transformers.utils.logging.disable_progress_bar()  # bars of milliseconds, between our own
        self.accelerator = Accelerator(mixed_precision=launch.mixed_precision)
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

    def barrier(self) -> None:
        if self.world_size > 1:
            torch.distributed.barrier()

    # ------------------------------------------------------------------------------------- models

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap for data parallelism or ZeRO; the module that comes back is the one to call."""
        if self.is_deepspeed:
            # DeepSpeed clips inside its own step, by its own setting
            self.accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
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
        max_grad_norm: float,
    ) -> float:
        """One optimiser step on the **sum** of the micro-batches' losses over all processes.

        Each element of `losses` runs one forward pass and returns its part of the global loss (already
        divided by the global count of what it averages over), so that the step is the same however the
        batch is cut. All processes give equally many. Returns the gradient norm before clipping.
        """
        parts = list(losses)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if self.is_deepspeed:
                model.set_gradient_accumulation_boundary(is_boundary=last)  # type: ignore[operator]
                model.backward(part() * self.world_size)  # type: ignore[operator]
            else:
                # DDP and ZeRO average gradients over processes; the loss is a part of a sum, hence × world
                with nullcontext() if last else self.accelerator.no_sync(model):
                    self.accelerator.backward(part() * self.world_size)
        if self.is_deepspeed:
            model.step()  # type: ignore[operator]
            return float(model.get_global_grad_norm() or 0.0)  # type: ignore[operator]
        norm = self.accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)


def adamw(model: nn.Module, settings: Optimisation | Ppo) -> torch.optim.AdamW:
    """AdamW with betas .9/.98 (arXiv 1706.03762) and eps 1e-5 (arXiv 2403.17031).

    Biases and norms do not decay.
    """
    decay = settings.weight_decay if isinstance(settings, Optimisation) else 0.0
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.98), eps=1e-5
    )


def learning_rate(settings: Optimisation | Ppo, step: int, num_steps: int) -> float:
    """The rate of step 0 … num_steps − 1: linear warm-up, then constant, linear or cosine to zero."""
    warmup = math.ceil(settings.warmup_fraction * num_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, num_steps - warmup)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return settings.learning_rate * factor[settings.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
