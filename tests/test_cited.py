"""Every test that a page of the documentation names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from benchmarks import faults

ROOT = Path(__file__).parents[1]
CITED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
PAGES = ("results/faults.md", "explanation/security.md", "how-to/other-machines.md")


@pytest.mark.parametrize("name", PAGES)
def test_every_test_that_a_page_cites_exists(name: str) -> None:
    cited = CITED.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert cited
    for file, test in cited:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert not test or test in found, f"{name} cites {file}::{test}"


def test_the_command_reads_the_table_of_faults_which_has_no_failure() -> None:
    rows = faults.ROW.findall(faults.PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 20
    assert [row for row in rows if row[2] == faults.FAILED] == []
