"""A real HTTP server on loopback with the part of the chat completions protocol that judges use.

It prefers the text that sorts last, unless a test sets another reply. It counts the requests, and the
complete replies, as a provider would bill them.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = Mapping[str, Any]
MODEL, KEY = "judge-1", f"key-{secrets.token_hex(8)}"
PROMPT = "{prompt}\nA={first}\nB={second}\n"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    number = 0
    """The number of different questions so far."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        with self.server.counting():
            with self.server.lock:
                attempt = self.server.requests[text] = self.server.requests[text] + 1
                self.number = len(self.server.requests)
            self.server.bodies.append(body)
            self.server.retries.append(self.headers.get("x-stainless-retry-count", ""))
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                return self.send(401, {"error": {"message": "no such key"}})
            if body["model"] != MODEL:
                return self.send(404, {"error": {"message": f"no model {body['model']}"}})
            self.server.behaviour(self, body, attempt)

    def reply(self, body: Body) -> None:
        """Send a valid reply, and bill it."""
        self.send(200, self.server.reply(body))
        self.server.paid[body["messages"][0]["content"]] += 1

    def send(self, status: int, tree: Any, **headers: str) -> None:
        data = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def half(self) -> None:
        """Send half of the promised body, and close the connection."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices": [')
        self.close_connection = True

    def close(self) -> None:
        """Send nothing, and close this side of the connection only."""
        self.connection.shutdown(socket.SHUT_WR)
        self.close_connection = True

    def drip(self) -> None:
        """Send a byte now and then, without end."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "100000")
        self.end_headers()
        while not self.server.closing.wait(0.05):
            self.wfile.write(b" ")

    def hang(self) -> None:
        self.server.closing.wait(600)
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.paid = Counter[str](), Counter[str]()
        self.bodies: list[Body] = []
        self.retries: list[str] = []
        self.closing = threading.Event()
        self.behaviour: Callable[[Handler, Body, int], None] = lambda handler, body, _: handler.reply(body)
        self.reply: Callable[[Body], Any] = preferring
        self.most_at_once = self._at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @contextmanager
    def counting(self) -> Iterator[None]:
        with self.lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client stopped waiting, or was killed
        finally:
            with self.lock:
                self._at_once -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


def shown(body: Body) -> tuple[str, str]:
    """The two texts of a question that was made with PROMPT."""
    lines = body["messages"][0]["content"].splitlines()
    first, second = (next(x for x in lines if x.startswith(letter))[2:] for letter in ("A=", "B="))
    return first, second


def preferring(body: Body) -> Any:
    first, second = shown(body)
    return completion("A" if first > second else "B")


def completion(
    text: str | None, *, probabilities: Mapping[str, float] | None = None, refusal: str | None = None
) -> dict[str, Any]:
    """A chat completion of 10 tokens; `probabilities` are those of its only token."""
    choice: dict[str, Any] = {
        "index": 0,
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": text, "refusal": refusal},
        "logprobs": None,
    }
    if probabilities is not None:
        listed = [{"token": token, "logprob": math.log(p)} for token, p in probabilities.items()]
        choice["logprobs"] = {"content": [{**listed[0], "top_logprobs": listed}]}
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": usage,
    }
