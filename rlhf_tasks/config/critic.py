"""Rules on the critic's settings in the section `ppo`: `advantages: gae` has a critic, others have none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rlhf_tasks.config.ppo_options import CriticWarmup, PolicyLora

NEEDED = ("value_model", "critic_init", "vf_coef", "lam")
"""What a critic cannot do without."""
OPTIONAL = ("value_learning_rate", "critic_warmup", "cliprange_value")


class Settings(Protocol):
    """What the rules read of the section `ppo`."""

    @property
    def advantages(self) -> str: ...
    @property
    def samples_per_prompt(self) -> int: ...
    @property
    def value_model(self) -> str | None: ...
    @property
    def critic_init(self) -> str | None: ...
    @property
    def critic_warmup(self) -> CriticWarmup | None: ...
    @property
    def vf_coef(self) -> float | None: ...
    @property
    def gamma(self) -> float: ...
    @property
    def truncation(self) -> str: ...
    @property
    def whiten_rewards(self) -> bool: ...
    @property
    def value_learning_rate(self) -> float | None: ...
    @property
    def lora(self) -> PolicyLora | None: ...


def critic_conflicts(ppo: Settings) -> Iterator[str]:
    """Settings of a critic that have no effect, or the wrong one, beside the other values."""
    if ppo.advantages == "gae":
        yield from _with_critic(ppo)
    elif ":" not in ppo.advantages:  # a function of one's own may want either
        yield from _without_critic(ppo)


def _with_critic(ppo: Settings) -> Iterator[str]:
    missing = [key for key in NEEDED if getattr(ppo, key) is None]
    if missing:
        yield f"advantages=gae needs a critic, and null stands for none: give {', '.join(missing)}"
    if ppo.critic_warmup is not None and ppo.vf_coef == 0:
        yield (
            "critic_warmup: with vf_coef=0 the critic learns nothing; raise vf_coef, or set "
            "critic_warmup to null"
        )
    if ppo.value_model != "shared":
        return
    if ppo.critic_init not in ("sft", None):
        yield (
            f"value_model=shared uses the policy's trunk: critic_init={ppo.critic_init!r} would be "
            "ignored; set it to sft"
        )
    if ppo.value_learning_rate is not None:
        yield (
            "value_model=shared trains one trunk, so it can have no value_learning_rate of its own; set "
            "it to null"
        )
    if ppo.critic_warmup is not None:
        yield (
            "value_model=shared: a warm-up of the critic would move the policy's trunk; set "
            "critic_warmup to null, or value_model to separate"
        )
    if ppo.lora is not None and ppo.lora.value:
        yield "value_model=shared has no trunk of its own for lora.value; set it to false"


def _without_critic(ppo: Settings) -> Iterator[str]:
    given = [key for key in (*NEEDED, *OPTIONAL) if getattr(ppo, key) is not None]
    if given:
        nulls = " ".join(f"ppo.{key}=null" for key in given)
        yield (
            f"advantages={ppo.advantages} has no critic, so that {', '.join(given)} would be ignored; set "
            f"{'it' if len(given) == 1 else 'them'} to null: "
            f"give `--set {nulls}` to `rlhf preset`, beside the presets that you name"
        )
    if ppo.samples_per_prompt == 1:
        yield (
            f"advantages={ppo.advantages} compares the responses to one prompt, and samples_per_prompt=1 "
            "leaves nothing to compare; set it to 2 or more, such as 4"
        )
    if ppo.gamma != 1:
        yield (
            f"advantages={ppo.advantages} sums the rewards of a response, so that gamma={ppo.gamma:g} would "
            "be ignored; set it to 1.0"
        )
    if ppo.whiten_rewards:
        yield (
            f"advantages={ppo.advantages} compares sums of token rewards, and whiten_rewards would add a "
            "part that grows with the length; set it to false"
        )
    if ppo.truncation.startswith("bootstrap"):
        yield (
            f"truncation={ppo.truncation} needs the value of a critic, and advantages={ppo.advantages} has "
            "none; set it to eos_trick_replace, eos_trick_subtract or none"
        )
    if ppo.lora is not None and ppo.lora.value:
        yield f"advantages={ppo.advantages} has no critic for lora.value; set it to false"
