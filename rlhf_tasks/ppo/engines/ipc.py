"""Weights as handles of a GPU's memory, from which a server on the same GPU copies them.

This is vLLM's weight transfer by CUDA IPC, as its page on weight transfer describes it for a trainer without
vLLM (version 0.32): `/init_weight_transfer_engine` once, and for each version `/start_weight_update`,
`/update_weights` and `/finish_weight_update`. A handle is that of `torch.multiprocessing`, pickled.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_tasks.errors import UserError

BEGIN = {"init_info": {"packed": False}}
"""The body of `/init_weight_transfer_engine`: each weight has a handle of its own."""


def names_in(folder: Path) -> list[str]:
    """The names of the weights in a folder of safetensors, which the server knows them by."""
    names = list[str]()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names += stored.keys()
    return names


def check(weights: PreTrainedModel, names: Sequence[str]) -> None:
    """Check that a server can read the weights where they are, by these names.

    Raises:
        UserError: if they are not on a GPU, or have other names.
    """
    kind = _device(weights).type
    if kind != "cuda":
        raise UserError(f"ppo.sampler.transfer=ipc needs a GPU, and PPO runs on: {kind}; set it to folder")
    known = _stored(weights)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"ppo.sampler.transfer=ipc: {type(weights).__name__} is saved with weights that it does not "
            f"name, such as {unknown[0]}; set it to folder"
        )


@contextmanager
def update_of(weights: PreTrainedModel, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The body of `/update_weights`. Its handles hold within the block, which must wait for the copies."""
    stored = _stored(weights)
    tensors = [stored[name].detach().contiguous() for name in names]
    handles = [_handle(tensor) for tensor in tensors]
    _wait(weights)  # the last step may still be writing them
    yield {
        "update_info": {
            "names": list(names),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }
    }
    del tensors


def _stored(weights: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by the names in a saved file, which in some families are not those of the modules."""
    stored: dict[str, Tensor] = revert_weight_conversion(weights, weights.state_dict())
    return stored


def _handle(tensor: Tensor) -> dict[str, tuple[Any, ...]]:
    """By the id of the GPU, the arguments with which torch's `rebuild_cuda_tensor` opens a tensor."""
    return {str(torch.cuda.get_device_properties(tensor.device).uuid): reduce_tensor(tensor)[1]}


def _device(weights: PreTrainedModel) -> torch.device:
    return next(weights.parameters()).device


def _wait(weights: PreTrainedModel) -> None:
    torch.cuda.synchronize(_device(weights))
