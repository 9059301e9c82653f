"""The client of language models behind an OpenAI-compatible endpoint, for judges and for scorers.

Each reply is kept under its request and endpoint: none is paid for twice, and what it says is read from the
kept text each time. The client library does the retries, the waiting and `Retry-After`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai

from rlhf_tasks import console
from rlhf_tasks.config.scorers import ChatModel
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, hashing
from rlhf_tasks.scoring.keys import read_key
from rlhf_tasks.scoring.protocol import shorten

LONGEST_WAIT_SECONDS = 120.0  # the client library never waits longer for `Retry-After`
# Errors that every other request would meet too.
REFUSED = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)

Request = Mapping[str, Any]
Record = Mapping[str, Any]


class Failure(NamedTuple):
    """A request without a usable reply."""

    reason: str
    is_temporary: bool = False
    """The server was busy or away after all retries: another run may succeed."""


class ChatClient:
    """Asks the model of `settings`, and keeps its replies in a file; `name` begins its messages.

    `read_body` makes the record of a reply that is kept, `find_problem` says why it cannot be used, or
    nothing. Those that cannot be used are kept too only where `keeps_unusable`: else another run asks again.

    Raises:
        UserError: if the environment lacks the key.
    """

    def __init__(
        self,
        settings: ChatModel,
        name: str,
        file: Path,
        *,
        read_body: Callable[[str], Record],
        find_problem: Callable[[Record], str],
        keeps_unusable: bool,
        options: Request | None = None,
    ) -> None:
        self._settings, self._name, self._cache = settings, name, Cache(file)
        self._read_body, self._find_problem, self._keeps_unusable = read_body, find_problem, keeps_unusable
        self._key = "none"  # the client library needs some text
        if settings.key_variable is not None:
            self._key = read_key(settings.key_variable, name)
        self._options: Request = {
            "model": settings.model,
            "temperature": 0.0,
            "max_tokens": settings.max_reply_tokens,
            **(options or {}),
        }
        self.requests = self.tokens = 0
        """Requests of this process, and the tokens of their replies."""

    def ask(
        self, texts: Sequence[str], stop: Callable[[Sequence[Failure]], Exception | None]
    ) -> list[Record | Failure]:
        """The reply to each text, kept or new, or why there is none.

        After each failure `stop` gets all of them, and may return the error that ends the work. Whatever
        ends it lets the requests in flight finish: they are paid for.

        Raises:
            UserError: if the budget is spent, or every other request would fail too.
            Exception: that of `stop`.
        """
        requests = [{**self._options, "messages": [{"role": "user", "content": text}]} for text in texts]
        endpoint = self._settings.base_url
        keys = [hashing.json_sha256({"endpoint": endpoint, "request": one}) for one in requests]
        todo = {key: r for key, r in zip(keys, requests, strict=True) if not self._is_kept(key)}
        failed = asyncio.run(self._fetch(todo, stop)) if todo else {}
        return [self._cache[key] if self._is_kept(key) else failed[key] for key in keys]

    def _is_kept(self, key: str) -> bool:
        """Whether there is a reply that can be used as things are now: a scale may have changed."""
        record = self._cache.get(key)
        return record is not None and (self._keeps_unusable or not self._find_problem(record))

    async def _fetch(
        self, todo: Mapping[str, Request], stop: Callable[[Sequence[Failure]], Exception | None]
    ) -> dict[str, Failure]:
        """Put replies into the cache; the failures, by key."""
        waiting, settings = iter(todo.items()), self._settings
        failed: dict[str, Failure] = {}
        stops: list[Exception] = []

        async def work() -> None:
            while not stops and (item := next(waiting, None)):
                key, request = item
                try:
                    self._check_budget(len(todo))
                    failure = await self._request_reply(client, key, request)
                except UserError as error:
                    stops.append(error)
                    return
                bar.advance()
                if failure is not None:
                    failed[key] = failure
                    if (end := stop([*failed.values()])) is not None:
                        stops.append(end)

        client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=self._key,
            timeout=settings.timeout_seconds,
            max_retries=settings.max_retries,
        )
        with console.progress(self._name, len(todo), unit="replies") as bar:
            async with client, asyncio.TaskGroup() as workers:
                for _ in range(min(settings.concurrency, len(todo))):
                    workers.create_task(work())
        if stops:
            raise stops[0]
        return failed

    def _check_budget(self, num_requested: int) -> None:
        budget = self._settings.budget
        if budget is None:
            return
        for name, most, used in (
            ("requests", budget.requests, self.requests),
            ("tokens", budget.tokens, self.tokens),
        ):
            if most is not None and used >= most:
                raise UserError(
                    f"{self._name}: its budget of {most} {name} is spent, and {num_requested} replies are "
                    "needed now. The replies so far are kept, and the same command requests only the others: "
                    "run it again, raise the budget, or use fewer prompts"
                )

    async def _request_reply(self, client: openai.AsyncOpenAI, key: str, request: Request) -> Failure | None:
        """Put one reply into the cache, or return why it cannot be used.

        Raises:
            UserError: for an error that every other request would meet too.
        """
        settings = self._settings
        longest = (settings.max_retries + 1) * (settings.timeout_seconds + LONGEST_WAIT_SECONDS)
        self.requests += 1
        try:
            # The client times each silence only; a reply that arrives byte by byte would never end.
            async with asyncio.timeout(longest):
                response = await client.chat.completions.with_raw_response.create(**request)
            record = self._read_body(response.text)
        except REFUSED as error:
            login = f"with the key in ${settings.key_variable}" if settings.key_variable else "without a key"
            raise UserError(
                f"{self._name}: {settings.base_url} returned status {error.status_code} for model "
                f"{settings.model!r}, {login}: {shorten(error.message)}"
            ) from None
        except openai.APIStatusError as error:
            is_temporary = error.status_code == 429 or error.status_code >= 500
            return Failure(f"status {error.status_code}: {shorten(error.message)}", is_temporary)
        except (openai.APIConnectionError, TimeoutError, Malformed) as error:
            return Failure(shorten(f"{type(error).__name__}: {error}"), not isinstance(error, Malformed))
        self.tokens += record["tokens"] or 0
        problem = self._find_problem(record)
        if not problem or self._keeps_unusable:
            self._cache.add(key, record)
        if record["tokens"] is None and settings.budget is not None and settings.budget.tokens is not None:
            raise UserError(
                f"{self._name}: the server does not report the tokens of a reply, so budget.tokens "
                "cannot be kept; set it to null, and limit the requests"
            )
        return Failure(problem) if problem else None


class Malformed(ValueError):
    """A body that is not a chat completion; the message shows it."""


def read_completion(
    body: str, read_logprobs: Callable[[Sequence[Any]], Mapping[str, Any]] = lambda listed: {}
) -> dict[str, Any]:
    """What is kept of a chat completion: text, refusal, tokens, model, and what is read of its log-probs.

    Raises:
        Malformed: if the body is not a chat completion.
    """
    try:
        tree = json.loads(body)
        choice = tree["choices"][0]
        message, usage = choice["message"], tree.get("usage") or {}
        text, refusal = message.get("content"), message.get("refusal")
        if not isinstance(text, str | None) or not isinstance(refusal, str | None):
            raise TypeError("content is not a text")
        tokens = usage.get("total_tokens")
        return {
            "text": text or "",
            "refusal": refusal or "",
            "tokens": tokens if isinstance(tokens, int) else None,
            "model": str(tree.get("model", "")),
            "is_cut": choice.get("finish_reason") == "length",
            **read_logprobs((choice.get("logprobs") or {}).get("content") or []),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Malformed(f"this is not a chat completion: {shorten(body)!r}") from error


def last_line(record: Record) -> str:
    """The last line of a reply that is not empty."""
    lines = [line for line in record["text"].splitlines() if line.strip()]
    return lines[-1] if lines else ""


def describe_reply(record: Record) -> str:
    """The beginning of a reply, or of a refusal, for a message."""
    return shorten(f"a refusal: {record['refusal']}" if record["refusal"] else repr(record["text"]))


class Cache(dict[str, Record]):
    """Records by key; the key is `hashing.json_sha256` of everything that decides a reply."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
                self[record["key"]] = record
            except (ValueError, LookupError, TypeError):  # a line that a killed process has cut off
                continue

    def add(self, key: str, record: Record) -> None:
        """Keep a record on the disk too."""
        self[key] = {"key": key, **record}
        atomic.append_line(self._path, json.dumps(self[key]))
