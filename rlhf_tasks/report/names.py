"""How the report names models, judges and origins of pairs."""

from __future__ import annotations

from collections.abc import Mapping

RESPONDERS = ("reference", "sft", "policy")
"""The origins of judged responses, in the order of the columns."""
LANGUAGE_MODELS = ("base", "sft", "policy")
MODELS: Mapping[str, str] = {"base": "Base", "reference": "Reference", "sft": "SFT", "policy": "Policy"}
JUDGES: Mapping[str, str] = {"gold": "Gold judge", "reward_model": "Reward model"}
REWARD_MODELS: Mapping[str, str] = {
    "reward": "the reward model that PPO optimises",
    "reward_heldout": "the held-out reward model",
}
ORIGINS: Mapping[str, str] = {
    "given": "given pairs",
    "sft_samples": "SFT samples",
    "policy_samples": "policy samples",
}


def model(name: str) -> str:
    return MODELS.get(name, name)


def judge(name: str) -> str:
    return JUDGES.get(name, name)
