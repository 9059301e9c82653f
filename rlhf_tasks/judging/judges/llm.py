"""Judges that are models behind an OpenAI-compatible endpoint, asked by `scoring.chat`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.config.judge import LISTED, LlmJudge
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import OutsideFault, UserError
from rlhf_tasks.judging.judges.comparisons import LETTERS, PROMPTS, Question, Reply, too_many_failures
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.chat import ChatClient, Failure, Record, describe_reply, last_line, read_completion
from rlhf_tasks.scoring.retokenize import remove_names
from rlhf_tasks.scoring.templates import fill_template, load_template

FILE = "judgements.jsonl"
NUM_ALTERNATIVES = 5  # log-probs per token: as many as every server gives


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
        special: Collection[str] = (),
    ) -> None:
        """The texts `special` are removed, which may be special tokens of the model too."""
        self._special = special
        self._name, self._max_failure_share = settings.name, max_failure_share
        self._prompt = load_template(settings.prompt, key, paths.root, PROMPTS, Question._fields)
        self._client = ChatClient(
            settings,
            f"judge {settings.name}",
            paths.home / FILE,
            read_body=read_record,
            find_problem=lambda record: read_reply(record).failure,
            keeps_unusable=True,
            options={"logprobs": True, "top_logprobs": NUM_ALTERNATIVES} if settings.logprobs else None,
        )

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        def stop(failures: Sequence[Failure]) -> UserError | OutsideFault | None:
            if len(failures) <= max_failures:
                return None
            reasons, what = [one.reason for one in failures], f"{len(failures)} of the replies so far"
            error = too_many_failures(self._name, reasons, what, self._max_failure_share)
            return OutsideFault(str(error)) if all(one.is_temporary for one in failures) else error

        client, before = self._client, self._client.requests
        filled = (fill_template(self._prompt, question._asdict()) for question in questions)
        texts = [remove_names(text, self._special) for text in filled]
        replies = client.ask(texts, stop)
        console.say(
            f"judge {self._name}: {client.requests - before} of {len(set(texts))} replies were requested, "
            f"the others were kept; spent so far: {client.requests} requests, {client.tokens} tokens"
        )
        return [Reply.failed(one.reason) if isinstance(one, Failure) else read_reply(one) for one in replies]


_PREFERENCE = re.compile(r"\W*(?:(?i:verdict|answer|better|preferred)\W+)?([AB])\W*")


def read_letters(listed: Sequence[Any]) -> dict[str, Any]:
    """Of the log-probs of a reply's tokens, those of its last letter and of the letter's rivals.

    Nothing but an end-of-reply token comes after the letter.
    """
    said = (one for one in reversed(listed) if re.sub(r"<[^>]*>|[\W_]", "", one["token"]))
    last = next(said, None)
    rivals = list[Any]()
    if last is not None and _letter(last["token"]) in LETTERS:
        rivals = [*(last.get("top_logprobs") or []), last]
    known = {token["token"]: token["logprob"] for token in rivals}
    return {"letters": {text: value for text, value in known.items() if value is not None}}  # null: −∞


read_record = partial(read_completion, read_logprobs=read_letters)
"""What is kept of a body; `Malformed` if it is not a chat completion."""


def _letter(token: str) -> str:
    """The token without punctuation: `**B` and ` (B)` are the letter B."""
    return re.sub(r"[\W_]", "", token)


def read_reply(record: Record) -> Reply:
    """The preference that a kept record states.

    Its last line must be one letter; a word such as `Verdict:` may come before it. Where the server gave
    the log-probs of that token, the probability is the letter's against the other's; else it is 1 or 0.
    """
    tokens = record["tokens"] or 0
    match = _PREFERENCE.fullmatch(last_line(record))
    if match is None:
        return Reply.failed(f"the reply does not end with A or B: {describe_reply(record)}", tokens)
    if not record["letters"]:
        return Reply(float(match[1] == LETTERS[0]), num_tokens=tokens)
    masses = dict.fromkeys(LETTERS, 0.0)
    for token, logprob in record["letters"].items():
        if _letter(token) in masses:
            masses[_letter(token)] += math.exp(logprob)
    total = sum(masses.values())
    probability = masses[LETTERS[0]] / total if total > 0 else float(match[1] == LETTERS[0])
    return Reply(probability, num_tokens=tokens)
