"""GPU slots: the slots that a run keeps, who is first, and what a run shows while it waits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.runtime import flow_run
from prefect.states import Cancelling, Completed, Crashed, Pending, Running

from flows import deployments, hooks, settings, slots, stage_tasks
from flows.pipeline import pipeline
from flows.slots import WAITING, Slots
from rlhf_tasks.config import TaskPolicy
from rlhf_tasks.errors import UserError
from tests.flows import toy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("server"),
    pytest.mark.filterwarnings("ignore"),  # those of Prefect and its server
]
POLICY = TaskPolicy(retries=0, retry_delay_seconds=0, timeout_seconds=None, gpu_slots=1)


@pytest.fixture
def client(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """A client of a server with one slot and no other run."""
    monkeypatch.setattr(slots, "POLL_SECONDS", 0.05)
    deployments.apply(root, 1)
    with get_client(sync_client=True) as made:
        for run in made.read_flow_runs():
            made.set_flow_run_state(run.id, Completed(), force=True)
        yield made


def other_run(client: SyncPrefectClient, state: Any, queue: str | None = None) -> FlowRun:
    """A run of the pipeline's deployment in this state."""
    deployment = client.read_deployment_by_name(f"{settings.PIPELINE}/pipeline")
    run = client.create_flow_run_from_deployment(
        deployment.id, name=f"run-{uuid.uuid4().hex[:6]}", work_queue_name=queue
    )
    client.set_flow_run_state(run.id, Running(), force=True)
    client.set_flow_run_state(run.id, state, force=True)
    return client.read_flow_run(run.id)


def task_of(client: SyncPrefectClient, run: FlowRun, state: Any) -> uuid.UUID:
    task = stage_tasks.stage_task("ppo", POLICY)
    made = client.create_task_run(task, run.id, dynamic_key=uuid.uuid4().hex, state=state)
    return made.id


def active(client: SyncPrefectClient) -> int:
    return int(client.read_global_concurrency_limit_by_name(settings.SLOTS).active_slots)


def in_a_run(body: Callable[[Slots], object]) -> None:
    """Run this in a flow, with slots."""

    @flow
    def run_of_the_test() -> None:
        with Slots() as held:
            body(held)

    run_of_the_test()


def test_a_run_without_a_free_slot_waits_visibly_behind_the_run_that_has_it(
    client: SyncPrefectClient,
) -> None:
    holder = other_run(client, Running())
    task_of(client, holder, Running())
    lease = client._client.post(
        "/v2/concurrency_limits/increment-with-lease",
        json={"names": [settings.SLOTS], "slots": 1, "lease_duration": 60},
    ).json()["lease_id"]
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        state = client.read_flow_run(uuid.UUID(str(flow_run.get_id()))).state
        assert state is not None
        assert (state.type, state.name, state.message) == (StateType.PENDING, WAITING, line)
        client.release_concurrency_slots_with_lease(lease_id=uuid.UUID(lease))

    def body(held: Slots) -> None:
        assert held.hold(1, show), "it had to wait"
        assert active(client) == 1
        state = client.read_flow_run(uuid.UUID(str(flow_run.get_id()))).state
        assert state is not None
        assert state.is_running()

    in_a_run(body)
    assert lines == [f"waiting for gpu, behind {holder.name}"]
    assert active(client) == 0


def test_a_slot_is_kept_unless_an_urgent_run_waits(client: SyncPrefectClient) -> None:
    lines: list[str] = []

    def body(held: Slots) -> None:
        assert not held.hold(1, lines.append)
        equal = other_run(client, Pending(name=WAITING, message=slots.WAITS))
        assert not held.hold(1, lines.append), "a run of another queue is no more urgent"
        client.set_flow_run_state(equal.id, Completed(), force=True)
        urgent = other_run(client, Pending(name=WAITING, message=slots.WAITS), settings.URGENT)

        def show(line: str) -> None:
            lines.append(line)
            assert active(client) == 0, "the slot is there for the urgent run"
            client.set_flow_run_state(urgent.id, Completed(), force=True)

        assert held.hold(1, show)
        assert lines == ["waiting for gpu"]
        held.release()
        assert active(client) == 0

    in_a_run(body)


def test_an_urgent_run_yields_to_no_other(client: SyncPrefectClient) -> None:
    runs = [
        other_run(client, Pending(name=WAITING, message=slots.WAITS), queue)
        for queue in ("default", settings.URGENT)
    ]
    assert [slots.must_yield(client, run) for run in runs] == [True, False]


def test_more_slots_than_the_limit_has_are_refused(client: SyncPrefectClient) -> None:
    with pytest.raises(UserError, match=r"2 slots are needed, and the limit `gpu` has 1: .* --limit 2"):
        in_a_run(lambda held: held.hold(2, print))


def test_a_run_that_is_being_cancelled_is_not_shown_as_waiting(client: SyncPrefectClient) -> None:
    run = other_run(client, Running())
    client._client.post(f"/flow_runs/{run.id}/set_state", json={"state": {"type": "CANCELLING"}})
    slots.show_waiting(client, run.id, "waiting for gpu")
    state = client.read_flow_run(run.id).state
    assert state is not None
    assert state.is_cancelling()


def test_tasks_end_as_their_run_does(client: SyncPrefectClient, root: Path) -> None:
    """A signal makes the running task crash; after a cancellation it is cancelled. Ended tasks stay."""
    for cancelled, expected in ((False, ["COMPLETED", "CRASHED", "CRASHED"]),
                                (True, ["COMPLETED", "CANCELLED", "CANCELLED"])):  # fmt: skip
        run = other_run(client, Running())
        before: list[Any] = [Completed(), Running(), Crashed()]
        tasks = [task_of(client, run, state) for state in before]
        end: Any = Cancelling() if cancelled else Crashed()
        hooks.clean(pipeline, run, end)
        found = [client.read_task_run(task).state for task in tasks]
        assert [state.type.value for state in found if state is not None] == expected
    assert (root / "dvc.yaml").exists()
    assert toy.git(root, "status", "--porcelain") == ""
