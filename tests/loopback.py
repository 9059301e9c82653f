"""What every HTTP server of the tests does: it listens on loopback, and answers in threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar


class Server(ThreadingHTTPServer):
    """A server; every request has a thread."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, handler: type[Handler], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), handler)
        self.closing = threading.Event()
        """Ends what would never answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is printed: a client that went away is a part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def send(self, status: int, tree: Any, **headers: str) -> None:
        """A reply of JSON, of bytes as they are, or without a body for None."""
        data = b"" if tree is None else tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        self.begin(status, len(data), **headers)
        self.wfile.write(data)

    def begin(self, status: int, length: int, **headers: str) -> None:
        """Send all of a reply but its body."""
        self.send_response(status)
        headers |= {"Content-Type": "application/json", "Content-Length": str(length)}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def drip(self) -> None:
        """Send a byte now and then, without end."""
        self.begin(200, 100_000)
        while not self.server.closing.wait(0.05):
            self.wfile.write(b" ")

    def log_message(self, *arguments: Any) -> None:
        pass


S = TypeVar("S", bound=Server)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """Within the block the server answers."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
