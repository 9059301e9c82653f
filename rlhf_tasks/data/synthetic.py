"""A generated TL;DR world whose right answers are known.

A post tells six facts (who, deed, thing, place, feeling, plan), each one word of a lexicon of its
own, among sentences that do not matter. Writers summarise posts imperfectly: they leave facts out,
get some wrong, and some ramble. References and demonstrations come from the same writers. The gold
judge reads a post and a summary and scores coverage, faithfulness and brevity; it labels
preferences (with noise, as people do) and judges at the end, and the policy never sees it.

Held-out posts use (who, thing) pairs that no training post has.
All text here is the project's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_tasks.config import Split

LEXICON: dict[str, tuple[str, ...]] = {
    slot: tuple(words.split())
    for slot, words in {
        "who": """
            roommate sister brother mother father boss coworker neighbour landlord cousin uncle aunt
            grandma grandpa teacher coach girlfriend boyfriend wife husband friend classmate tenant
            nephew
        """,
        "deed": """
            broke stole lost sold burned borrowed hid painted washed dropped copied scratched
        """,
        "thing": """
            lamp guitar laptop bike phone jacket camera wallet notebook couch blender teapot mirror
            skateboard tent kayak violin drone telescope backpack helmet necklace watch umbrella
        """,
        "place": """
            kitchen garage office basement attic park library gym beach school hospital airport market
            garden hallway balcony
        """,
        "feeling": """
            angry sad guilty confused hurt jealous nervous embarrassed relieved lonely bitter anxious
        """,
        "plan": """
            refund apology divorce receipt replacement lawyer meeting break explanation favour witness
            contract loan letter truce promise
        """,
    }.items()
}
SLOTS = tuple(LEXICON)
SLOT_OF = {word: slot for slot, words in LEXICON.items() for word in words}

_WEATHER = "rainy snowy windy foggy sunny cloudy freezing humid".split()  # noqa: SIM905
_FOOD = "soup pizza noodles salad tacos rice pancakes curry".split()  # noqa: SIM905
_COLOUR = "green purple orange grey blue yellow silver pink".split()  # noqa: SIM905
_SUBREDDITS = "relationships advice pettyrevenge tifu askreddit family work neighbours".split()  # noqa: SIM905

_EVENT = (
    "my {who} {deed} my {thing} .",
    "so my {who} {deed} my {thing} .",
    "today my {who} {deed} my {thing} .",
)
_PLACE = ("it happened at the {place} .", "we were at the {place} .", "this was at the {place} .")
_FEELING = ("i feel {feeling} .", "i am so {feeling} .", "now i am {feeling} .")
_PLAN = ("i want a {plan} .", "should i ask for a {plan} ?", "i hope for a {plan} .")
_ASIDES = (
    "it was {weather} .",
    "i had {food} for lunch .",
    "the walls are {colour} .",
    "sorry for any typos .",
)
_TITLES = (
    "my {who} and my {thing}",
    "advice about my {who} ?",
    "{feeling} about my {who}",
    "my {thing} is gone",
)
_RAMBLINGS = (
    ("and it was {}", _WEATHER),
    ("and i had {} for lunch", _FOOD),
    ("and the walls are {}", _COLOUR),
)

LENGTH_BUDGET = 18
"""Words a summary may have before brevity costs anything."""
TOO_LONG_PENALTY = 0.1
"""Score lost for each word above the budget."""


@dataclass(frozen=True)
class Writer:
    """How a summariser errs: chances per fact of leaving it out or getting it wrong, and of rambling."""

    omit: float
    invent: float
    ramble: float


WRITERS = (Writer(0.30, 0.05, 0.05), Writer(0.05, 0.32, 0.05), Writer(0.12, 0.08, 0.50))


@dataclass(frozen=True)
class GoldScore:
    """What the gold judge says of one summary. Shares are of the post's facts; the score is at most 1."""

    coverage: float
    faithfulness: float
    brevity: float

    @property
    def score(self) -> float:
        """coverage − invented share − what is lost above the length budget."""
        return self.coverage + (self.faithfulness - 1) + (self.brevity - 1)


