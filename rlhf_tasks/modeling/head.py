"""Log-probs, entropies and losses of response tokens, from a model that never makes all of its logits.

The model runs as ever, but for its output layer: there `vocabulary` computes what is asked for.

B batch · R response · N response tokens of all rows, without padding · H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch, collate
from rlhf_tasks.modeling.classifiers import find_trunk
from rlhf_tasks.modeling.contracts import ContractError
from rlhf_tasks.modeling.last_layer import Forward, forward_replaced, last_columns_only
from rlhf_tasks.modeling.products import LINEAR
from rlhf_tasks.modeling.vocabulary import Loss, Stats, label_loss, label_stats, stats_of_logits

_ADJUSTED: WeakSet[nn.Module] = WeakSet()
"""Heads whose model changes their logits: softcapping (Gemma 2), scaling (Cohere, Granite)."""


class TokenStats(NamedTuple):
    """Statistics of the response tokens. The first three are zero on padding and have no gradient."""

    logprobs: Tensor  # (B, R)
    entropy: Tensor  # (B, R), of the distribution at each token
    likeliest: Tensor  # (B, R), 1 where no other token is likelier, else 0
    states: Tensor  # (B, R + 1, H): the head's input before each response token, and after the last
    loss: Tensor  # scalar, of the `loss` that was given; else 0


def token_stats(
    model: nn.Module, batch: Batch, temperature: float = 1.0, loss: Loss | None = None
) -> TokenStats:
    """The response tokens' statistics under softmax(logits / temperature) of a causal LM.

    `loss` is a loss of the N response tokens, row after row, to train the model with.

    `model` may be wrapped for data parallelism: the statistics are computed in place of the logits within its
    forward pass, where the hooks of DDP and ZeRO expect the use of the head's weights. If the model changes
    its logits after the head, they are all made instead.
    """
    head, mask = _head(model), batch.response_mask
    if head in _ADJUSTED or not _is_linear(head):
        logits, states = _run(model, batch, lambda original, states: original(states))
        found = stats_of_logits(logits[:, :-1][mask].float() / temperature, batch.responses[mask])
        total = _zero(states) if loss is None else loss(found.logprobs, found.entropy, slice(len(found[0])))
        return _spread(found, batch, states, total)
    made = list[tuple[Tensor, int, Stats]]()  # the tensor is kept: else a later one could take its address

    def forward(_: Forward, states: Tensor) -> Tensor:
        total, stats = _stats_of_states(head, states, batch, temperature, loss)
        answer = total.expand(1, 1, 1).clone()  # passes through hooks as logits do, which want no view
        made.append((answer.detach(), answer._version, stats))
        return answer

    answer, states = _run(model, batch, forward)
    own, version, stats = made[0]
    if answer.data_ptr() != own.data_ptr() or answer._version > version:  # the model changed them
        _ADJUSTED.add(head)
        return token_stats(model, batch, temperature, loss)
    return _spread(stats, batch, states, answer.sum())


def head_states(model: nn.Module, batch: Batch) -> Tensor:
    """`TokenStats.states` alone, without the cost of the head."""
    return _run(model, batch, lambda _, states: states)[1]


def head_width(model: PreTrainedModel) -> int:
    """H of `TokenStats.states`; it may differ from the config's `hidden_size` (OPT-350m)."""
    return cast(nn.Linear, _head(model)).in_features


@torch.no_grad()
def reads_trunk(model: PreTrainedModel) -> bool:
    """Whether the logits are the head's product with the trunk's states, unchanged before and after it.

    Only then `head_loss` on those states is the model's own. It is tried on four tokens: what is given
    to the head must be the states, bit for bit, and the model must return what the head returns.
    """
    batch = collate([[0, 1]], [[2, 3]], pad=0).to(next(model.parameters()).device)
    given = token_stats(model, batch).states
    with last_columns_only(model, given.shape[1]):  # the same sizes of products, or the last bits differ
        out = find_trunk(model)(
            input_ids=batch.query_response, attention_mask=batch.attention_mask,
            position_ids=batch.position_ids, use_cache=False,
        )  # fmt: skip
    states = out.last_hidden_state[:, -given.shape[1] :]
    head = _head(model)
    return _is_linear(head) and head not in _ADJUSTED and torch.equal(given, states)


def head_loss(head: nn.Linear, states: Tensor, batch: Batch, loss: Loss) -> Tensor:
    """The loss of the response tokens by a head of its own, on (B, R + 1, H) states: a scalar."""

    def forward(_: Forward, states: Tensor) -> Tensor:
        return _stats_of_states(head, states, batch, 1.0, loss)[0]

    with forward_replaced(head, forward):
        answer: Tensor = head(states)
    return answer


def _head(model: nn.Module) -> nn.Module:
    head: nn.Module = _unwrapped(model).get_output_embeddings()
    return head


def _is_linear(head: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the head computes hidden · weightᵀ + bias and nothing else."""
    return type(head).forward in {kind.forward for kind in LINEAR}


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

    reading = last_columns_only(_unwrapped(model), columns)
    with forward_replaced(_head(model), last_columns), reading:
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


def _stats_of_states(
    head: nn.Linear, states: Tensor, batch: Batch, temperature: float, loss: Loss | None
) -> tuple[Tensor, Stats]:
    mask = batch.response_mask
    hidden, labels = states[:, :-1][mask], batch.responses[mask]
    if loss is None:
        return _zero(states), label_stats(head, hidden, labels, temperature)
    return label_loss(head, hidden, labels, loss, temperature)


def _zero(states: Tensor) -> Tensor:
    return states.new_zeros((), dtype=torch.float32)


def _spread(stats: Stats, batch: Batch, states: Tensor, loss: Tensor) -> TokenStats:
    """(N,) each → (B, R), zero on padding."""
    mask = batch.response_mask
    logprobs, entropy, likeliest = (x.new_zeros(mask.shape).masked_scatter(mask, x.detach()) for x in stats)
    return TokenStats(logprobs, entropy, likeliest, states, loss)
