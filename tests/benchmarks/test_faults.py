"""The table of faults, and the page that it is written into."""

from __future__ import annotations

from pathlib import Path

from benchmarks import faults


def test_the_page_keeps_the_results_of_tests_that_do_not_run_and_the_part_of_the_long_run(
    tmp_path: Path,
) -> None:
    page, (first, second) = tmp_path / "faults.md", (fault.test for fault in faults.FAULTS[:2])
    page.write_text(f"an old page{faults.MARK}\nfive minutes\n", encoding="utf-8")
    faults.write({first: "passed", "tests/x.py::test_of_a_former_row": "passed"}, page)
    text = page.read_text(encoding="utf-8")
    assert "an old page" not in text
    assert text.endswith(f" |\n{faults.MARK}\nfive minutes\n")
    kept = faults.results_of(text)
    assert (kept[first], kept[second]) == ("passed", faults.NOT_RUN)
    assert "test_of_a_former_row" not in text
    faults.write(kept | {second: "skipped: not root"}, page)
    assert f"`{second}` | skipped: not root |" in page.read_text(encoding="utf-8")
    assert faults.results_of(page.read_text(encoding="utf-8"))[first] == "passed"
