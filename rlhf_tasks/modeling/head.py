"""Log-probs and entropies of response tokens, from a model that never makes all of its logits.

With a vocabulary of 50,000 the logits are by far the largest tensor of a pass. Here they exist for one slice
of the vocabulary at a time, and the backward pass computes each slice again.

B batch · R response · N tokens · V vocabulary · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch, collate
from rlhf_tasks.modeling.classifiers import trunk_of
from rlhf_tasks.modeling.contracts import ContractError
from rlhf_tasks.modeling.last_layer import Forward, forward_replaced, last_columns_only
from rlhf_tasks.modeling.products import RoundedLinear, rounded_rows

CPU_SLICE, GPU_SLICE = 2**21, 2**26
"""Logits that exist at a time: on a CPU few enough for its cache, on a GPU enough to keep it busy."""

_ADJUSTED: WeakSet[nn.Module] = WeakSet()
"""Heads whose model changes their logits: softcapping (Gemma 2), scaling (Cohere, Granite)."""


class TokenStats(NamedTuple):
    """Statistics of the response tokens, float32 and zero on padding; and the states that they come from."""

    logprobs: Tensor  # (B, R)
    entropy: Tensor  # (B, R), of the distribution at each token
    likeliest: Tensor  # (B, R), 1 where no other token is likelier, else 0
    states: Tensor  # (B, R + 1, H): the head's input before each response token, and after the last


def token_stats(
    model: nn.Module, batch: Batch, temperature: float = 1.0, *, entropy_gradient: bool = False
) -> TokenStats:
    """The response tokens' statistics under softmax(logits / temperature) of a causal LM.

    `model` may be wrapped for data parallelism: the statistics are computed in place of the logits within its
    forward pass, where the hooks of DDP and ZeRO expect the use of the head's weights. If the model changes
    its logits after the head, they are all made instead.
    """
    head = _head(model)
    if head in _ADJUSTED or not _is_linear(head):
        logits, states = _run(model, batch, lambda original, states: original(states))
        labels, z = batch.responses[batch.response_mask], logits[:, :-1][batch.response_mask].float()
        answer = _spread(stats_of_logits(z / temperature, labels), batch, entropy_gradient)
        return _named(answer, states)
    made = list[tuple[Tensor, int]]()  # the tensor is kept: else a later one could take its address

    def forward(_: Forward, states: Tensor) -> Tensor:
        stats = _stats_of_states(head, states, batch, temperature, entropy_gradient)
        made.append((stats.detach(), stats._version))
        return stats

    answer, states = _run(model, batch, forward)
    stats, version = made[0]
    if answer.data_ptr() != stats.data_ptr() or answer._version > version:  # the model changed them
        _ADJUSTED.add(head)
        return token_stats(model, batch, temperature, entropy_gradient=entropy_gradient)
    return _named(answer, states)


def head_states(model: nn.Module, batch: Batch) -> Tensor:
    """`TokenStats.states` alone, without the cost of the head."""
    return _run(model, batch, lambda _, states: states)[1]


def head_width(model: PreTrainedModel) -> int:
    """H of `TokenStats.states`; it may differ from the config's `hidden_size` (OPT-350m)."""
    return cast(nn.Linear, _head(model)).in_features


@torch.no_grad()
def reads_trunk(model: PreTrainedModel) -> bool:
    """Whether the logits are the head's product with the trunk's states, unchanged before and after it.

    Only then `head_logprobs` on those states are the model's own. It is tried on four tokens: what is given
    to the head must be the states, bit for bit, and the model must return what the head returns.
    """
    batch = collate([[0, 1]], [[2, 3]], pad=0).to(next(model.parameters()).device)
    given = token_stats(model, batch).states
    with last_columns_only(model, given.shape[1]):  # the same sizes of products, or the last bits differ
        out = trunk_of(model)(
            input_ids=batch.query_response, attention_mask=batch.attention_mask,
            position_ids=batch.position_ids, use_cache=False,
        )  # fmt: skip
    states = out.last_hidden_state[:, -given.shape[1] :]
    head = _head(model)
    return _is_linear(head) and head not in _ADJUSTED and torch.equal(given, states)


