"""Human labels: reading a file, and how far a judge agrees with it, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.rows import measure_agreement, read_labels

TEXTS = {"prompt": "p", "answer_a": "x", "answer_b": "y"}


def labels(file: Path, *outcomes: float | None) -> Path:
    lines = [json.dumps(TEXTS | {"outcome": outcome, "by": "me"}) for outcome in outcomes]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


def test_skipped_pairs_are_left_out_and_other_keys_are_not_read(tmp_path: Path) -> None:
    found = read_labels(labels(tmp_path / "labels.jsonl", 1, None, 0.5, 0))
    assert [label.outcome for label in found] == [1.0, 0.5, 0.0]
    assert (found[0].prompt, found[0].answer_a, found[0].answer_b) == ("p", "x", "y")


def test_labels_of_a_spreadsheet_are_read(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("prompt,answer_a,answer_b,outcome\np,x,y,1\np,x,y,\np,x,y,0.5\n", encoding="utf-8")
    assert [label.outcome for label in read_labels(file)] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "p", "outcome": 1}, "answer_a: Field required"),
        (TEXTS, "outcome: Field required"),
        (TEXTS | {"outcome": True}, "outcome: Input should be a valid number"),
        (TEXTS | {"outcome": 2}, "outcome: Input should be less than or equal to 1"),
        (TEXTS | {"outcome": "A"}, "outcome: Value error, could not convert string to float: 'A'"),
    ],
)
def test_a_row_that_is_not_a_label_is_named(tmp_path: Path, row: dict[str, object], problem: str) -> None:
    file = labels(tmp_path / "labels.jsonl", 1)
    file.write_text(f"{file.read_text('utf-8')}\n\n{json.dumps(row)}\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_labels(file)
    first, form = str(caught.value).splitlines()
    assert first == f"{file}:3: {problem}"
    assert "an outcome: 1 (A is better), 0.5, 0 or null" in form


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read: there is no such file"):
        read_labels(tmp_path / "none.jsonl")


def test_agreement_by_hand(tmp_path: Path) -> None:
    """Ties of people are left out of the agreement, failures of both, and κ has three categories."""
    people = read_labels(labels(tmp_path / "labels.jsonl", 1, 0, 1, 0.5, 1))
    result = measure_agreement(people, np.array([1.0, 0.0, 0.0, 1.0, np.nan]))
    assert result is not None
    assert result.agreement is not None
    assert result.agreement.value == pytest.approx(2 / 3)
    # Of four: p = 2/4; e = (people: 2 win, 1 tie, 1 loss; judge: 2 win, 2 loss) = ½·½ + ¼·½ = .375; κ = .2.
    assert result.kappa.value == pytest.approx(0.2)
    assert measure_agreement(people[:1], np.array([np.nan])) is None
    of_tie = measure_agreement(people[3:4], np.array([1.0]))
    assert of_tie is not None
    assert of_tie.agreement is None, "the person did not prefer either"
