"""Low-rank adapters: which layers get them, the model without them, and the weights with them merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_tasks.config import Lora
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.heads import score_head
from rlhf_tasks.models.load import copy_to


def add_lora(model: PreTrainedModel, lora: Lora, *, seed: int) -> PreTrainedModel:
    """Put low-rank adapters into every linear layer but the head, in place; returns the same model.

    W x becomes W x + alpha / r · B A x. A is drawn with `seed` and B is zero, so that the model is unchanged
    at first (arXiv 2106.09685, 4.1). Only the adapters and the head of a scoring model are trained. Experts
    that a mixture holds as one tensor, and their router, get none; nor does a layer that could not learn by
    one (`_learning_layers`).

    Raises:
        UserError: if the model has no layer for an adapter.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    scores = model.get_output_embeddings() is None
    head = score_head(model) if scores else model.get_output_embeddings()
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=[f"0.{name}" for name in _learning_layers(model, head)],
        task_type=TaskType.SEQ_CLS if scores else TaskType.CAUSAL_LM,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's (in, out)
    )
    with torch.random.fork_rng(devices=[]):  # adapters change no other random draw
        torch.manual_seed(seed)
        # Inside a plain list peft does not know the family. Of some it would adapt the experts in place of
        # layers with such names, in a form that could not be merged. Of others it refuses Mamba's out_proj,
        # whose weight is read directly in training mode; models train in eval mode here, which calls it.
        inject_adapter_in_model(settings, nn.ModuleList([model]))
    if scores:
        head.requires_grad_(True)
    return cast(PreTrainedModel, model.eval())


def _learning_layers(model: PreTrainedModel, head: nn.Module) -> list[str]:
    """The linear layers, but the head, that could learn by an adapter which can be merged.

    A short row shows it: a layer returns a tensor (a router of Llama 4 returns a tuple), and the logits have
    a gradient for it (not if only the layer's weight is read, as of Jamba's dt_proj, or if it makes a sparse
    index). Experts that the row does not reach are taken as well; layers with tied weights are not.

    Raises:
        UserError: if there is none.
    """
    outputs = list[tuple[nn.Module, Any]]()
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    # of a reward model the states, as `TokenScores` reads them
    computed = model.base_model if model.get_output_embeddings() is None else model
    hook = register_module_forward_hook(lambda module, _, output: outputs.append((module, output)))
    try:
        with torch.enable_grad():
            logits = computed(input_ids=ids, use_cache=False)[0]
    finally:
        hook.remove()
    tried = [(layer, one) for layer, one in outputs if isinstance(one, Tensor) and one.requires_grad]
    gradients = torch.autograd.grad(logits.sum(), [one for _, one in tried], allow_unused=True)
    learning = {layer for (layer, _), gradient in zip(tried, gradients, strict=True) if gradient is not None}
    reached = {layer for layer, _ in outputs}
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    names = list[str]()
    for name, layer in model.named_modules():
        if layer is head or not isinstance(layer, nn.Linear | Conv1D) or uses[id(layer.weight)] > 1:
            continue
        if layer in learning or not {layer, model.get_submodule(name.rpartition(".")[0])} & reached:
            names.append(name)
    if not names:
        raise UserError(f"lora: {type(model).__name__} has no linear layer that could learn by an adapter")
    return names


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Within the block, the model without its adapters: PPO's reference without a copy.

    A trained head stays as it is. Afterwards the same parameters are trainable as before.
    """
    layers = adapted_layers(model).values()
    were_trainable = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, was_trainable in were_trainable:
            parameter.requires_grad_(was_trainable)


@torch.no_grad()
def merge_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """A copy on the CPU with the adapters merged into the weights, for saving.

    The model itself does not change, since merging and unmerging would round its weights. A model without
    adapters is returned as it is.
    """
    layers = adapted_layers(model)
    if not layers:
        return model
    merged = copy_to(model, torch.device("cpu"))
    for name in layers:
        layer: Any = merged.get_submodule(name).float()  # in bf16 small changes would be rounded away
        plain = layer.base_layer
        plain.weight.data = plain.weight + layer.get_delta_weight("default")
        merged.set_submodule(name, plain)
    return nn.Module.to(merged, "cpu")  # buffers


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that carry an adapter, by name; recognized without peft, which takes long to import."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
