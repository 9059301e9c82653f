"""GPU slots: which GPU a run gets, what it keeps, what it shows while it waits, and when they are free."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.runtime import flow_run
from prefect.states import Cancelling, Completed, Crashed, Running

from flows import deployments, devices, run_folder, settings, slots, stage_tasks, sweep
from flows.pipeline import pipeline
from flows.slots import WAITING, Slots, limit_of
from flows.stage_tasks import Dvc, StageFailed
from rlhf_tasks import config
from rlhf_tasks.config import TaskPolicy
from rlhf_tasks.errors import UserError
from tests.flows import toy
from tests.flows.conftest import ShowGpus
from tests.flows.test_devices import FIRST, SECOND, THIRD

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # those of Prefect and its server
POLICY = TaskPolicy(retries=0, retry_delay_seconds=0, timeout_seconds=None, gpu_slots=1)


def gpus(*names: str) -> str:
    return "".join(f"GPU {index}: NVIDIA H100 (UUID: {name})\n" for index, name in enumerate(names))


@pytest.mark.usefixtures("no_run")
def test_a_stage_sees_its_gpus_and_the_next_one_what_the_flow_sees(root: Path, show_gpus: ShowGpus) -> None:
    show_gpus(gpus(FIRST, SECOND, THIRD))
    toy.write_script(root, ["echo ${CUDA_VISIBLE_DEVICES-none} >> ../seen.txt", toy.SECOND.strip(), "exit 1"])
    environment = toy.run_environment() | {devices.VISIBLE: "0,2"}
    dvc = Dvc(root, environment, 20.0)
    dvc.reproduce("first")
    for chosen in ([SECOND, THIRD], []):
        with pytest.raises(StageFailed):
            dvc.reproduce("second", chosen)
    assert (root.parent / "seen.txt").read_text(encoding="utf-8").split() == ["1,2", "0,2"]


@pytest.mark.parametrize(
    ("stage", "gpu_slots", "processes", "machines", "expected"),
    [
        ("ppo", 1, 1, 1, 1),
        ("ppo", 1, 4, 2, 2),
        ("ppo", 3, 2, 1, 3),
        ("judge", 1, 4, 2, 1),  # one process judges
        ("ppo", 0, 4, 2, 0),
    ],
)
def test_a_training_stage_needs_a_slot_for_each_of_its_processes_on_this_machine(
    root: Path, show_gpus: ShowGpus, stage: str, gpu_slots: int, processes: int, machines: int, expected: int
) -> None:
    launch = {"num_processes": processes, "num_machines": machines}
    toy.write_params(root, service={"gpu_slots": gpu_slots}, launch=launch)
    values = config.load(root / "params.yaml")
    show_gpus(gpus(FIRST, SECOND, THIRD))
    assert Slots().num_slots(stage, values) == expected
    show_gpus("")
    assert Slots().num_slots(stage, values) == gpu_slots, "without GPUs the processes share the machine"


@pytest.fixture
def client(server: None, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """A client of a server without other runs, and without limits."""
    monkeypatch.setattr(slots, "POLL_SECONDS", 0.05)
    with get_client(sync_client=True) as made:
        for run in made.read_flow_runs():
            made.set_flow_run_state(run.id, Completed(), force=True)
        for limit in made.read_global_concurrency_limits():
            made.delete_global_concurrency_limit_by_name(limit.name)
        yield made


def limit(client: SyncPrefectClient, name: str = settings.SLOTS) -> tuple[int, int]:
    found = client.read_global_concurrency_limit_by_name(name)
    return found.limit, int(found.active_slots)


def in_a_run(body: Callable[[], object]) -> None:
    @flow
    def run_of_the_test() -> None:
        body()

    run_of_the_test()


def own_state(client: SyncPrefectClient) -> State[Any]:
    state = client.read_flow_run(uuid.UUID(str(flow_run.get_id()))).state
    assert state is not None
    return state


def other_run(client: SyncPrefectClient) -> FlowRun:
    """A run of the pipeline's deployment that is running."""
    deployment = client.read_deployment_by_name(f"{settings.PIPELINE}/pipeline")
    run = client.create_flow_run_from_deployment(deployment.id)
    client.set_flow_run_state(run.id, Running(), force=True)
    return client.read_flow_run(run.id)


