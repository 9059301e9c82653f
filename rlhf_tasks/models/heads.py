"""What reads numbers from a trunk: reward models, critics, and the actor-critic of PPO.

B batch · R response · H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch
from rlhf_tasks.models.classifiers import INSTEAD
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.logprobs import TokenStats, at_least_float32, replace_forward, token_stats


class TokenScores(nn.Module):
    """A scalar for every token: a reward model uses that of the last real token, a value model uses all.

    `mean` is subtracted from every score, so that demonstrations (without any, the responses of the pairs)
    score zero on average. It is stored in the model's config; a value model starts with it too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.mean: float = getattr(model.config, "score_mean", 0.0)

    def forward(self, batch: Batch, *, ends_only: bool = False) -> Tensor:
        """(B, R + 1) float32: a score before each response token, and after the last.

        With `ends_only`, (B,): the score after the last token of each response.
        """
        states: Tensor = self.model.base_model(
            input_ids=batch.query_response,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
        ).last_hidden_state  # (B, T, H), or (P, T, H) where queries are shared
        if ends_only:
            return self._score(batch.ends(states))
        return batch.states(self._score(states[:, -batch.num_last_columns :]))

    def _score(self, hidden: Tensor) -> Tensor:
        """(…, H) → (…) float32, minus the stored mean."""
        return _in_float32(score_head(self.model), hidden) - self.mean

    def set_mean(self, mean: float) -> None:
        """Store the constant that is subtracted from every score."""
        self.mean = self.model.config.score_mean = mean


def _in_float32(head: nn.Linear, states: Tensor) -> Tensor:
    """(…, H) → (…): 16 bits, in which DeepSpeed holds the weights, would round scores to 3 digits."""

    def linear(x: Tensor) -> Tensor:  # within the layer, where a sharded weight is whole
        bias = None if head.bias is None else at_least_float32(head.bias)
        return F.linear(at_least_float32(x), at_least_float32(head.weight), bias)

    with torch.autocast(states.device.type, enabled=False), replace_forward(head, linear):
        scores: Tensor = head(states).squeeze(-1)
    return scores


def score_head(model: PreTrainedModel) -> nn.Linear:
    """The score head of a sequence classifier.

    Raises:
        ContractError: naming the family, if its head is not the linear map `score` of a token's state.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ContractError(
            f"{type(model).__name__} (family {model.config.model_type}) has no linear head `score` of single "
            f"tokens; {INSTEAD}"
        )
    return head


def supports_shared_prefix(model: PreTrainedModel) -> bool:
    """Whether the model gives the responses of a `SharedPrefixBatch` what it gives each of them alone.

    It must follow a mask and positions that are given to it, in every layer. The families that
    `from_scratch` makes do, and are tested for it, except with a sliding window.
    """
    config = model.config
    return (
        config.model_type in ("gpt_neox", "gpt2", "llama", "qwen2")
        and config._attn_implementation == "sdpa"
        and getattr(config, "sliding_window", None) is None
    )


class ValueHead(nn.Linear):
    """A critic without a trunk of its own: a linear map of the policy's hidden state to one number.

    It starts at zero, as in lm-human-preferences: a random head would add noise to the first advantages.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class NoCritic(nn.Module):
    """The critic where advantages need none: it has no weights, and every value is 0."""

    def forward(self, batch: Batch) -> Tensor:
        """(B, R + 1) zeros."""
        rows, width = batch.response_mask.shape
        return torch.zeros(rows, width + 1, device=batch.response_mask.device)


class ActorCritic(nn.Module):
    """Policy and critic as one module, so that one optimizer, and one wrapper of DDP or ZeRO, hold both.

    The critic is a model of its own, a head on the policy's trunk, or there is none.
    """

    def __init__(self, policy: PreTrainedModel, critic: TokenScores | ValueHead | NoCritic) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(
        self, batch: Batch, temperature: float = 1.0, *, entropy_grad: bool = False, with_values: bool = True
    ) -> tuple[TokenStats, Tensor | None]:
        """The policy's statistics, (B, R) each, and (B, R + 1) values, or None with `with_values=False`.

        `values[:, t]` is the value of the state before response token t; the one after a row's last token
        follows it.
        """
        stats = token_stats(self.policy, batch, temperature, entropy_grad=entropy_grad)
        if not with_values:
            return stats, None
        if isinstance(self.critic, ValueHead):
            return stats, left_aligned(batch.states(_in_float32(self.critic, stats.states)), batch)
        return stats, self.values(batch)

    @property
    def shares_queries(self) -> bool:
        """Whether both models share queries among responses; the reference is like the policy."""
        models = [self.policy, *([self.critic.model] if isinstance(self.critic, TokenScores) else [])]
        return all(map(supports_shared_prefix, models))

    def values(self, batch: Batch) -> Tensor:
        """The (B, R + 1) values alone, of a critic with a trunk of its own."""
        return left_aligned(self.critic(batch), batch)


def left_aligned(values: Tensor, batch: Batch) -> Tensor:
    """(B, R + 1) values, moved from columns that end with a row's last token to ours."""
    width = values.shape[1]
    shift = width - 1 - batch.response_mask.sum(1, keepdim=True)  # (B, 1)
    columns = torch.arange(width, device=values.device) + shift
    return values.take_along_dim(columns.clamp_max(width - 1), 1)
