"""Whole updates: what they learn and measure, the critic's warm-up, snapshots, and guards that stop them."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.workloads import NoEvaluator
from rlhf_tasks import console
from rlhf_tasks.ppo.guards import GuardTrip, GuardTripped
from rlhf_tasks.ppo.metrics import Metrics
from rlhf_tasks.ppo.reporting import sample_updates, selection_updates
from rlhf_tasks.ppo.state import handle_trips
from tests import small
from tests.ppo.toy import DEMONSTRATIONS, QUERIES, Memory, toy, untimed, without_critic

NAMES = ["rloo", "group"]


def test_samples_and_evaluations_are_evenly_spaced_last_update_included() -> None:
    assert [sorted(sample_updates(n, 8)) for n in (0, 1, 2, 3)] == [[], [8], [0, 8], [0, 4, 8]]
    assert sample_updates(9, 8) == set(range(9))
    assert [sorted(selection_updates(n, 8)) for n in (1, 2, 3)] == [[8], [4, 8], [3, 5, 8]]
    assert selection_updates(9, 8) == set(range(1, 9))


# -------------------------------------------------------------------------------------- without a critic


@pytest.mark.parametrize("name", NAMES)
def test_each_prompt_of_a_rollout_has_all_of_its_samples_and_comes_once(name: str) -> None:
    seen = list[list[Any]]()

    def score(queries: Any, responses: Any) -> torch.Tensor:
        seen.append(list(queries))
        return torch.zeros(len(queries))

    list(toy(score, total_episodes=64, **without_critic(name)).updates)
    assert [queries == queries[:4] * 4 for queries in seen] == [True] * 4
    assert sorted(query for queries in seen for query in queries[:4]) == sorted(QUERIES)


def test_a_critic_can_learn_from_several_samples_of_a_prompt() -> None:
    history = list(toy(total_episodes=32, advantages__samples_per_prompt=4).updates)
    assert all("loss/value_avg" in metrics and "val/group_deviation" not in metrics for metrics in history)


# ----------------------------------------------------------------------------------------- critic warm-up


def test_the_warm_up_changes_the_critic_alone_and_ends_when_its_loss_has_settled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes: dict[str, Any] = {"learning_rate": 3e-3, "num_ppo_epochs": 4, "total_episodes": 16}
    changes |= {"advantages__critic__warmup": {"max_updates": 12, "settled": 0.3}}
    one = toy(truncation__kind="none", **changes)
    policy, losses = copy.deepcopy(one.actor_critic.policy.state_dict()), []
    for metrics in one.updates:
        if "lr" in metrics:
            break
        losses.append(metrics["warmup/value_loss"])
        after = one.actor_critic.policy.state_dict()
        assert all(torch.equal(after[key], policy[key]) for key in policy)
    assert losses == one.state.warmup_losses
    assert 3 <= len(losses) <= 12
    assert losses[-1] < losses[0]
    said = [line for line in capsys.readouterr().out.splitlines() if "the critic warms up" in line]
    assert said[-1].endswith(f"update {len(losses)} of at most 12: value loss {losses[-1]:.4g}")
    assert len(said) == len(losses)
    settled = [n for n in range(3, len(losses) + 1) if min(losses[n - 2 : n]) > 0.7 * min(losses[: n - 2])]
    assert len(losses) == next(iter(settled), 12)
    assert one.state.update == 1, "the first update follows the warm-up"


def test_the_policys_first_steps_after_a_warm_up_are_adams_first_steps() -> None:
    """Gradients of zero must not count as steps: Adam would correct the moments for too many."""
    one = toy(advantages__critic__warmup={"max_updates": 3, "settled": 0.01}, total_episodes=16)
    before = copy.deepcopy(one.actor_critic.policy)
    assert [("lr" in metrics) for metrics in one.updates] == [False, False, False, True]
    moments = one.state.optimizer.state
    assert {float(moments[p]["step"]) for p in one.actor_critic.policy.parameters()} == {4.0}
    assert {float(moments[p]["step"]) for p in one.actor_critic.critic.parameters()} == {16.0}
    pairs = zip(one.actor_critic.policy.parameters(), before.parameters(), strict=True)
    largest = max(float((p - q).detach().abs().max()) for p, q in pairs)
    assert 1e-3 < largest <= 4 * 1e-3 * 1.3, "each of Adam's first steps is about the rate"


# ----------------------------------------------------------------------------------------------- snapshots

EVERYTHING: dict[str, Any] = {
    "total_episodes": 80,
    "adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "kl_penalty": {"beta": 0.5, "target": 0.001},
    "reference_sync": {"every": 2, "alpha": 0.5},
    "score_scaling": {"subtract_mean": True, "clip": 2.0},
    "ptx": {"coef": 0.1, "text": None},
    "schedule": "linear",
    "entropy_coef": 0.01,
    "dual_clip": 3.0,
    "target_kl": 1.0,
}
WITH_CRITIC: dict[str, Any] = EVERYTHING | {
    "advantages__critic__warmup": {"max_updates": 2, "settled": 0.9},
    "truncation__kind": "bootstrap",
    "advantages__critic__learning_rate": 2e-3,
    "cliprange_high": 0.3,
}


@pytest.mark.parametrize(
    "changes",
    [WITH_CRITIC, *(without_critic(name) | EVERYTHING for name in NAMES)],
    ids=["gae", *NAMES],
)
def test_a_resumed_training_ends_with_the_same_bytes(changes: dict[str, Any]) -> None:
    """From every snapshot, those of the warm-up included."""
    whole = toy(text=DEMONSTRATIONS, snapshots=(memory := Memory()), **changes)
    series = untimed(list(whole.updates))
    assert list(memory.saved) == list(range(1, len(series) + 1))
    for step, state in memory.saved.items():
        resumed = toy(text=DEMONSTRATIONS, snapshots=Memory({step: state}), **changes)
        assert untimed(list(resumed.updates)) == series[step:]
        assert torch.equal(resumed.weights, whole.weights)


# -------------------------------------------------------------------------------------------------- guards

RAISE_KL: dict[str, Any] = {
    **{"patience": 1, "kl_min": -99.0, "perplexity_min": 1e-9, "ratio_min": 1e-9, "ratio_max": 1e9},
    **{"kl_max": 50.0, "eos_share_min": 0.0, "action": "raise_kl", "kl_coef_factor": 1.5},
}


class NanIn:
    """A scorer that gives NaN in the n-th rollout."""

    def __init__(self, *numbers: int) -> None:
        self.count, self._numbers = 0, numbers

    def __call__(self, queries: Any, responses: Any) -> torch.Tensor:
        self.count += 1
        scores = torch.tensor([r.count(5) / len(r) for r in responses])
        return scores * math.nan if self.count in self._numbers else scores


def test_a_snapshot_holds_every_field_of_the_state_but_what_is_built_anew() -> None:
    state = toy().state
    snapshot = state.state_dict(small.distributed())
    held = snapshot.keys() | snapshot["shared"].keys() | snapshot["shared"]["plain"].keys()
    weights = dict.fromkeys(("actor_critic", "wrapped", "optimizer"), "training")
    budgets = dict.fromkeys(("budget", "evaluation_budget"), "budgets")
    names = weights | budgets | {"prompt_order": "prompts"}
    missing = {field.name for field in fields(state) if names.get(field.name, field.name) not in held}
    assert missing == {"num_policy_groups"}, "a resumed run would lose a field in silence"


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> list[float | str]:
    """What the progress bar is told, in order: episodes that are done or taken back, and `restart`."""
    told = list[float | str]()

    class Recorder(console.Meter):
        def advance(self, n: float = 1, **metrics: float) -> None:
            told.append(n)

        def skip(self, n: float) -> None:
            told.append(n)

        def restart_speed(self) -> None:
            told.append("restart")

    monkeypatch.setattr(console, "progress", lambda *args, **kwargs: nullcontext(Recorder()))
    return told


def test_the_progress_does_not_count_a_warm_up_for_its_speed(progress: list[float | str]) -> None:
    list(toy(advantages__critic__warmup={"max_updates": 2}, total_episodes=32).updates)
    assert progress == ["restart", 16, 16]


def test_all_trips_of_an_update_are_recorded_and_one_that_a_higher_kl_coef_does_not_help_stops() -> None:
    one = toy(guards=RAISE_KL)
    next(one.updates)
    trips = [GuardTrip("kl_high", "12", "steps"), GuardTrip("first_ratio", "0.1", "a bug", kl_helps=False)]
    with pytest.raises(GuardTripped, match="by the guard first_ratio"):
        handle_trips(one.setup, one.state, trips)
    assert [trip["guard"] for trip in one.state.trips] == ["kl_high", "first_ratio"]


class Gaps(NoEvaluator):
    """Every second update is evaluated; the gap is 2 at the evaluations of these episodes, else 0."""

    def __init__(self, *episodes: int) -> None:
        self._episodes = episodes

    def evaluate(self, *_: Any, **given: Any) -> Metrics:
        return {"eval/standardized_gap": 2.0 * (given["episode"] in self._episodes)}


GAP: dict[str, Any] = {"guards": RAISE_KL | {"gap_max": 1.0}, "total_episodes": 96, "num_selections": 3}


def test_raise_kl_multiplies_kl_coef_at_each_trip_and_a_resumed_run_ends_with_the_same_bytes() -> None:
    changes: dict[str, Any] = {"evaluator": Gaps(32, 64), "reference_seed": 7, **GAP}
    whole = toy(snapshots=(memory := Memory()), **changes)
    history = untimed(list(whole.updates))
    assert [m["episode"] for m in history] == [16 * n for n in range(1, 7)]
    expected = [0.05] * 2 + [0.075] * 2 + [0.1125] * 2
    assert [m["objective/kl_coef"] for m in history] == pytest.approx(expected)
    assert [trip["episode"] for trip in whole.state.trips] == [32, 64]
    for step in (2, 3, 4, 5):
        resumed = toy(snapshots=Memory({step: memory.saved[step]}), **changes)
        assert untimed(list(resumed.updates)) == history[step:]
        assert torch.equal(resumed.weights, whole.weights)
        assert (resumed.state.kl_coef, resumed.state.trips) == (whole.state.kl_coef, whole.state.trips)


@pytest.mark.parametrize("action", ["warn", "raise_kl"])
def test_nan_stops_whatever_the_action_is_and_its_batch_is_written(action: str, tmp_path: Path) -> None:
    one = toy(NanIn(2), guards=RAISE_KL | {"action": action}, faults=tmp_path)
    with pytest.raises(GuardTripped, match=r"update 1 by the guard non_finite: .*scores"):
        list(one.updates)
    assert [trip["guard"] for trip in one.state.trips] == ["non_finite"]
    assert len(list(tmp_path.iterdir())) == 1