def head_logprobs(head: nn.Linear, states: Tensor, batch: Batch) -> Tensor:
    """(B, R) log-probs of the response tokens, by a head of its own on (B, R + 1, H) states."""
    with forward_replaced(head, lambda _, x: _stats_of_states(head, x, batch, 1.0, False)):
        answer: Tensor = head(states)
    return answer[..., 0]


def _head(model: nn.Module) -> nn.Module:
    head: nn.Module = _unwrapped(model).get_output_embeddings()
    return head


def _is_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the head computes hidden · weightᵀ + bias and nothing else."""
    return type(head).forward in (nn.Linear.forward, RoundedLinear.forward)


def _unwrapped(model: nn.Module) -> PreTrainedModel:
    unwrapped: Any = getattr(model, "module", model)
    return cast(PreTrainedModel, unwrapped)


def _run(
    model: nn.Module, batch: Batch, forward: Callable[[Forward, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The model's answer with `forward` in place of its head's, and the (B, R + 1, H) that it was given.

    `forward` is given the head's own function too.
    """
    columns, given = batch.num_response_columns + 1, list[Tensor]()

    def last_columns(original: Forward, hidden: Tensor) -> Tensor:
        given.append(hidden[:, -columns:])
        return forward(original, given[0])

    with forward_replaced(_head(model), last_columns), last_columns_only(_unwrapped(model), columns):
        out = model(
            input_ids=batch.query_response, attention_mask=batch.attention_mask,
            position_ids=batch.position_ids, use_cache=False, logits_to_keep=columns,
        )  # fmt: skip
    if not given:
        inner = _unwrapped(model)
        raise ContractError(
            f"{type(inner).__name__} (family {inner.config.model_type}) makes its logits without its output "
            "layer's forward pass, and cannot be trained here; use a model of another family"
        )
    return out.logits, given[0]


def _named(answer: Tensor, states: Tensor) -> TokenStats:
    logprobs, entropy, likeliest = answer.unbind(2)
    return TokenStats(logprobs, entropy, likeliest, states)


def _stats_of_states(
    head: nn.Linear, states: Tensor, batch: Batch, temperature: float, entropy_gradient: bool
) -> Tensor:
    mask = batch.response_mask
    found = label_stats(head, states[:, :-1][mask], batch.responses[mask], temperature)
    return _spread(found, batch, entropy_gradient)


def _spread(stats: tuple[Tensor, Tensor, Tensor], batch: Batch, entropy_gradient: bool) -> Tensor:
    """(N,) each → (B, R, 3) in one tensor, which passes through hooks as logits do; zero on padding."""
    logprobs, entropy, likeliest = stats
    whole = torch.stack([logprobs, entropy if entropy_gradient else entropy.detach(), likeliest], dim=1)
    mask = batch.response_mask
    return whole.new_zeros(*mask.shape, 3).masked_scatter(mask[..., None], whole)


