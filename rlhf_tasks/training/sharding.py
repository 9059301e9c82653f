"""Weights that several ranks share: how a model is sharded, read whole, and written.

FSDP2 (PyTorch's `fully_shard`) makes each weight a DTensor of which a rank keeps some rows. DeepSpeed's
ZeRO-3 leaves an empty tensor in its place, with the attribute `ds_id`. What is asked of a weight here depends
on the weight alone. A model whose weights are not shared is returned as it is.

A collective function must be called by all ranks, or they wait for each other without end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_tasks.errors import LESS_MEMORY, UserError
from rlhf_tasks.models.classifiers import find_trunk
from rlhf_tasks.models.load import copy_to


class _Plain(NamedTuple):
    """What a sharded model is when it is whole."""

    structure: PreTrainedModel  # without weights
    computes_in: torch.dtype | None  # None: in the type of its weights


_PLAIN: WeakKeyDictionary[PreTrainedModel, _Plain] = WeakKeyDictionary()


# ------------------------------------------------------------------------------------- splitting


def shard(
    model: nn.Module, mesh: DeviceMesh, *, offload: bool, computes_in: torch.dtype | None = None
) -> None:
    """Split the weights of a model over the ranks of `mesh`, in place, by FSDP2. Collective.

    In a mesh of two dimensions the first one is of copies, and the second one of their shards (HSDP).

    The layers, the trunk around them, and every module outside of it, such as a head, are split and gathered
    each on its own: any of them may be called without the others. A head that shares its weight with the
    embeddings belongs to the trunk. With `offload` a rank keeps its shards in the machine's memory.

    The shards and the gradients keep the type of the weights; gathered weights and the passes through them
    are of the type `computes_in`, if it is given. Heads of one number keep theirs: 16 bits would round scores
    and values to 3 digits.
    """
    where = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    kept_in = next(model.parameters()).dtype
    keep_structure(model, computes_in)
    for module in _units(model):
        is_score_head = isinstance(module, nn.Linear) and module.out_features == 1
        types = MixedPrecisionPolicy(None if is_score_head else computes_in, reduce_dtype=kept_in)
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=where, mp_policy=types)


def _units(model: nn.Module) -> list[nn.Module]:
    """The modules whose weights are gathered together, each before those that hold it."""
    units, covered = list[nn.Module](), set[nn.Module]()

    def add(module: nn.Module) -> None:
        if module not in covered and any(True for _ in module.parameters()):
            units.append(module)
            covered.update(module.modules())

    for one in pretrained_in(model):
        for layer in one.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                add(layer)
        head = one.get_output_embeddings()
        is_tied = head is not None and getattr(one.get_input_embeddings(), "weight", None) is head.weight
        whole = one if is_tied else find_trunk(one)
        if whole not in covered:
            units.append(whole)
            covered.update(whole.modules())
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            add(module)
    return units


def pretrained_in(model: nn.Module) -> list[PreTrainedModel]:
    """The models of transformers in a module, without those inside of others."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return list(chain.from_iterable(pretrained_in(child) for child in model.children()))


def keep_structure(model: nn.Module, computes_in: torch.dtype | None = None) -> None:
    """Remember what the models in `model` are without their weights, before they are sharded."""
    for one in pretrained_in(model):
        _PLAIN[one] = _Plain(copy_to(one, torch.device("meta")), computes_in)


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds only a part of the weights, by FSDP2 (`DTensor`) or ZeRO-3 (`ds_id`)."""
    return any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())


def num_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """The number of all ranks' parameters together, or of those that train."""
    weights = [weight for weight in model.parameters() if weight.requires_grad or not trained]
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in weights)


# --------------------------------------------------------------------------------------- reading


@torch.no_grad()
def gather(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The whole of one weight, on the device that computes, in its own type or another. Collective."""
    if isinstance(weight, DTensor):
        own = weight.to_local().to(weight.device_mesh.device_type, dtype)  # offloaded ones go to the GPU
        return _shard_like(weight, own).full_tensor()
    if hasattr(weight, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters([weight]):
            return weight.detach().clone().to(dtype)
    return weight.detach().to(dtype)


def frozen_in(model: nn.Module) -> set[str]:
    """The names of the weights that do not train, as those below adapters."""
    weights = model.named_parameters(remove_duplicate=False)
    return {name for name, weight in weights if not weight.requires_grad}


def weights_of(
    model: nn.Module, but: Collection[str] = (), dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The whole weights by name, as copies on the CPU, but for some names. Collective.

    Of a sharded model the first rank alone gets them, so that a machine holds them once, the matrices of type
    `dtype` if it is given; the others get an empty dict.
    """
    if not is_sharded(model):
        state = model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items() if name not in but}
    found, is_first = dict[str, Tensor](), torch.distributed.get_rank() == 0
    for weight, names in _names_of(model).items():
        if not set(but) & set(names):
            whole = gather(weight, dtype if weight.ndim > 1 else None)
            if is_first:
                found |= dict.fromkeys(names, whole.cpu())
    return found


