"""Log-probs and entropies of response tokens, with gradients, without all of a model's logits at once.

With 50,000 tokens in the vocabulary the logits are by far the largest tensor of a pass. So they are made for
some tokens at a time, and what is kept of them is one number each. In the backward pass every chunk's logits
are made again.

The model itself runs as ever, wrapped for data parallelism or not: only the `forward` of its output layer is
replaced while it runs. So the hooks of DDP, ZeRO and FSDP2 find the layer's weights where they expect them.

B batch · R longest response · N response tokens of all rows, without padding · H hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch
from rlhf_tasks.models import fast_cpu
from rlhf_tasks.models.contracts import ContractError

CPU_LOGITS, GPU_LOGITS = 2**22, 2**25
"""Logits of one chunk: 16 MB in float32 on a CPU, 128 MB on a GPU. Two or three such tensors live at once."""

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_LINEAR: dict[Any, LinearFunction] = {
    nn.Linear.forward: F.linear,
    fast_cpu.OneDnnLinear.forward: fast_cpu.linear,
}
"""The output layers whose logits are made in chunks, by their `forward`."""
_ADJUSTED: WeakSet[nn.Module] = WeakSet()
"""Output layers whose model changes their logits: softcapping (Gemma 2), scaling (Cohere, Granite)."""


class TokenStats(NamedTuple):
    """Statistics of the response tokens; a row starts with its first one and is zero on padding."""

    logprobs: Tensor  # (B, R)
    entropy: Tensor  # (B, R), of the distribution that the token was drawn from
    is_top: Tensor  # (B, R), 1 where no other token is more likely, else 0; no gradient
    states: Tensor  # the output layer's input, of which `Batch.states` makes (B, R + 1, H)


def token_stats(
    model: nn.Module, batch: Batch, temperature: float = 1.0, *, entropy_grad: bool = False
) -> TokenStats:
    """The response tokens' statistics under softmax(logits / temperature) of a causal LM.

    With `entropy_grad` the entropy has a gradient too. All logits are made at once where the model changes
    them after the output layer, or where this is not an ordinary linear layer.

    Raises:
        ContractError: if the model does not call its output layer.
    """
    inner = cast(PreTrainedModel, getattr(model, "module", model))  # without DDP's or DeepSpeed's wrapper
    head: Any = inner.get_output_embeddings()
    mask, labels = batch.response_mask, batch.responses[batch.response_mask]  # (B, R), (N,)
    call_head = head.forward
    linear = _LINEAR.get(getattr(call_head, "__func__", None))
    makes_all = linear is None or head in _ADJUSTED
    states: list[Tensor] = []
    outputs: list[tuple[Tensor, int]] = []  # what the head returned; its version counts changes in place

    def forward(hidden: Tensor) -> Tensor:
        """(B, T, H) → (B, R + 1, 3), the statistics in place of logits; or (B, T, V), all logits."""
        states.append(hidden)
        if linear is None:
            logits: Tensor = call_head(hidden)
            return logits
        multiply = _Tf32Linear.apply if linear is F.linear and _uses_tf32(hidden, head.weight) else linear
        # Logits of 16 bits round by more than an update moves a log-prob. So the output layer computes in
        # float32, under autocast and with weights that FSDP2 or DeepSpeed hold in 16 bits too.
        with torch.autocast(hidden.device.type, enabled=False):
            weight = at_least_float32(head.weight)  # within the layer, where a sharded weight is whole
            bias = None if head.bias is None else at_least_float32(head.bias)
            if makes_all:
                return multiply(hidden.to(weight.dtype), weight, bias)
            hidden = batch.predicting(hidden).to(weight.dtype)  # (N, H)
            stats = _chunked_stats(
                hidden, weight, bias, labels, temperature, entropy_grad, multiply
            )  # (N, 3)
        padded = stats.new_zeros(*mask.shape, 3).masked_scatter(mask[:, :, None], stats)
        padded = torch.cat([padded, padded.new_zeros(len(mask), 1, 3)], dim=1)
        outputs.append((padded.detach(), padded._version))
        return padded

    with replace_forward(head, forward):
        out = model(
            input_ids=batch.query_response,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.num_last_columns,
        )
    if not states:
        raise ContractError(
            f"{type(inner).__name__} (family {inner.config.model_type}) makes its logits without its output "
            "layer's forward pass, and cannot be trained here; use a model of another family"
        )
    if makes_all:
        logits = batch.predicting(out.logits)  # (N, V)
        return _left_aligned(_stats(logits, labels, temperature, entropy_grad), batch, states[0])
    output, version = outputs[0]
    if out.logits.data_ptr() != output.data_ptr() or out.logits._version > version:  # the model changed them
        _ADJUSTED.add(head)
        return token_stats(model, batch, temperature, entropy_grad=entropy_grad)
    return _left_aligned(out.logits[:, :-1][mask], batch, states[0])


def response_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """(B, R) log-probs of the response tokens; zero on padding."""
    return token_stats(model, batch, temperature).logprobs


def head_width(model: PreTrainedModel) -> int:
    """H of `TokenStats.states`; it may differ from the config's `hidden_size` (OPT-350m)."""
    return cast(nn.Linear, model.get_output_embeddings()).in_features


