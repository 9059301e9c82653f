"""The table of architectures: a family that crashes or never ends costs only its own row."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks import architectures
from benchmarks.architectures import NOTED, REFUSED, RIGHT, UNTRIED, Outcome, outcome, page, tried


@pytest.mark.parametrize(
    ("family", "kind", "note"),
    [
        ("gpt_neox", RIGHT, ""),
        ("xlnet", REFUSED, "sampling and training agree: off by"),
        ("gemma3", UNTRIED, "see gemma3_text"),
    ],
)
def test_the_verdict_on_a_family(family: str, kind: str, note: str) -> None:
    found = outcome(family)
    assert found.kind == kind
    assert found.note.startswith(note)


def test_a_family_that_ends_its_process_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "outcome", lambda family: os._exit(11))
    assert tried("gpt2") == Outcome("gpt2", UNTRIED, None, "the process crashed")


def test_a_family_that_never_ends_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "outcome", lambda family: time.sleep(60))
    assert tried("gpt2", seconds=0.2).note == "took longer than 0 seconds"


def test_the_page_counts_and_lists_every_family() -> None:
    outcomes = [
        Outcome("a", RIGHT, 2e-6), Outcome("b", NOTED, 1e-6, "no reward model"),
        Outcome("c", REFUSED, 1.0, "x | y"), Outcome("d", UNTRIED, None, "crashed"),
        Outcome("e", RIGHT, 1e-6),
    ]  # fmt: skip
    text = page(outcomes)
    assert "| right | 2 |" in text
    assert "a (2e-06), e (1e-06)." in text
    assert "| c | x / y |" in text
