"""The scorers of preset docstrings."""

from __future__ import annotations

import math

import pytest

from examples.docstrings import SUFFIX
from examples.summaries import chrf, retrieval

SUMMARIES = {"sort_rows": "Give all rows sorted.", "read_file": "Open a byte stream."}
SUMMARIES |= {"send_mail": "Deliver a message to its server.", "draw_line": "Stroke with a color."}
PROMPTS = [f"def {name}(table, path):\n    return table[path]{SUFFIX}" for name in SUMMARIES]
SENTENCES = list(SUMMARIES.values())


def test_a_response_is_scored_by_the_rank_of_its_function_in_its_package() -> None:
    responses = ["Gives it sorted.", "Opens a stream.", "The color.", "A message in color, in color."]
    scores = retrieval(PROMPTS, responses, ["a"] * 4, SENTENCES)
    assert scores[:2] == [1, 1]
    assert scores[2] == pytest.approx(1 / 3), "another function is first, and three share what follows"
    assert scores[3] == 1, "more of it is about the right function than about another"


def test_the_authors_sentence_finds_its_function() -> None:
    assert retrieval(PROMPTS, SENTENCES, ["a"] * 4, SENTENCES) == [1] * 4


def test_no_function_is_found_where_there_is_nothing_to_choose_from() -> None:
    responses = ["Sorted.", "Stream."]
    assert all(math.isnan(x) for x in retrieval(PROMPTS[:2], responses, ["a", "b"], SENTENCES[:2]))
    assert all(math.isnan(x) for x in retrieval(PROMPTS[:2], responses, ["a", "a"], ["1 + 1", "¿?"]))


@pytest.mark.parametrize(
    "response", ["Sort rows of table and path.", "SortRows", "sorted(rows)", "return", "x_sorted", "", "¿?"]
)
def test_names_code_and_an_empty_response_find_nothing(response: str) -> None:
    assert retrieval(PROMPTS, [response, *["x"] * 3], ["a"] * 4, SENTENCES)[0] == pytest.approx(1 / 2.5)


def test_a_score_depends_on_the_prompts_and_not_on_their_order_or_number_of_responses() -> None:
    responses = ["Gives it sorted.", "Opens a canvas.", "Delivers it.", "Strokes a stream."]
    straight = retrieval(PROMPTS, responses, ["a"] * 4, SENTENCES)
    assert retrieval(PROMPTS[::-1], responses[::-1], ["a"] * 4, SENTENCES[::-1])[::-1] == straight
    assert retrieval(PROMPTS * 2, responses * 2, ["a"] * 8, SENTENCES * 2) == straight * 2


def test_fifty_functions_are_searched_and_each_in_as_many_searches() -> None:
    """119 responses are about the one of 120 functions that has another sentence."""
    prompts = [f"def f{i}():\n    return {i}{SUFFIX}" for i in range(120)]
    scores = retrieval(prompts, ["About omega."] * 120, ["a"] * 120, ["The alpha."] * 119 + ["The omega."])
    assert scores[-1] == 1
    below, without = 1 / (2 + 48 / 2), 1 / (1 + 49 / 2)
    assert sorted(scores[:-1]) == pytest.approx([below] * 49 + [without] * 70)


def test_chrf_is_that_of_its_definition() -> None:
    """Of "ab" against "abc", precisions of one and two characters are 1 and 1, recalls 2/3 and 1/2.

    Of "abcd" against "abcf" both are 3/4, 2/3, 1/2 and 0, of one to four characters.
    """
    found = chrf(["p"] * 4, ["Sort the rows.", "xyz", "ab", "abcd"], ["Sort the rows.", "abc", "abc", "abcf"])
    recall = (2 / 3 + 1 / 2) / 2
    assert found == pytest.approx(
        [100, 0, 100 * 2 * recall / (1 + recall), 100 * (3 / 4 + 2 / 3 + 1 / 2) / 4]
    )
