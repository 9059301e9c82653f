"""The GPU slots of a run: slots of Prefect's concurrency limit `gpu`, which it keeps from stage to stage.

Where the machine has GPUs, a slot is one of them: the run also takes a slot of a limit of that GPU's own. So
the server knows who has which GPU, whatever the machine, worker or container that asks. A run that finds no
free slot shows the state `Waiting for gpu`. No torch here.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any
from uuid import UUID

from prefect import get_run_logger
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
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.training import launch as launching

POLL_SECONDS = 1.0
# Prefect renews a lease after three quarters of it, and then tries again after 2, 4, 8 … seconds: the slot of
# a run is safe while the server is away for less than a quarter of that quarter, and mostly for much longer.
LEASE_SECONDS = 1200.0
LABEL = "rlhf.leases"  # of a run: the ids of its leases, for whoever ends it if its process was killed
WAITING = f"Waiting for {settings.SLOTS}"  # the name of the state of a run that waits


def limit_of(device: str) -> str:
    """The name of the limit of one GPU; Prefect allows no slash, which names of MIG instances may have."""
    return f"{settings.SLOTS} {device.replace('/', '-')}"


def find_limit(client: SyncPrefectClient, name: str) -> GlobalConcurrencyLimitResponse | None:
    """The concurrency limit of this name, if there is one."""
    with suppress(ObjectNotFound):
        return client.read_global_concurrency_limit_by_name(name)
    return None


class Slots:
    """The slots that a run holds, and the GPUs that they are; at the end of the block they are free again."""

    def __init__(self) -> None:
        self._leases: list[tuple[str, int, ExitStack]] = []
        """The GPU of each lease, the number of its slots, and what ends it. Without GPUs: one lease of ""."""

    @cached_property
    def gpus(self) -> list[str]:
        """The GPUs of this machine that the run may use."""
        return devices.visible()

    @property
    def held(self) -> list[str]:
        """The GPUs that the run has."""
        return [gpu for gpu, _, _ in self._leases if gpu]

    def needed(self, stage: str, values: Config) -> int:
        """The number of slots that a stage holds: `gpu_slots`, or one for each process that uses a GPU."""
        number, launch = values.service.policy(stage).gpu_slots, values.launch
        if number and stage in launching.TRAINING and self.gpus:
            return max(number, launch.num_processes // launch.num_machines)
        return number

    def hold(self, number: int, show: Callable[[str], None]) -> bool:
        """Hold this many slots; True if the run had to wait. `show` gets a line that says what it waits for.

        Slots that the run has already stay with it. A run outside the service needs none: there is no limit.

        Raises:
            UserError: if there are never as many.
        """
        while self._leases and sum(count for _, count, _ in self._leases[:-1]) >= number:
            self._leases.pop()[2].close()
        if self._leases and sum(count for _, count, _ in self._leases) == number:
            return False
        self.release()
        run, shown = UUID(str(flow_run.get_id())), ""
        with get_client(sync_client=True) as client:
            if find_limit(client, settings.SLOTS) is None:
                if deployment.id is None:
                    return False
                raise UserError(
                    f"the limit `{settings.SLOTS}` does not exist; `rlhf up` or `rlhf deploy --work` makes it"
                )
            while reason := self._take(client, run, number):
                if reason != shown:
                    get_run_logger().info("%s", reason)
                    show_waiting(client, run, reason)
                    show(reason)
                    shown = reason
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
        if limit.active_slots + number > limit.limit:
            return f"waiting for {settings.SLOTS}"
        limits = {gpu: _limit_of_gpu(client, gpu) for gpu in self.gpus}
        chosen = choose(limits, number) if limits else [""] * number
        if not chosen:
            return f"waiting for {settings.SLOTS} on {platform.node()}"
        for gpu, count in Counter(chosen).items():
            names, lease = [settings.SLOTS, *([limit_of(gpu)] if gpu else [])], ExitStack()
            slots = concurrency(
                names,
                count,
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
            self._leases.append((gpu, count, lease))
        if context := ConcurrencyContext.get():
            label: dict[str, bool | int | float | str] = {
                LABEL: " ".join(map(str, context.cleanup_lease_ids))
            }
            client.update_flow_run_labels(run, label)
        return ""

    def release(self) -> None:
        """Let other runs have the slots."""
        while self._leases:
            self._leases.pop()[2].close()

    def __enter__(self) -> Slots:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def choose(limits: Mapping[str, GlobalConcurrencyLimitResponse], number: int) -> list[str]:
    """A GPU for each slot: others first, as far as there are enough, then the most idle; empty if too few.

    Raises:
        UserError: if these GPUs never have as many slots.
    """
    if number > (most := sum(limit.limit for limit in limits.values())):
        raise UserError(
            f"{number} slots are needed, and the GPUs that {platform.node()} shows to this run have {most}: "
            "change launch.num_processes or the section `service`, or the limits "
            f"{', '.join(map(limit_of, limits))}"
        )
    free = {gpu: limit.limit - limit.active_slots for gpu, limit in limits.items()}
    chosen = list[str]()
    while len(chosen) < number:
        eligible = [gpu for gpu in limits if chosen.count(gpu) < free[gpu]]
        if not eligible:
            return []
        chosen.append(min(eligible, key=lambda gpu: (chosen.count(gpu), -free[gpu])))
    return chosen


def _limit_of_gpu(client: SyncPrefectClient, gpu: str) -> GlobalConcurrencyLimitResponse:
    """The limit of one GPU, which is made if this is its first run."""
    if (found := find_limit(client, limit_of(gpu))) is None:
        with suppress(ObjectAlreadyExists):
            client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit_of(gpu), limit=1))
        found = client.read_global_concurrency_limit_by_name(limit_of(gpu))
    return found


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
