"""A topic and a constraint that a regular expression verifies, without responses: `rlhf preset constraints`.

    data:
      source: "examples.constraints:constraints"
      options: {num_prompts: 2000, unseen: [capitals, no_commas]}
      columns: {keep: [rule, about, form, kind, seen]}

Column `rule` is the expression for the whole stripped response; `about` and `form` are its two halves, for
partial credit. `kind` names the constraint, and `seen` says whether train prompts have its kind. Every topic
is in one split only.

A rule also needs at least LEAST_WORDS words and the name of the topic, in any case, so that a response which
only has the right form fails. The kinds are after IFEval (arXiv 2311.07911).
"""

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .topics import TOPICS

LEAST_WORDS = 10
UNSEEN = ("capitals", "highlights", "placeholder", "no_commas")

WORDS = ("because", "people", "important", "small", "often", "time", "world", "always")
STARTS = ("Today", "Imagine", "Indeed", "Well", "Honestly", "Once", "Think", "Sometimes")
ENDS = (
    "That is all.",
    "I hope this helps.",
    "Ask me for more.",
    "Now you know.",
    "Is there anything else?",
    "Thank you for reading.",
)


class Kind(NamedTuple):
    """A constraint in words, with {argument}, and the arguments that it may have."""

    words: str
    rule: Callable[[Any], str]
    """The expression that the whole response matches; `.` matches line breaks."""
    arguments: Sequence[Any] = ("",)


def _bullets(count: int) -> str:
    """Exactly `count` lines that begin with * or -, among any other lines."""
    bullet, other = r"[ \t]*[*-] [^\n]*(?:\n|\Z)", r"(?:(?![ \t]*[*-] )[^\n]*\n)*"
    return rf"(?:{other}{bullet}){{{count}}}{other}(?![ \t]*[*-] )[^\n]*"


KINDS = {
    "quotes": Kind("Put your whole answer in double quotation marks.", lambda _: '"[^"]*"'),
    "lowercase": Kind("Use only lowercase letters.", lambda _: "[^A-Z]*"),
    "begins": Kind('Begin your answer with the word "{argument}".', lambda word: rf"{word}\b.*", STARTS),
    "ends": Kind(
        'End your answer with the exact sentence "{argument}"', lambda end: f".*{re.escape(end)}", ENDS
    ),
    "keyword": Kind(
        'Use the word "{argument}" at least twice.', lambda word: rf"(?i:.*\b{word}\b.*\b{word}\b.*)", WORDS
    ),
    "title": Kind("Give your answer a title in <<double angle brackets>>.", lambda _: r".*<<[^<>\n]+>>.*"),
    "postscript": Kind('Add a postscript at the end that starts with "P.S."', lambda _: r".*\sP\.S\..*\w.*"),
    "bullets": Kind("Answer with exactly {argument} bullet points.", _bullets, (2, 3, 4)),
    "sentences": Kind(
        "Answer with exactly {argument} sentences.", lambda n: rf"(?:[^.!?]+[.!?]+){{{n}}}[\"')*]*", (2, 3)
    ),
    "at_most": Kind(
        "Use at most {argument} words.", lambda most: rf"\S+(?:\s+\S+){{0,{most - 1}}}", (15, 20, 25)
    ),
    "capitals": Kind("Use only capital letters.", lambda _: "[^a-z]*"),
    "highlights": Kind("Highlight two phrases with *asterisks*.", lambda _: r"(?:.*?\*[^*\n]+\*){2}.*"),
    "placeholder": Kind(
        "Include a placeholder in square brackets, such as [name].", lambda _: r".*\[[^\[\]]+\].*"
    ),
    "no_commas": Kind("Do not use any commas.", lambda _: "[^,]*"),
}
OPENERS = (
    "Describe {} in a few words.",
    "Tell me about {} in a few words.",
    "Explain {} in a few words.",
    "Write about {} in a few words.",
)


def constraints(
    seed: int, num_validation: int, num_test: int, num_prompts: int = 2000, unseen: Sequence[str] = UNSEEN
) -> dict[str, list[dict[str, Any]]]:
    """Prompts alone; the kinds `unseen` are in the test split only.

    Held-out splits have as few topics as their numbers of rows allow, each with every kind; train prompts
    have all other topics.
    """
    rng = random.Random(f"constraints-{seed}")
    topics = list(TOPICS)
    rng.shuffle(topics)

    def rows(split: str, topics: Sequence[str], kinds: Sequence[str]) -> list[dict[str, Any]]:
        found = []
        for topic in topics:
            for kind in kinds:
                words, rule, arguments = KINDS[kind]
                argument = rng.choice(arguments)
                prompt = f"{rng.choice(OPENERS).format(topic)} {words.format(argument=argument)}"
                start, form = about(topic), rule(argument)
                row = {"prompt": prompt, "split": split, "source": "constraints"}
                row |= {"rule": start + form, "about": f"{start}.*", "form": form, "topic": topic}
                found.append(row | {"kind": kind, "seen": "no" if kind in unseen else "yes"})
        return found

    seen = [kind for kind in KINDS if kind not in unseen]
    prompts = []
    for split, count, kinds in (("test", num_test, [*seen, *unseen]), ("validation", num_validation, seen)):
        needed = -(-count // len(kinds))
        prompts += rows(split, topics[:needed], kinds)[:count]
        topics = topics[needed:]
    train = rows("train", topics, seen)
    if num_prompts > len(train):
        raise ValueError(f"{len(train)} prompts are left for train, fewer than {num_prompts=}; lower it")
    rng.shuffle(train)
    return {"prompts": prompts + train[:num_prompts]}


def about(topic: str) -> str:
    """The start of an expression that needs the topic's name and LEAST_WORDS words."""
    name = re.escape(topic.removesuffix("s"))  # the singular names it too
    return rf"(?=\S+(?:\s+\S+){{{LEAST_WORDS - 1}}})(?=(?i:.*\b{name}))"


def credit(
    prompts: Sequence[str],
    responses: Sequence[str],
    *,
    rule: Sequence[str],
    about: Sequence[str],
    form: Sequence[str],
) -> list[float]:
    """A label for pairs, `preferences.function`: 1 for the whole rule, 0.2 each for topic and form alone."""
    return [
        sum(
            weight * bool(re.fullmatch(one, response.strip(), re.DOTALL))
            for weight, one in zip((1, 0.2, 0.2), parts, strict=True)
        )
        for response, *parts in zip(responses, rule, about, form, strict=True)
    ]
