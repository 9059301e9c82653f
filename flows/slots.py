"""The GPU slots of a run: slots of Prefect's concurrency limit `gpu`, which it keeps from stage to stage.

Where the machine has GPUs, a slot is one of them: the run also takes a slot of a limit of that GPU's own. So
the server knows who has which GPU, whatever the machine, worker or container that asks.

Runs that find no free slot wait in a queue: first by the priority of their work queue (1 is the most urgent),
then by their start. The queue is the state of these runs in Prefect, so that no other record can be wrong.
No torch here.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.states import Pending, Running

from flows import devices, leases, settings
from flows.leases import Lease, Unavailable
from rlhf_tasks.config import STAGES, Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.training import launch as launching

POLL_SECONDS = 1.0
WAITING = f"Waiting for {settings.SLOTS}"  # the name of the state of a run in the queue
WAITS_HERE = f"waiting for {settings.SLOTS} on "  # begins its message if only a GPU of its machine is missing
QUEUED = FlowRunFilter.model_validate({"state": {"name": {"any_": [WAITING]}}})
AT_WORK = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}})
HOLDING = TaskRunFilter.model_validate(
    {"tags": {"all_": [settings.SLOTS]}, "state": {"type": {"any_": ["RUNNING"]}}}
)


def limit_of(device: str) -> str:
    """The name of the limit of one GPU; Prefect allows no slash, which names of MIG instances may have."""
    return f"{settings.SLOTS} {device.replace('/', '-')}"


def num_runs(values: Config) -> int:
    """The number of runs with these parameters that the slots of the limit `gpu` suffice for, at least 1."""
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(settings.SLOTS).limit
        except ObjectNotFound:
            return 1
    most = max(Slots().needed(stage, values) for stage in STAGES)
    return max(1, limit // max(1, most))


class Slots:
    """The slots that a run holds, and the GPUs that they are; at the end of the block they are free again."""

    def __init__(self) -> None:
        self._leases: dict[tuple[str, ...], Lease] = {}
        """By the GPUs that each is for; where the machine has none, one lease has all slots."""

    @cached_property
    def gpus(self) -> list[str]:
        """The GPUs of this machine that the run may use."""
        return devices.visible()

    @property
    def held(self) -> list[str]:
        """The GPUs that the run has."""
        return [gpu for gpus in self._leases for gpu in gpus]

    @property
    def number(self) -> int:
        """The number of slots that the run has."""
        return sum(lease.number for lease in self._leases.values())

    def needed(self, stage: str, values: Config) -> int:
        """The number of slots that a stage holds: `gpu_slots`, or one for each process that uses a GPU."""
        number, launch = values.service.policy(stage).gpu_slots, values.launch
        if number and stage in launching.TRAINING and self.gpus:
            return max(number, launch.num_processes // launch.num_machines)
        return number

    def hold(self, number: int, show: Callable[[str], None]) -> bool:
        """Hold this many slots; True if the run had to wait. `show` gets a line that says behind which runs.

        Slots that the run has already stay with it, unless a run of a more urgent work queue waits.

        Raises:
            UserError: if there are never as many.
        """
        with get_client(sync_client=True) as client:
            queue = Queue.of(client)
            if self._keeps(number) and not queue.has_more_urgent():
                return False
            self.release()
            shown, shown_reason = "", ""
            while reason := self._try(queue, number):
                names = queue.names()
                line = reason + (f", behind {', '.join(names)}" if names else "")
                # without a name the other is between two stages: only another reason is news then
                if line != shown and (names or reason != shown_reason):
                    get_run_logger().info("%s", line)
                    queue.wait(line)
                    show(line)
                    shown, shown_reason = line, reason
                time.sleep(POLL_SECONDS)
            if shown:
                client.set_flow_run_state(queue.run.id, Running())
            return bool(shown)

    def _keeps(self, number: int) -> bool:
        """Free what the run has above this number; True if it then has just as many."""
        for gpus, lease in reversed(list(self._leases.items())):
            if self.number - lease.number >= number:
                self._leases.pop(gpus).end()
        return self.number == number

    def release(self) -> None:
        """Let other runs have the slots."""
        while self._leases:
            self._leases.popitem()[1].end()

    def _try(self, queue: Queue, number: int) -> str:
        """Take the slots, and a GPU for each. Returns what the run waits for; nothing if it has them."""
        if not queue.has_free(number) or queue.ahead():
            return f"waiting for {settings.SLOTS}"
        gpus = self.gpus if queue.has_limit else []
        chosen = queue.choose(gpus, number)
        if gpus and not chosen:
            return f"{WAITS_HERE}{platform.node()}"
        try:
            for gpu, count in chosen.items():
                names = [settings.SLOTS, limit_of(gpu)]
                self._leases[(gpu,)] = Lease(queue.client, names, count)
            if queue.has_limit and not gpus:
                self._leases[()] = Lease(queue.client, [settings.SLOTS], number)
        except Unavailable:  # another run was faster
            self.release()
            return f"waiting for {settings.SLOTS}"
        if self._leases:
            leases.note(queue.client, *(lease.identity for lease in self._leases.values()))
        return ""

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class Queue:
    """The runs that wait for slots, as one of them sees them."""

    client: SyncPrefectClient
    run: FlowRun

    @classmethod
    def of(cls, client: SyncPrefectClient) -> Queue:
        return cls(client, client.read_flow_run(UUID(str(flow_run.get_id()))))

    def has_more_urgent(self) -> bool:
        """Whether a run of a work queue with a better priority waits."""
        own = self._rank(self.run)[0]
        return any(self._rank(other)[0] < own for other in self._waiting())

    @cached_property
    def has_limit(self) -> bool:
        """Whether there is a limit at all; a run outside the service has none.

        Raises:
            UserError: if a run of the service has none.
        """
        found = self._limit(settings.SLOTS) is not None
        if not found and deployment.id is not None:
            raise UserError(f"the limit `{settings.SLOTS}` does not exist; `rlhf up` or `rlhf work` makes it")
        return found

    def has_free(self, number: int) -> bool:
        """Whether so many are free, or there is no limit.

        Raises:
            UserError: if the limit never has as many.
        """
        limit = self._limit(settings.SLOTS)
        if limit is None:
            return True
        if number > limit.limit:
            raise UserError(
                f"{number} slots are needed, and the limit `{settings.SLOTS}` has {limit.limit}: change the "
                "section `service` or launch.num_processes, or the limit: "
                f"`prefect gcl update {settings.SLOTS} --limit {number}`"
            )
        return limit.active_slots + number <= limit.limit

    def choose(self, gpus: Sequence[str], number: int) -> dict[str, int]:
        """The slots to take of each GPU, most idle GPUs first; empty if too few are free.

        Every slot is another GPU, as far as there are enough of them.

        Raises:
            UserError: if these GPUs never have as many.
        """
        if not gpus:
            return {}
        limits = {gpu: self._limit_of(gpu) for gpu in gpus}
        if number > (most := sum(limit.limit for limit in limits.values())):
            raise UserError(
                f"{number} slots are needed, and the GPUs that {platform.node()} shows to this run have "
                f"{most}: change launch.num_processes or the section `service`, or the limits "
                f"{', '.join(map(limit_of, gpus))}"
            )
        first = sorted(gpus, key=lambda gpu: limits[gpu].active_slots - limits[gpu].limit)
        first = first[:number]
        shares = dict.fromkeys(first, 0)

        def eligible(gpu: str) -> tuple[bool, int]:
            return limits[gpu].active_slots + shares[gpu] < limits[gpu].limit, -shares[gpu]

        while sum(shares.values()) < number:
            shares[max(first, key=eligible)] += 1
        is_free = all(limits[gpu].active_slots + share <= limits[gpu].limit for gpu, share in shares.items())
        return shares if is_free else {}

    def _limit_of(self, gpu: str) -> GlobalConcurrencyLimitResponse:
        """The limit of one GPU, which is made if this is its first run."""
        if (found := self._limit(limit_of(gpu))) is not None:
            return found
        with suppress(ObjectAlreadyExists):
            self.client.create_global_concurrency_limit(
                GlobalConcurrencyLimitCreate(name=limit_of(gpu), limit=1)
            )
        return self.client.read_global_concurrency_limit_by_name(limit_of(gpu))

    def _limit(self, name: str) -> GlobalConcurrencyLimitResponse | None:
        try:
            return self.client.read_global_concurrency_limit_by_name(name)
        except ObjectNotFound:
            return None

    def ahead(self) -> list[FlowRun]:
        """The waiting runs that get slots before this one."""
        own = self._rank(self.run)
        return [other for other in self._waiting() if self._rank(other) < own]

    def names(self) -> list[str]:
        """The names of the runs that have slots, and of those ahead."""
        have = self.client.read_flow_runs(flow_run_filter=AT_WORK, task_run_filter=HOLDING)
        runs = [*have, *self.ahead()]
        return list(dict.fromkeys(run.name for run in runs if run.id != self.run.id))

    def wait(self, message: str) -> None:
        """Show the run as waiting. Its time in this state is no run time, since the state is of type PENDING.

        Prefect's rules allow PENDING before a start only, so it is forced, but not upon a run that ends.
        """
        state: State[Any] | None = self.client.read_flow_run(self.run.id).state
        if state is not None and (state.is_running() or state.is_pending()):
            waiting: State[Any] = Pending(name=WAITING, message=message)
            waiting.state_details.deployment_concurrency_lease_id = (
                state.state_details.deployment_concurrency_lease_id
            )
            self.client.set_flow_run_state(self.run.id, waiting, force=True)

    def _waiting(self) -> list[FlowRun]:
        """Those that compete with this one; a run that lacks only a GPU of another machine does not."""
        found = self.client.read_flow_runs(flow_run_filter=QUEUED)
        return [run for run in found if run.id != self.run.id and not _is_elsewhere(run)]

    def _rank(self, run: FlowRun) -> tuple[float, float]:
        """The smallest is the first of the queue; a run without a work queue comes last."""
        queue = self.client.read_work_queue(run.work_queue_id) if run.work_queue_id else None
        start = run.start_time.timestamp() if run.start_time is not None else math.inf
        return (math.inf if queue is None or queue.priority is None else queue.priority, start)


def _is_elsewhere(run: FlowRun) -> bool:
    message = (run.state.message if run.state is not None else None) or ""
    machine = message.removeprefix(WAITS_HERE).partition(",")[0]
    return message.startswith(WAITS_HERE) and machine != platform.node()
