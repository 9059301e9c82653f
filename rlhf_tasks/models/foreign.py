"""Checkpoints that other programs wrote: reward heads under their names, and what is no model for a stage.

    score.weight                         transformers, TRL's RewardTrainer, OpenRLHF
    value_head.weight                    OpenRLHF, or the name in `value_head_prefix` of its config
    v_head.summary.weight, .bias         TRL's AutoModelForCausalLMWithValueHead; LLaMA-Factory, which keeps
                                         them in a file of their own, value_head.safetensors

OpenRLHF's reward is (score - mean) / std, where its config holds both, unless `normalize_reward` is false.

H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_tasks.models.contracts import ContractError

VALUE_HEADS = ("v_head.summary", "value_head")
SCORE_HEADS = ("score", "classifier", "v_head", "value_head")
"""How the names of heads that score or classify texts begin."""
OTHER_HEADS = {
    "ForMaskedLM": "a masked language model, which reads both sides of a token",
    "ForTokenClassification": "a classifier of single tokens, such as a process reward model",
    "ForQuestionAnswering": "a model that marks answers in a text",
    "CriticModel": "a critic of OpenRLHF, whose values are no rewards; give its reward model",
}
"""What a config is whose architecture ends so."""


class Head(NamedTuple):
    """The head of a reward model: score = weight · state + bias."""

    weight: Tensor
    """(1, H)."""
    bias: float


def check_kind(source: str | Path, config: PretrainedConfig) -> None:
    """Check that a config is of a model that a stage can use.

    Raises:
        ContractError: naming what the source is, and what to give instead.
    """
    names = config.architectures or ()
    what = next((what for end, what in OTHER_HEADS.items() if any(n.endswith(end) for n in names)), None)
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        what = f"quantized ({method}), and its weights cannot be trained; give the model as it was before"
    if config.is_encoder_decoder:
        what = f"an encoder-decoder model ({config.model_type})"
    if what is not None:
        raise ContractError(f"{source} is {what}; give a causal language model, or a reward model")


def find_head(folder: Path, prefix: str | None = None) -> Head | None:
    """The head of a reward model that is stored under another name than `score`; None where there is none.

    `prefix` is the name in the model's config, where it has one.

    Raises:
        ContractError: if it is in a file of another format, scores more than once, or is no linear map.
    """
    names = [prefix, *VALUE_HEADS] if prefix and prefix != "score" else VALUE_HEADS
    heads = dict(_heads(folder, (*names, "score", "v_head")))
    known = {f"{name}.{part}" for name in names for part in ("weight", "bias")} | {"score.weight"}
    if strange := sorted(heads.keys() - known):
        raise ContractError(
            f"{folder} has a head of another form ({', '.join(strange)}); a reward model has one linear head "
            "score.weight, v_head.summary or value_head: merge its adapter, or save its head so"
        )
    name = next((name for name in names if f"{name}.weight" in heads), None)
    if name is None:
        return None
    weight, bias = heads[f"{name}.weight"].float(), heads.get(f"{name}.bias", torch.zeros(1))
    if weight.dim() != 2 or len(weight) != 1:
        raise ContractError(
            f"{folder} is not a reward model: the shape of {name}.weight is {tuple(weight.shape)}, and a "
            "reward model has one score"
        )
    return Head(weight, float(bias))


def _heads(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder whose names begin with one of these."""
    begins = tuple(f"{name}." for name in names)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 – it is no mapping
                    if name.startswith(begins):
                        yield name, tensors.get_tensor(name)
        except SafetensorError as error:
            raise ContractError(f"cannot load a model from {folder}: {file.name}: {error}") from error


@torch.no_grad()
def put_head(model: PreTrainedModel, head: Head | None) -> None:
    """Give a classifier its head, and the scale that its config holds, as `score` and `score_mean`."""
    score: Any = model.score
    config = model.config
    bias = 0.0
    if head is not None:
        score.weight.copy_(head.weight)
        bias = head.bias
    mean, std = getattr(config, "mean", 0.0), getattr(config, "std", 1.0)
    if getattr(config, "normalize_reward", True) is False:
        mean, std = 0.0, 1.0
    for name in ("mean", "std"):  # or they would be applied again when the model was saved and loaded
        if hasattr(config, name):
            delattr(config, name)
    if (bias, mean, std) != (0.0, 0.0, 1.0):
        score.weight.div_(std)
        config.score_mean = getattr(config, "score_mean", 0.0) + (mean - bias) / std
