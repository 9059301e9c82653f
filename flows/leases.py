"""A lease of slots of Prefect's concurrency limits, which lasts as long as somebody renews it. No torch here.

The run has the ids of its leases as a label, so that whoever ends a run whose process was killed can end its
leases as well. Only if the worker was killed too do they last for LEASE_SECONDS.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import copy_context
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.runtime import flow_run

LEASE_SECONDS = 300.0  # a server may be away for so long, less RENEWAL_SECONDS
RENEWAL_SECONDS = 20.0
END_SECONDS = 2.0  # for a renewal in progress
LABEL = "rlhf.leases"


class Lease:
    """Slots that this process has taken and renews until `end`."""

    def __init__(self, client: SyncPrefectClient, names: Sequence[str], number: int) -> None:
        """Take this number of slots of each of the limits, or of none of them.

        Raises:
            Unavailable: if not all of them are free.
        """
        self._names, self.number = list(names), number
        self.identity = self._take(client)
        self._ended = threading.Event()
        # In the context of the run: its logger, and the address of its server.
        self._thread = threading.Thread(target=copy_context().run, args=(self._renew,), daemon=True)
        self._thread.start()

    def _take(self, client: SyncPrefectClient) -> UUID:
        try:
            answer = client.increment_concurrency_slots_with_lease(
                self._names, self.number, "concurrency", LEASE_SECONDS
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.LOCKED:
                raise Unavailable from None
            raise
        return UUID(answer.json()["lease_id"])

    def _renew(self) -> None:
        while not self._ended.wait(RENEWAL_SECONDS):
            try:
                with get_client(sync_client=True) as client:
                    self._renew_once(client)
            except httpx.HTTPError as error:  # the training goes on: the server may be restarting
                get_run_logger().warning("the lease of %s was not renewed: %s", self._names[0], error)

    def _renew_once(self, client: SyncPrefectClient) -> None:
        """Renew the lease. One that the server has ended, after a jump of its clock, is taken again."""
        try:
            client.renew_concurrency_lease(self.identity, LEASE_SECONDS)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.GONE:
                raise
            try:
                self.identity = self._take(client)
            except Unavailable:
                get_run_logger().warning("the lease of %s has ended, and another run has it", self._names[0])
            else:
                note(client, self.identity)

    def end(self) -> None:
        """Free the slots."""
        self._ended.set()
        self._thread.join(END_SECONDS)
        with get_client(sync_client=True) as client:
            client.release_concurrency_slots_with_lease(self.identity)


class Unavailable(Exception):
    """Too few slots are free."""


def note(client: SyncPrefectClient, *leases: UUID) -> None:
    """Add these leases to the label of the present run."""
    run = client.read_flow_run(UUID(str(flow_run.get_id())))
    known = _noted(run)
    client.update_flow_run_labels(run.id, {LABEL: " ".join(dict.fromkeys([*known, *map(str, leases)]))})


def end_all(client: SyncPrefectClient, run: FlowRun) -> None:
    """Free the slots of a run whose processes have all ended. A lease that has ended is left alone."""
    for lease in _noted(run):
        client.release_concurrency_slots_with_lease(UUID(lease))


def _noted(run: FlowRun) -> list[str]:
    return str(run.labels.get(LABEL, "")).split()
