"""A scoring service on loopback with scripted faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import loopback


class Server(loopback.Server):
    """Runs an entry of `script` per request; after them it returns the length of each response."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.script: list[Callable[[Handler], None]] = []
        self.requests: list[dict[str, Any]] = []
        self.logins: list[str | None] = []

    @property
    def url(self) -> str:
        return f"{super().url}/score"


class Handler(loopback.Handler):
    server: Server

    def do_POST(self) -> None:
        self.server.requests.append(self.body())
        self.server.logins.append(self.headers.get("Authorization"))
        script = self.server.script
        if script:
            script.pop(0)(self)
        else:
            scores(self)


def scores(handler: Handler) -> None:
    given = [float(len(text)) for text in handler.server.requests[-1]["responses"]]
    handler.send(200, {"scores": given})


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(code, b"not now", **headers)


def replies(body: str) -> Callable[[Handler], None]:
    return lambda handler: handler.send(200, body.encode())


def slow(handler: Handler) -> None:
    handler.server.closing.wait(0.1)
    scores(handler)


def hung(handler: Handler) -> None:
    handler.server.closing.wait(30)


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()
