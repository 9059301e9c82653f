"""A classifier with a linear head on the trunk of any causal LM.

transformers has such classes, with a head `score`, for most families of decoders. For the others (Granite,
Cohere, OLMoE, CodeGen, …), and where the head has another form (CTRL), the class is made here, from the
generic one on which transformers builds its own. Its folders are plain too: safetensors with the trunk under
`model.` and the head `score.weight`, and the family's config, whose `architectures` names the class.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GenericForSequenceClassification

from rlhf_tasks.models.contracts import ContractError

SUFFIX = "ForTokenScores"
INSTEAD = "use a decoder of another family, such as llama, qwen2 or gpt_neox"


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint's config names a sequence classifier, or OpenRLHF's reward model."""
    ends = ("ForSequenceClassification", "RewardModel", SUFFIX)
    return any(name.endswith(ends) for name in config.architectures or ())


def classifier_class(config: PretrainedConfig, source: str | Path) -> Any:
    """The class whose `from_pretrained` loads the classifier of a source with this config.

    Raises:
        ContractError: naming a family that has no classifier.
    """
    generic = _generic_class(config)
    is_generic = generic is not None and generic.__name__ in (config.architectures or ())
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not is_generic:
        return AutoModelForSequenceClassification
    if generic is None:
        raise ContractError(f"{source} is a {config.model_type} model, which has no classifier; {INSTEAD}")
    return generic


def build_classifier(trunk: nn.Module, config: PretrainedConfig) -> PreTrainedModel:
    """A classifier with the weights of a causal LM's trunk; its linear head `score` is not initialized.

    Raises:
        ContractError: naming the family, if no classifier of it reads the states of this trunk.
    """
    builders: list[Any] = []
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        builders.append(AutoModelForSequenceClassification.from_config)
    if (generic := _generic_class(config)) is not None:
        builders.append(generic._from_config)
    weights = trunk.state_dict()
    for build in builders:
        with no_init_weights():
            model: PreTrainedModel = build(config, dtype=torch.float32)
        base = model.base_model
        is_same = type(base) is type(trunk) and base.state_dict().keys() == weights.keys()
        if is_same and isinstance(getattr(model, "score", None), nn.Linear):
            base.load_state_dict(weights, assign=True)  # views of the file, which ranks share
            return model
    raise ContractError(
        f"no reward model or critic can be put on {type(trunk).__name__} (family {config.model_type}): it is "
        f"no trunk of a decoder that transformers builds from its config; {INSTEAD}"
    )


def find_trunk(model: PreTrainedModel) -> nn.Module:
    """The part of a causal LM below its head, also where `base_model` does not find it (Llama 4)."""
    if model.base_model is not model:
        return model.base_model
    return next((child for child in model.children() if isinstance(child, PreTrainedModel)), model)


def replace_trunk(model: PreTrainedModel, trunk: nn.Module) -> None:
    """Put a causal LM's head, and what it does to its logits, on another trunk of the same class."""
    old = find_trunk(model)
    name = next(name for name, child in model.named_children() if child is old)
    setattr(model, name, trunk)


def _generic_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    """The class that is made for a family; None if the family has no causal LM or no trunk of its own."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) not in MODEL_MAPPING:
        return None
    if not hasattr(config.get_text_config(), "hidden_size"):
        return None
    return _make_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


@functools.cache
def _make_class(causal: Any) -> type[PreTrainedModel]:
    family = next(cls for cls in causal.__mro__ if PreTrainedModel in cls.__bases__)
    name = family.__name__.removesuffix("PreTrainedModel") + SUFFIX
    # transformers reads in the source of the class's module what the family's attention and experts can do
    own = {"config_class": causal.config_class, "__module__": family.__module__}
    return type(name, (GenericForSequenceClassification, family), own)
