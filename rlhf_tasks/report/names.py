"""How the report names models and judges in titles."""

from __future__ import annotations

from collections.abc import Mapping

RESPONDERS = ("reference", "sft", "policy")
"""The origins of judged responses, in the order of the columns."""
LANGUAGE_MODELS = ("base", "sft", "policy")
MODELS: Mapping[str, str] = {"base": "Base", "reference": "Reference", "sft": "SFT", "policy": "Policy"}
JUDGES: Mapping[str, str] = {"gold": "Gold judge", "reward_model": "Reward model"}


def model(name: str) -> str:
    return MODELS.get(name, name)


def judge(name: str) -> str:
    return JUDGES.get(name, name)
