"""A service that scores responses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import httpx
import torch
from torch import Tensor

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.columns import take
from rlhf_tasks.scoring.keys import read_key
from rlhf_tasks.scoring.protocol import Responses, ServiceFailed, UnusableScores, excerpt, read_scores

NUM_TRIES = 5
BACK_OFF_SECONDS = 1.0  # doubles from try to try
LONGEST_WAIT_SECONDS = 30.0


class ScoringService:
    """A service that receives {"prompts": […], "responses": […]} and returns {"scores": […]}.

    Where columns are kept, it also receives {"columns": {NAME: […]}}.

    A request is tried NUM_TRIES times, after 429, 5xx, a timeout or a broken connection. The wait doubles
    from try to try, or is that of `Retry-After`. Any other status or content is an error at once.
    `timeout_seconds` limits each try as a whole.
    """

    def __init__(self, settings: config.HttpScorer) -> None:
        self._settings, self._headers = settings, dict[str, str]()
        self._name = f"http scorer {settings.url.partition('?')[0]}"  # what follows may be secret
        if settings.key_variable is not None:
            self._headers["Authorization"] = f"Bearer {read_key(settings.key_variable, 'ppo.scorers')}"

    def __call__(self, rows: Responses) -> Tensor:
        scores, size = [torch.zeros(0)], self._settings.batch_size
        for start in range(0, len(rows), size):
            part = range(len(rows))[start : start + size]
            request: dict[str, Any] = {
                "prompts": [rows.prompts[i] for i in part],
                "responses": [rows.texts[i] for i in part],
            }
            if rows.columns:
                request["columns"] = take(rows.columns, part)
            scores.append(self._read(self._request(request), len(part)))
        return torch.cat(scores)

    def _read(self, body: bytes, count: int) -> Tensor:
        try:
            reply = json.loads(body)
        except ValueError as error:
            raise UnusableScores(f"{self._name} must return JSON, but returned {excerpt(body)}") from error
        if not (isinstance(reply, dict) and isinstance(reply.get("scores"), list)):
            raise UnusableScores(f'{self._name} must return {{"scores": […]}}, but returned {excerpt(body)}')
        return read_scores(self._name, reply["scores"], count)

    def _request(self, request: Mapping[str, Any]) -> bytes:
        """The body of a successful reply, after at most NUM_TRIES tries."""
        problem = ""
        for number in range(NUM_TRIES):
            wait = BACK_OFF_SECONDS * 2**number
            try:
                reply = asyncio.run(self._post(request))
            except TimeoutError:
                problem = f"no complete reply after {self._settings.timeout_seconds:g} s"
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if reply.is_success:
                    return reply.content
                problem = f"status {reply.status_code}: {excerpt(reply.content)}"
                if reply.status_code != 429 and reply.status_code < 500:
                    raise UnusableScores(f"{self._name} rejected the request: {problem}")
                seconds = reply.headers.get("Retry-After", "")  # RFC 9110, 10.2.3; its dates are not read
                wait = float(seconds) if seconds.isdecimal() else wait
            if number < NUM_TRIES - 1:
                time.sleep(min(wait, LONGEST_WAIT_SECONDS))
        raise ServiceFailed(
            f"{self._name} returned no scores in {NUM_TRIES} tries; the last error: {problem}"
        )

    async def _post(self, request: Mapping[str, Any]) -> httpx.Response:
        limit = self._settings.timeout_seconds  # httpx itself limits only each pause in a reply
        async with httpx.AsyncClient(timeout=None) as client, asyncio.timeout(limit):
            return await client.post(self._settings.url, json=request, headers=self._headers)
