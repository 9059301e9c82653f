"""Responses by vLLM's server, which this process starts and ends, or finds at an address.

What it calls besides `/v1/completions` of vLLM's OpenAI-compatible server, with token ids, is vLLM's
development mode (version 0.32).
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config.ppo import VllmSampler
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import OutsideFault
from rlhf_tasks.models.sampling import Samples
from rlhf_tasks.models.stop_tokens import StopTokens
from rlhf_tasks.project import processes
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.processes import HOST, Daemon
from rlhf_tasks.training import launch


class VllmError(OutsideFault):
    """vLLM gave no responses, or responses that cannot be right."""


# ------------------------------------------------------------------------------------ requests and replies

MAX_CONNECTIONS = 256
SHOWN_CHARACTERS = 300  # of a reply, in a message
ABOVE_ZERO = 1e-4  # nats by which rounding may lift a log-prob above 0
PURE: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""Nothing but the temperature changes the distribution; a server's own defaults do not count."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How PPO samples. A response ends with one of `ends`, or has `max_tokens`."""

    temperature: float
    ends: StopTokens
    max_tokens: int
    longest_query: int  # tokens
    is_float32: bool


def completion(query: Ids, n: int, seed: int, sampling: Sampling) -> dict[str, Any]:
    """The request for `n` responses to one query.

    One seed in a request would be that of all its queries, so that each query has a request of its own; vLLM
    adds the number of the sample to the seed. Only `sampling.ends` end a response: with `ignore_eos` the
    model's own end tokens do not.
    """
    return PURE | {
        "prompt": query,
        "n": n,
        "seed": seed,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.ends),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "add_special_tokens": False,
    }


