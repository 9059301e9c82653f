"""Judges that are models behind an OpenAI-compatible endpoint.

Each reply is kept under its question, model and endpoint: no question is paid for twice, and the preference
is read from the kept text each time. The client library does the retries, the waiting and `Retry-After`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openai

from rlhf_tasks import console
from rlhf_tasks.config.judge import LISTED, LlmJudge
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import (
    LETTERS,
    Question,
    Reply,
    excerpt,
    fill_prompt,
    load_prompt,
    too_many_failures,
)
from rlhf_tasks.project import atomic, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.http import read_key

FILE = "judgements.jsonl"
NUM_ALTERNATIVES = 5  # log-probs per token: as many as every server gives
LONGEST_WAIT_SECONDS = 120.0  # the client library never waits longer for `Retry-After`
# Errors that every other question would meet too.
REFUSED = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)

Request = Mapping[str, Any]
Record = Mapping[str, Any]


class LlmComparer:
    """A `Comparer`. The prompt's file is below `paths.root`; replies are kept in `paths.home`.

    Raises:
        UserError: if the environment lacks the key, or the prompt cannot be read.
    """

    def __init__(
        self, settings: LlmJudge, max_failure_share: float, paths: Paths, *, key: str = LISTED
    ) -> None:
        self._settings, self._max_failure_share = settings, max_failure_share
        self._prompt = load_prompt(settings.prompt, key, paths.root)
        self._key, self._cache = "none", Cache(paths.home / FILE)  # the client library needs some text
        if settings.key_variable is not None:
            self._key = read_key(settings.key_variable, f"judge {settings.name}")
        self._requests = self._tokens = 0
        """Requests of this process, and the tokens of their replies."""

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        settings = self._settings
        fixed: Request = {
            "model": settings.model,
            "temperature": 0.0,
            "max_tokens": settings.max_reply_tokens,
            **({"logprobs": True, "top_logprobs": NUM_ALTERNATIVES} if settings.logprobs else {}),
        }
        texts = (fill_prompt(self._prompt, question) for question in questions)
        requests = [{**fixed, "messages": [{"role": "user", "content": text}]} for text in texts]
        keys = [hashing.json_sha256({"endpoint": settings.base_url, "request": one}) for one in requests]
        todo = {key: r for key, r in zip(keys, requests, strict=True) if key not in self._cache}
        failed = asyncio.run(self._fetch(todo, max_failures)) if todo else {}
        console.say(
            f"judge {settings.name}: {len(todo)} of {len(set(keys))} replies were requested, the "
            f"others were kept; spent so far: {self._requests} requests, {self._tokens} tokens"
        )
        records = [self._cache.get(key) for key in keys]
        return [
            Reply.failed(failed[key]) if record is None else read_reply(record)
            for key, record in zip(keys, records, strict=True)
        ]

    async def _fetch(self, todo: Mapping[str, Request], max_failures: float) -> dict[str, str]:
        """Put replies into the cache; the reason of each failure, by key.

        Whatever stops it lets the requests in flight finish: they are paid for.

        Raises:
            UserError: if the budget is spent, too many replies fail, or every other request would fail too.
        """
        waiting = iter(todo.items())
        failed: dict[str, str] = {}
        stops: list[UserError] = []

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
                if failure:
                    failed[key] = failure
                if len(failed) > max_failures:
                    what = f"{len(failed)} of the replies so far"
                    stops.append(
                        too_many_failures(self._settings.name, failed.values(), what, self._max_failure_share)
                    )

        settings = self._settings
        client = openai.AsyncOpenAI(
            base_url=settings.base_url,
            api_key=self._key,
            timeout=settings.timeout_seconds,
            max_retries=settings.max_retries,
        )
        with console.progress(f"judge {settings.name}", len(todo), unit="replies") as bar:
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
            ("requests", budget.requests, self._requests),
            ("tokens", budget.tokens, self._tokens),
        ):
            if most is not None and used >= most:
                raise UserError(
                    f"judge {self._settings.name}: its budget of {most} {name} is spent, and this comparison "
                    f"needs {num_requested} replies. The replies so far are kept, and the same command "
                    "requests only the others: run it again, raise the budget, or judge fewer prompts"
                )

    async def _request_reply(self, client: openai.AsyncOpenAI, key: str, request: Request) -> str:
        """Put one reply into the cache; the reason if it fails or states no preference, else nothing.

        Raises:
            UserError: for an error that every other question would meet too.
        """
        settings = self._settings
        longest = (settings.max_retries + 1) * (settings.timeout_seconds + LONGEST_WAIT_SECONDS)
        self._requests += 1
        try:
            # The client times each silence only; a reply that arrives byte by byte would never end.
            async with asyncio.timeout(longest):
                response = await client.chat.completions.with_raw_response.create(**request)
            record = read_record(response.text)
        except REFUSED as error:
            given = f"with the key in ${settings.key_variable}" if settings.key_variable else "without a key"
            raise UserError(
                f"judge {settings.name}: {settings.base_url} returned status {error.status_code} for model "
                f"{settings.model!r}, {given}: {excerpt(error.message)}"
            ) from None
        except openai.APIStatusError as error:
            return f"status {error.status_code}: {excerpt(error.message)}"
        except (openai.APIConnectionError, TimeoutError, Malformed) as error:
            return excerpt(f"{type(error).__name__}: {error}")
        self._tokens += record["tokens"] or 0
        self._cache.add(key, record)
        if record["tokens"] is None and settings.budget is not None and settings.budget.tokens is not None:
            raise UserError(
                f"judge {settings.name}: the server does not report the tokens of a reply, so budget.tokens "
                "cannot be kept; set it to null, and limit the requests"
            )
        return read_reply(record).failure


_PREFERENCE = re.compile(r"\W*(?:(?i:verdict|answer|better|preferred)\W+)?([AB])\W*")


class Malformed(ValueError):
    """A body that is not a chat completion; the message shows it."""


def read_record(body: str) -> dict[str, Any]:
    """What is kept of a chat completion: text, refusal, log-probs of the letter's rivals, tokens, model.

    Raises:
        Malformed: if the body is not a chat completion.
    """
    try:
        tree = json.loads(body)
        choice = tree["choices"][0]
        message, usage = choice["message"], tree.get("usage") or {}
        listed = (choice.get("logprobs") or {}).get("content") or []
        place = _letter_token([token["token"] for token in listed])
        rivals = [] if place is None else [*(listed[place].get("top_logprobs") or []), listed[place]]
        text, refusal = message.get("content"), message.get("refusal")
        if not isinstance(text, str | None) or not isinstance(refusal, str | None):
            raise TypeError("content is not a text")
        tokens = usage.get("total_tokens")
        return {
            "text": text or "",
            "refusal": refusal or "",
            "letters": {token["token"]: token["logprob"] for token in rivals},
            "tokens": tokens if isinstance(tokens, int) else None,
            "model": str(tree.get("model", "")),
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Malformed(f"this is not a chat completion: {excerpt(body)!r}") from error


def _letter(token: str) -> str:
    """The token without punctuation: `**B` and ` (B)` are the letter B."""
    return re.sub(r"[\W_]", "", token)


def _letter_token(tokens: Sequence[str]) -> int | None:
    """The place of the token that is the last letter, if only an end-of-reply token comes after it."""
    for place in reversed(range(len(tokens))):
        if re.sub(r"<[^>]*>|[\W_]", "", tokens[place]):
            return place if _letter(tokens[place]) in LETTERS else None
    return None


def read_reply(record: Mapping[str, Any]) -> Reply:
    """The preference that a kept record states.

    Its last line must be one letter; a word such as `Verdict:` may come before it. Where the server gave
    the log-probs of that token, the probability is the letter's against the other's; else it is 1 or 0.
    """
    tokens = record["tokens"] or 0
    lines = [line for line in record["text"].splitlines() if line.strip()]
    match = _PREFERENCE.fullmatch(lines[-1]) if lines else None
    if match is None:
        text = f"a refusal: {record['refusal']}" if record["refusal"] else repr(record["text"])
        return Reply.failed(f"the reply does not end with A or B: {excerpt(text)}", tokens)
    if not record["letters"]:
        return Reply(float(match[1] == LETTERS[0]), num_tokens=tokens)
    masses = dict.fromkeys(LETTERS, 0.0)
    for token, logprob in record["letters"].items():
        if _letter(token) in masses:
            masses[_letter(token)] += math.exp(logprob)
    total = sum(masses.values())
    probability = masses[LETTERS[0]] / total if total > 0 else float(match[1] == LETTERS[0])
    return Reply(probability, num_tokens=tokens)


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
