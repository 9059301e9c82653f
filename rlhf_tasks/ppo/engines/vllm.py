"""Responses by vLLM's server, which this process starts and ends, or finds at an address.

Weights reach it through a folder of safetensors for each version, or by `ipc` from the memory of the GPU that
both share. A server that was started here and stops answering is started again, once, if its weights are in a
folder.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from rlhf_tasks import console
from rlhf_tasks.config.ppo import VllmSampler as Settings
from rlhf_tasks.errors import UserError
from rlhf_tasks.ppo.engines import ipc, wire
from rlhf_tasks.ppo.engines.client import Client
from rlhf_tasks.ppo.engines.protocol import Answers, EngineError, EngineGone, Ids
from rlhf_tasks.ppo.engines.wire import Sampling
from rlhf_tasks.project.atomic import whole, write_text
from rlhf_tasks.project.processes import HOST, Daemon, send
from rlhf_tasks.tracking import context
from rlhf_tasks.training import attached, launch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
GRACE_SECONDS = 2 * attached.GRACE_SECONDS  # for the server's own end, and for what is killed after it
CHECK_SECONDS = 5.0  # for one answer to whether it is healthy
SERVER = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
UNPICKLES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # as it does with the handles of `ipc`
WEIGHTS, OWNER = "weights-", "owner"  # a folder's name begins so; the file in it with its process's name


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """What the rollouts need of the server."""

    sampling: Sampling
    max_tokens: int
    """Of the longest query and its response together."""
    is_float32: bool


class VllmEngine:
    """An `Engine` by the calls in `wire`."""

    def __init__(
        self, settings: Settings, home: Path, tokenizer: PreTrainedTokenizerBase, rollouts: Rollouts
    ) -> None:
        """`home` holds the server's log and, by default, the weights. The first `load` starts the server."""
        self._settings, self._rollouts, self._tokenizer = settings, rollouts, tokenizer
        name = f"vllm-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}"
        self._server = None if settings.command is None else Daemon(name, home)
        place = home if settings.weights_folder is None else Path(settings.weights_folder).absolute()
        remove_abandoned(place)
        self._folder = place / f"{WEIGHTS}{platform.node()}-{os.getpid()}-{id(self):x}"
        self._client: Client | None = None
        self._version, self._names = 0, list[str]()
        self._has_restarted = self._is_closed = False
        self.name = "vLLM"

    # --------------------------------------------------------------------------------- the protocol

    def load(self, weights: PreTrainedModel, version: int) -> None:
        """Write the weights, and start the server with them or let it load them."""
        if self._by_ipc and self._client is not None:
            self._version = version
            self._renew(lambda: self._hand_over(weights))
            return
        before, self._version = self._weights, version
        self._folder.mkdir(parents=True, exist_ok=True)
        write_text(self._folder / OWNER, context.process_name(psutil.Process()))
        with whole(self._weights) as folder:
            weights.save_pretrained(folder)
            self._tokenizer.save_pretrained(folder)
        if self._by_ipc:
            self._names = ipc.names_in(self._weights)
            ipc.check(weights, self._names)
        if self._client is None:
            self._begin()
        else:
            self._recovering(self._reload, lambda: None)
        if before != self._weights:
            shutil.rmtree(before, ignore_errors=True)

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        """One request for each query, all at once."""

        def sampled() -> Answers:
            return self._sampled(queries, n, seeds)

        return self._recovering(sampled, sampled)

    def close(self) -> None:
        """End the server if it was started here, and remove the weights; its log stays."""
        self._is_closed = True
        if self._server is not None:
            _stop(self._server)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------ sampling

    def _sampled(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        sampling, version = self._rollouts.sampling, self._version_in_use()
        bodies = [wire.completion(q, n, seed, sampling) for q, seed in zip(queries, seeds, strict=True)]
        replies = self._connected.post_all("/v1/completions", bodies)
        groups = [wire.responses(reply, query, n) for reply, query in zip(replies, queries, strict=True)]
        if self._version_in_use() != version:
            raise EngineError("the engine's weights were changed while it sampled; nothing else may use it")
        rows = [group[i] for i in range(n) for group in groups]
        return Answers([ids for ids, _ in rows], [logprobs for _, logprobs in rows], version)

    def _version_in_use(self) -> int:
        found = self._connected.get("/weight_info")
        version = found.get("weight_version") if isinstance(found, dict) else found
        if not str(version).isdecimal():
            raise EngineError(
                f"the engine has weights of version {version!r}, not {self._version}: it was started anew, "
                "or something else uses it"
            )
        return int(str(version))

    # ------------------------------------------------------------------------------------- weights

    @property
    def _weights(self) -> Path:
        return self._folder / f"version-{self._version}"

    @property
    def _by_ipc(self) -> bool:
        return self._settings.transfer == "ipc"

    def _reload(self) -> None:
        self._renew(lambda: self._connected.post("/collective_rpc", wire.reload_from(self._weights)))

    def _hand_over(self, weights: PreTrainedModel) -> None:
        client = self._connected
        with ipc.update_of(weights, self._names) as body:
            client.post("/start_weight_update")
            client.post("/update_weights", body)
            client.post("/finish_weight_update")

    def _renew(self, load: Callable[[], object]) -> None:
        client = self._connected
        client.post("/pause?mode=wait")
        load()
        done = client.post("/reset_prefix_cache")
        if isinstance(done, dict) and done.get("success") is False:
            raise EngineError(
                "the engine could not empty its prefix cache, which has states of older weights"
            )
        client.post("/update_weight_version", {"new_version": str(self._version)})
        client.post("/resume")

    # ---------------------------------------------------------------------------------- the server

    @property
    def _connected(self) -> Client:
        assert self._client is not None, "load comes first"
        return self._client

    def _begin(self) -> None:
        if self._server is None:
            assert self._settings.url is not None
            self._client = Client(self._settings.url, self._settings.timeout_seconds)
            self._reload()
        else:
            self._start(self._server)
        if self._by_ipc:
            self._connected.post("/init_weight_transfer_engine", ipc.BEGIN)
        version: Any = self._connected.get("/version")
        self.name = f"vLLM {version['version'] if isinstance(version, dict) else version}"

    def _start(self, server: Daemon) -> None:
        """Start the server with the newest weights.

        Raises:
            UserError: with the end of its log, if it is not ready in time.
        """
        assert self._settings.command is not None
        port, rollouts = _free_port(), self._rollouts
        words = [*self._settings.command, *wire.options(
            self._weights, port, max_tokens=rollouts.max_tokens, is_float32=rollouts.is_float32,
            by_ipc=self._by_ipc,
        )]  # fmt: skip
        url = f"http://{HOST}:{port}"
        console.say(f"ppo: starting the engine; its log is {server.log}")
        if shutil.which(words[0]) is None:
            raise UserError(
                f"ppo.sampler.command: {words[0]} is no program here; name the server's by its path"
            )
        variables = launch.without_worker(os.environ) | SERVER | (UNPICKLES if self._by_ipc else {})
        server.start(attached.command(words), variables, Path.cwd(), url=url)
        check = Client(url, CHECK_SECONDS)
        server.wait_until_ready(
            lambda: _is_healthy(check) and server.listens(port), self._settings.start_seconds
        )
        self._client = Client(url, self._settings.timeout_seconds)
        self._client.post("/update_weight_version", {"new_version": str(self._version)})

    def _recovering(self, call: Callable[[], T], again: Callable[[], T]) -> T:
        """The result of `call`; if the server has gone, it is started again, once, and `again` is called."""
        try:
            return call()
        except EngineGone as error:
            if self._server is None or self._is_closed or self._by_ipc:
                raise
            if self._has_restarted:
                raise self._final(error, self._server) from None
            self._restart(error, self._server)
        try:
            return again()
        except EngineGone as error:
            raise self._final(error, self._server) from None

    def _restart(self, error: EngineGone, server: Daemon) -> None:
        self._has_restarted = True
        console.say(f"ppo: {error}; it is started again, once")
        _stop(server)
        try:
            self._start(server)
        except UserError as problem:
            raise EngineError(f"{error}, and it did not start again: {problem}") from error

    def _final(self, error: EngineGone, server: Daemon) -> EngineGone:
        return EngineGone(f"{error}; it was started again once before, and its log is {server.log}")


def _stop(server: Daemon) -> None:
    """End the server with all of its session, even if the process that should do it was killed."""
    leader = server.record().get("pid")
    server.stop(GRACE_SECONDS)
    if leader is not None:
        send(attached.others_in_session(leader), signal.SIGKILL)


def remove_abandoned(folder: Path) -> None:
    """Remove the weights that killed processes of this machine have left in the folder."""
    for owner in folder.glob(f"{WEIGHTS}*/{OWNER}"):
        with suppress(FileNotFoundError):  # its process has just ended and removed it
            if not context.is_alive(owner.read_text(encoding="utf-8")):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _is_healthy(client: Client) -> bool:
    try:
        client.get("/health")
    except EngineError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
