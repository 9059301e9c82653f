from __future__ import annotations

import pytest

from rlhf_tasks.config import Split
from rlhf_tasks.data.rows import (
    Problems,
    Role,
    Row,
    check_duplicates,
    check_leaks,
    check_lengths,
    check_texts,
    measure,
    without,
)
from tests.data.conftest import store


def row(prompt: str, completion: str = " yes", source: str = "sft.jsonl:1") -> dict[str, str]:
    return {"prompt": prompt, "completion": completion, "source": source}


def pair(prompt: str, chosen: str | None = " good", rejected: str | None = " bad", line: int = 1) -> Row:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "source": f"preferences.jsonl:{line}"}


def test_a_row_with_two_faults_is_one_bad_row_with_both_in_the_report() -> None:
    problems = Problems()
    check_texts(store({"sft": {"train": [row(" ", "")]}}), "<eos>", problems)
    assert len(problems) == 1
    assert problems.counts()["empty"] == 2
    assert "sft.jsonl:1: empty: prompt is empty" in problems.report()
    assert "sft.jsonl:1: empty: completion is empty" in problems.report()


def test_the_report_has_twenty_examples_by_reason_in_the_order_of_the_source_and_counts_all() -> None:
    problems = Problems()
    for line in (10, 2, *range(100, 160)):
        problems.add(f"b.jsonl:{line}", {"line": line}, "malformed", "x")
    problems.add("a.jsonl:7", {}, "empty", "y")
    lines = problems.report().splitlines()
    assert lines[0] == "63 row(s) of the data cannot be used (62 malformed, 1 empty):"
    assert [line.split(": ")[0].strip() for line in lines[1:4]] == ["a.jsonl:7", "b.jsonl:2", "b.jsonl:10"]
    assert lines[-1] == "  … and 43 more: malformed"
    assert len(lines) == 1 + 20 + 1


@pytest.mark.parametrize(
    ("role", "rows", "counts"),
    [
        ("preferences", [pair("q", " same", "same\n"), pair("q2")], {"chosen_is_rejected": 1}),
        ("preferences", [pair("q", " a", None), pair("q", None, " "), pair("q", None)], {"empty": 1}),
        ("sft", [row("q", " one<eos> two"), row("q<eos>", " fine")], {"malformed": 1}),
    ],
    ids=["but for outer white space", "unpaired labels", "an answer with EOS inside"],
)
def test_equal_sides_and_answers_that_end_early_are_bad(
    role: Role, rows: list[Row], counts: dict[str, int]
) -> None:
    problems = Problems()
    check_texts(store({role: {"train": rows}}), "<eos>", problems)
    assert {name: n for name, n in problems.counts().items() if n} == counts


def test_the_first_of_equal_rows_is_kept_and_named() -> None:
    corpus = store(
        {"sft": {"train": [row("a", source="f:1"), row("b", source="f:2"), row("a", source="f:3")]}}
    )
    problems = Problems()
    check_duplicates(corpus, problems)
    assert "f:3: duplicate: the same row as f:1" in problems.report()
    assert [r["source"] for r in without(corpus, problems)["sft"]["train"]] == ["f:1", "f:2"]


def test_a_prompt_with_another_completion_is_no_duplicate() -> None:
    problems = Problems()
    check_duplicates(store({"sft": {"train": [row("a", " x"), row("a", " y")]}}), problems)
    labels = [pair("a", " x", None), pair("a", None, " x")]  # people disagree
    check_duplicates(store({"preferences": {"train": labels}}), problems)
    assert not problems


@pytest.mark.parametrize(
    ("preferences", "sft", "leak"),
    [
        (
            {"train": [pair("c\n d ", line=4)]},
            {"validation": [row("b")], "test": [row("c d", source="sft.jsonl:9")]},
            "sft.jsonl:9: leak: this test prompt is also in train of preferences (preferences.jsonl:4)",
        ),
        ({}, {"validation": [row("b")], "test": [row("b", source="f:2")]}, "f:2: leak"),
        (
            {"train": [pair("b")], "validation": [pair("b", line=2)], "test": [pair("a", line=3)]},
            {},
            "preferences.jsonl:2: leak",
        ),
    ],
    ids=["any role trains on it", "test in validation", "a comparison of a prompt that only sft trains on"],
)
def test_a_held_out_prompt_that_is_trained_on_is_a_leak_whatever_its_white_space(
    preferences: dict[Split, list[Row]], sft: dict[Split, list[Row]], leak: str
) -> None:
    given: dict[Role, dict[Split, list[Row]]] = {"sft": {"train": [row("a")], **sft}}
    given |= {"preferences": preferences} if preferences else {}
    corpus, problems = store(given), Problems()
    check_leaks(corpus, problems)
    assert problems.counts()["leak"] == 1
    assert leak in problems.report()


def test_eos_counts_in_an_answers_length_and_not_in_a_prompts() -> None:
    corpus = store({"sft": {"train": [row("1 2 3", " 1 2", "f:1"), row("1 2 3 4", " 1", "f:2")]}})

    def count(prompts: list[str], texts: list[str]) -> tuple[list[int], list[int], list[bool]]:
        queries, responses = (list(map(len, map(str.split, some))) for some in (prompts, texts))
        return queries, [n + 1 for n in responses], [text == " 1" for text in texts]

    lengths = measure(corpus, count)
    assert lengths["sft"].merged.tolist() == [False, True]
    at_the_limit, over = Problems(), Problems()
    check_lengths(corpus, lengths, 4, 3, at_the_limit)
    check_lengths(corpus, lengths, 3, 2, over)
    assert not at_the_limit
    assert "f:1: too_long: completion has 3 tokens, data.max_completion_tokens is 2" in over.report()
    assert "f:2: too_long: prompt has 4 tokens, data.max_prompt_tokens is 3" in over.report()
