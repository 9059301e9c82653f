"""The label and the judge of preset docstrings."""

from __future__ import annotations

import pytest

from rlhf_tasks.data.docstrings import SUFFIX
from rlhf_tasks.scoring.summaries import chrf, retrieval

BODIES = {"sort_rows": "return sorted(table)", "read_file": "with open(path) as stream:\n        pass"}
BODIES |= {"send_mail": "server.deliver(message)", "draw_line": "canvas.stroke(color)"}
PROMPTS = [f"def {name}(table, path):\n    {body}{SUFFIX}" for name, body in BODIES.items()]


def test_a_response_is_scored_by_the_rank_of_its_function_in_its_package() -> None:
    said = ["Gives it sorted.", "Opens a stream.", "The color.", "Color, sorted."]
    scores = retrieval(PROMPTS, said, ["a"] * 4)
    assert scores[:2] == [1.0, 1.0]
    assert scores[2] == pytest.approx(1 / 3), "another function is first, and two share what follows"
    assert scores[3] in (1.0, 0.5)
    assert retrieval(PROMPTS, said, ["a", "a", "b", "c"])[2:] == [1.0, 1.0], "alone in its package"


def test_the_words_of_the_signature_and_an_empty_response_find_nothing() -> None:
    for said in ("sort_rows of table and path", "SortRows", "", "¿?"):
        assert retrieval(PROMPTS, [said, *["x"] * 3], ["a"] * 4)[0] == pytest.approx(1 / 2.5)


def test_a_score_depends_on_the_prompts_and_not_on_their_order_or_number_of_responses() -> None:
    said = ["Gives it sorted.", "Opens a canvas.", "Delivers it.", "Strokes a stream."]
    straight = retrieval(PROMPTS, said, ["a"] * 4)
    assert retrieval(PROMPTS[::-1], said[::-1], ["a"] * 4)[::-1] == straight
    assert retrieval(PROMPTS * 2, said * 2, ["a"] * 8) == straight * 2


def test_at_most_fifty_functions_are_searched() -> None:
    many = [f"def f{i}():\n    return alpha{SUFFIX}" for i in range(1)]
    many += [
        f"def g{i}():\n    return {chr(97 + i % 26) * 4}{chr(97 + i // 26) * 4}{SUFFIX}" for i in range(120)
    ]
    (lowest, *_) = retrieval(many, ["¿?"] * len(many), ["a"] * len(many))
    assert lowest == pytest.approx(1 / (1 + 49 / 2)), "all 50 are equal, and share the mean of 1 to 50"


def test_chrf_is_that_of_its_definition() -> None:
    """ "ab" against "abc": precision 1 and 1, recall 2/3 and 1/2 of one and two characters; F2 of the means.

    "abcd" against "abcf": 3/4, 2/3, 1/2 and 0 of one to four characters, both ways.
    """
    found = chrf(["p"] * 4, ["Sort the rows.", "xyz", "ab", "abcd"], ["Sort the rows.", "abc", "abc", "abcf"])
    recall = (2 / 3 + 1 / 2) / 2
    assert found == pytest.approx(
        [100, 0, 100 * 5 * recall / (4 + recall), 100 * (3 / 4 + 2 / 3 + 1 / 2) / 4]
    )
