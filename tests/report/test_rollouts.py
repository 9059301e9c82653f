"""The page of rollouts: complete, escaped, bounded, and readable without its script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rlhf_tasks.report import document, rollouts
from tests import small
from tests.report import workspace
from tests.report.test_page import HOSTILE, Document

TRIPS = [{"episode": 768, "guard": "gap", "message": "gap: eval/standardized_gap = 1.2 exceeds 1"}]


def written(root: Path, **changes: Any) -> str:
    rows = pq.read_table(root / "evaluation/ppo/rollouts.parquet").to_pylist()
    kept = rollouts.context(rows, TRIPS, small.view("report").ppo, **changes)
    return document.render("rollouts.html", kept, "rollouts.js")


def test_the_page_shows_each_rollout_and_says_which_are_kept(tmp_path: Path) -> None:
    workspace.put_rollouts(tmp_path)
    found = Document(written(tmp_path))
    for expected in (
        "2 kept updates",
        "3 of 256 rollouts of update 1, episode 256 .",
        "2 of 256 rollouts of update 3, episode 768: guard gap tripped .",
        "at most 32 rollouts of an update",
        "1 post 0 sampled as number 1 2 −1.50 3.50 0.100 −0.200 10",
        "3 post 2 sampled as number 4 no end within 9 tokens 0.600 0.600 0 0.400 −0.200 13",
        "1 · reward_ model , under the rule eos_trick_replace",
    ):
        assert expected.replace(" .", ".") in found.text
    assert "left out" not in found.text
    gaps = [row["data-gap"] for row in found.of("tr") if "data-gap" in row]
    assert gaps == ["0.1", "3.5", "0.25", "-0.5", "0.0"]
    assert "hidden" in found.of("form")[0], "the script shows what only works with it"


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    """The last rollouts of all updates go first, and the page stays below the bound."""
    workspace.put_rollouts(tmp_path, "&" * 1000)
    largest = 100_000 + 3 * (rollouts.CELLS + 10_100)
    html = written(tmp_path, largest=largest)
    text = Document(html).text
    assert "2 of the 5 kept rollouts are left out" in text
    assert "2 of 256 rollouts of update 1" in text
    assert "1 of 256 rollouts of update 3" in text
    assert len(html.encode()) < largest


def test_without_a_heldout_model_there_is_no_gap(tmp_path: Path) -> None:
    columns = "episode update rollouts prompt response length notes score kl advantage"
    row = (256, 1, 16, "a post", "", 1, "", 0.5, 0.1, 0.2)
    workspace.put_rows(tmp_path / "evaluation/ppo/rollouts.parquet", columns, row)
    text = Document(written(tmp_path)).text
    assert "Gap" not in text
    assert "gap first" not in text
    assert "a post (empty) 0.500" in text


def test_hostile_text_stays_text_and_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    workspace.put_rollouts(tmp_path, HOSTILE)
    html = written(tmp_path)
    found = Document(html)
    assert len(found.of("script")) == 1
    assert found.of("img") == []
    assert " ".join(HOSTILE.split()) in found.text
    assert re.findall(r"https?://|@import|url\(", html) == []
    assert {a["href"] for a in found.of("a")} == {"#main", "#rollouts", "#columns", "index.html"}