def keep_on_first_rank(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank keeps of `weights_of(model)` that all ranks have read from a file.

    Of a sharded model that is all on the first rank, and nothing on the others.
    """
    if not is_sharded(model):  # copies: another machine may remove the file that these are views of
        return {name: value.clone() for name, value in weights.items()}
    return weights if torch.distributed.get_rank() == 0 else {}


def _names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """All names of every weight."""
    names: dict[Tensor, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return names


@contextmanager
def full_params(model: PreTrainedModel, device: torch.device) -> Iterator[PreTrainedModel]:
    """Within the block, a plain copy of a sharded model with all of its weights on `device`. Collective.

    Its weights have the type that the model computes in.
    It is for sampling: ranks sample texts of different lengths, and a sharded model would make one wait for
    the others at each token. It costs the memory of all weights beside the rank's own shards.

    Raises:
        UserError: if the memory does not suffice for these weights, or for what the block does.
    """
    try:
        if (plain := _PLAIN.get(model)) is None:
            yield model
            return
        weights = dict[str, Tensor]()
        for weight, names in _names_of(model).items():
            weights |= dict.fromkeys(names, gather(weight, plain.computes_in).to(device))
        with _fill(plain.structure, weights, device):
            yield plain.structure
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"rank {os.environ.get('RANK', 0)} is out of memory while it samples one row; {LESS_MEMORY}, or "
            "let vLLM sample (ppo.sampler), on another GPU"
        ) from error


@contextmanager
def to_save(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[PreTrainedModel]:
    """Within the block, the first rank has a plain model with all weights, on the CPU. Collective.

    Of a sharded one the matrices have the type `dtype`, if it is given.
    """
    plain = _PLAIN.get(model)
    if plain is None or not (weights := weights_of(model, dtype=dtype)):
        yield model
        return
    with _fill(plain.structure, weights, torch.device("cpu")):
        yield plain.structure


@contextmanager
def _fill(plain: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> Iterator[None]:
    for module in plain.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    plain.load_state_dict(weights, strict=False, assign=True)
    try:
        yield
    finally:
        empty = {name: weight.detach().to("meta") for name, weight in weights.items()}
        plain.load_state_dict(empty, strict=False, assign=True)


# --------------------------------------------------------------------------------------- writing


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put `weights_of` back, or some of them. Collective: the first rank's are used."""
    if not is_sharded(model):
        model.load_state_dict(weights, strict=False)
        return
    names = [list(weights)]
    torch.distributed.broadcast_object_list(names, src=0)
    wanted = set(names[0])
    for weight, own_names in _names_of(model).items():
        if wanted & set(own_names):
            _assign(weight, weights.get(own_names[0]))


def _assign(weight: Tensor, value: Tensor | None) -> None:
    """Give a weight the value of the first rank. Collective."""
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        if value is None:
            value = torch.empty(weight.shape, device=mesh.device_type)
        given = value.to(mesh.device_type, weight.dtype)
        part = distribute_tensor(given, mesh, weight.placements)
        weight.to_local().copy_(part.to_local())
    elif hasattr(weight, "ds_id"):
        from deepspeed import zero

        with zero.GatheredParameters([weight], modifier_rank=0):
            if value is not None:
                weight.data.copy_(value)
    elif value is not None:
        weight.copy_(value)


@torch.no_grad()
def move_toward(own: nn.Module, other: nn.Module, alpha: float) -> None:
    """own ← (1 − alpha) · own + alpha · other, weight by weight. Collective."""
    for mine, theirs in zip(own.parameters(), other.parameters(), strict=True):
        if isinstance(mine, DTensor):  # both are split alike
            _local(mine).lerp_(_local(theirs).to(mine.dtype), alpha)
        else:
            mine.lerp_(gather(theirs).to(mine.dtype), alpha)


# ------------------------------------------------------------------------- FSDP2's shards of this rank


def clip_gradients(model: nn.Module, max_norm: float | None, total: Callable[[Tensor], Tensor]) -> float:
    """Scale all gradients so that their norm is at most `max_norm`, if it is finite; returns the norm.

    It is the L2 norm over all ranks; `total` sums over them. Gradients that are offloaded are on the CPU.
    """
    gradients = [_local(weight.grad) for weight in model.parameters() if weight.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients)).square().sum()
    weight: Any = next(model.parameters())
    mesh = weight.device_mesh
    copies = mesh.size(0) if mesh.ndim == 2 else 1
    norm = math.sqrt(float(total(squares.to(mesh.device_type))) / copies)
    if max_norm is not None and math.isfinite(norm):
        torch._foreach_mul_(gradients, min(1.0, max_norm / (norm + 1e-6)))
    return norm


def exchange_copies(model: nn.Module, is_last: bool) -> None:
    """Let the next pass add up the gradients of a model's copies only if it `is_last` of a step (HSDP)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(is_last, recurse=False)


def save_shards(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Write this rank's shards of the weights and of the optimizer's moments."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    weights = {name: _own(weight.detach()) for name, weight in trained.items()}
    moments = {
        key: {name: _own(value) for name, value in state.items()}
        for key, state in optimizer.state_dict()["state"].items()
    }
    torch.save({"model": weights, "optimizer": moments}, file)


@torch.no_grad()
def load_shards(model: nn.Module, optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Restore `save_shards`."""
    saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            _local(weight).copy_(saved["model"][name])
    numbered = [weight for group in optimizer.param_groups for weight in group["params"]]
    for key, moments in saved["optimizer"].items():
        weight = numbered[key]
        device = _local(weight).device
        copies = {name: value.to(device, copy=True) for name, value in moments.items()}
        optimizer.state[weight] = {
            name: value if value.ndim == 0 else _shard_like(weight, value)
            for name, value in copies.items()  # AdamW's step count is a number, and no shard
        }


def _local(value: Tensor) -> Tensor:
    """This rank's shard, whose memory it shares."""
    return value.to_local() if isinstance(value, DTensor) else value


def _own(value: Tensor) -> Tensor:
    """This rank's shard, to be written; a copy only where its storage, which is written whole, has more."""
    local = _local(value)
    return local if local.untyped_storage().nbytes() == local.nbytes else local.clone()


def _shard_like(weight: DTensor, shard: Tensor) -> DTensor:
    """The tensor of which this rank's part is `shard`, split as `weight` is."""
    return DTensor.from_local(
        shard,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