def read_reply(reply: Any, query: Ids, n: int) -> list[tuple[Ids, list[float]]]:
    """The token ids and log-probs of the `n` responses to one query, in order.

    Raises:
        VllmError: if the reply has another form, number or prompt.
    """
    try:
        choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
        numbers = [int(choice["index"]) for choice in choices]
        prompts = [choice.get("prompt_token_ids", query) for choice in choices]
        ids = [[int(token) for token in choice["token_ids"]] for choice in choices]
        # JSON has no NaN: vLLM's server sends null in its place
        logprobs = [
            [math.nan if x is None else float(x) for x in choice["logprobs"]["token_logprobs"]]
            for choice in choices
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise VllmError(
            f"vLLM's reply has an unknown form ({type(error).__name__}: {error}); PPO needs token ids and "
            "log-probs: use vLLM 0.32 or newer"
        ) from None
    if numbers != list(range(n)):
        raise VllmError(f"vLLM gave {len(choices)} responses to a prompt, and {n} are needed")
    if any(prompt != query for prompt in prompts):
        raise VllmError("vLLM answered another prompt than the one sent: it changed its token ids")
    return list(zip(ids, logprobs, strict=True))


def check_response(ids: Ids, logprobs: Sequence[float], sampling: Sampling, vocab: int) -> None:
    """Check that a response can be a sample: its tokens, its end and its log-probs.

    Raises:
        VllmError: naming the first problem.
    """
    problem, ends, most = None, sampling.ends, sampling.max_tokens
    has_end, continues = ids[-1:] and ids[-1] in ends, set(ends) & set(ids[:-1])
    if any(not 0 <= token < vocab for token in ids):
        problem = f"with a token that the model does not have; it has {vocab}"
    elif continues or len(ids) > most or not (has_end or len(ids) == most):
        problem = f"of {len(ids)} tokens that ends neither at its first stop token nor after {most} tokens"
    elif len(logprobs) != len(ids) or not all(math.isfinite(x) and x <= ABOVE_ZERO for x in logprobs):
        problem = "with a log-prob that is missing, NaN, infinite or above 0"
    if problem is not None:
        raise VllmError(f"vLLM gave a response {problem}")


class Client:
    """Requests to one server on this machine, many at once; each call is complete within `seconds`, or fails.

    Raises:
        VllmError: if the server does not answer in time, reports an error, or its reply is no JSON.
    """

    def __init__(self, url: str, seconds: float, log: Path | None = None) -> None:
        """`log` is that of a server which was started here."""
        self._url, self._seconds = url, seconds
        self._advice = "" if log is None else f"; its log is {log}"

    def get(self, path: str) -> Any:
        """The JSON of the reply, or None for an empty one."""
        return self._send("GET", path, [None])[0]

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._send("POST", path, [body])[0]

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The replies to all of these bodies, in their order."""
        return self._send("POST", path, bodies)

    def _send(self, method: str, path: str, bodies: Sequence[Mapping[str, Any] | None]) -> list[Any]:
        try:
            return asyncio.run(asyncio.wait_for(self._send_all(method, path, bodies), self._seconds))
        except TimeoutError:
            problem = f"did not answer {path} within {self._seconds:g} s"
        except httpx.RequestError as error:
            problem = f"does not answer {path} ({type(error).__name__}: {error})"
        raise VllmError(f"vLLM at {self._url} {problem}{self._advice}")

    async def _send_all(
        self, method: str, path: str, bodies: Sequence[Mapping[str, Any] | None]
    ) -> list[Any]:
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        # With `trust_env` a proxy of the environment would receive what is meant for this machine. The
        # addresses are plain HTTP, so that no certificates need to be loaded.
        async with httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=limits, trust_env=False, verify=False
        ) as client:
            requests = [client.request(method, path, json=body) for body in bodies]
            return await asyncio.gather(*(self._read(path, request) for request in requests))

    async def _read(self, path: str, request: Awaitable[httpx.Response]) -> Any:
        reply = await request
        text = reply.content[:SHOWN_CHARACTERS].decode("utf-8", errors="replace")
        if reply.status_code == 404:
            raise VllmError(
                f"the server at {self._url} has no {path}; it must be vLLM 0.32 or newer, with "
                "VLLM_SERVER_DEV_MODE=1"
            )
        if not reply.is_success:
            raise VllmError(f"vLLM answered {path} with status {reply.status_code}: {text}{self._advice}")
        try:
            return reply.json() if reply.content else None
        except ValueError:
            raise VllmError(f"vLLM's answer to {path} is no JSON: {text}") from None


# -------------------------------------------------------------------------------------------- the server

GRACE_SECONDS = 2 * processes.ATTACHED_GRACE_SECONDS  # for the server's end, and for what is killed after it
HEALTH_SECONDS = 5.0  # for one answer to whether it is healthy
VARIABLES = dict.fromkeys(
    ("VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"), "1"
)
WEIGHTS = "weights-"  # begins a folder's name, which the name of its process follows


class VllmServer:
    """A server that samples from the weights it was given last, in a folder of safetensors by version."""

    def __init__(
        self, settings: VllmSampler, home: Path, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
    ) -> None:
        """`home` holds the server's log and, by default, the weights. The first `load` starts the server."""
        self.name = "vLLM"
        """With its version, once it has weights."""
        self._settings, self._tokenizer, self._sampling = settings, tokenizer, sampling
        self._daemon: Daemon | None = None
        self._client: Client
        if settings.url is not None:
            self._client = Client(settings.url, settings.timeout_seconds)
        else:
            self._daemon = Daemon(f"vllm-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}", home)
        place = home if settings.weights_folder is None else Path(settings.weights_folder).absolute()
        remove_abandoned(place)
        self._folder = place / (WEIGHTS + processes.name_of(psutil.Process()).replace(":", "@"))
        self._version, self._vocab = 0, 0
        # an earlier run leaves a server of `url` asleep
        self._is_asleep = settings.sleep and self._daemon is None

    def load(self, weights: PreTrainedModel) -> None:
        """Sample from these weights from now on. No `sample` runs meanwhile.

        Raises:
            VllmError: if the server does not take them.
            UserError: if it does not start, or cannot read them where they are.
        """
        before = self._weights
        self._version += 1
        self._vocab = int(weights.config.get_text_config().vocab_size)
        with whole(self._weights) as folder:
            state = None if self._sampling.is_float32 else rounded_state(weights)
            weights.save_pretrained(folder, state_dict=state)
            self._tokenizer.save_pretrained(folder)
        del state
        is_first = self._version == 1
        if self._daemon is not None and is_first:
            self._start(self._daemon)
        else:
            self._reload()
        if is_first:
            self.name = f"vLLM {self._client.get('/version')['version']}"
        shutil.rmtree(before, ignore_errors=True)

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Samples:
        """`n` responses to each query; each query's draws depend on its seed.

        Raises:
            VllmError: after a bounded time, if there are no usable responses.
        """
        self._wake_up()
        bodies = [completion(q, n, seed, self._sampling) for q, seed in zip(queries, seeds, strict=True)]
        replies = self._client.post_all("/v1/completions", bodies)
        found = self._client.get("/weight_info")
        version = found.get("weight_version") if isinstance(found, dict) else found
        if str(version) != str(self._version):
            raise VllmError(
                f"vLLM has weights of version {version!r}, not {self._version}: it was started anew, or "
                "something else uses it"
            )
        if self._settings.sleep:  # its weights wait in the machine's memory, and its cache is dropped
            self._client.post("/sleep?level=1")
            self._is_asleep = True
        groups = [read_reply(reply, query, n) for reply, query in zip(replies, queries, strict=True)]
        rows = [group[i] for i in range(n) for group in groups]
        for ids, logprobs in rows:
            check_response(ids, logprobs, self._sampling, self._vocab)
        return Samples([ids for ids, _ in rows], [torch.tensor(logprobs) for _, logprobs in rows])

    def close(self) -> None:
        """End the server if it was started here, and remove the weights; its log stays."""
        if self._daemon is not None:
            leader = self._daemon.record().get("pid")
            self._daemon.stop(GRACE_SECONDS)
            if leader is not None:  # the process that should end its session may have been killed
                processes.send(processes.others_in_session(leader), signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wake_up(self) -> None:
        if self._is_asleep:
            self._client.post("/wake_up")
            self._is_asleep = False

    def _reload(self) -> None:
        """Let the server read the weights of this version while it samples nothing."""
        self._wake_up()
        client = self._client
        client.post("/pause?mode=wait")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(self._weights)}}
        client.post("/collective_rpc", reload)
        done = client.post("/reset_prefix_cache")
        if isinstance(done, dict) and done.get("success") is False:
            raise VllmError("vLLM could not empty its prefix cache, which has states of older weights")
        client.post("/update_weight_version", {"new_version": str(self._version)})
        client.post("/resume")

    @property
    def _weights(self) -> Path:
        return self._folder / f"version-{self._version}"

    def _start(self, daemon: Daemon) -> None:
        """Start the program with the newest weights.

        Raises:
            UserError: with the end of its log, if it is not ready in time.
        """
        assert self._settings.command is not None
        console.say(f"ppo: starting vLLM; its log is {daemon.log}")
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        url, sampling = f"http://{HOST}:{port}", self._sampling
        options = {
            "--host": HOST,
            "--port": port,
            "--dtype": "float32" if sampling.is_float32 else "bfloat16",
            "--max-model-len": sampling.longest_query + sampling.max_tokens,
            "--logprobs-mode": "processed_logprobs",
            "--generation-config": "vllm",
        }
        variables = launch.without_worker(os.environ) | VARIABLES
        for name in [name for name in variables if name.endswith("_ALLOC_CONF")]:
            del variables[name]  # of this process; vLLM's sleep mode frees nothing with expandable segments
        words = [*self._settings.command, str(self._weights)]
        words += [str(word) for option in options.items() for word in option]
        words += ["--enable-sleep-mode"] if self._settings.sleep else []
        daemon.start(processes.attached(words), variables, Path.cwd(), url=url)

        def is_ready() -> bool:
            with suppress(httpx.TransportError):
                health = httpx.get(f"{url}/health", timeout=HEALTH_SECONDS, trust_env=False)
                return health.is_success and daemon.listens(port)
            return False

        daemon.wait_until_ready(is_ready, self._settings.start_seconds)
        self._client = Client(url, self._settings.timeout_seconds, daemon.log)
        self._client.post("/update_weight_version", {"new_version": str(self._version)})


def rounded_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state with matrices in bfloat16, on the CPU, as a server would round them.

    Tied ones stay tied, and vectors, such as norms, keep their type.
    """
    state = model.state_dict()
    matrices = {x.data_ptr(): x for x in state.values() if x.is_floating_point() and x.dim() > 1}
    rounded = {key: x.to("cpu", torch.bfloat16) for key, x in matrices.items()}
    return {name: rounded.get(x.data_ptr(), x) for name, x in state.items()}


def remove_abandoned(folder: Path) -> None:
    """Remove the weights that killed processes of this machine have left in the folder."""
    for weights in folder.glob(f"{WEIGHTS}*@*@*"):
        if not processes.is_alive(weights.name.removeprefix(WEIGHTS).replace("@", ":")):
            shutil.rmtree(weights, ignore_errors=True)
