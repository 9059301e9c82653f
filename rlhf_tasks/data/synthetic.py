"""A synthetic TL;DR task whose right answers are known.

A post states four facts (who, thing, place, plan), each a word of its own lexicon, among other words and
sentences. Writers summarize posts imperfectly: they omit facts, get some wrong, and some ramble.
References and demonstrations come from the same writers. The gold judge reads a post and a summary and
scores coverage, faithfulness and brevity. It labels preferences (with noise, as people do) and judges at
the end; the policy never sees it.

Held-out posts use (who, thing) pairs that no training post has.
All text here is the project's own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_tasks.config import Split

LEXICON: dict[str, tuple[str, ...]] = {
    slot: tuple(words.split())
    for slot, words in {
        "who": """
            roommate sister brother mother father boss coworker neighbour landlord cousin uncle aunt
            grandma grandpa teacher coach girlfriend boyfriend wife husband friend classmate tenant
            nephew
        """,
        "thing": """
            lamp guitar laptop bike phone jacket camera wallet notebook couch blender teapot mirror
            skateboard tent kayak violin drone telescope backpack helmet necklace watch umbrella
        """,
        "place": """
            kitchen garage office basement attic park library gym beach school hospital airport market
            garden hallway balcony
        """,
        "plan": """
            refund pardon divorce receipt replacement lawyer meeting break warning favour witness
            contract loan letter truce promise
        """,
    }.items()
}
SLOTS = tuple(LEXICON)
SLOT_OF = {word: slot for slot, words in LEXICON.items() for word in words}

_FILLERS: dict[str, tuple[str, ...]] = {
    kind: tuple(words.split())
    for kind, words in {
        "deed": "broke stole lost sold burned borrowed hid painted",
        "weather": "rainy snowy windy foggy sunny cloudy freezing humid",
        "feeling": "angry sad guilty confused hurt jealous nervous lonely",
        "food": "soup pizza noodles salad tacos rice pancakes curry",
        "colour": "green purple orange grey blue yellow silver pink",
    }.items()
}
_SUBREDDITS = "relationships advice pettyrevenge tifu askreddit family work neighbours".split()  # noqa: SIM905

_EVENT = (
    "my {who} {deed} my {thing} .",
    "so my {who} {deed} my {thing} .",
    "today my {who} {deed} my {thing} .",
)
_PLACE = ("it happened at the {place} .", "we were at the {place} .", "this was at the {place} .")
_PLAN = ("i want a {plan} .", "should i ask for a {plan} ?", "i hope for a {plan} .")
_ASIDES = (
    "it was {weather} .",
    "i am so {feeling} .",
    "i had {food} for lunch .",
    "the walls are {colour} .",
    "sorry for any typos .",
)
_TITLES = (
    "my {who} and my {thing}",
    "{feeling} about my {who}",
    "my {thing} is gone",
    "what happened at the {place}",
    "i need a {plan}",
)
_RAMBLINGS = ("and it was {weather}", "and i had {food} for lunch", "and the walls are {colour}")

LENGTH_BUDGET = 14
"""Words a summary may have before brevity costs anything."""
TOO_LONG_PENALTY = 0.1
"""Score lost for each word above the budget."""


@dataclass(frozen=True)
class WriterErrors:
    """The errors of a summarizer: the chance to omit a fact, to get it wrong, and to ramble."""

    omit: float
    invent: float
    ramble: float


WRITERS = (WriterErrors(0.20, 0.05, 0.05), WriterErrors(0.05, 0.20, 0.05), WriterErrors(0.10, 0.05, 0.50))


@dataclass(frozen=True)
class GoldScore:
    """The gold judge's scores of one summary. Shares are of the post's facts; the score is at most 1."""

    coverage: float
    faithfulness: float
    brevity: float

    @property
    def score(self) -> float:
        """coverage − share of invented facts − penalty for words above the length budget."""
        return self.coverage + (self.faithfulness - 1) + (self.brevity - 1)


def gold(prompt: str, summary: str) -> GoldScore:
    """Judge a summary by the facts in its post.

    coverage: share of the post's facts that the summary names. faithfulness: 1 − (facts it names that
    are not in the post) / (number of facts). brevity: 1 − TOO_LONG_PENALTY × words above LENGTH_BUDGET.
    All scores are NaN for a prompt without facts, which belongs to another task.
    """
    facts = {word for word in prompt.partition("POST:")[2].split() if word in SLOT_OF}
    if not facts:
        return GoldScore(math.nan, math.nan, math.nan)
    words = summary.split()
    claims = {word for word in words if word in SLOT_OF}
    return GoldScore(
        coverage=len(claims & facts) / len(facts),
        faithfulness=1 - len(claims - facts) / len(facts),
        brevity=1 - TOO_LONG_PENALTY * max(0, len(words) - LENGTH_BUDGET),
    )


def gold_scores(prompts: Sequence[str], summaries: Sequence[str]) -> list[float]:
    """The gold judge as a scorer: texts → scores."""
    return [gold(p, s).score for p, s in zip(prompts, summaries, strict=True)]


def generate(
    seed: int,
    *,
    num_prompts: int,
    num_sft: int,
    num_preferences: int,
    num_validation: int,
    num_test: int,
    facts: Sequence[str] = (),
) -> dict[str, dict[Split, list[dict[str, Any]]]]:
    """Rows by role and split; no post occurs twice, in whatever role. `facts` are columns of the prompts.

    `prompts` and `preferences` have separate train posts. The first `num_sft` prompts, whose references PPO
    does not read, are also demonstrations. The held-out splits of all roles share their posts.
    """
    rng = random.Random(f"synthetic-{seed}")
    seen: set[str] = set()
    posts: dict[str, list[dict[str, str]]] = {
        "prompts": [_post(rng, "train", seen) for _ in range(num_prompts)],
        "preferences": [_post(rng, "train", seen) for _ in range(num_preferences)],
        "validation": [_post(rng, "validation", seen) for _ in range(num_validation)],
        "test": [_post(rng, "test", seen) for _ in range(num_test)],
    }
    tables: dict[str, dict[Split, list[dict[str, Any]]]] = {"sft": {}, "preferences": {}, "prompts": {}}
    for split in ("train", "validation", "test"):
        own = posts[split if split != "train" else "prompts"]
        summarized = [(p["prompt"], _written(rng, *_draft(rng, p))) for p in own]
        tables["prompts"][split] = [
            {"prompt": prompt, "reference": summary, "source": "synthetic"}
            | {name: post[name] for name in facts}
            for (prompt, summary), post in zip(summarized, own, strict=True)
        ]
        tables["sft"][split] = [
            {"prompt": prompt, "completion": summary, "source": "synthetic"}
            for prompt, summary in (summarized[:num_sft] if split == "train" else summarized)
        ]
        compared = posts[split if split != "train" else "preferences"]
        tables["preferences"][split] = [_pair(rng, p) for p in compared]
    return tables


def _split_of(facts: dict[str, str]) -> Split:
    """By the (who, thing) pair: an eighth of the pairs is for validation, an eighth for test."""
    place = (LEXICON["who"].index(facts["who"]) * 3 + LEXICON["thing"].index(facts["thing"])) % 8
    return "validation" if place == 0 else "test" if place == 1 else "train"


def _post(rng: random.Random, split: Split, seen: set[str]) -> dict[str, str]:
    while True:
        facts = {slot: rng.choice(words) for slot, words in LEXICON.items()}
        if _split_of(facts) != split:
            continue
        prompt = _render(rng, facts)
        if prompt not in seen:
            seen.add(prompt)
            return facts | {"prompt": prompt}


def _render(rng: random.Random, facts: dict[str, str]) -> str:
    def fill(template: str) -> str:
        return template.format(**facts, **_filled(rng))

    facts_used = [fill(rng.choice(kind)) for kind in (_EVENT, _PLACE, _PLAN)]
    rng.shuffle(facts_used)
    facts_used.insert(rng.randrange(len(facts_used) + 1), fill(rng.choice(_ASIDES)))
    post = " ".join(facts_used)
    return f"SUBREDDIT: r/{rng.choice(_SUBREDDITS)}\nTITLE: {fill(rng.choice(_TITLES))}\nPOST: {post}\nTL;DR:"


def _filled(rng: random.Random) -> dict[str, str]:
    return {kind: rng.choice(words) for kind, words in _FILLERS.items()}


def _draft(rng: random.Random, facts: dict[str, str]) -> tuple[dict[str, str], bool]:
    """The facts in one writer's summary, by slot, right or wrong; and whether the writer rambles."""
    writer = rng.choice(WRITERS)
    facts_used: dict[str, str] = {}
    for slot in SLOTS:
        if rng.random() >= writer.omit:
            facts_used[slot] = _other(rng, slot, facts[slot]) if rng.random() < writer.invent else facts[slot]
    return facts_used, rng.random() < writer.ramble


