"""The layouts that share a training step between processes: data parallelism, DeepSpeed's ZeRO, and FSDP2.

A layout wraps the model, adds up gradients over micro-batches and processes, clips, steps, and stores what
a resumed run needs. `Runtime` chooses one; nothing else differs between layouts but `sharding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.training import sharding
from rlhf_tasks.training.state import Files

Optimizer = torch.optim.Optimizer
ENGINE = "engine"  # the name of DeepSpeed's checkpoint in its folder


class Layout(Protocol):
    def prepare(
        self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap both; call the returned module instead of the given one."""

    def accumulating(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """The context of a micro-batch's forward and backward pass."""

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        """Add the gradients of a micro-batch's loss; over processes they are averaged."""

    def step(self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None) -> float:
        """Clip, and take an optimiser step; returns the norm of the gradient before clipping.

        Raises:
            NonFiniteError: on all processes.
        """

    def training_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | Files:
        """Weights and optimiser, for a snapshot."""

    def load_training_state(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any] | Path
    ) -> None:
        """Restore a `training_state`; that of `Files` is the path of its folder."""


class Parallel:
    """One process, or DDP: every process has the whole model."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, Optimizer]:
        prepared, wrapped = self._accelerator.prepare(model, optimizer)
        return prepared, wrapped

    def accumulating(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext() if is_last else self._accelerator.no_sync(model)
        return context

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def step(self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None) -> float:
        norm = float(self._accelerator.clip_grad_norm_(model.parameters(), max_grad_norm or math.inf))
        return _step_if_finite(optimizer, norm)

    def training_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | Files:
        inner = self._accelerator.unwrap_model(model)
        return {"model": inner.state_dict(), "optimizer": optimizer.state_dict()}

    def load_training_state(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any] | Path
    ) -> None:
        assert isinstance(state, dict)
        self._accelerator.unwrap_model(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def _step_if_finite(optimizer: Optimizer, norm: float) -> float:
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(norm):
        raise NonFiniteError("the gradient is NaN or infinite")
    return norm


class DeepSpeed:
    """ZeRO-2 and ZeRO-3, by the settings in infra/deepspeed."""

    def __init__(self, accelerator: Accelerator, total: Callable[[Tensor], Tensor], *, offload: bool) -> None:
        """`total` sums over processes."""
        self._accelerator, self._total, self._offload = accelerator, total, offload
        self.shards: bool = accelerator.state.deepspeed_plugin.zero_stage == 3
        self._loss = torch.zeros((), device=accelerator.device)

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, Optimizer]:
        settings = self._accelerator.state.deepspeed_plugin.deepspeed_config
        settings["gradient_clipping"] = max_grad_norm or 0.0  # DeepSpeed clips inside its own step
        zero = settings["zero_optimization"]
        if self.shards:
            sharding.keep_structure(model)
            # weights that are fetched ahead and then not used, as by a pass of the critic alone, are an
            # error of DeepSpeed: "still have inflight params" (its issue 5828)
            zero["stage3_prefetch_bucket_size"] = 0
        if self._offload:
            settings["zero_force_ds_cpu_optimizer"] = False  # AdamW stays torch's own
            for part in ("optimizer", "param") if self.shards else ("optimizer",):
                zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        prepared, wrapped = self._accelerator.prepare(model, optimizer)
        return prepared, wrapped

    def accumulating(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        model.set_gradient_accumulation_boundary(is_boundary=is_last)  # type: ignore[operator]
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        self._loss += loss.detach()
        model.backward(loss)  # type: ignore[operator]

    def step(self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None) -> float:
        """As declared; where only the gradient is not finite, DeepSpeed has then changed the weights."""
        is_finite = bool(self._total(self._loss).isfinite())
        self._loss = torch.zeros_like(self._loss)
        if not is_finite:
            model.zero_grad()
            raise NonFiniteError("the loss is NaN or infinite")
        model.step()  # type: ignore[operator]
        norm = float(model.get_global_grad_norm() or 0.0)  # type: ignore[operator]
        if not math.isfinite(norm):  # DeepSpeed computes the norm within its step
            raise NonFiniteError(
                "the gradient is NaN or infinite, and DeepSpeed has changed the weights by it"
            )
        return norm

    def training_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | Files:
        """DeepSpeed writes its own files, which hold the partitions of all processes."""
        save: Callable[..., Any] = model.save_checkpoint  # type: ignore[assignment]
        return Files(lambda folder: save(str(folder), tag=ENGINE, save_latest=False))

    def load_training_state(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any] | Path
    ) -> None:
        load: Callable[..., Any] = model.load_checkpoint  # type: ignore[assignment]
        load(str(state), tag=ENGINE)


class Fsdp2:
    """PyTorch's fully sharded data parallelism. accelerate 1.15 starts it on GPUs only, so it is called here.

    The gradients of each micro-batch are shared out at once: none is ever kept whole.
    """

    def __init__(
        self, mesh: DeviceMesh, total: Callable[[Tensor], Tensor], shard: Callable[[nn.Module], None]
    ) -> None:
        self._mesh, self._total, self._shard = mesh, total, shard

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None
    ) -> tuple[nn.Module, Optimizer]:
        """The optimiser gets the sharded weights in place of the whole ones; it must have no state yet."""
        names = {id(weight): name for name, weight in model.named_parameters()}
        groups = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
        self._shard(model)
        sharded = dict(model.named_parameters())
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [sharded[name] for name in own]
        return model, optimizer

    def accumulating(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, model: nn.Module, loss: Tensor) -> None:
        loss.backward()

    def step(self, model: nn.Module, optimizer: Optimizer, max_grad_norm: float | None) -> float:
        gradients = sharding.parts_of([p.grad for p in model.parameters() if p.grad is not None])
        norm = self._norm(gradients)
        if max_grad_norm is not None and math.isfinite(norm):
            torch._foreach_mul_(gradients, min(1.0, max_grad_norm / (norm + 1e-6)))
        return _step_if_finite(optimizer, norm)

    def _norm(self, gradients: list[Tensor]) -> float:
        """The L2 norm over all processes, equal on all of them; offloaded gradients are on the CPU."""
        squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
        return math.sqrt(float(self._total(squares.to(self._mesh.device_type))))

    def training_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | Files:
        """A file for each process, with its part."""
        return Files(lambda folder: self._write(folder, model, optimizer))

    def _write(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        moments = optimizer.state_dict()["state"]
        own = {
            "model": {name: _own_copy(weight) for name, weight in model.named_parameters()},
            "optimizer": {
                key: {name: _own_copy(value) for name, value in state.items()}
                for key, state in moments.items()
            },
        }
        torch.save(own, self._file(folder))

    def _file(self, folder: Path) -> Path:
        return folder / f"part-{self._mesh.get_local_rank()}.pt"

    @torch.no_grad()
    def load_training_state(
        self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any] | Path
    ) -> None:
        assert isinstance(state, Path)
        own = torch.load(self._file(state), map_location="cpu", weights_only=True)
        weights = dict(model.named_parameters())
        for name, part in own["model"].items():
            sharding.parts_of([weights[name]])[0].copy_(part)
        numbered = [weight for group in optimizer.param_groups for weight in group["params"]]
        for key, moments in own["optimizer"].items():
            weight = numbered[key]
            optimizer.state[weight] = {name: _like(weight, value) for name, value in moments.items()}


def _own_copy(value: Tensor) -> Tensor:
    return sharding.parts_of([value.detach()])[0].clone()


def _like(weight: Tensor, part: Tensor) -> Tensor:
    """A moment of a weight from this process's part; AdamW's step count is no part."""
    if part.ndim == 0 or not isinstance(weight, DTensor):
        return part.to(sharding.parts_of([weight])[0].device)
    own = part.to(weight.to_local().device)
    return DTensor.from_local(
        own, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape,
        stride=weight.stride(),
    )  # fmt: skip


def reset_moments(optimizer: Optimizer, num_groups: int) -> None:
    """Set the moments of an AdamW's first groups to zero, and the step counts that correct them."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps DeepSpeed's
    if hasattr(inner, "fp32_partitioned_groups_flat"):  # ZeRO-3 keeps the moments of pieces of groups
        for piece, weights in enumerate(inner.fp32_partitioned_groups_flat):
            if inner.sub_group_to_group_id[piece] < num_groups:
                _zero(inner.optimizer.state.get(weights, {}))
        return
    for group in optimizer.param_groups[:num_groups]:
        for weights in group["params"]:
            _zero(optimizer.state.get(weights, {}))


def _zero(moments: dict[str, Tensor]) -> None:
    for moment in moments.values():
        moment.zero_()
