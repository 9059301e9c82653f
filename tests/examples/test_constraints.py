"""The generated instructions: their rules by hand-worked responses, and the kinds held out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from examples.constraints import KINDS, LEAST_WORDS, UNSEEN, about, constraints, credit
from rlhf_tasks.config.scorers import Check
from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.scoring.verifier import Verifier
from tests.examples.conftest import of_split

VERIFIER = Verifier([Check(kind="regex", column="rule")], None)
TEXT = "A lighthouse is a tall tower by the sea that warns all ships at night"  # 15 words
SMALL = TEXT.lower()


def passes(kind: str, response: str, argument: Any = "") -> bool:
    rule = about("lighthouses") + KINDS[kind].rule(argument)
    (right,) = VERIFIER.correct([response], {"rule": [rule]})
    return right


@pytest.mark.parametrize(
    ("kind", "argument", "right", "wrong"),
    [
        ("quotes", "", [f'"{TEXT}."', f' "{TEXT}"\n'], [TEXT, f'"{TEXT}', f'"{TEXT}" "Y"', f'So: "{TEXT}"']),
        ("lowercase", "", [SMALL, f"{SMALL}, 24 hours."], [TEXT]),
        ("begins", "Well", [f"Well, {SMALL}", f"Well\n{SMALL}"], [f"Wells: {SMALL}", f"well, {SMALL}", TEXT]),
        ("ends", "That is all.", [f"{TEXT}. That is all."], [f"{TEXT}. That is all", f"That is all. {TEXT}"]),
        ("keyword", "small", [f"Small: {TEXT}. It is small."], [f"{TEXT} small", f"{TEXT}: smallest small"]),
        ("title", "", [f"<<At sea>>\n{TEXT}"], [f"<At sea>\n{TEXT}", f"<<>> {TEXT}", f"<<At\nsea>> {TEXT}"]),
        ("postscript", "", [f"{TEXT}.\n\nP.S. Go."], [f"{TEXT}. P.S.", f"{TEXT}\nPS. Go", f"P.S. {TEXT}"]),
        (
            "bullets",
            2,
            [f"* {TEXT}\n* yes", f"Here:\n\n- {TEXT}\n\n  - yes\n\nBye", f"- {TEXT}\nor\n- no"],
            [f"* {TEXT}", f"* {TEXT}\n* b\n* c", TEXT, f"{TEXT} * a * b", f"*{TEXT}*\n*b*"],
        ),
        ("sentences", 2, [f"{TEXT}. Yes!", f"{TEXT}... Is it?"], [f"{TEXT}.", f"{TEXT}. A. B", f"{TEXT}. A"]),
        ("at_most", 15, [TEXT], [f"{TEXT} too", f"{TEXT}\n\n.\n"]),
        ("capitals", "", [TEXT.upper()], [TEXT, SMALL]),
        ("highlights", "", [f"*A* *b c*. {TEXT}", f"**A** **b** {TEXT}"], [f"*A* {TEXT}", f"* a\n* {TEXT}"]),
        ("placeholder", "", [f"{TEXT} [name]"], [f"{TEXT} []", f"{TEXT} (name)"]),
        ("no_commas", "", [TEXT], [f"{TEXT}, yes"]),
    ],
)
def test_a_rule_accepts_what_its_words_ask_for(
    kind: str, argument: Any, right: list[str], wrong: list[str]
) -> None:
    assert [text for text in right if not passes(kind, text, argument)] == []
    assert [text for text in wrong if passes(kind, text, argument)] == []
    assert {passes(kind, text, argument) for text in right * 100} == {True}, "the same text, the same score"


def test_a_response_without_the_topic_or_with_fewer_than_ten_words_fails() -> None:
    def is_about(text: str) -> bool:
        return VERIFIER.correct([text], {"rule": [about("lighthouses") + ".*"]}) == [True]

    nine = "Lighthouses" + " yes" * (LEAST_WORDS - 2)
    assert not is_about(nine)
    assert is_about(f"{nine}\nyes")
    assert is_about(f"{SMALL}\nyes")
    assert not is_about("yes " * 20)
    assert not is_about(f"{'yes ' * 20} enlightenment")
    assert not passes("quotes", '"lighthouse"')


def test_unseen_kinds_are_in_the_test_split_only() -> None:
    sizes: dict[str, Any] = {"num_prompts": 2000, "num_validation": 95, "num_test": 140}
    every = constraints(3, **sizes)["prompts"]
    rows = {split: of_split(every, split) for split in SPLITS}
    assert len({row["topic"] for row in rows["train"]}) > 300
    assert Counter(row["kind"] for row in rows["test"]) == dict.fromkeys(KINDS, 10)
    for row in every:
        assert row["rule"] == row["about"].removesuffix(".*") + row["form"]
        assert row["seen"] == ("no" if row["kind"] in UNSEEN else "yes")
    assert {row["seen"] for split in ("train", "validation") for row in rows[split]} == {"yes"}
    assert {row["kind"] for row in rows["train"]} == {*KINDS} - {*UNSEEN}
    assert len({row["prompt"] for row in every}) == len(every)
    kinds = {row["kind"] for row in of_split(constraints(3, **sizes, unseen=["quotes"])["prompts"], "train")}
    assert kinds == {*KINDS} - {"quotes"}


def test_a_label_of_pairs_has_the_rewards_weights() -> None:
    start, form = about("cats"), ".*!"
    responses = [
        "A cat sleeps long and often, on every day of the year!",
        "A cat sleeps long and often, on every day of the year",
        "No!",
        "No",
    ]
    columns = {"rule": [start + form] * 4, "about": [f"{start}.*"] * 4, "form": [form] * 4}
    assert credit(["p"] * 4, responses, **columns) == pytest.approx([1.4, 0.2, 0.2, 0])
