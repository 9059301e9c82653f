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


def test_the_table_of_faults_has_the_rows_of_its_command_and_no_failure() -> None:
    lines = (ROOT / "docs/results/faults.md").read_text(encoding="utf-8").splitlines()
    table = lines[lines.index(faults.HEAD) + 2 :]
    rows = [row.strip("| ").split(" | ") for row in table[: table.index("")]]
    assert len(rows) >= 20
    assert [row[:3] for row in rows] == [[x.fault, x.happens, f"`{x.test}`"] for x in faults.FAULTS]
    assert [row for row in rows if row[3] == faults.FAILED] == []
