"""The table of faults: the results of its tests, and the page that it is written into."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import faults

TESTS = """\
import pytest

def test_holds() -> None:
    pass

def test_breaks() -> None:
    assert 1 == 2, "one is not two"

def test_lacks() -> None:
    pytest.skip("not root | no package")

@pytest.mark.parametrize("number", [1, 2, 3])
def test_lacks_some(number: int) -> None:
    if number > 1:
        pytest.skip("one is enough")

@pytest.mark.slow
def test_takes_long() -> None:
    pass
"""


@pytest.mark.e2e
def test_the_result_of_a_test_is_what_pytest_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n", encoding="utf-8")
    file = tmp_path / "test_faults.py"
    file.write_text(TESTS, encoding="utf-8")

    def found(name: str, *, quick: bool = True) -> str | None:
        return faults.run(f"{file}::{name}", quick=quick)

    assert found("test_holds") == "passed"
    assert found("test_lacks") == "skipped: not root / no package"
    assert found("test_lacks_some") == "passed, but 2 of 3 skipped: one is enough"
    assert (found("test_takes_long"), found("test_takes_long", quick=False)) == (None, "passed")
    assert capsys.readouterr().err == ""
    assert found("test_breaks") == faults.FAILED
    assert "one is not two" in capsys.readouterr().err
    assert found("test_that_is_not_there") == faults.FAILED


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
