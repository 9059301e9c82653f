"""Prefect with a server that waits for SQLite, and not for events: `python -P -m flows.server server start`.

SQLite transactions start deferred; start them IMMEDIATE instead. When a deferred one wants to write after
another one has written, SQLite refuses it at once ("database is locked"): clients repeat the request after
2 s, pages show an error, and some writes are lost. Immediate ones wait for each other. Prefect has no setting
for it.

It has one for the order of events, `PREFECT_SERVER_EVENTS_CAUSAL_ORDERING`, which names this module.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from prefect.cli import app
from prefect.server.database.configurations import AioSqliteConfiguration
from prefect.server.events.ordering import EventArrivedEarly, memory
from prefect.server.events.schemas.events import ReceivedEvent

begin = AioSqliteConfiguration.begin_transaction


def begin_writing(
    self: AioSqliteConfiguration, session: Any, with_for_update: bool = True
) -> AbstractAsyncContextManager[Any]:
    """A transaction that has the write lock from its beginning, whatever the caller asks for."""
    return begin(self, session, with_for_update=True)


class CausalOrdering(memory.CausalOrdering):
    """Automations see an event at once, also if the one that it follows never arrived.

    Prefect holds such an event back for 15 minutes, and all that follow it. But its scheduler emits no event
    of a run's first state, which the second one follows if the run was scheduled less than five minutes
    before (PrefectHQ/prefect 21932), and a server that was restarted has forgotten what it saw. A single
    server gets the events of a run in their order; one that is still processed is waited for.
    """

    async def wait_for_leader(self, event: ReceivedEvent) -> None:
        try:
            await super().wait_for_leader(event)
        except EventArrivedEarly:
            await self.forget_follower(event)


if __name__ == "__main__":
    AioSqliteConfiguration.begin_transaction = begin_writing  # type: ignore[method-assign, assignment]
    app()
