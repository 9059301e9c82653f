"""The scorer of preset sentiment."""

from __future__ import annotations

from examples.sentiment import vader


def test_a_positive_text_has_a_higher_score_than_a_negative_one() -> None:
    good, plain, bad = vader(["p"] * 3, ["I love it, it is great!", "It is made of wood.", "I hate this."])
    assert -1 <= bad < plain == 0 < good <= 1
