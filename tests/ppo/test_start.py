"""What stage ppo trains and from which weights, seen as it puts policy and critic together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.data.batches import collate
from rlhf_tasks.modeling import models
from rlhf_tasks.modeling.models import TokenScores
from rlhf_tasks.ppo.rollout import ActorCritic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import ppo
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.small import PAD

Start = Callable[..., ActorCritic]
LORA = {"r": 4, "alpha": 8.0, "value": False}


@pytest.fixture
def start(models_here: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """`start(**changes)`: the stage's policy and critic before anything is learned; there it ends."""

    class Seen(BaseException):
        pass

    made: list[ActorCritic] = []

    def caught(policy: Any, value: Any) -> NoReturn:
        made.append(ActorCritic(policy, value))
        raise Seen

    def started(**changes: Any) -> ActorCritic:
        with pytest.raises(Seen):
            ppo.run(
                small.view("ppo", {f"ppo.{key}": value for key, value in changes.items()}),
                Paths(),
                NullTracker("ppo"),
            )
        return made[-1]

    monkeypatch.setattr(ppo, "ActorCritic", caught)
    return started


def critic_of(one: ActorCritic) -> TokenScores:
    assert isinstance(one.value, TokenScores)
    return one.value


def same(found: nn.Module, expected: nn.Module) -> bool:
    mine, its = found.state_dict(), expected.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in its)


# -------------------------------------------------------------------------------- the critic's weights


@pytest.mark.parametrize("source", ["sft", "base"])
def test_a_critic_of_a_language_model_has_its_trunk_under_a_head_of_zeros(source: str, start: Start) -> None:
    critic = critic_of(start(critic_init=source))
    trunks = {name: models.load_causal(Path("models") / name).base_model for name in ("sft", "base")}
    assert [name for name, trunk in trunks.items() if same(critic.model.base_model, trunk)] == [source]
    assert not models.head_of(critic.model).weight.any()


def test_a_critic_of_the_reward_model_gives_its_scores_as_first_values(start: Start) -> None:
    """The mean that is taken off its scores is taken off the values too."""
    config = Path("models/reward/config.json")
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"score_mean": 0.7}), encoding="utf-8"
    )
    queries, responses = small.rows(6)
    batch = collate(queries, responses, PAD)
    reward, one = models.load_reward("models/reward"), start(critic_init="reward")
    assert reward.mean == 0.7
    with torch.no_grad():
        scores: Tensor = reward(batch)[:, -batch.num_response_columns - 1 :]
        assert torch.equal(one.eval().state_values(batch), scores)
    assert scores.std() > 0.01
    assert same(critic_of(one), reward)


@pytest.mark.parametrize("source", ["reward", "sft", "base"])
def test_all_of_policy_and_critic_is_trained(source: str, start: Start) -> None:
    """The reward model itself stands still; the critic that starts as it must not."""
    assert all(p.requires_grad for p in start(critic_init=source).parameters())


# ---------------------------------------------------------------------------- adapters, checkpointing


def trained(model: nn.Module) -> set[str]:
    """What of it is trained: adapters, the head of scores, or the other weights too."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"adapter" if "lora_" in n else "head" if "score" in n else "trunk" for n in names}


@pytest.mark.parametrize("source", ["reward", "sft"])
@pytest.mark.parametrize(
    ("lora", "of_policy", "of_critic"),
    [
        (None, {"trunk"}, {"trunk", "head"}),
        (LORA, {"adapter"}, {"trunk", "head"}),
        (LORA | {"value": True}, {"adapter"}, {"adapter", "head"}),
    ],
    ids=["none", "policy", "policy-and-critic"],
)
def test_adapters_are_put_where_lora_says(
    lora: dict[str, Any] | None, of_policy: set[str], of_critic: set[str], source: str, start: Start
) -> None:
    one = start(lora=lora, critic_init=source)
    assert trained(one.policy) == of_policy
    assert trained(critic_of(one)) == of_critic


@pytest.mark.parametrize("on", [True, False])
def test_gradient_checkpointing_goes_through_policy_and_critic_twice(on: bool, start: Start) -> None:
    """What is not kept of the first pass is computed again for the gradient."""
    one = start(gradient_checkpointing=on).train()
    passes: Counter[str] = Counter()
    for name, module in one.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: passes.update([name]))
    logits, values = one(collate(*small.rows(3), PAD))
    (logits.mean() + values.mean()).backward()
    assert {name.split(".")[0] for name in passes} == {"policy", "value"}
    assert set(passes.values()) == {2 if on else 1}


# ------------------------------------------------------------------------------------------ a warning


@pytest.mark.parametrize(
    ("truncation", "warmup", "warned"),
    [
        ("bootstrap", None, True),
        ("bootstrap_add", None, True),
        ("bootstrap", {"max_updates": 1, "settled": 0.1}, False),
        ("eos_trick_replace", None, False),
    ],
)
def test_bootstrapping_from_a_cold_critic_alone_is_warned_of(
    truncation: str,
    warmup: dict[str, float] | None,
    warned: bool,
    start: Start,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start(truncation=truncation, critic_warmup=warmup)
    assert ("set ppo.critic_warmup" in capsys.readouterr().out) is warned


@pytest.mark.parametrize(
    ("truncation", "gamma", "warned"),
    [
        ("bootstrap", 1.0, True),
        ("bootstrap_add", 1.0, True),
        ("bootstrap", 0.99, False),
        ("none", 1.0, False),
    ],
)
def test_bootstrapping_without_a_discount_is_warned_of(
    truncation: str, gamma: float, warned: bool, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start(truncation=truncation, gamma=gamma)
    assert ("set ppo.gamma below 1" in capsys.readouterr().out) is warned
