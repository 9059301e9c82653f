"""Prefect with a server on SQLite that waits for the database: `python -P -m flows.server server start`.

SQLite transactions start deferred; start them IMMEDIATE instead. When a deferred one wants to write after
another one has written, SQLite refuses it at once ("database is locked"): clients repeat the request after
2 s, pages show an error, and some writes are lost. Immediate ones wait for each other. Prefect has no setting
for it.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from prefect.cli import app
from prefect.server.database.configurations import AioSqliteConfiguration

begin = AioSqliteConfiguration.begin_transaction


def begin_writing(
    self: AioSqliteConfiguration, session: Any, with_for_update: bool = True
) -> AbstractAsyncContextManager[Any]:
    """A transaction that has the write lock from its beginning, whatever the caller asks for."""
    return begin(self, session, with_for_update=True)


if __name__ == "__main__":
    AioSqliteConfiguration.begin_transaction = begin_writing  # type: ignore[method-assign, assignment]
    app()
