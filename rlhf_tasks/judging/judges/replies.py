"""What a chat completion contains, and the preference that it states."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_tasks.judging.judges.comparisons import excerpt
from rlhf_tasks.judging.judges.pairwise import Reply
from rlhf_tasks.judging.judges.prompt_templates import LETTERS

_PREFERENCE = re.compile(r"\W*(?:(?i:verdict|answer|better|preferred)\W+)?([AB])\W*")


class Malformed(ValueError):
    """A body that is not a chat completion; the message shows it."""


def record_of(body: str) -> dict[str, Any]:
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
        rivals = {} if place is None else {
            t["token"]: t["logprob"] for t in [*(listed[place].get("top_logprobs") or []), listed[place]]
        }  # fmt: skip
        text, refusal = message.get("content"), message.get("refusal")
        if not isinstance(text, str | None) or not isinstance(refusal, str | None):
            raise TypeError("content is not a text")
        tokens = usage.get("total_tokens")
        return {
            "text": text or "",
            "refusal": refusal or "",
            "letters": rivals,
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


def reply_of(record: Mapping[str, Any]) -> Reply:
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
