"""A real HTTP server on loopback with the part of the chat completions protocol that judges use.

It prefers the text that sorts last, unless a test sets another reply. It counts the requests, and the
complete replies, as a provider would bill them.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests import loopback

Body = Mapping[str, Any]
MODEL, KEY = "judge-1", f"key-{secrets.token_hex(8)}"
PROMPT = "{prompt}\nA={first}\nB={second}\n"


class Handler(loopback.Handler):
    server: Server
    number = 0
    """The number of different questions so far."""

    def do_POST(self) -> None:
        body = self.body()
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

    def half(self) -> None:
        """Send half of the promised body, and close the connection."""
        self.begin(200, 1000)
        self.wfile.write(b'{"choices": [')
        self.close_connection = True

    def close(self) -> None:
        """Send nothing, and close this side of the connection only."""
        self.connection.shutdown(socket.SHUT_WR)
        self.close_connection = True

    def hang(self) -> None:
        self.server.closing.wait(600)
        self.close_connection = True


class Server(loopback.Server):
    def __init__(self) -> None:
        super().__init__(Handler)
        self.requests, self.paid = Counter[str](), Counter[str]()
        self.bodies: list[Body] = []
        self.retries: list[str] = []
        self.behaviour: Callable[[Handler, Body, int], None] = lambda handler, body, _: handler.reply(body)
        self.reply: Callable[[Body], Any] = preferring
        self.most_at_once = self._at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"{super().url}/v1"

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
    message = {"role": "assistant", "content": text, "refusal": refusal}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
    if probabilities is not None:
        listed = [{"token": token, "logprob": math.log(p)} for token, p in probabilities.items()]
        choice["logprobs"] = {"content": [{**listed[0], "top_logprobs": listed}]}
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
    kind = {"id": "x", "object": "chat.completion", "created": int(time.time()), "model": MODEL}
    return {**kind, "choices": [choice], "usage": usage}