def _chunked_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    entropy_grad: bool,
    linear: LinearFunction,
) -> Tensor:
    """`_stats` of (N, H) states, (N, 3), from as many logits at a time as one chunk may have."""

    def stats_of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return _stats(linear(hidden, weight, bias), labels, temperature, entropy_grad)

    size = max(1, (CPU_LOGITS if hidden.device.type == "cpu" else GPU_LOGITS) // len(weight))
    chunks = zip(hidden.split(size), labels.split(size), strict=True)
    return torch.cat(
        [checkpoint(stats_of_chunk, *c, use_reentrant=False, preserve_rng_state=False) for c in chunks]
    )


def _stats(logits: Tensor, labels: Tensor, temperature: float, entropy_grad: bool) -> Tensor:
    """(N, V) logits, (N,) labels → (N, 3): log-prob, entropy, and 1 if no token is more likely.

    H = −Σ p · log p, with p = softmax(logits / temperature). At least in float32.
    """
    z = at_least_float32(logits)
    logp = (z if temperature == 1 else z / temperature).log_softmax(-1)  # (N, V)
    chosen = logp.gather(1, labels[:, None]).squeeze(1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -torch.einsum("nv,nv->n", logp.exp(), logp)
    return torch.stack([chosen, entropy, (chosen >= logp.amax(-1)).to(z.dtype)], dim=1)


def _uses_tf32(hidden: Tensor, weight: Tensor) -> bool:
    """Whether a float32 matmul may use TF32: on a GPU, in a pass whose other layers have fewer bits still."""
    rounds = torch.is_autocast_enabled(hidden.device.type) or weight.dtype.itemsize < 4
    return hidden.device.type == "cuda" and rounds


class _Tf32Linear(torch.autograd.Function):
    """`F.linear` with operands of TF32, whose products have 11 significant bits and are summed in float32.

    A plain float32 matmul takes about eight times as long on a GPU. All of torch must not be set so: rotary
    positions above 2048 would be rounded.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(…, H), (V, H), (V,) → (…, V)."""
        ctx.save_for_backward(hidden, weight)
        with _tf32():
            return F.linear(hidden, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of states, weight and bias, where they are needed."""
        (hidden, weight), needs = ctx.saved_tensors, ctx.needs_input_grad
        rows, states = grad.flatten(0, -2), hidden.flatten(0, -2)
        with _tf32():
            return (
                grad @ weight if needs[0] else None,
                rows.T @ states if needs[1] else None,
                rows.sum(0) if needs[2] else None,
            )


@contextmanager
def _tf32() -> Iterator[None]:
    matmul: Any = torch.backends.cuda.matmul
    name, value = ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _left_aligned(stats: Tensor, batch: Batch, states: Tensor) -> TokenStats:
    """(N, 3), row after row → (B, R) each."""
    mask = batch.mask
    logprobs, entropy, is_top = (
        stats.new_zeros(mask.shape).masked_scatter(mask, column) for column in stats.unbind(1)
    )
    return TokenStats(logprobs, entropy, is_top.detach(), states)


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the block the module computes `forward` instead; its hooks stay."""
    before: Any = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
