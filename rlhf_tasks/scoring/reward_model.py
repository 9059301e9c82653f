"""Reward models as scorers: where they compute, and which token ids they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.data import positions
from rlhf_tasks.data.batches import group_rows
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.models import checks, contracts
from rlhf_tasks.models.heads import TokenScores, supports_shared_prefix
from rlhf_tasks.models.load import load_reward
from rlhf_tasks.models.passes import RunBatches, TokenBudget, read_rows
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.scoring.retokenize import Retokenizer

M = TypeVar("M", bound=nn.Module)


class Placement(Protocol):
    """Where a stage computes with models that it does not train: on its device, or sharded over processes."""

    device: torch.device
    is_float32: bool
    """Whether passes compute in float32, and not in bfloat16."""

    def put(self, model: nn.Module) -> None:
        """Put a model there."""

    def to_check(self, model: M) -> M | None:
        """A model, or a copy, whole and where it can be computed; None where this process is not to do it."""

    def run_batches(
        self, budget: TokenBudget, rows: Sequence[int], compute: Callable[[list[int]], None]
    ) -> None:
        """`RunBatches` of rows, whose tokens are given."""


class RewardModel:
    """A reward model as a scorer: the score of each row's last real token, in the stage's precision."""

    def __init__(
        self,
        model: TokenScores,
        tokenizer: PreTrainedTokenizerBase,
        max_tokens: int = 16384,
        placement: Placement | None = None,
        retokenize: Retokenizer | None = None,
    ) -> None:
        """`placement` is where the model is or will be put; None: where it is now, in its own precision.

        Without `retokenize`, ids that the rows hold are those of this tokenizer.
        """
        self.model, self._tokenizer, self._retokenize = model.eval(), tokenizer, retokenize
        self._budget, self._device = TokenBudget(max_tokens), next(model.parameters()).device
        self._run_batches: RunBatches = TokenBudget.each
        self._rounds = placement is not None and not placement.is_float32
        if placement is not None:
            self._device, self._run_batches = placement.device, placement.run_batches

    def __call__(self, rows: Responses) -> Tensor:
        queries, responses = self._retokenize(rows) if self._retokenize else rows.ids(self._tokenizer)
        shares = supports_shared_prefix(self.model.model)
        groups = group_rows(queries, responses, range(len(rows)), self._budget.max_tokens, shares=shares)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._rounds):
            return read_rows(
                lambda batch: self.model(batch, ends_only=True),
                queries,
                responses,
                groups=groups,
                pad=self._tokenizer.pad_token_id,
                device=self._device,
                budget=self._budget,
                run=self._run_batches,
            ).float()


def load(folder: Path, device: torch.device, policy: PreTrainedTokenizerBase | None = None) -> RewardModel:
    """A reward model that reads texts; as a judge models/reward_heldout, which PPO never optimizes.

    With the tokenizer of a `policy` it reads its texts by its own tokenizer and chat template.
    """
    model, own = load_reward(folder).to(device), load_tokenizer(folder)
    contracts.check_fits(model.model, own, str(folder))
    reads = None if policy is None else Retokenizer(own, policy, folder, _max_length(model))
    return RewardModel(model, own, retokenize=reads)


def load_foreign(
    folder: Path, policy: PreTrainedTokenizerBase, max_tokens: int, placement: Placement
) -> RewardModel:
    """A reward model that reads responses of a policy through its own tokenizer and chat template.

    Raises:
        ContractError: if the folder holds no reward model with a trained head, or a tokenizer that does not
            fit it.
        UserError: if the scores of a padded batch are not those of each row alone.
    """
    own, model = load_tokenizer(folder), load_reward(folder).requires_grad_(False)
    contracts.check_fits(model.model, own, str(folder))
    if (checked := placement.to_check(model)) is not None:
        rows = checks.random_rows(model.model.config)
        checks.require(checks.check_scores(checked, rows, pad=own.pad_token_id), str(folder))
    del checked
    placement.put(model)
    reads = Retokenizer(own, policy, folder, _max_length(model))
    return RewardModel(model, own, max_tokens, placement, reads)


def _max_length(model: TokenScores) -> int | None:
    """The number of tokens that the model can read; None: no limit."""
    settings = model.model.config
    bounds = positions.max_positions(settings), *positions.batch_bounds(settings)
    return min((bound for bound in bounds if bound is not None), default=None)
