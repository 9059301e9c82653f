"""Guards of stage ppo: what stops or warns; and killed runs, which resume to the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks.models import contracts
from rlhf_tasks.ppo.guards import GuardTripped
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training.checkpoint import State
from tests import small
from tests.stages.test_ppo import POLICY, SAMPLES, SETTINGS, run


def table(name: str) -> Any:
    return pq.read_table(SAMPLES / f"{name}.parquet").to_pylist()


def plain(series: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "eps" and not k.startswith("time/")} for row in series]


EVERYTHING = {
    "ppo.adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2},
    "ppo.ptx": {"coef": 0.1, "text": None},
    "ppo.score_scaling": {"subtract_mean": True, "clip": 2.0},
    "ppo.advantages.critic.warmup": {"max_updates": 2, "settled": 0.9},
    "ppo.reference_sync": {"every": 1, "alpha": 0.5},
    "resume.every_seconds": 1e-6,
}


pytestmark = pytest.mark.usefixtures("snapshots_at_any_cost")


class Killed(BaseException):
    pass


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Within the block the stage is killed as soon as it has saved this snapshot."""
    save = checkpoint.SavedSnapshots.save

    def saved(self: checkpoint.SavedSnapshots, number: int, state: State) -> None:
        save(self, number, state)
        if number == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.SavedSnapshots, "save", saved)
        with pytest.raises(Killed):
            yield


CALLS: list[int] = []
"""The numbers of responses that the scorer was called with."""


def nan_at_the_second_evaluation(prompts: list[str], responses: list[str]) -> list[float]:
    CALLS.append(len(responses))
    is_bad = len(responses) == 12 and CALLS.count(12) == 2
    return [float("nan") if is_bad else 0.0] * len(responses)


def scorer(function: Callable[..., Any]) -> dict[str, Any]:
    return {"kind": "function", "weight": 1.0, "function": f"{__name__}:{function.__name__}"}


@pytest.mark.parametrize(
    ("changes", "rollouts"),
    [
        (EVERYTHING, 3),
        pytest.param(
            {"ppo.lora": {"r": 4, "alpha": 8.0}, "ppo.advantages.critic.lora": {"r": 4, "alpha": 8.0}},
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["everything", "lora"],
)
def test_a_killed_run_resumes_to_the_same_bytes_and_curves(
    models_here: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], rollouts: int
) -> None:
    """A run killed after so many rollouts has the bytes and curves of an uninterrupted one."""
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(small.ROOT / name, Path())
    changes = {"resume.every_seconds": 1e-6, **changes}
    monkeypatch.setenv("RLHF_STATE_DIR", "uninterrupted")
    metrics, series = run(**changes)
    weights, samples, kept = contracts.fingerprint(POLICY), table("samples"), table("rollouts")
    assert len(kept) == 2 * 16, "the first and the last update, once each"
    monkeypatch.setenv("RLHF_STATE_DIR", "killed")
    with killed_after(rollouts):
        run(**changes)
    again, series_again = run(**changes)
    assert plain([again]) == plain([metrics])
    assert plain(series_again) == plain(series)
    assert contracts.fingerprint(POLICY) == weights
    assert (table("samples"), table("rollouts")) == (samples, kept)


FAR = {"ppo.learning_rate": 3e-3, "ppo.kl_coef": 1e-4, "ppo.total_episodes": 96}


def guards(**changes: Any) -> dict[str, Any]:
    shipped: dict[str, Any] = small.params()["ppo"]["guards"]
    return shipped | {"patience": 1, "kl_max": 1.0} | changes


class Events(NullTracker):
    def __init__(self) -> None:
        super().__init__("ppo")
        self.events: list[tuple[str, str]] = []

    def event(self, name: str, text: str, *, step: int) -> None:
        self.events.append((name, text))


def run_guarded(**changes: Any) -> tuple[Events, dict[str, float]]:
    tracker = Events()
    return tracker, small.run("ppo", SETTINGS | FAR | {"ppo.guards": guards(**changes)}, tracker)


def test_a_tripped_guard_stops_the_stage_with_its_cause(models_here: Path) -> None:
    before = contracts.fingerprint(POLICY)
    with pytest.raises(GuardTripped, match=r"objective/kl_k1 = .* exceeds 1; likely cause: .*kl_coef"):
        run_guarded(action="stop")
    assert contracts.fingerprint(POLICY) == before, "no unfinished policy is written"


def test_with_action_warn_training_continues_after_a_trip(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker, metrics = run_guarded(action="warn")
    assert metrics["episode"] == 96
    assert {name for name, _ in tracker.events} == {"guard.kl_high"}
    assert "guard kl_high: objective/kl_k1" in capsys.readouterr().out
    assert metrics["guards/trips"] == len(tracker.events)
    trips = json.loads((SAMPLES / "guards.json").read_text(encoding="utf-8"))["trips"]
    assert [(f"guard.{trip['guard']}", trip["message"]) for trip in trips] == tracker.events
    assert all(trip["episode"] % 16 == 0 for trip in trips)
    kept = {row["episode"] for row in table("rollouts")}
    assert kept == {16, trips[0]["episode"], 96}, "beside samples, and where the guard trips first"


def test_a_policy_with_nan_weights_trips_the_guard(models_here: Path) -> None:
    wild = {"ppo.learning_rate": 1e30, "ppo.num_mini_batches": 1, "ppo.num_ppo_epochs": 1}
    with pytest.raises(GuardTripped, match=r"non_finite: the model's logits are NaN"):
        run(**wild)


def test_nan_at_an_evaluation_trips_the_guard_and_keeps_the_curve(models_here: Path) -> None:
    """The evaluations are before training and after each update; the second one fails."""
    CALLS.clear()
    tracker = Events()
    changes = {
        "ppo.scorers": [scorer(nan_at_the_second_evaluation)],
        "ppo.num_sample_generations": 0,
        "ppo.audit_prompts": 0,
    }
    with pytest.raises(GuardTripped, match=r"non_finite: ppo\.scorers: .*gave nan") as caught:
        small.run("ppo", SETTINGS | changes, tracker)
    assert [name for name, _ in tracker.events] == ["guard.non_finite"]
    file = str(caught.value).split("see ")[1].split(")")[0]
    assert len(torch.load(file, weights_only=False)["responses"]) == 12
    updates = [row["episode"] for row in tracker.history() if "objective/kl" in row]
    assert updates == [16.0], "the update before the failure is on the curve"
