"""The scorer of preset sentiment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project.imports import load_function

VADER = "rlhf_tasks.scoring.sentiment:vader"


def test_a_positive_text_has_a_higher_score_than_a_negative_one() -> None:
    pytest.importorskip("vaderSentiment")
    vader = load_function(VADER, "preferences.function", Path())
    good, plain, bad = vader(["p"] * 3, ["I love it, it is great!", "It is made of wood.", "I hate this."])
    assert -1 <= bad < plain == 0 < good <= 1


def test_a_missing_package_is_named_before_anything_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    monkeypatch.delitem(sys.modules, "rlhf_tasks.scoring.sentiment", raising=False)
    with pytest.raises(UserError, match="needs `pip install vaderSentiment`"):
        load_function(VADER, "preferences.function", Path())
