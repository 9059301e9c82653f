"""Which GPU a slot is: what a machine shows, what its runs take, and what their stages see."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.runtime import flow_run
from prefect.states import Completed, Crashed, Pending

from flows import deployments, devices, hooks, settings, slots
from flows.slots import WAITING, Slots, limit_of
from flows.stage_tasks import Dvc, StageFailed
from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from tests.flows import toy
from tests.flows.test_slots import active, other_run

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # those of Prefect and its server

FIRST, SECOND, THIRD = (f"GPU-{letter * 8}-1111-2222-3333-444455556666" for letter in "abc")
PART, OTHER_PART = (f"MIG-{letter * 8}-1111-2222-3333-444455556666" for letter in "de")
OLD_PART = "MIG-GPU-ffffffff-1111-2222-3333-444455556666/7/0"  # as older drivers name one
LISTING = f"""\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: {FIRST})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {SECOND})
  MIG 3g.20gb     Device  0: (UUID: {PART})
  MIG 1g.5gb      Device  1: (UUID: {OTHER_PART})
GPU 2: NVIDIA A100-SXM4-40GB (UUID: {THIRD})
"""

Show = Callable[..., None]


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Show:
    """Puts a stand-in for `nvidia-smi` on the path, with this listing and exit status."""
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")

    def put(listing: str, status: int = 0) -> None:
        (programs / "listing").write_text(listing, encoding="utf-8")
        program = programs / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && cat {programs}/listing\nexit {status}\n', "utf-8")
        program.chmod(0o755)

    return put


def gpus(*names: str) -> str:
    return "".join(f"GPU {index}: NVIDIA H100 (UUID: {name})\n" for index, name in enumerate(names))


def test_a_machine_has_its_gpus_and_the_instances_of_those_in_mig_mode(show: Show) -> None:
    show(LISTING)
    assert devices.visible() == [FIRST, PART, OTHER_PART, THIRD]
    show(f"GPU 0: NVIDIA A100 (UUID: {FIRST})\n  MIG 3g.20gb Device 0: (UUID: {OLD_PART})\n")
    assert devices.visible({}) == [OLD_PART]
    assert limit_of(OLD_PART) == "gpu MIG-GPU-ffffffff-1111-2222-3333-444455556666-7-0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2,0", [THIRD, FIRST]),
        (" 2 , 2", [THIRD]),
        (SECOND, [PART]),  # CUDA takes the first instance of a GPU in MIG mode
        ("1", [PART]),
        ("GPU-cccc", [THIRD]),
        (f"{OTHER_PART},GPU-aaaa", [OTHER_PART, FIRST]),
        ("0,-1,2", [FIRST]),  # CUDA ignores an unknown entry, and what follows
        ("7", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_a_worker_gives_no_other_devices_than_it_was_given(
    show: Show, given: str, expected: Sequence[str]
) -> None:
    show(LISTING)
    assert devices.visible({devices.VISIBLE: given}) == expected


def test_a_machine_without_gpus_has_none(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    show("No devices were found\n")
    assert devices.visible() == []
    show("NVIDIA-SMI has failed because it could not communicate with the driver\n", status=9)
    assert devices.visible() == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert devices.visible({devices.VISIBLE: "0"}) == []


def test_a_driver_that_hangs_is_one_message(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(LISTING)
    (tmp_path / "programs/nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    monkeypatch.setattr(devices, "ANSWER_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"`nvidia-smi -L` does not answer .* CUDA_VISIBLE_DEVICES"):
        devices.visible({})
    assert devices.visible({devices.VISIBLE: ""}) == []


def test_a_stage_sees_its_gpus_and_the_next_one_what_the_flow_sees(
    root: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.write_script(root, ["echo ${CUDA_VISIBLE_DEVICES-none} >> ../seen.txt", toy.SECOND.strip(), "exit 1"])
    for given in ({}, {devices.VISIBLE: "0,2"}):
        dvc = Dvc(root, toy.run_environment() | given, 20.0, logging.getLogger("test"))
        dvc.reproduce("first")
        for chosen in ([SECOND, THIRD], [FIRST], []):
            with pytest.raises(StageFailed):
                dvc.reproduce("second", chosen)
    expected = [f"{SECOND},{THIRD}", FIRST, "none", f"{SECOND},{THIRD}", FIRST, "0,2"]
    assert (root.parent / "seen.txt").read_text(encoding="utf-8").split() == expected


def test_a_training_stage_needs_a_slot_for_each_of_its_processes_on_this_machine(
    root: Path, show: Show
) -> None:
    def needed(stage: str, gpu_slots: int, processes: int, machines: int) -> int:
        toy.write_params(
            root,
            service={"gpu_slots": gpu_slots},
            launch={"num_processes": processes, "num_machines": machines},
        )
        return Slots().needed(stage, config.load(root / "params.yaml"))

    show(gpus(FIRST, SECOND, THIRD))
    assert needed("ppo", 1, 1, 1) == 1
    assert needed("ppo", 1, 4, 2) == 2
    assert needed("ppo", 3, 2, 1) == 3
    assert needed("judge", 1, 4, 2) == 1, "one process judges"
    assert needed("ppo", 0, 4, 2) == 0
    show("")
    assert needed("ppo", 1, 4, 2) == 1, "without GPUs the processes share the machine"


# ------------------------------------------------------------------------- with a Prefect server


@pytest.fixture
def client(server: None, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncPrefectClient]:
    """A client of a server without other runs, and without limits of GPUs."""
    monkeypatch.setattr(slots, "POLL_SECONDS", 0.05)
    with get_client(sync_client=True) as made:
        for run in made.read_flow_runs():
            made.set_flow_run_state(run.id, Completed(), force=True)
        for limit in made.read_global_concurrency_limits():
            made.delete_global_concurrency_limit_by_name(limit.name)
        yield made


def in_a_run(body: Callable[[], object]) -> None:
    @flow
    def run_of_the_test() -> None:
        body()

    run_of_the_test()


def limit(client: SyncPrefectClient, name: str) -> tuple[int, int]:
    found = client.read_global_concurrency_limit_by_name(name)
    return found.limit, int(found.active_slots)


def test_up_makes_a_slot_for_each_gpu_and_shares_them_out_when_asked(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    show(gpus(FIRST, SECOND))
    deployments.apply(root, None)
    sizes = {name: limit(client, name)[0] for name in (settings.SLOTS, limit_of(FIRST), limit_of(SECOND))}
    assert sizes == {"gpu": 2, f"gpu {FIRST}": 1, f"gpu {SECOND}": 1}
    deployments.apply(root, 3)
    assert [limit(client, name)[0] for name in sizes] == [3, 2, 2]
    client.upsert_global_concurrency_limit_by_name(limit_of(FIRST), 1)
    deployments.apply(root, None)
    assert [limit(client, name)[0] for name in sizes] == [3, 1, 2], "what a user changed stays"


def test_a_sweep_counts_the_runs_that_its_slots_suffice_for(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    def runs(processes: int) -> int:
        toy.write_params(root, launch={"num_processes": processes, "num_machines": 1})
        return slots.num_runs(config.load(root / "params.yaml"))

    show(gpus(FIRST, SECOND, THIRD))
    assert runs(1) == 1, "there is no limit"
    deployments.apply(root, 3)
    assert [runs(1), runs(2), runs(4)] == [3, 1, 1]


def test_two_runs_get_two_gpus_and_a_third_waits_for_the_one_that_becomes_free(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    show(gpus(FIRST, SECOND))
    deployments.apply(root, 5)
    for gpu in (FIRST, SECOND):
        client.upsert_global_concurrency_limit_by_name(limit_of(gpu), 1)
    lines: list[str] = []

    def body() -> None:
        with Slots() as one, Slots() as other, Slots() as third:
            assert not one.hold(1, lines.append)
            assert not other.hold(1, lines.append)
            assert (one.held, other.held) == ([FIRST], [SECOND])
            assert active(client) == 2

            def free(line: str) -> None:
                lines.append(line)
                other.release()

            assert third.hold(1, free), "it had to wait for a GPU, though slots are free"
            assert third.held == [SECOND]
            assert lines == [f"waiting for gpu on {platform.node()}"]
        assert [limit(client, limit_of(gpu))[1] for gpu in (FIRST, SECOND)] == [0, 0]

    in_a_run(body)
    assert active(client) == 0


def test_a_run_keeps_as_many_gpus_as_its_next_stage_needs(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    show(gpus(FIRST, SECOND, THIRD))
    deployments.apply(root, None)

    def body() -> None:
        with Slots() as held:
            held.hold(3, print)
            assert held.held == [FIRST, SECOND, THIRD]
            assert not held.hold(1, print)
            assert (held.held, active(client)) == ([FIRST], 1)
            held.hold(2, print)
            assert (len(held.held), active(client)) == (2, 2)

    in_a_run(body)


def test_runs_share_a_gpu_only_where_its_limit_allows_it(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    show(gpus(FIRST, SECOND))
    deployments.apply(root, 4)  # two slots on each GPU

    def body() -> None:
        with ExitStack() as stack:
            taken = [stack.enter_context(Slots()) for _ in range(4)]
            for one in taken:
                one.hold(1, print)
            assert [one.held for one in taken] == [[FIRST], [SECOND], [FIRST], [SECOND]]
        with Slots() as all_of_it:
            all_of_it.hold(4, print)
            assert (all_of_it.held, active(client)) == ([FIRST, SECOND], 4)

    in_a_run(body)
    client.upsert_global_concurrency_limit_by_name(limit_of(FIRST), 1)
    with pytest.raises(UserError, match=r"^4 slots are needed, and the GPUs that .* shows .* have 3: "):
        in_a_run(lambda: Slots().hold(4, print))


def test_machines_keep_their_gpus_apart_and_do_not_wait_for_each_other(
    client: SyncPrefectClient, root: Path, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One limit `gpu` counts the slots of both; the GPUs of one machine are busy, those of the other idle."""
    show(gpus(FIRST))
    deployments.apply(root, 4)
    client.upsert_global_concurrency_limit_by_name(limit_of(FIRST), 1)
    there = f"{slots.WAITS_HERE}another-machine"
    waiting = other_run(client, Pending(name=WAITING, message=f"{there}, behind run-1"), settings.URGENT)

    def body() -> None:
        with Slots() as here, Slots() as elsewhere:
            assert not here.hold(1, print), "the other waits for a GPU of its own machine"
            assert not here.hold(1, print), "and gets nothing from a run that ends here"
            show(gpus(SECOND))  # as the other machine's `nvidia-smi`, whose first GPU it is, too
            monkeypatch.setattr(platform, "node", lambda: "another-machine")
            client.set_flow_run_state(waiting.id, Completed(), force=True)
            assert not elsewhere.hold(1, print)
            assert (here.held, elsewhere.held) == ([FIRST], [SECOND])

    in_a_run(body)


