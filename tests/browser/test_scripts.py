"""A planted script in an answer, a prompt or a name stays text in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.browser.conftest import Reader
from tests.report import test_comparison, test_page, workspace

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


def test_a_planted_script_stays_text_in_the_comparison(tmp_path: Path, reader: Reader) -> None:
    runs = [replace(run, experiment=f"{run.experiment}{PLANTED}") for run in test_comparison.RUNS]
    (tmp_path / "comparison.html").write_text(test_comparison.written(runs), encoding="utf-8")
    assert_text(reader, (tmp_path / "comparison.html").as_uri())
