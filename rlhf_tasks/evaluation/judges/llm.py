"""Comparisons by a model behind an OpenAI-compatible endpoint.

Every reply that arrives is kept under its question, the model and the endpoint: the same question is
never paid for twice, and what the reply says is read anew each time. Tries, waiting and `Retry-After`
are the client's own.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import openai

from rlhf_tasks import console
from rlhf_tasks.config.judge import LISTED, LlmJudge
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.judges import prompts
from rlhf_tasks.evaluation.judges.cache import Cache, key_of
from rlhf_tasks.evaluation.judges.comparing import Question, Reply
from rlhf_tasks.evaluation.judges.prompts import LETTERS
from rlhf_tasks.evaluation.judges.verdicts import shown, too_many

FILE = "judgements.jsonl"
NUM_ALTERNATIVES = 5  # log-probs of a token: as many as every server gives
LONGEST_WAIT_SECONDS = 120.0  # no `Retry-After` is waited for longer, by the client's rule
REFUSED = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)
"""What no other question would change."""
_VERDICT = re.compile(r"\W*(?:(?i:verdict|answer|better|preferred)\W+)?([AB])\W*")

Request = Mapping[str, Any]


class Trace(Protocol):
    def __call__(
        self, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *, start: int, end: int
    ) -> None:
        """Show one call of a model, with times in milliseconds since 1970."""


class Malformed(ValueError):
    """A reply that does not speak the protocol; says what came."""


@dataclass
class Spent:
    """In this process: replies that were asked for, and their tokens."""

    requests: int = 0
    tokens: int = 0


class Llm:
    """A `Comparer`.

    Raises:
        UserError: if the key is not in the environment, or the prompt is none.
    """

    def __init__(
        self,
        settings: LlmJudge,
        max_failure_share: float,
        home: Path,
        *,
        key: str = LISTED,
        trace: Trace | None = None,
        num_traces: int = 0,
    ) -> None:
        self._settings, self._max_failure_share = settings, max_failure_share
        self._trace, self._num_traces = trace, num_traces
        self._prompt, self._key = prompts.load(settings.prompt, key), _key(settings)
        self._cache = Cache(home / FILE)
        self.spent = Spent()

    def __call__(self, questions: Sequence[Question], max_failures: float) -> list[Reply]:
        asked = [self._request(prompts.filled(self._prompt, question)) for question in questions]
        keys = [key_of({"endpoint": self._settings.base_url, "request": request}) for request in asked]
        todo = {key: r for key, r in zip(keys, asked, strict=True) if key not in self._cache}
        failed = asyncio.run(self._fetch(todo, max_failures)) if todo else {}
        console.say(
            f"judge {self._settings.name}: of {len(set(keys))} replies {len(todo)} were asked for; spent so "
            f"far: {self.spent.requests} requests, {self.spent.tokens} tokens"
        )
        records = [self._cache.get(key) for key in keys]
        replies = [
            Reply.failed(failed[key]) if record is None else read(record)
            for key, record in zip(keys, records, strict=True)
        ]
        self._show(asked, records, replies)
        return replies

    def _show(
        self,
        asked: Sequence[Request],
        records: Sequence[Mapping[str, Any] | None],
        replies: Sequence[Reply],
    ) -> None:
        """Trace as many replies as are left to show; of one that is kept, at the time it was asked for."""
        if self._trace is None:
            return
        shown = list(zip(asked, records, replies, strict=True))[: self._num_traces]
        self._num_traces -= len(shown)
        now = round(time.time() * 1000)
        for request, found, reply in shown:
            record = found or {}
            outputs = {"text": record.get("text", ""), "tokens": reply.num_tokens}
            if reply.failure:
                outputs["failure"] = reply.failure
            else:
                outputs["first_is_better"] = reply.probability
            start = record.get("asked_at", now)
            self._trace(
                f"judge {self._settings.name}",
                request,
                outputs,
                start=start,
                end=start + record.get("milliseconds", 0),
            )

    def _request(self, text: str) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self._settings.max_reply_tokens,
        }
        probabilities = {"logprobs": True, "top_logprobs": NUM_ALTERNATIVES}
        return request | (probabilities if self._settings.logprobs else {})

    async def _fetch(self, todo: Mapping[str, Request], max_failures: float) -> dict[str, str]:
        """Put replies into the cache; why there is none, or none of use, by key.

        Whatever stops it lets the requests in flight finish: they are paid for.
        """
        settings, waiting = self._settings, iter(todo.items())
        failed: dict[str, str] = {}
        stops: list[UserError] = []

        async def work() -> None:
            while not stops and (item := next(waiting, None)):
                key, request = item
                try:
                    self._check_budget(len(todo))
                    why = await self._ask(client, key, request)
                except UserError as error:
                    stops.append(error)
                    return
                bar.advance()
                if why:
                    failed[key] = why
                if len(failed) > max_failures:
                    told = f"{len(failed)} of the replies so far"
                    stops.append(too_many(settings.name, failed.values(), told, self._max_failure_share))

        client = openai.AsyncOpenAI(
            base_url=settings.base_url, api_key=self._key, timeout=settings.timeout_seconds,
            max_retries=settings.max_retries,
        )  # fmt: skip
        with console.progress(f"judge {settings.name}", len(todo), unit="replies") as bar:
            async with client, asyncio.TaskGroup() as workers:
                for _ in range(min(settings.concurrency, len(todo))):
                    workers.create_task(work())
        if stops:
            raise stops[0]
        return failed

    def _check_budget(self, num_asked: int) -> None:
        budget, spent = self._settings.budget, self.spent
        if budget is None:
            return
        for name, most, used in (
            ("requests", budget.requests, spent.requests),
            ("tokens", budget.tokens, spent.tokens),
        ):
            if most is not None and used >= most:
                raise UserError(
                    f"judge {self._settings.name}: its budget of {most} {name} is spent, and this comparison "
                    f"asked for {num_asked} replies. Those that came are kept: raise the budget, or "
                    "judge fewer prompts, or give the same again; the same command then goes on from there"
                )

    async def _ask(self, client: openai.AsyncOpenAI, key: str, request: Request) -> str:
        """Put one reply into the cache; why there is none, or none of use.

        Raises:
            UserError: where no other question would fare better.
        """
        settings = self._settings
        longest = (settings.max_retries + 1) * (settings.timeout_seconds + LONGEST_WAIT_SECONDS)
        self.spent.requests += 1
        asked_at = round(time.time() * 1000)
        try:
            async with asyncio.timeout(longest):  # the client times each silence; a reply may drip for ever
                came = await client.chat.completions.with_raw_response.create(**request)
            took = round(time.time() * 1000) - asked_at
            record = reply_of(came.text) | {"asked_at": asked_at, "milliseconds": took}
        except REFUSED as error:
            raise UserError(self._refusal(error)) from None
        except openai.APIStatusError as error:
            return f"status {error.status_code}: {shown(error.message)}"
        except (openai.APIConnectionError, TimeoutError, Malformed) as error:
            return shown(f"{type(error).__name__}: {error}")
        self.spent.tokens += record["tokens"] or 0
        self._cache.add(key, record)
        if record["tokens"] is None and settings.budget is not None and settings.budget.tokens is not None:
            raise UserError(
                f"judge {settings.name}: the server does not say how many tokens a reply cost, so that "
                "budget.tokens cannot be kept; set it to null, and limit the requests"
            )
        return read(record).failure

    def _refusal(self, error: openai.APIStatusError) -> str:
        settings = self._settings
        key = f"the key in ${settings.key_variable}" if settings.key_variable else "without a key"
        return (
            f"judge {settings.name}: {settings.base_url} answered {error.status_code} for model "
            f"{settings.model!r}, {key}: {shown(error.message)}"
        )


def _key(settings: LlmJudge) -> str:
    if settings.key_variable is None:
        return "none"  # the client wants one
    key = os.environ.get(settings.key_variable, "").strip()
    if not key or not key.isascii():
        raise UserError(
            f"judge {settings.name}: the environment variable {settings.key_variable} holds no key; export "
            "it, or set key_variable to null for a server that asks for none"
        )
    return key


# ------------------------------------------------------------------------------------- replies


def reply_of(body: str) -> dict[str, Any]:
    """What is kept of a chat completion: text, the rivals of the verdict's letter, cost, and who answered.

    Raises:
        Malformed: if it is none.
    """
    try:
        tree = json.loads(body)
        choice = tree["choices"][0]
        message, usage = choice["message"], tree.get("usage") or {}
        listed = (choice.get("logprobs") or {}).get("content") or []
        letters = _verdict_token([token["token"] for token in listed])
        rivals = {} if letters is None else {
            t["token"]: t["logprob"] for t in [*(listed[letters].get("top_logprobs") or []), listed[letters]]
        }  # fmt: skip
        text, refusal = message.get("content"), message.get("refusal")
        if not isinstance(text, str | None) or not isinstance(refusal, str | None):
            raise TypeError("content is no text")
        tokens = usage.get("total_tokens")
        return {
            "text": text or "",
            "refusal": refusal or "",
            "letters": rivals,
            "tokens": tokens if isinstance(tokens, int) else None,
            "model": str(tree.get("model", "")),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Malformed(f"no chat completion but {shown(body)!r}") from error


def _bare(token: str) -> str:
    """`**B` and ` (B)` are the letter B."""
    return re.sub(r"[\W_]", "", token)


def _verdict_token(tokens: Sequence[str]) -> int | None:
    """The token that is the last letter, if nothing is said after it but what ends a reply."""
    for place in reversed(range(len(tokens))):
        if re.sub(r"<[^>]*>|[\W_]", "", tokens[place]):
            return place if _bare(tokens[place]) in LETTERS else None
    return None


def read(record: Mapping[str, Any]) -> Reply:
    """The verdict of a reply.

    Its last line must be one letter (a word such as `Verdict:` may stand before it). Where the server gave
    log-probs of that very token, the probability is the letter's against the other's; else it is 1 or 0.
    """
    tokens = record["tokens"] or 0
    lines = [line for line in record["text"].splitlines() if line.strip()]
    found = _VERDICT.fullmatch(lines[-1]) if lines else None
    if found is None:
        said = f"a refusal: {record['refusal']}" if record["refusal"] else repr(record["text"])
        return Reply.failed(f"no verdict but {shown(said)}", tokens)
    if not record["letters"]:
        return Reply(float(found[1] == LETTERS[0]), num_tokens=tokens)
    masses = dict.fromkeys(LETTERS, 0.0)
    for token, logprob in record["letters"].items():
        if _bare(token) in masses:
            masses[_bare(token)] += math.exp(logprob)
    total = sum(masses.values())
    probability = masses[LETTERS[0]] / total if total > 0 else float(found[1] == LETTERS[0])
    return Reply(probability, num_tokens=tokens)
