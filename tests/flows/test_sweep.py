"""What a sweep and the watch decide by themselves; no server is started here."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Cancelled, Completed, Running
from prefect.variables import Variable

from flows import sweep, watch
from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from tests.flows import toy

pytestmark = pytest.mark.filterwarnings("ignore")  # Prefect's own


class Runs:
    """A Prefect server whose runs complete when they are looked at, and change the data after some."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, changes_after: int) -> None:
        self.root, self.left = root, changes_after
        self.started: list[str] = []
        self.cancelled: list[uuid.UUID] = []
        monkeypatch.setattr(sweep, "run_deployment", self._start)
        monkeypatch.setattr(sweep, "get_client", lambda **_: self)
        monkeypatch.setattr(sweep, "POLL_SECONDS", 0.0)

    def _start(self, deployment: str, *, parameters: dict[str, Any], **_: Any) -> FlowRun:
        self.started.append(parameters["name"])
        return FlowRun(flow_id=uuid.uuid4(), state=Running())

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_flow_run(self, identity: uuid.UUID) -> FlowRun:
        self.left -= 1
        if self.left == 0:
            (self.root / "given/rows.txt").write_text("other rows\n", encoding="utf-8")
        return FlowRun(flow_id=identity, state=Completed() if self.left >= 0 else Running())

    def set_flow_run_state(self, identity: uuid.UUID, state: State[Any]) -> None:
        self.cancelled.append(identity)


def begun(root: Path) -> sweep.Data:
    data = sweep.Data(root)
    data.fingerprint(config.load(root / "params.yaml"))
    return data


CELLS = [sweep.Cell("a", seed, {}, f"s-{seed}") for seed in (1, 2, 3)]


def test_a_sweep_whose_data_changes_fails_and_says_which_runs_are_in_doubt(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(root, monkeypatch, changes_after=2)
    with pytest.raises(sweep.SweepFailed, match=r"the data at given changed .*`dvc exp remove s-2` first"):
        sweep.run_cells(CELLS, "any", None, "c0ffee", 1, begun(root))
    assert runs.started == ["s-1", "s-2"]


def test_a_sweep_starts_no_run_on_other_data(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, data = Runs(root, monkeypatch, changes_after=9), begun(root)
    (root / "given/rows.txt").write_text("other rows\n", encoding="utf-8")
    with pytest.raises(sweep.SweepFailed, match=r"start it again, and all is .* then$"):
        sweep.run_cells(CELLS, "any", None, "c0ffee", 2, data)
    assert runs.started == []


def test_a_sweep_that_ends_before_its_runs_cancels_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(root, monkeypatch, changes_after=1)
    with pytest.raises(sweep.SweepFailed, match="`dvc exp remove s-1` first"):
        sweep.run_cells(CELLS, "any", None, "c0ffee", 2, begun(root))
    assert len(runs.cancelled) == 1


def test_sweeps_of_one_name_have_a_commit_each_whatever_their_seeds() -> None:
    first = sweep.variable("rlhf", "sweep", None, [{"ppo.kl_coef": 0.1}])
    assert first == sweep.variable("rlhf", "sweep", None, [{"ppo.kl_coef": 0.1}])
    others = [
        sweep.variable("rlhf", "sweep", None, [{"ppo.kl_coef": 0.2}]),
        sweep.variable("rlhf", "sweep", "smoke", [{"ppo.kl_coef": 0.1}]),
        sweep.variable("rlhf", "other", None, [{"ppo.kl_coef": 0.1}]),
        sweep.variable("another-project", "sweep", None, [{"ppo.kl_coef": 0.1}]),
    ]
    assert len({first, *others}) == 5


def test_a_commit_that_is_gone_is_told_with_where_it_came_from(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Variable, "get", lambda *_: "0" * 40)
    with pytest.raises(UserError, match=r"the sweep s broke off on commit 0+, .* `revision: HEAD`"):
        sweep.begun_with(root, "s", "any")
    monkeypatch.setattr(Variable, "get", lambda *_: None)
    assert sweep.begun_with(root, "s", "any") == toy.git(root, "rev-parse", "HEAD").strip()


def test_a_run_of_changed_data_that_was_cancelled_is_told_and_not_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def start(deployment: str, *, idempotency_key: str, **_: Any) -> FlowRun:
        asked.append(idempotency_key)
        return FlowRun(flow_id=uuid.uuid4(), name="run-1", state=Cancelled())

    monkeypatch.setattr(watch, "run_deployment", start)
    for _ in range(2):
        state = watch.ask_for_run("f/d", {"preset": "smoke"}, "a")
        assert state.is_failed()
        assert "its run run-1 was cancelled" in str(state.message)
        assert "`prefect deployment run f/d --param preset=smoke` does it" in str(state.message)
    assert asked == ["a-try-1"] * 2
