"""The GPU slots of a run: slots of Prefect's concurrency limit `gpu`, which it keeps from stage to stage.

Runs that find no free slot wait in a queue: first by the priority of their work queue (1 is the most urgent),
then by their start. The queue is the state of these runs in Prefect, so that no other record can be wrong.
No torch here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.runtime import deployment, flow_run
from prefect.states import Pending, Running

from flows import settings
from rlhf_tasks.errors import UserError

LEASE_SECONDS = 60.0  # after which a slot is free whose holder vanished
POLL_SECONDS = 1.0
WAITING = f"Waiting for {settings.SLOTS}"  # the name of the state of a run in the queue
QUEUED = FlowRunFilter.model_validate({"state": {"name": {"any_": [WAITING]}}})
AT_WORK = FlowRunFilter.model_validate({"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}})
HOLDING = TaskRunFilter.model_validate(
    {"tags": {"all_": [settings.SLOTS]}, "state": {"type": {"any_": ["RUNNING"]}}}
)


class Slots(ExitStack):
    """The slots that a run holds; at the end of the block they are free again."""

    _number = 0

    def hold(self, number: int, show: Callable[[str], None]) -> bool:
        """Hold this many slots; True if the run had to wait. `show` gets a line that says behind which runs.

        Slots that the run has already stay with it, unless a run of a more urgent work queue waits.
        """
        with get_client(sync_client=True) as client:
            queue = Queue.of(client)
            if self._number == number and not queue.has_more_urgent():
                return False
            self.release()
            shown = ""
            while queue.ahead() or not queue.has_free(number) or not self._try(number):
                names = queue.names()
                line = f"waiting for {settings.SLOTS}" + (f", behind {', '.join(names)}" if names else "")
                if line != shown and (names or not shown):  # no name: the other is between two stages
                    get_run_logger().info("%s", line)
                    queue.wait(line)
                    show(line)
                    shown = line
                time.sleep(POLL_SECONDS)
            if shown:
                client.set_flow_run_state(queue.run.id, Running())
            return bool(shown)

    def release(self) -> None:
        """Let other runs have the slots."""
        self._number = 0
        self.close()

    def _try(self, number: int) -> bool:
        """Take the slots; False if another run was faster."""
        lease = concurrency(
            settings.SLOTS,
            occupy=number,
            max_retries=0,  # Prefect's own wait has no order, and lasts up to 30 s longer than needed
            strict=deployment.id is not None,  # a run outside the service has no such limit
            lease_duration=LEASE_SECONDS,
            raise_on_lease_renewal_failure=False,  # or else a restart of the server would end the training
        )
        try:
            self.enter_context(lease)
        except Exception as error:
            cause = error.__cause__
            if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.LOCKED:
                return False
            raise
        self._number = number
        return True


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

    def has_free(self, number: int) -> bool:
        """Whether so many are free, or there is no limit. Prefect logs a request in vain as an error.

        Raises:
            UserError: if the limit never has as many.
        """
        try:
            limit = self.client.read_global_concurrency_limit_by_name(settings.SLOTS)
        except ObjectNotFound:
            return True
        if number > limit.limit:
            raise UserError(
                f"gpu_slots={number} is more than the limit `{settings.SLOTS}`, which is {limit.limit}: "
                f"change the section `service`, or run `rlhf up --gpu-slots {number}`"
            )
        return limit.active_slots + number <= limit.limit

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
        return [run for run in self.client.read_flow_runs(flow_run_filter=QUEUED) if run.id != self.run.id]

    def _rank(self, run: FlowRun) -> tuple[float, float]:
        """The smallest is the first of the queue; a run without a work queue comes last."""
        queue = self.client.read_work_queue(run.work_queue_id) if run.work_queue_id else None
        start = run.start_time.timestamp() if run.start_time is not None else math.inf
        return (math.inf if queue is None or queue.priority is None else queue.priority, start)
