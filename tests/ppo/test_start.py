"""What stage ppo trains, and from which weights, by the models that it loads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_tasks.config import PpoView
from rlhf_tasks.data.batches import collate
from rlhf_tasks.models.heads import ActorCritic, TokenScores, ValueHead, score_head
from rlhf_tasks.models.load import load_causal, load_reward, save_checkpoint
from rlhf_tasks.ppo import preconditions
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import ppo
from tests import small
from tests.ppo import toy
from tests.small import PAD

Start = Callable[..., ActorCritic]
LORA = {"r": 4, "alpha": 8.0}


def view(**changes: Any) -> PpoView:
    keys = {f"ppo.{key.replace('__', '.')}": value for key, value in changes.items()}
    result: PpoView = small.view("ppo", keys)
    return result


@pytest.fixture
def start(models_here: Path) -> Start:
    """`start(**changes)`: the stage's policy and critic before training."""
    return lambda **changes: ppo.load_models(small.distributed(), view(**changes), Paths())[0]


def critic_of(one: ActorCritic) -> TokenScores:
    assert isinstance(one.critic, TokenScores)
    return one.critic


def same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in b)


# -------------------------------------------------------------------------------- the critic's weights


@pytest.mark.parametrize("source", ["sft", "base"])
def test_a_critic_from_a_language_model_has_its_trunk_and_a_head_of_zeros(source: str, start: Start) -> None:
    critic = critic_of(start(advantages__critic__init=source))
    trunks = {name: load_causal(Path("models") / name).base_model for name in ("sft", "base")}
    assert [name for name, trunk in trunks.items() if same(critic.model.base_model, trunk)] == [source]
    assert not score_head(critic.model).weight.any()


def test_the_first_values_of_a_critic_from_the_reward_model_are_its_scores(start: Start) -> None:
    """The mean that is subtracted from its scores is subtracted from the values too."""
    config = Path("models/reward/config.json")
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"score_mean": 0.7}), "utf-8")
    queries, responses = small.rows(6)
    batch = collate(queries, responses, PAD)
    reward, one = load_reward("models/reward"), start(advantages__critic__init="reward")
    assert reward.mean == 0.7
    with torch.no_grad():
        scores, values = reward(batch)[:, -batch.num_response_columns - 1 :], one.eval().values(batch)
    for row, n in enumerate(map(len, responses)):
        assert torch.equal(values[row, : n + 1], scores[row, -n - 1 :])
    assert scores.std() > 0.01
    assert same(critic_of(one), reward)


@pytest.mark.parametrize("family", ["opt", "llama4_text", "cohere", "minicpm3"])
@pytest.mark.parametrize("kind", ["shared", "separate"])
def test_a_critic_of_any_family_and_width_learns(family: str, kind: str, models_here: Path) -> None:
    """OPT-350m's head reads states that are narrower than its layers; Llama 4 hides its trunk."""
    save_checkpoint(small.other(family), small.tokenizer(), Paths().sft, identity={}, card="")
    rewards = {"ppo.scorers": [{"kind": "dummy"}], "reward.train": False, "judge.judges": [small.GOLD]}
    critic = {"kind": kind} if kind == "shared" else {"kind": kind, "init": "sft"}
    config = small.view("ppo", rewards | {"ppo.advantages.critic": critic})
    one, reference, _ = ppo.load_models(small.distributed(), config, Paths())
    head = one.critic if isinstance(one.critic, ValueHead) else score_head(critic_of(one).model)
    assert not head.weight.any()
    changes = {"advantages__critic": critic, **toy.ONE_STEP}
    metrics = next(toy.toy(actor_critic=one, reference=reference, **changes).updates)
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-4)  # of the only step, before which nothing moved
    assert metrics["objective/kl_k1"] == pytest.approx(0, abs=1e-4)
    assert head.weight.all()


# ---------------------------------------------------------------------------- adapters, checkpointing


def trained(model: nn.Module) -> set[str]:
    """The kinds of weights that are trained: adapters, the score head, the trunk."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return {"adapter" if "lora_" in n else "head" if "score" in n else "trunk" for n in names}


@pytest.mark.parametrize("source", ["reward", "sft"])
@pytest.mark.parametrize(("lora", "critic_lora"), [(None, None), (LORA, None), (LORA, LORA)])
def test_lora_puts_adapters_into_the_policy_and_on_demand_into_the_critic(
    lora: dict[str, Any] | None, critic_lora: dict[str, Any] | None, source: str, start: Start
) -> None:
    one = start(lora=lora, advantages__critic={"init": source, "lora": critic_lora})
    assert trained(one.policy) == ({"adapter"} if lora else {"trunk"})
    assert trained(critic_of(one)) == {"adapter" if critic_lora else "trunk", "head"}


@pytest.mark.parametrize("on", [True, False])
def test_gradient_checkpointing_passes_policy_and_critic_twice(on: bool, start: Start) -> None:
    """Activations that the first pass does not keep are computed again for the gradient."""
    one = start(gradient_checkpointing=on)
    passes: Counter[str] = Counter()
    for name, module in one.named_modules():
        if name.endswith(".mlp"):
            module.register_forward_pre_hook(lambda *_, name=name: passes.update([name]))
    stats, values = one(collate(*small.rows(3), PAD))
    (stats.logprobs.sum() + values.mean()).backward()
    assert {name.split(".")[0] for name in passes} == {"policy", "critic"}
    assert set(passes.values()) == {2 if on else 1}


# ------------------------------------------------------------------------------------------- warnings


WARMUP = {"max_updates": 1, "settled": 0.1}
WARM_UP, DISCOUNT = "set ppo.advantages.critic.warmup", "set ppo.advantages.gamma below 1"


@pytest.mark.parametrize(
    ("truncation", "warmup", "gamma", "warnings"),
    [
        ("bootstrap", None, 1.0, {WARM_UP, DISCOUNT}),
        ("bootstrap_add", WARMUP, 1.0, {DISCOUNT}),
        ("bootstrap", None, 0.99, {WARM_UP}),
        ("eos_trick_replace", None, 1.0, set()),
    ],
)
@pytest.mark.usefixtures("models_here")
def test_bootstrapping_without_a_warm_up_or_a_discount_gives_a_warning(
    truncation: str, warmup: Any, gamma: float, warnings: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"advantages__critic__warmup": warmup, "advantages__gamma": gamma}
    preconditions.check(view(truncation__kind=truncation, **changes), Paths())
    said = capsys.readouterr().out
    assert {text for text in (WARM_UP, DISCOUNT) if text in said} == warnings