def test_a_run_without_a_free_slot_waits_visibly_and_then_runs(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus
) -> None:
    show_gpus("")
    deployments.apply(root, 1)
    lines: list[str] = []

    def body() -> None:
        with Slots() as other, Slots() as held:
            assert not other.hold(1, lines.append)

            def show(line: str) -> None:
                lines.append(line)
                state = own_state(client)
                assert (state.type, state.name, state.message) == (StateType.PENDING, WAITING, line)
                other.release()

            assert held.hold(1, show), "it had to wait"
            assert not held.hold(1, show), "it keeps its slot from stage to stage"
            assert limit(client) == (1, 1)
            assert own_state(client).is_running()

    in_a_run(body)
    assert lines == ["waiting for gpu"]
    assert limit(client) == (1, 0)


def test_more_slots_than_the_limit_has_are_refused(client: SyncPrefectClient, root: Path) -> None:
    deployments.apply(root, 1)
    with pytest.raises(UserError, match=r"2 slots are needed, and the limit `gpu` has 1: .* --limit 2"):
        in_a_run(lambda: Slots().hold(2, print))


def test_a_run_that_is_being_cancelled_is_not_shown_as_waiting(client: SyncPrefectClient, root: Path) -> None:
    deployments.apply(root, 1)
    run = other_run(client)
    client._client.post(f"/flow_runs/{run.id}/set_state", json={"state": {"type": "CANCELLING"}})
    slots.show_waiting(client, run.id, "waiting for gpu")
    state = client.read_flow_run(run.id).state
    assert state is not None
    assert state.is_cancelling()


def test_up_makes_a_slot_for_each_gpu_and_keeps_what_a_user_changed(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus
) -> None:
    show_gpus(gpus(FIRST, SECOND))
    for asked, expected in ((None, 2), (3, 3), (None, 3)):
        deployments.apply(root, asked)
        assert limit(client)[0] == expected


def test_a_sweep_counts_the_runs_that_its_slots_suffice_for(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus
) -> None:
    def runs(processes: int) -> int:
        toy.write_params(root, launch={"num_processes": processes, "num_machines": 1})
        return sweep.num_runs(config.load(root / "params.yaml"))

    show_gpus(gpus(FIRST, SECOND, THIRD))
    assert runs(1) == 1, "there is no limit"
    deployments.apply(root, 3)
    assert [runs(1), runs(2), runs(4)] == [3, 1, 1]


def test_two_runs_get_two_gpus_and_a_third_waits_for_the_one_that_becomes_free(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus
) -> None:
    show_gpus(gpus(FIRST, SECOND))
    deployments.apply(root, 5)
    lines: list[str] = []

    def body() -> None:
        with Slots() as one, Slots() as other, Slots() as third:
            assert not one.hold(1, lines.append)
            assert not other.hold(1, lines.append)
            assert (one.held, other.held) == ([FIRST], [SECOND])

            def free(line: str) -> None:
                lines.append(line)
                other.release()

            assert third.hold(1, free), "it had to wait for a GPU, though slots are free"
            assert third.held == [SECOND]
            assert lines == [f"waiting for gpu on {platform.node()}"]
            client.upsert_global_concurrency_limit_by_name(limit_of(FIRST), 2)
            assert not other.hold(1, lines.append)
            assert other.held == [FIRST], "a user may let two runs share a GPU"
        assert [limit(client, limit_of(gpu))[1] for gpu in (FIRST, SECOND)] == [0, 0]

    in_a_run(body)
    assert limit(client) == (5, 0)
    with pytest.raises(UserError, match=r"^4 slots are needed, and .* shows 2 GPUs to this run: "):
        in_a_run(lambda: Slots().hold(4, print))


def test_a_run_keeps_as_many_gpus_as_its_next_stage_needs(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus
) -> None:
    show_gpus(gpus(FIRST, SECOND, THIRD))
    deployments.apply(root, None)

    def body() -> None:
        with Slots() as held:
            held.hold(3, print)
            assert held.held == [FIRST, SECOND, THIRD]
            assert not held.hold(1, print)
            assert (held.held, limit(client)) == ([FIRST], (3, 1))
            held.hold(2, print)
            assert (len(held.held), limit(client)) == (2, (3, 2))

    in_a_run(body)


