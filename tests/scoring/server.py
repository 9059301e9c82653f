"""A scoring service on loopback with scripted faults."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Runs an entry of `script` per request; after them it returns the length of each response."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Callable[[Handler], None]] = []
        self.requests: list[dict[str, Any]] = []
        self.logins: list[str | None] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is a part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        self.server.logins.append(self.headers.get("Authorization"))
        script = self.server.script
        if script:
            script.pop(0)(self)
        else:
            scores(self)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def scores(handler: Handler) -> None:
    given = [float(len(text)) for text in handler.server.requests[-1]["responses"]]
    handler.answer(200, json.dumps({"scores": given}).encode())


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(code, b"not now", **headers)


def replies(body: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(200, body.encode())


def slow(handler: Handler) -> None:
    handler.server.ended.wait(0.1)
    scores(handler)


def hung(handler: Handler) -> None:
    handler.server.ended.wait(30)


def dripping(handler: Handler) -> None:
    """Never silent for long, and never done."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.server.ended.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()