def gold(prompt: str, summary: str) -> GoldScore:
    """Judge a summary against the facts that its post tells.

    coverage: share of the post's facts that the summary names. faithfulness: 1 − (facts it names that
    the post does not tell) / (number of facts). brevity: 1 − TOO_LONG_PENALTY × words above LENGTH_BUDGET.
    """
    facts = {word for word in prompt.partition("POST:")[2].split() if word in SLOT_OF}
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
    seed: int, *, num_sft: int, num_preferences: int, num_validation: int, num_test: int
) -> dict[str, dict[Split, list[dict[str, str]]]]:
    """Rows by role and split; no post occurs twice, in whatever role.

    `sft` and `preferences` get train posts of their own; the held-out splits of all roles share their
    posts. The `prompts` to train on are those of `sft`, whose references PPO does not read.
    """
    rng = random.Random(f"synthetic-{seed}")
    seen: set[str] = set()
    posts: dict[str, list[dict[str, str]]] = {
        "sft": [_post(rng, "train", seen) for _ in range(num_sft)],
        "preferences": [_post(rng, "train", seen) for _ in range(num_preferences)],
        "validation": [_post(rng, "validation", seen) for _ in range(num_validation)],
        "test": [_post(rng, "test", seen) for _ in range(num_test)],
    }  # fmt: skip
    tables: dict[str, dict[Split, list[dict[str, str]]]] = {"sft": {}, "preferences": {}, "prompts": {}}
    for split in ("train", "validation", "test"):
        own = split if split != "train" else "sft"
        demonstrated = [(p, _summary(rng, p)) for p in posts[own]]
        tables["sft"][split] = [
            {"prompt": p["prompt"], "completion": s, "source": "synthetic"} for p, s in demonstrated
        ]
        tables["prompts"][split] = [
            {"prompt": p["prompt"], "reference": s, "source": "synthetic"} for p, s in demonstrated
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
        prompt = _tell(rng, facts)
        if prompt not in seen:
            seen.add(prompt)
            return facts | {"prompt": prompt}


def _tell(rng: random.Random, facts: dict[str, str]) -> str:
    def fill(template: str) -> str:
        aside = {"weather": rng.choice(_WEATHER), "food": rng.choice(_FOOD), "colour": rng.choice(_COLOUR)}
        return template.format(**facts, **aside)

    told = [fill(rng.choice(kind)) for kind in (_EVENT, _PLACE, _FEELING, _PLAN)]
    rng.shuffle(told)
    told.insert(rng.randrange(len(told) + 1), fill(rng.choice(_ASIDES)))
    post = " ".join(told)
    return f"SUBREDDIT: r/{rng.choice(_SUBREDDITS)}\nTITLE: {fill(rng.choice(_TITLES))}\nPOST: {post}\nTL;DR:"


def _summary(rng: random.Random, facts: dict[str, str]) -> str:
    """One writer's summary of the post's facts."""
    return _written(rng, *_draft(rng, facts))


def _draft(rng: random.Random, facts: dict[str, str]) -> tuple[dict[str, str], bool]:
    """What one writer tells, by slot, right or wrong; and whether they ramble."""
    writer = rng.choice(WRITERS)
    told: dict[str, str] = {}
    for slot in SLOTS:
        if rng.random() >= writer.omit:
            told[slot] = _other(rng, slot, facts[slot]) if rng.random() < writer.invent else facts[slot]
    return told, rng.random() < writer.ramble


def _other(rng: random.Random, slot: str, word: str) -> str:
    return rng.choice([other for other in LEXICON[slot] if other != word])


def _written(rng: random.Random, told: dict[str, str], rambles: bool) -> str:
    """The text of a draft, with a leading space, as completions have."""
    event = "my {who} {deed} my {thing}".format(
        **{"who": "someone", "deed": "ruined", "thing": "stuff"} | told
    )
    parts = [f"{event} at the {told['place']}" if "place" in told else event]
    if rambles:
        template, words = rng.choice(_RAMBLINGS)
        parts[0] += f" {template.format(rng.choice(words))}"
    rest = [f"i feel {told['feeling']}"] if "feeling" in told else []
    rest += [rng.choice(("i want a {}", "hoping for a {}")).format(told["plan"])] if "plan" in told else []
    if len(rest) == 2 and rng.random() < 0.4:
        rest.reverse()
    return " " + " , ".join([*parts, *rest])


def _pair(rng: random.Random, post: dict[str, str]) -> dict[str, str]:
    """Two summaries of a post that the gold judge does not find equal, the better one chosen.

    Half of the pairs are two drafts; half are a draft and its revision, with one fact changed or left out.
    """
    while True:
        told, rambles = _draft(rng, post)
        first = _written(rng, told, rambles)
        second = _summary(rng, post)
        if told and rng.random() < 0.5:
            second = _written(rng, _revised(rng, told), rambles)
        scores = gold_scores([post["prompt"]] * 2, [first, second])
        if scores[0] != scores[1]:
            chosen, rejected = (first, second) if scores[0] > scores[1] else (second, first)
            return {"prompt": post["prompt"], "chosen": chosen, "rejected": rejected, "source": "synthetic"}


def _revised(rng: random.Random, told: dict[str, str]) -> dict[str, str]:
    """A draft's facts with one of them changed or left out."""
    slot = rng.choice(list(told))
    kept = {key: word for key, word in told.items() if key != slot}
    return kept if rng.random() < 0.25 else kept | {slot: _other(rng, slot, told[slot])}
