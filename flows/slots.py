"""The GPU slots of a run: slots of Prefect's concurrency limit `gpu`, which it keeps from stage to stage.

Where the machine has GPUs, a slot is one of them: the run also takes a slot of a limit of that GPU's own. So
the server knows who has which GPU, whatever the machine, worker or container that asks. A run that finds no
free slot shows the state `Waiting for gpu`. No torch here.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cached_property
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import State
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.context import ConcurrencyContext
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.states import Pending, Running

from flows import devices, settings
from flows.subprocesses import OutOfTime
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.training import auto

POLL_SECONDS = 1.0
# Prefect renews a lease after three quarters of it, and then tries again after 2, 4, 8 … seconds: the slot of
# a run is safe while the server is away for less than a quarter of that quarter, and mostly for much longer.
LEASE_SECONDS = 1200.0
LABEL = "rlhf.leases"  # of a run: the ids of its leases, for whoever ends it if its process was killed
WAITING = f"Waiting for {settings.SLOTS}"  # the name of the state of a run that waits


def limit_of(device: str) -> str:
    """The name of the limit of one GPU."""
    return f"{settings.SLOTS} {device}"


def find_limit(client: SyncPrefectClient, name: str) -> GlobalConcurrencyLimitResponse | None:
    with suppress(ObjectNotFound):
        return client.read_global_concurrency_limit_by_name(name)
    return None


class Slots(AbstractContextManager["Slots"]):
    """Context manager: a run's GPU slots and devices, released on exit."""

    def __init__(self, deadline: float = math.inf) -> None:
        self._deadline = deadline  # when a wait for slots ends, by `time.monotonic`
        self._leases: list[tuple[str, ExitStack]] = []
        """The GPU of each slot, and what ends its lease; without GPUs it is an empty text."""

    @cached_property
    def gpus(self) -> list[str]:
        """The GPUs of this machine that the run may use."""
        return devices.visible()

    @property
    def held(self) -> list[str]:
        return [gpu for gpu, _ in self._leases if gpu]

    def num_slots(self, stage: str, values: Config) -> int:
        """The number of slots that a stage holds: `gpu_slots`, or one for each process that uses a GPU."""
        number, launch = values.service.policy(stage).gpu_slots, values.launch
        if number and stage in auto.TRAINED and self.gpus:
            return max(number, launch.num_processes // launch.num_machines)
        return number

    def hold(self, number: int, show: Callable[[str], object]) -> bool:
        """Hold this many slots; True if the run had to wait. `show` gets a status line.

        Slots that the run has already stay with it. A run outside the service needs none: there is no limit.

        Raises:
            UserError: if there are never as many.
            OutOfTime: at the deadline.
        """
        while len(self._leases) > number:
            self._leases.pop()[1].close()
        if len(self._leases) == number:
            return False
        self.release()
        run, shown = UUID(str(flow_run.get_id())), ""
        with get_client(sync_client=True) as client:
            if find_limit(client, settings.SLOTS) is None:
                if deployment.id is None:
                    return False
                raise UserError(f"the limit `{settings.SLOTS}` does not exist; `rlhf up` makes it")
            while reason := self._take(client, run, number):
                if reason != shown:
                    show_waiting(client, run, reason)
                    show(reason)
                    shown = reason
                if time.monotonic() > self._deadline:
                    raise OutOfTime
                time.sleep(POLL_SECONDS)
            if shown:
                client.set_flow_run_state(run, Running())
        return bool(shown)

    def _take(self, client: SyncPrefectClient, run: UUID, number: int) -> str:
        """Take the slots, and a GPU for each. Returns what the run waits for; nothing if it has them."""
        limit = client.read_global_concurrency_limit_by_name(settings.SLOTS)
        if number > limit.limit:
            raise UserError(
                f"{number} slots are needed, and the limit `{settings.SLOTS}` has {limit.limit}: change the "
                "section `service` or launch.num_processes, or the limit: "
                f"`prefect gcl update {settings.SLOTS} --limit {number}`"
            )
        if self.gpus and number > len(self.gpus):
            raise UserError(
                f"{number} slots are needed, and {platform.node()} shows {len(self.gpus)} GPUs to this run: "
                "change launch.num_processes or the section `service`"
            )
        if limit.active_slots + number > limit.limit:
            return f"waiting for {settings.SLOTS}"
        free = [] if self.gpus else [""] * number
        for gpu in self.gpus:
            if (own := find_limit(client, limit_of(gpu))) is None:  # its first run makes the limit
                with suppress(ObjectAlreadyExists):
                    made = GlobalConcurrencyLimitCreate(name=limit_of(gpu), limit=1)
                    client.create_global_concurrency_limit(made)
            free += [gpu] if own is None or own.active_slots < own.limit else []
        if len(free) < number:
            return f"waiting for {settings.SLOTS} on {platform.node()}"
        for gpu in free[:number]:
            lease = ExitStack()
            slots = concurrency(
                [settings.SLOTS, *([limit_of(gpu)] if gpu else [])],
                max_retries=0,
                strict=True,
                lease_duration=LEASE_SECONDS,
                raise_on_lease_renewal_failure=False,  # training goes on while the server is away
            )
            try:
                lease.enter_context(slots)
            except ConcurrencySlotAcquisitionError:  # another run was faster
                self.release()
                return f"waiting for {settings.SLOTS}"
            self._leases.append((gpu, lease))
        if context := ConcurrencyContext.get():
            label: dict[str, bool | int | float | str] = {
                LABEL: " ".join(map(str, context.cleanup_lease_ids))
            }
            client.update_flow_run_labels(run, label)
        return ""

    def release(self) -> None:
        """Let other runs have the slots."""
        while self._leases:
            self._leases.pop()[1].close()

    def __exit__(self, *_: object) -> None:
        self.release()


def show_waiting(client: SyncPrefectClient, run: UUID, message: str) -> None:
    """Show the run as waiting. Its time in this state is no run time, since the state is of type PENDING.

    Prefect's rules allow PENDING before a start only, so it is forced, but not upon a run that ends.
    """
    state: State[Any] | None = client.read_flow_run(run).state
    if state is not None and (state.is_running() or state.is_pending()):
        waiting: State[Any] = Pending(name=WAITING, message=message)
        lease = state.state_details.deployment_concurrency_lease_id
        waiting.state_details.deployment_concurrency_lease_id = lease
        client.set_flow_run_state(run, waiting, force=True)