def label_stats(
    head: nn.Linear, hidden: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`stats_of_logits` of a linear head's logits over the temperature: (N, H), (N,) → (N,) each."""
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    kind, count = hidden.device.type, len(hidden)
    if isinstance(head, RoundedLinear):
        hidden, weight = rounded_rows(hidden), weight.bfloat16()
        bias = None if bias is None else bias.bfloat16()
        labels = F.pad(labels, (0, len(hidden) - count))
    elif torch.is_autocast_enabled(kind):  # the backward pass has no autocast of its own
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _LabelStats.apply
    logprobs, entropy, likeliest = apply(hidden, weight, bias, labels, temperature)
    return logprobs[:count], entropy[:count], likeliest[:count]


def stats_of_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the label, entropy, and 1 if no token is likelier: (N, V) logits, (N,) → (N,) each."""
    log_p = logits.log_softmax(-1)
    logprobs = log_p.gather(1, labels[:, None]).squeeze(1)
    entropy = logits.logsumexp(-1) - (log_p.exp() * logits).sum(-1)
    return logprobs, entropy, (logprobs >= log_p.amax(-1)).to(log_p.dtype)


class _LabelStats(torch.autograd.Function):
    """`stats_of_logits` of hidden · weightᵀ + bias over a temperature, one slice of V at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        kind = torch.promote_types(hidden.dtype, torch.float32)
        top = hidden.new_full(labels.shape, -torch.inf, dtype=kind)  # the largest logit z so far
        chosen, total, moment = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
        for start, z in _slices(hidden, weight, bias, temperature):
            before, top = top, torch.maximum(top, z.amax(1))
            local, inside = _within(labels, start, z)
            chosen = torch.where(inside, z.gather(1, local).squeeze(1), chosen)
            p = (z - top[:, None]).exp_()  # Σ e^(z − top) and Σ z · e^(z − top), as in online softmax
            shrink = (before - top).exp()
            total = total * shrink + p.sum(1)
            moment = moment * shrink + p.mul_(z).sum(1)
        log_total = top + total.log()
        mean = moment / total  # Σ p · z
        ctx.save_for_backward(hidden, weight, bias, labels, log_total, mean)
        likeliest = (chosen >= top).to(kind)
        ctx.mark_non_differentiable(likeliest)
        return chosen - log_total, log_total - mean, likeliest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """∂ log p(label) / ∂z = [label] − p and ∂H / ∂z = −p · (z − Σ p·z), z being the logits."""
        of_logprob, of_entropy, _ = gradients
        hidden, weight, bias, labels, log_total, mean = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g = torch.zeros_like(mean) if of_logprob is None else of_logprob / ctx.temperature
        g_entropy = None if of_entropy is None else of_entropy / ctx.temperature
        d_hidden = torch.zeros_like(hidden, dtype=mean.dtype) if needs_hidden else None
        d_weight = torch.empty_like(weight) if needs_weight else None
        d_bias = torch.empty_like(bias) if needs_bias else None
        for start, z in _slices(hidden, weight, bias, ctx.temperature):
            stop = start + z.shape[1]
            local, inside = _within(labels, start, z)
            if g_entropy is None:
                d_z = z.sub_(log_total[:, None]).exp_().mul_(-g[:, None])
            else:
                p = (z - log_total[:, None]).exp_()
                d_z = p.mul_(z.sub_(mean[:, None]).mul_(g_entropy[:, None]).add_(g[:, None])).neg_()
            d_z.scatter_add_(1, local, torch.where(inside, g, 0)[:, None])
            d_z = d_z.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden += d_z @ weight[start:stop]
            if d_weight is not None:
                torch.mm(d_z.t(), hidden, out=d_weight[start:stop])
            if d_bias is not None:
                d_bias[start:stop] = d_z.sum(0)
        return None if d_hidden is None else d_hidden.to(hidden.dtype), d_weight, d_bias, None, None


def _slices(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Iterator[tuple[int, Tensor]]:
    """The logits over the temperature in float32, as (first token, (N, width)) from left to right."""
    width = max(256, (CPU_SLICE if hidden.device.type == "cpu" else GPU_SLICE) // max(1, len(hidden)))
    exact = hidden.float() if hidden.device.type == "cpu" and hidden.dtype == torch.bfloat16 else hidden
    for start in range(0, len(weight), width):
        stop = start + width
        # on a CPU a product in bfloat16 rounds the logits too: by more than an update moves a log-prob
        own = weight[start:stop].to(exact.dtype)
        z = F.linear(exact, own, None if bias is None else bias[start:stop].to(exact.dtype))
        yield start, z.to(torch.promote_types(z.dtype, torch.float32)).div_(temperature)


def _within(labels: Tensor, start: int, z: Tensor) -> tuple[Tensor, Tensor]:
    """(N, 1) each label's column in this slice, or any other column; (N,) whether the label lies in it."""
    local = labels - start
    return local.clamp(0, z.shape[1] - 1)[:, None], (local >= 0) & (local < z.shape[1])
