"""Requests to a server on this machine, many at once, that end within a given time. No torch here."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from rlhf_tasks.ppo.engines.protocol import EngineError, EngineGone

MAX_CONNECTIONS = 256
SHOWN_CHARACTERS = 300  # of a reply, in a message


class Client:
    """Requests to one server; each call is complete within `seconds`, or fails."""

    def __init__(self, url: str, seconds: float) -> None:
        self._url, self._seconds = url, seconds

    def get(self, path: str) -> Any:
        """The JSON of a reply, or None for an empty one.

        Raises:
            EngineGone: if the server does not answer in time, or reports an error of its own (status 5xx).
            EngineError: if it refuses the request, or its reply is no JSON.
        """
        return self._run([("GET", path, None)])[0]

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """As `get`."""
        return self._run([("POST", path, body)])[0]

    def post_all(self, path: str, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The replies to all of these bodies, in their order; as `get`, within `seconds` for all of them."""
        return self._run([("POST", path, body) for body in bodies])

    def _run(self, requests: Sequence[tuple[str, str, Mapping[str, Any] | None]]) -> list[Any]:
        try:
            return asyncio.run(asyncio.wait_for(self._all(requests), self._seconds))
        except TimeoutError:
            raise EngineGone(
                f"the engine at {self._url} did not answer {requests[0][1]} within {self._seconds:g} s"
            ) from None

    async def _all(self, requests: Sequence[tuple[str, str, Mapping[str, Any] | None]]) -> list[Any]:
        limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
        # With `trust_env` a proxy of the environment would receive what is meant for this machine. The
        # addresses are plain HTTP, so that no certificates need to be loaded.
        async with httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=limits, trust_env=False, verify=False
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(_answer(client, *request)) for request in requests]
            except BaseExceptionGroup as errors:  # one failure ends all requests
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


async def _answer(client: httpx.AsyncClient, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
    try:
        reply = await client.request(method, path, json=body)
    except httpx.RequestError as error:
        raise EngineGone(
            f"the engine at {client.base_url} does not answer {path} ({type(error).__name__}: {error})"
        ) from None
    if reply.status_code >= 500:
        raise EngineGone(f"the engine answered {path} with status {reply.status_code}: {_shown(reply)}")
    if reply.status_code == 404:
        raise EngineError(
            f"the engine has no {path}; it must be vLLM 0.32 or newer, with VLLM_SERVER_DEV_MODE=1"
        )
    if not 200 <= reply.status_code < 300:
        raise EngineError(f"the engine refused {path} with status {reply.status_code}: {_shown(reply)}")
    try:
        return reply.json() if reply.content else None
    except ValueError:
        raise EngineError(f"the engine's answer to {path} is no JSON: {_shown(reply)}") from None


def _shown(reply: httpx.Response) -> str:
    return reply.content[:SHOWN_CHARACTERS].decode("utf-8", errors="replace")
