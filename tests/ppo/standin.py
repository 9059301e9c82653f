"""A stand-in for vLLM's server, with the calls that PPO makes, in this process or as a program of its own.

    python tests/ppo/standin.py serve FOLDER --port PORT

It samples from the real model of the folder, or `--canned` gives responses without loading torch. It can be
wrong, or fail, in the ways that the tests name.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import loopback

Answer = tuple[list[int], list[float]]
VERSION = "0.32.0-standin"
GPU = "GPU-standin"  # the id of a GPU in a handle of its memory


def command(*options: str) -> list[str]:
    """The words of `ppo.sampler.command` that start it."""
    return [sys.executable, __file__, *options, "serve"]


class Canned:
    """The stop token at once, with a log-prob of −1."""

    def load(self, folder: Path) -> None:
        assert (folder / "model.safetensors").exists()

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[list[Answer]]:
        return [[([one["stop_token_ids"][0]], [-1.0]) for _ in range(one["n"])] for one in requests]


class Model(Canned):
    """Samples of softmax(logits / temperature) of the model in the folder."""

    def load(self, folder: Path) -> None:
        from rlhf_tasks.models.load import load_causal

        self.model = load_causal(folder)

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[list[Answer]]:
        import torch

        from rlhf_tasks.console import Meter
        from rlhf_tasks.data.batches import collate
        from rlhf_tasks.models.sampling import _decode

        rows = [(one["prompt"], one["seed"] + i) for one in requests for i in range(one["n"])]
        first, ends = requests[0], requests[0]["stop_token_ids"]
        generators = [torch.Generator().manual_seed(seed) for _, seed in rows]
        uniform = torch.stack([torch.rand(first["max_tokens"], generator=one) for one in generators])
        batch = collate([prompt for prompt, _ in rows], [[]] * len(rows), 0)
        with torch.no_grad():
            rows_of = torch.arange(len(rows))
            decoded = _decode(self.model, batch, rows_of, uniform, first["temperature"], ends, Meter())
        answers = []
        for ids, logprobs in zip(*(x.tolist() for x in decoded), strict=True):
            end = next((n for n, token in enumerate(ids, start=1) if token in ends), len(ids))
            answers.append((ids[:end], logprobs[:end]))
        left = iter(answers)
        return [[next(left) for _ in range(one["n"])] for one in requests]


class Server(loopback.Server):
    def __init__(self, backend: Canned, port: int = 0, fault: str | None = None, marker: Path | None = None):
        super().__init__(Handler, port)
        self.backend, self.fault, self.marker = backend, fault, marker
        self.version, self.is_paused, self.calls = "default", False, list[str]()
        self.is_asleep = False
        self._one_at_a_time = threading.Lock()

    def complete(self, body: dict[str, Any]) -> list[Answer]:
        with self._one_at_a_time:
            return self.backend.answer([body])[0]

    def takes_fault(self, name: str) -> bool:
        """Whether to fail now: always, or with a marker only the first time."""
        if self.fault != name or (self.marker is not None and self.marker.exists()):
            return False
        if self.marker is not None:
            self.marker.touch()
        return True


class Handler(loopback.Handler):
    server: Server

    def do_GET(self) -> None:
        known: dict[str, Any] = {"/health": None, "/version": {"version": VERSION}}
        known["/weight_info"] = {"weight_version": self.server.version}
        found = self.path in known
        self.send(200 if found else 404, known.get(self.path, {"detail": "Not Found"}))

    def do_POST(self) -> None:
        body, path, server = self.body(), self.path.partition("?")[0], self.server
        server.calls.append(self.path)
        if path == "/v1/completions":
            return self.completion(body)
        if path in ("/sleep", "/wake_up"):
            server.is_asleep = path == "/sleep"
            return self.send(200, None)
        if server.is_asleep:  # its weights are elsewhere
            return self.send(500, {"error": "asleep"})
        if path in ("/pause", "/resume"):
            server.is_paused = path == "/pause"
            return self.send(200, {"status": "paused" if server.is_paused else "resumed"})
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            assert server.is_paused
            server.backend.load(Path(body["kwargs"]["weights_path"]))
            return self.send(200, {"results": [None]})
        if path == "/reset_prefix_cache":
            return self.send(200, {"success": server.fault != "cache"})
        if path == "/update_weight_version":
            server.version = "7" if server.fault == "version" else body["new_version"]
            return self.send(200, {"success": True, "new_version": body["new_version"]})
        return self.send(404, {"detail": "Not Found"})

    def completion(self, body: dict[str, Any]) -> None:
        server = self.server
        if server.is_paused:
            return self.send(503, {"error": "paused"})
        if server.takes_fault("die"):
            os._exit(1)
        if server.takes_fault("hang"):
            server.closing.wait(600)
            return None
        if server.takes_fault("500"):
            return self.send(500, {"error": {"message": "EngineDeadError"}})
        if server.takes_fault("no json"):
            return self.send(200, b"<html>")
        common = {"text": "", "finish_reason": "stop", "prompt_token_ids": body["prompt"]}
        choices = [
            common | {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
            for i, (ids, logprobs) in enumerate(server.complete(body))
        ]
        return self.send(200, {"choices": self.wrong(choices)})

    def wrong(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The choices as the fault has them."""
        first, fault = choices[0], self.server.fault
        if fault == "count":
            return choices[1:]
        if fault == "nan":
            first["logprobs"]["token_logprobs"][0] = None
        if fault == "prompt":
            first["prompt_token_ids"] = [1, *first["prompt_token_ids"]]
        if fault == "cut":
            first["token_ids"], first["logprobs"]["token_logprobs"] = [5], [-1.0]
        if fault == "token":
            first["token_ids"][0] = 10**6
        if fault == "text":
            del first["token_ids"]
        return choices


def serving(backend: Canned | None = None, fault: str | None = None) -> AbstractContextManager[Server]:
    """The server in threads of this process."""
    return loopback.serving(Server(backend or Model(), fault=fault))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--canned", action="store_true", help="load no model")
    parser.add_argument("--fault", help="how to fail")
    parser.add_argument(
        "--marker", type=Path, help="a file that is made at the first fault; then none follows"
    )
    parser.add_argument("--child", action="store_true", help="start a process that hides where it comes from")
    parser.add_argument("serve", choices=["serve", "end"], help="`end` fails at the start")
    parser.add_argument("folder", type=Path, help="the model")
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args()
    of_a_worker = [name for name in os.environ if name.startswith(("TORCHELASTIC", "RANK", "LOCAL_RANK"))]
    if of_a_worker:  # vLLM's own processes would look for each other where the training's do
        sys.exit(f"started as a worker of the training: {of_a_worker}")
    if options.serve == "end":
        sys.exit("no such architecture")
    if options.child:
        subprocess.Popen(["/bin/sleep", "600"], env={})
    backend = Canned() if options.canned else Model()
    backend.load(options.folder)
    Server(backend, options.port, options.fault, options.marker).serve_forever()


if __name__ == "__main__":
    main()