def _other(rng: random.Random, slot: str, word: str) -> str:
    return rng.choice([other for other in LEXICON[slot] if other != word])


def _written(rng: random.Random, facts_used: dict[str, str], rambles: bool) -> str:
    """The text of a draft, with a leading space, as completions have."""
    event = "my {who} ruined my {thing}".format(**{"who": "someone", "thing": "stuff"} | facts_used)
    parts = [f"{event} at the {facts_used['place']}" if "place" in facts_used else event]
    if rambles:
        parts[0] += f" {rng.choice(_RAMBLINGS).format(**_filled(rng))}"
    if "plan" in facts_used:
        parts.append(rng.choice(("i want a {plan}", "hoping for a {plan}")).format(**facts_used))
    return " " + " , ".join(parts)


def _pair(rng: random.Random, post: dict[str, str]) -> dict[str, str]:
    """Two summaries of a post with different gold scores; the better one is chosen.

    Half of the pairs are two drafts; half are a draft and its revision, with one fact changed or left out.
    """
    while True:
        facts_used, rambles = _draft(rng, post)
        first = _written(rng, facts_used, rambles)
        second = _written(rng, *_draft(rng, post))
        if facts_used and rng.random() < 0.5:
            second = _written(rng, _revised(rng, facts_used), rambles)
        scores = gold_scores([post["prompt"]] * 2, [first, second])
        if scores[0] != scores[1]:
            chosen, rejected = (first, second) if scores[0] > scores[1] else (second, first)
            return {"prompt": post["prompt"], "chosen": chosen, "rejected": rejected, "source": "synthetic"}


def _revised(rng: random.Random, facts_used: dict[str, str]) -> dict[str, str]:
    """A draft's facts with one of them changed or left out."""
    slot = rng.choice(list(facts_used))
    kept = {key: word for key, word in facts_used.items() if key != slot}
    return kept if rng.random() < 0.25 else kept | {slot: _other(rng, slot, facts_used[slot])}