def test_machines_keep_their_gpus_apart(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit `gpu` counts the slots of both; the first GPU of each is another one."""
    show_gpus(gpus(FIRST))
    deployments.apply(root, 4)

    def body() -> None:
        with Slots() as here, Slots() as elsewhere:
            assert not here.hold(1, print)
            show_gpus(gpus(SECOND))
            assert not elsewhere.hold(1, print)
            assert (here.held, elsewhere.held) == ([FIRST], [SECOND])
            assert limit(client, limit_of(SECOND)) == (1, 1), "its first run makes the limit"

    in_a_run(body)


def test_the_slots_of_a_killed_run_are_free_as_soon_as_its_stages_have_ended(
    client: SyncPrefectClient, root: Path, show_gpus: ShowGpus
) -> None:
    """Whoever cleans up after it ends its leases; nobody waits for Prefect to do so."""
    show_gpus(gpus(FIRST, SECOND))
    deployments.apply(root, None)

    def body() -> None:
        with Slots() as held:
            held.hold(2, print)
            assert limit(client) == (2, 2)
            # as if this process were killed
            run_folder.clean_run(uuid.UUID(str(flow_run.get_id())), Crashed())
            assert limit(client) == (2, 0)
            assert [limit(client, limit_of(gpu)) for gpu in (FIRST, SECOND)] == [(1, 0), (1, 0)]
        assert limit(client) == (2, 0), "a lease that has ended frees nothing again"

    in_a_run(body)


def test_tasks_end_as_their_run_does(client: SyncPrefectClient, root: Path) -> None:
    """A signal makes the running task crash; after a cancellation it is cancelled. Ended tasks stay."""
    deployments.apply(root, 1)
    ends: dict[str, State[Any]] = {"CRASHED": Crashed(), "CANCELLED": Cancelling()}
    for expected, end in ends.items():
        run, task = other_run(client), stage_tasks.stage_task("ppo", POLICY)
        before: list[State[Any]] = [Completed(), Running(), Crashed()]
        tasks = [client.create_task_run(task, run.id, uuid.uuid4().hex, state=state).id for state in before]
        run_folder.clean(pipeline, run, end)
        found = [client.read_task_run(task).state for task in tasks]
        assert [s.type.value for s in found if s is not None] == ["COMPLETED", expected, expected]
    assert toy.git(root, "status", "--porcelain") == ""


@pytest.mark.slow
def test_runs_of_a_sweep_train_on_a_gpu_each_and_the_third_waits_for_one(
    tmp_path: Path, show_gpus: ShowGpus
) -> None:
    """The first two cannot end before both have begun."""
    show_gpus(gpus(FIRST, SECOND))
    root = toy.make(tmp_path / "project", tracking={"enabled": False}, service={"gpu_slots": 1, "retries": 0})
    seen = tmp_path / "seen"
    both = f"until [ $(grep -c begin {seen}) -ge 2 ]; do sleep 0.2; done"
    begin, end = (f"echo {word} $CUDA_VISIBLE_DEVICES >> {seen}" for word in ("begin", "end"))
    toy.write_script(root, [begin, both, "sleep 2", end, toy.SECOND.strip()])
    with toy.service(root) as service:
        settings_of_runs = {"ppo.kl_coef": [0.3, 0.4, 0.5]}
        identity = service.start("rlhf-sweep/sweep", grid=settings_of_runs, seeds=[1])
        state = service.end(identity)
        assert state["message"] == "3 setting(s), 3 runs, 0 of them done before", service.logs(identity)
    lines = [line.split() for line in seen.read_text(encoding="utf-8").splitlines()]
    assert sorted(lines[:2]) == [["begin", "0"], ["begin", "1"]]
    third = next(number for number, (word, _) in enumerate(lines) if word == "begin" and number > 1)
    assert ["end", lines[third][1]] in lines[:third], "it gets the GPU of a run whose stage has ended"
    assert [word for word, _ in lines].count("end") == 3
