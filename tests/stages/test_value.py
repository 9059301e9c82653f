"""Stage value: what a critic is trained on, what is measured of it, and PPO that starts from it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks import config
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import score_head
from rlhf_tasks.models.load import load_reward
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import value
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.tasks import ValueTargets
from tests import small, toy
from tests.small import PAD

QUERIES, RESPONSES = small.rows(6, seed=1)
OUTCOMES = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, 1.5])
SMALL: dict[str, Any] = {
    "value": {
        "num_prompts": 96,
        "micro_batch_tokens": 16384,
        "num_epochs": 12.0,
        "batch_size": 32,
        "learning_rate": 0.02,
        "patience": 100,
    },
    "ppo.advantages.critic": {"kind": "separate", "init": "value"},
    "ppo.scorers": [{"kind": "function", "function": "scores:of_topic"}],
    "ppo.micro_batch_tokens": 16384,
    "ppo.total_episodes": 64,
    "ppo.rollout_batch_size": 32,
    "ppo.truncation": {"kind": "none"},
    "reward.train": False,
    "judge.judges": [small.GOLD],
}
FUNCTION = '''
def of_topic(prompts, responses, **_):
    """Most of a score is the prompt's, known from the first state on; the rest is the response's."""
    of_prompt = [float("askreddit" in prompt) for prompt in prompts]
    return [score + 0.1 * (len(response) % 7) for score, response in zip(of_prompt, responses)]
'''


@pytest.fixture
def settings(models_here: Path) -> config.Config:
    Path("scores.py").write_text(FUNCTION, encoding="utf-8")
    small.write_params(Path(), SMALL)
    return config.load()


def test_the_loss_and_what_is_explained_by_hand() -> None:
    """γ^(l − 1 − t) · outcome at each of l tokens; the values are those of each row alone."""
    critic, gamma = small.scores(), 0.9
    targets = ValueTargets(QUERIES, RESPONSES, OUTCOMES, gamma, PAD, by_position=True)
    errors, returns = list[list[float]](), list[list[float]]()
    for query, response, outcome in zip(QUERIES, RESPONSES, OUTCOMES.tolist(), strict=True):
        with torch.no_grad():
            states = critic.model.base_model(torch.tensor([query + response])).last_hidden_state[0]
            values = score_head(critic.model)(states[len(query) - 1 : -1]).squeeze(-1).tolist()
        returns.append([gamma ** (len(response) - 1 - t) * outcome for t in range(len(response))])
        errors.append([(v - g) ** 2 for v, g in zip(values, returns[-1], strict=True)])
    sums = targets.sums(critic, range(6), torch.device("cpu"))
    count = targets.num_targets(range(6))
    assert count == sum(map(len, RESPONSES))
    assert sums["loss"].item() == pytest.approx(0.5 * sum(map(sum, errors)), rel=1e-4)

    def explained(squares: list[float], of: list[float]) -> float:
        return 1 - sum(squares) / len(squares) / torch.tensor(of).double().var(correction=0).item()

    flat = [sum(parts, start=list[float]()) for parts in (errors, returns)]
    assert sums["explained_variance"].item() / count == pytest.approx(explained(*flat), rel=1e-4)
    for name, at in {"first": 0.0, "middle": 0.5, "last": 1.0}.items():
        picks = [int(at * (len(row) - 1)) for row in errors]
        one = explained(*([row[t] for row, t in zip(of, picks, strict=True)] for of in (errors, returns)))
        assert sums[f"explained_variance/{name}"].item() / count == pytest.approx(one, rel=1e-4)


def test_padding_and_the_cut_into_micro_batches_change_no_sum() -> None:
    critic, targets = small.scores(), ValueTargets(QUERIES, RESPONSES, OUTCOMES, 1.0, PAD, by_position=True)
    whole = targets.sums(critic, range(6), torch.device("cpu"))
    parts = [targets.sums(critic, [i], torch.device("cpu")) for i in range(6)]
    for name, total in whole.items():
        assert total.item() == pytest.approx(sum(part[name].item() for part in parts), rel=1e-4, abs=1e-5)


def test_a_critic_learns_what_the_prefix_tells_and_ppo_starts_from_it(settings: config.Config) -> None:
    tracker = NullTracker("value")
    metrics = toy.run("value", settings, tracker)
    assert metrics["explained_variance/first"] > 0.3, "the prompt decides most of the score"
    assert 0.5 < metrics["prompt_share/low"] < metrics["prompt_share"] < metrics["prompt_share/high"] <= 1
    rising = [row["eval/explained_variance"] for row in tracker.history() if "eval/explained_variance" in row]
    assert rising[-1] > rising[0]
    assert contracts.read_parents(Paths().value) == {"sft": contracts.fingerprint(Paths().sft)}
    assert toy.run("ppo", settings)["val/explained_variance_mc"] > -1
    assert "models/value" in (Paths().policy / "README.md").read_text(encoding="utf-8")


def test_runs_of_ppo_with_another_penalty_share_the_critic(settings: config.Config) -> None:
    view = config.VIEWS["value"].of(settings)
    assert view.declared["ppo.advantages.critic.init"] == "value"
    changed = settings.model_copy(
        update={
            "ppo": settings.ppo.model_copy(update={"kl_coef": 9.0, "learning_rate": 1.0, "cliprange": 0.3})
        }
    )
    assert config.VIEWS["value"].of(changed).declared == view.declared, "other runs of PPO share the critic"


@pytest.mark.parametrize(
    "advantages", [{"kind": "rloo"}, {"kind": "gae", "critic": {"kind": "separate", "init": "sft"}}]
)
def test_without_need_there_is_a_readme_and_no_metric(models_here: Path, advantages: dict[str, Any]) -> None:
    given = {key: value for key, value in SMALL.items() if not key.startswith("ppo.")}
    dummy = {"ppo.scorers": [{"kind": "dummy"}], "ppo.advantages": advantages}
    small.write_params(Path(), {**given, **dummy})
    assert toy.run("value", config.load()) == {}
    assert [file.name for file in Paths().value.iterdir()] == ["README.md"]


def test_cut_responses_get_the_score_of_the_truncation_rule(settings: config.Config) -> None:
    rule = {"kind": "eos_trick_replace", "missing_eos_score": -1.5}
    small.write_params(Path(), {**SMALL, "ppo.truncation": rule})
    view, tokenizer = config.ValueView.of(config.load()), load_tokenizer(Paths().sft)
    for targets in value._collect_targets(small.distributed(), view, Paths(), tokenizer).values():
        is_cut = [response[-1] != tokenizer.eos_token_id for response in targets.responses]
        assert [outcome == -1.5 for outcome in targets.outcomes.tolist()] == is_cut
        assert set(is_cut) == {True, False}


def test_equal_scores_are_refused_before_training(settings: config.Config) -> None:
    Path("scores.py").write_text(
        "def of_topic(prompts, responses, **_):\n    return [1.0] * len(responses)\n"
    )
    with pytest.raises(UserError, match="have one score, 1"):
        toy.run("value", settings)


def test_a_critic_of_another_sft_model_is_refused(settings: config.Config) -> None:
    toy.run("value", settings)
    critic = load_reward(Paths().value)
    assert math.isfinite(critic.mean)
    file = Paths().value / "rlhf.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"sft": "', '"sft": "0'), encoding="utf-8")
    with pytest.raises(UserError, match="another sft model"):
        toy.run("ppo", settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo.advantages.whiten_rewards": True}, "whiten_rewards"),
        ({"ppo.truncation": {"kind": "bootstrap"}}, "truncation rule"),
        ({"ppo.advantages.critic.warmup": {"max_updates": 2}}, "trained alone"),
        ({"ppo.advantages.fallback": "group"}, "samples_per_prompt"),
        ({"ppo.advantages.fallback": "batch", "ppo.advantages.gamma": 0.9}, "whole responses"),
        ({"ppo.advantages.critic.steps": 2, "ppo.advantages.critic.vf_coef": 0.0}, "learns nothing"),
        ({"ppo.advantages.critic.steps": 2, "launch.parallelism": "zero3"}, "as one"),
        ({"value.init": "reward"}, "value.init"),
    ],
)
def test_what_cannot_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.validate(small.params({**SMALL, **changes}), "test")
