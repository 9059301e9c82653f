"""The reference model, from which the KL of the policy is measured."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import Batch
from rlhf_tasks.modeling.load import disable_adapters
from rlhf_tasks.ppo.rollout import logprobs_of
from rlhf_tasks.training import sharding


class Reference(Protocol):
    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        """(B, R) log-probs of the response tokens."""

    def follow(self, policy: PreTrainedModel, alpha: float) -> None:
        """Move towards the policy: ref ← (1 − alpha) · ref + alpha · policy."""

    def state_dict(self) -> dict[str, Any]:
        """The weights that a resumed run cannot read from models/sft."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OwnModel:
    """A copy of the SFT model, fixed unless it `moves`."""

    def __init__(self, model: PreTrainedModel, *, moves: bool = False) -> None:
        self._model, self._moves = model.eval(), moves

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        return logprobs_of(self._model, batch, temperature)

    def follow(self, policy: PreTrainedModel, alpha: float) -> None:
        sharding.move_towards(self._model, policy, alpha)

    def state_dict(self) -> dict[str, Any]:
        return sharding.weights_of(self._model) if self._moves else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._moves:
            sharding.load_weights(self._model, state)


class AdapterOff:
    """The policy itself with its LoRA adapters switched off: no second copy of the weights."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self._policy = policy

    def logprobs(self, batch: Batch, temperature: float) -> Tensor:
        with disable_adapters(self._policy):
            return logprobs_of(self._policy, batch, temperature)

    def follow(self, policy: PreTrainedModel, alpha: float) -> None:
        raise AssertionError("config rejects reference_sync together with lora")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