def test_a_run_waits_behind_a_run_that_waits_for_a_gpu_of_the_same_machine(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    show(gpus(FIRST))
    deployments.apply(root, 2)
    message = f"{slots.WAITS_HERE}{platform.node()}"
    waiting = other_run(client, Pending(name=WAITING, message=message), settings.URGENT)

    def end(line: str) -> None:
        client.set_flow_run_state(waiting.id, Completed(), force=True)

    def body() -> None:
        with Slots() as held:
            assert held.hold(1, end)

    in_a_run(body)


# ------------------------------------------------------------------------------- killed holders


def test_the_slots_of_a_killed_run_are_free_as_soon_as_its_stages_have_ended(
    client: SyncPrefectClient, root: Path, show: Show
) -> None:
    """Whoever cleans up after it ends its leases; nobody waits for Prefect to do so."""
    show(gpus(FIRST, SECOND))
    deployments.apply(root, None)

    def body() -> None:
        with Slots() as held:
            held.hold(2, print)
            assert active(client) == 2
            hooks.clean_run(uuid.UUID(str(flow_run.get_id())), Crashed())  # as if this process were killed
            assert active(client) == 0
            assert [limit(client, limit_of(gpu))[1] for gpu in (FIRST, SECOND)] == [0, 0]
        assert active(client) == 0, "a lease that has ended frees nothing again"

    in_a_run(body)


@pytest.mark.slow
def test_two_runs_of_the_service_sit_on_two_gpus(tmp_path: Path, show: Show) -> None:
    show(gpus(FIRST, SECOND))
    root = toy.make(tmp_path / "project", tracking={"enabled": False}, service={"gpu_slots": 1})
    seen = tmp_path / "seen"
    both = f"until [ $(wc -l < {seen}) = 2 ]; do sleep 0.2; done"
    toy.write_script(root, [f"echo $CUDA_VISIBLE_DEVICES >> {seen}", both, toy.SECOND.strip()])
    with toy.service(root) as service:
        runs = [service.start(seed=1), service.start("rlhf-pipeline/urgent", seed=2)]
        assert [service.end(run)["type"] for run in runs] == ["COMPLETED"] * 2, service.logs(runs[0])
        assert sorted(seen.read_text(encoding="utf-8").split()) == [FIRST, SECOND]
        assert "uses GPU-" in service.logs(runs[0])


@pytest.mark.slow
def test_two_runs_of_a_sweep_train_at_once_and_the_third_waits_for_a_gpu(tmp_path: Path, show: Show) -> None:
    """The first two cannot end before both have begun."""
    show(gpus(FIRST, SECOND))
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
    assert sorted(lines[:2]) == [["begin", FIRST], ["begin", SECOND]]
    third = next(number for number, (word, _) in enumerate(lines) if word == "begin" and number > 1)
    assert ["end", lines[third][1]] in lines[:third], "it gets the GPU of a run whose stage has ended"
    assert [word for word, _ in lines].count("end") == 3
