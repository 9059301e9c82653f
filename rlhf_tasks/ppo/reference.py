"""The model that KL is measured from."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch
from rlhf_tasks.modeling.models import without_adapters
from rlhf_tasks.ppo.rollout import logprobs_of


class Reference(Protocol):
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """(B, R) of the response tokens."""

    def follow(self, policy: PreTrainedModel, alpha: float) -> None:
        """ref ← (1 − alpha) · ref + alpha · policy."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run cannot read from models/sft."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OwnModel:
    """A copy of the SFT model; stands still unless it `moves`."""

    def __init__(self, model: PreTrainedModel, *, moves: bool = False) -> None:
        self._model, self._moves = model.eval(), moves

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        return logprobs_of(self._model, batch, temperature)

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel, alpha: float) -> None:
        for mine, its in zip(self._model.parameters(), policy.parameters(), strict=True):
            mine.lerp_(its.to(mine.dtype), alpha)

    def state_dict(self) -> dict[str, Any]:
        return self._model.state_dict() if self._moves else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._moves:
            self._model.load_state_dict(state)


class AdapterOff:
    """The policy itself without its LoRA adapter: no second copy of the weights."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        with without_adapters(self._policy):
            return logprobs_of(self._policy, batch, temperature)

    def follow(self, policy: PreTrainedModel, alpha: float) -> None:
        raise AssertionError("config refuses reference_sync beside lora")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
