"""A planted script in an answer, a prompt or a name stays text in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser.conftest import Reader
from tests.report import test_comparison, test_page, test_rollouts, workspace

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.e2e]
PLANTED = (
    "<script>window.planted = 1</script>"
    '<img src="x" onerror="window.planted = 2">'
    "</pre></textarea><svg onload='window.planted = 3'>"
    '<a href="javascript:window.planted = 4">press</a>{{ 7 * 7 }}'
)


def assert_text(reader: Reader, address: str) -> None:
    """Nothing ran, no element came of it, and a reader sees all of it."""
    reader.open(address)
    assert reader.page.evaluate("window.planted") is None
    assert reader.page.locator("script:has-text('planted'), img[onerror], svg[onload]").count() == 0
    assert reader.page.locator("a[href^='javascript']").count() == 0
    assert PLANTED in reader.page.evaluate("document.body.textContent")


def test_a_planted_script_stays_text_in_the_report(tmp_path: Path, reader: Reader) -> None:
    workspace.put_all(tmp_path)
    workspace.put_responses(tmp_path, PLANTED)
    workspace.put_training_samples(tmp_path, PLANTED)
    (tmp_path / "report.html").write_text(test_page.written(tmp_path), encoding="utf-8")
    assert_text(reader, (tmp_path / "report.html").as_uri())


def test_rollouts_are_sorted_filtered_and_searched_and_a_planted_script_stays_text(
    tmp_path: Path, reader: Reader
) -> None:
    workspace.put_rollouts(tmp_path, PLANTED)
    (tmp_path / "rollouts.html").write_text(test_rollouts.written(tmp_path), encoding="utf-8")
    assert_text(reader, (tmp_path / "rollouts.html").as_uri())

    def numbers() -> list[str]:
        """The responses that are visible, in their order."""
        shown = reader.page.locator("tbody tr:visible td:nth-child(3)").all_inner_texts()
        return [text.split("number ")[1][0] for text in shown]

    assert numbers() == ["0", "1", "2", "3", "4"]
    reader.page.get_by_label("Order").select_option("largest gap first (worst)")
    assert numbers() == ["1", "2", "0", "4", "3"]
    reader.page.get_by_label("Update").select_option("768")
    assert numbers() == ["4", "3"]
    reader.page.get_by_label("Search").fill("NUMBER 3")
    assert numbers() == ["3"]
    assert reader.page.locator("output").inner_text() == "1 of 5 rollouts"


def test_a_planted_script_stays_text_in_the_comparison(tmp_path: Path, reader: Reader) -> None:
    runs = [replace(run, experiment=f"{run.experiment}{PLANTED}") for run in test_comparison.RUNS]
    (tmp_path / "comparison.html").write_text(test_comparison.written(runs), encoding="utf-8")
    assert_text(reader, (tmp_path / "comparison.html").as_uri())
