"""Links to MLflow's dashboard are best effort: a missing one fails no run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from rlhf_tasks.config import Tracking
from rlhf_tasks.tracking import links


class Server(HTTPServer):
    """Answers every request with the first of `bodies`, the last one again and again."""

    bodies: tuple[bytes, ...] = ()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        first, *rest = self.server.bodies
        self.server.bodies = tuple(rest) or (first,)
        self.send_response(200)
        self.send_header("Content-Length", str(len(first)))
        self.end_headers()
        self.wfile.write(first)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def settings(server: Server) -> Tracking:
    return Tracking(enabled=True, experiment="rlhf", uri=f"http://127.0.0.1:{server.server_port}")


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"experiment": 7}', b"{}"])
def test_there_are_no_links_if_another_program_answers(server: Server, body: bytes) -> None:
    server.bodies = (body,)
    assert links.run_links(settings(server), {"sft": "k"}, "p") == {}


def body(run: str | None = None) -> bytes:
    """One answer for both requests: the experiment, and a run in it."""
    tree: dict[str, Any] = {"experiment": {"experiment_id": "7"}}
    if run is not None:
        tree["runs"] = [{"info": {"run_id": run}}]
    return json.dumps(tree).encode()


def test_links_wait_for_the_pipeline_s_run_and_not_forever(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(links.MLFLOW_URL, "http://browser")
    server.bodies = (body(), body(), body(), body("p"), body(), body("s"), body("p"))
    assert links.run_links(settings(server), {"sft": "k"}, "p") == {
        "sft": "http://browser/#/experiments/7/runs/s/model-metrics?workflowType=machine_learning",
        "pipeline": "http://browser/#/experiments/7/runs/p?workflowType=machine_learning",
    }
    server.bodies = (body(),)
    assert links.run_links(settings(server), {"sft": "k"}, "p", 0.0) == {}
