"""The task with the known answer: its judge by hand, its splits, and that no shortcut wins."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.data.synthetic import (
    LENGTH_BUDGET,
    LEXICON,
    SLOTS,
    TOO_LONG_PENALTY,
    generate,
    gold,
    gold_scores,
)
from tests import small
from tests.data.conftest import are_disjoint

PROMPT = (
    "SUBREDDIT: r/work\nTITLE: my aunt and my vase\n"
    "POST: my boss stole my lamp . it was at the park . i am so sad . i want a refund .\nTL;DR:"
)
SMALL: dict[str, Any] = {
    "num_prompts": 60,
    "num_sft": 40,
    "num_preferences": 60,
    "num_validation": 40,
    "num_test": 40,
}


def test_coverage_is_the_share_of_the_posts_facts_in_the_summary() -> None:
    found = gold(PROMPT, " my boss stole my lamp")
    assert (found.coverage, found.faithfulness, found.brevity) == (2 / 4, 1, 1)
    assert found.score == 0.5
    assert gold(PROMPT, " boss lamp park refund").score == 1


def test_facts_that_are_not_in_the_post_are_unfaithful_even_if_in_its_title() -> None:
    found = gold(PROMPT, " my aunt stole my guitar at the park")
    assert found.coverage == 1 / 4
    assert found.faithfulness == pytest.approx(1 - 2 / 4)
    assert found.score == pytest.approx(1 / 4 - 2 / 4)


def test_a_repeated_fact_counts_once() -> None:
    assert gold(PROMPT, " boss boss boss guitar guitar").score == pytest.approx(1 / 4 - 1 / 4)


def test_only_words_above_the_budget_cost_anything() -> None:
    assert gold(PROMPT, " so" * LENGTH_BUDGET).brevity == 1
    assert gold(PROMPT, " so" * (LENGTH_BUDGET + 3)).brevity == pytest.approx(1 - 3 * TOO_LONG_PENALTY)
    assert gold(PROMPT, " so" * (LENGTH_BUDGET + 3)).score == pytest.approx(-3 * TOO_LONG_PENALTY)


SHORTCUTS: dict[str, Callable[[str], str]] = {
    "nothing": lambda prompt: "",
    "title": lambda prompt: prompt.split("TITLE: ")[1].split("\n")[0],
    "first sentence": lambda prompt: re.split(r"(?<=[.?])\s", prompt.split("POST: ")[1])[0],
    "whole post": lambda prompt: prompt.split("POST: ")[1].removesuffix("\nTL;DR:"),
}


@functools.cache
def shipped_test_rows(seed: int) -> list[dict[str, str]]:
    """The held-out posts that the shipped parameters judge by."""
    params = small.params()
    sizes = {
        "num_prompts": params["prepare"]["synthetic_prompt_rows"],
        "num_sft": params["prepare"]["synthetic_sft_rows"],
        "num_preferences": params["prepare"]["synthetic_preference_rows"],
        "num_validation": params["data"]["num_validation"],
        "num_test": params["data"]["num_test"],
    }
    return generate(seed, **sizes)["prompts"]["test"]


def win_rate(shortcut: str, rows: list[dict[str, str]]) -> float:
    prompts = [row["prompt"] for row in rows]
    ours = gold_scores(prompts, [SHORTCUTS[shortcut](prompt) for prompt in prompts])
    theirs = gold_scores(prompts, [row["reference"] for row in rows])
    points = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True)]
    return sum(points) / len(points)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("shortcut", SHORTCUTS)
def test_no_shortcut_wins_a_fifth_against_the_shipped_references(shortcut: str, seed: int) -> None:
    assert len(shipped_test_rows(seed)) == 1000
    assert win_rate(shortcut, shipped_test_rows(seed)) < 0.2


def _facts(prompt: str) -> dict[str, str]:
    words = prompt.partition("POST:")[2].split()
    return {slot: word for slot in SLOTS for word in words if word in LEXICON[slot]}


def test_every_post_states_one_fact_of_each_kind() -> None:
    words = [word for kind in LEXICON.values() for word in kind]
    assert len(words) == len(set(words))
    for row in generate(5, **SMALL)["sft"]["train"]:
        stated = [word for word in row["prompt"].partition("POST:")[2].split() if word in set(words)]
        assert len(stated) == len(SLOTS) == len(_facts(row["prompt"]))


def test_held_out_pairs_of_who_and_thing_are_never_trained_on() -> None:
    tables = generate(4, **SMALL)
    prompts = ([row["prompt"] for role in tables.values() for row in role[split]] for split in SPLITS)
    assert are_disjoint({(_facts(p)["who"], _facts(p)["thing"]) for p in some} for some in prompts)


def test_no_post_occurs_twice() -> None:
    tables = generate(4, **SMALL)
    posts = [row["prompt"] for role in ("prompts", "preferences") for row in tables[role]["train"]]
    posts += [row["prompt"] for split in ("validation", "test") for row in tables["prompts"][split]]
    assert len(posts) == len(set(posts)) == sum(SMALL.values()) - SMALL["num_sft"]


def test_the_first_prompts_are_demonstrated_by_their_references() -> None:
    tables = generate(4, **SMALL)
    for split, rows in tables["sft"].items():
        stated = [(row["prompt"], row["completion"]) for row in rows]
        prompts = [(row["prompt"], row["reference"]) for row in tables["prompts"][split]]
        assert stated == prompts[:40]
    assert len(tables["prompts"]["train"]) == 60


def test_the_gold_judge_prefers_every_chosen_summary() -> None:
    for rows in generate(2, **SMALL)["preferences"].values():
        prompts = [row["prompt"] for row in rows]
        chosen = gold_scores(prompts, [row["chosen"] for row in rows])
        rejected = gold_scores(prompts, [row["rejected"] for row in rows])
        assert all(a > b for a, b in zip(chosen, rejected, strict=True))


def test_references_and_demonstrations_come_from_imperfect_writers() -> None:
    sizes: dict[str, Any] = dict.fromkeys(SMALL, 1) | {"num_prompts": 1000, "num_sft": 1000}
    rows = generate(1, **sizes)["sft"]["train"]
    found = [gold(row["prompt"], row["completion"]) for row in rows]
    coverage = sum(f.coverage for f in found) / len(found)
    faithfulness = sum(f.faithfulness for f in found) / len(found)
    assert 0.5 < coverage < 0.95
    assert 0.7 < faithfulness < 0.99


def test_a_prompt_of_another_task_has_no_gold_score() -> None:
    assert math.isnan(gold_scores(["def f(x): return x"], ["Return x."])[0])
