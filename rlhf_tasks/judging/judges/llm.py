"""Judges that are models behind an OpenAI-compatible endpoint.

Each reply is kept under its question, model and endpoint: no question is paid for twice, and the preference
is read from the kept text each time. The client library does the retries, the waiting and `Retry-After`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import openai

from rlhf_tasks import console
from rlhf_tasks.config.judge import LISTED, LlmJudge
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges import assessments, prompt_templates
from rlhf_tasks.judging.judges.assessments import Labels
from rlhf_tasks.judging.judges.cache import Cache
from rlhf_tasks.judging.judges.comparisons import excerpt, too_many_failures
from rlhf_tasks.judging.judges.pairwise import Question, Reply
from rlhf_tasks.judging.judges.replies import Malformed, record_of, reply_of
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking.events import Assessment

if TYPE_CHECKING:
    from rlhf_tasks.judging.human_labels import Label

FILE = "judgements.jsonl"
NUM_ALTERNATIVES = 5  # log-probs per token: as many as every server gives
LONGEST_WAIT_SECONDS = 120.0  # the client library never waits longer for `Retry-After`
REFUSED = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)
"""Errors that every other question would meet too."""

Request = Mapping[str, Any]
Record = Mapping[str, Any]


class Trace(Protocol):
    def __call__(
        self,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        start: int,
        end: int,
        assessments: Sequence[Assessment],
    ) -> None:
        """Record one call of a model and what is said of it, with times in milliseconds since 1970."""


@dataclass
class Spent:
    """Requests of this process, and the tokens of their replies."""

    requests: int = 0
    tokens: int = 0


class LlmComparer:
    """A `Comparer`. The prompt's file is below `paths.root`; replies are kept in `paths.home`.

    Raises:
        UserError: if the environment lacks the key, or the prompt cannot be read.
    """

    def __init__(
        self,
        settings: LlmJudge,
        max_failure_share: float,
        paths: Paths,
        *,
        key: str = LISTED,
        trace: Trace | None = None,
        num_traces: int = 0,
        labels: Sequence[Label] = (),
        longest_wait_seconds: float = LONGEST_WAIT_SECONDS,
    ) -> None:
        self._settings, self._max_failure_share = settings, max_failure_share
        self._trace = trace if num_traces else None
        self._num_traces, self._labels = num_traces, Labels(labels)
        self._traced = set[str]()
        self._prompt = prompt_templates.load(settings.prompt, key, paths.root)
        self._key, self._cache = _key(settings), Cache(paths.home / FILE)
        self._longest_wait_seconds = longest_wait_seconds
        self.spent = Spent()

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        requests = [self._request(prompt_templates.fill(self._prompt, question)) for question in questions]
        keys = [
            hashing.json_sha256({"endpoint": self._settings.base_url, "request": request})
            for request in requests
        ]
        todo = {key: r for key, r in zip(keys, requests, strict=True) if key not in self._cache}
        failed = asyncio.run(self._fetch(todo, max_failures)) if todo else {}
        console.say(
            f"judge {self._settings.name}: {len(todo)} of {len(set(keys))} replies were requested, the "
            f"others were kept; spent so far: {self.spent.requests} requests, {self.spent.tokens} tokens"
        )
        records = [self._cache.get(key) for key in keys]
        replies = [
            Reply.failed(failed[key]) if record is None else reply_of(record)
            for key, record in zip(keys, records, strict=True)
        ]
        if self._trace is not None:
            self._record_traces(self._trace, questions, requests, keys, replies)
        return replies

    def _record_traces(
        self,
        trace: Trace,
        questions: Sequence[Question],
        requests: Sequence[Request],
        keys: Sequence[str],
        replies: Sequence[Reply],
    ) -> None:
        """Trace the first `num_traces` replies and all on pairs that people labelled, each once.

        A kept reply is traced at the time of its request.
        """
        now = round(time.time() * 1000)
        for question, request, key, reply in zip(questions, requests, keys, replies, strict=True):
            labels = self._labels.of(question)
            if key in self._traced or not (labels or self._num_traces):
                continue
            self._traced.add(key)
            self._num_traces -= not labels
            record = self._cache.get(key) or {}
            text = record.get("text", "")
            outputs = {"text": text, "tokens": reply.num_tokens}
            outputs |= {"failure": reply.failure} if reply.failure else {"first_is_better": reply.probability}
            start = record.get("asked_at", now)
            end = start + record.get("milliseconds", 0)
            name = self._settings.name
            said = [
                assessments.of_judge(name, self._settings.model, reply, text, end),
                *assessments.of_people(name, question, labels, end),
            ]
            trace(f"judge {name}", request, outputs, start=start, end=end, assessments=said)

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

        with console.progress(f"judge {self._settings.name}", len(todo), unit="replies") as bar:
            async with self._client() as client, asyncio.TaskGroup() as workers:
                for _ in range(min(self._settings.concurrency, len(todo))):
                    workers.create_task(work())
        if stops:
            raise stops[0]
        return failed

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=self._settings.base_url, api_key=self._key, timeout=self._settings.timeout_seconds,
            max_retries=self._settings.max_retries,
        )  # fmt: skip

    def _check_budget(self, num_requested: int) -> None:
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
                    f"needs {num_requested} replies. The replies so far are kept, and the same command "
                    "requests only the others: run it again, raise the budget, or judge fewer prompts"
                )

    async def _request_reply(self, client: openai.AsyncOpenAI, key: str, request: Request) -> str:
        """Put one reply into the cache; the reason if it fails or states no preference, else nothing.

        Raises:
            UserError: for an error that every other question would meet too.
        """
        settings = self._settings
        longest = (settings.max_retries + 1) * (settings.timeout_seconds + self._longest_wait_seconds)
        self.spent.requests += 1
        asked_at, start = round(time.time() * 1000), time.monotonic()
        try:
            # The client times each silence only; a reply that arrives byte by byte would never end.
            async with asyncio.timeout(longest):
                response = await client.chat.completions.with_raw_response.create(**request)
            took = round((time.monotonic() - start) * 1000)
            record = record_of(response.text) | {"asked_at": asked_at, "milliseconds": took}
        except REFUSED as error:
            raise UserError(self._refusal(error)) from None
        except openai.APIStatusError as error:
            return f"status {error.status_code}: {excerpt(error.message)}"
        except (openai.APIConnectionError, TimeoutError, Malformed) as error:
            return excerpt(f"{type(error).__name__}: {error}")
        self.spent.tokens += record["tokens"] or 0
        self._cache.add(key, record)
        if record["tokens"] is None and settings.budget is not None and settings.budget.tokens is not None:
            raise UserError(
                f"judge {settings.name}: the server does not report the tokens of a reply, so budget.tokens "
                "cannot be kept; set it to null, and limit the requests"
            )
        return reply_of(record).failure

    def _refusal(self, error: openai.APIStatusError) -> str:
        settings = self._settings
        key = f"with the key in ${settings.key_variable}" if settings.key_variable else "without a key"
        return (
            f"judge {settings.name}: {settings.base_url} returned status {error.status_code} for model "
            f"{settings.model!r}, {key}: {excerpt(error.message)}"
        )


def _key(settings: LlmJudge) -> str:
    if settings.key_variable is None:
        return "none"  # the client library needs some text
    key = os.environ.get(settings.key_variable, "").strip()
    if not key or not key.isascii():
        raise UserError(
            f"judge {settings.name}: the environment variable {settings.key_variable} holds no key; export "
            "it, or set key_variable to null for a server that needs none"
        )
    return key
