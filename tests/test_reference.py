"""The generated reference pages and DVC's plots agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generator.__main__ import pages

ROOT = Path(__file__).parents[1]
PAGES = ["docs/reference/" + name for name in ("parameters.md", "metrics.md", "cli.md", "stages.md")]


@pytest.mark.parametrize("path", [*PAGES, "dvc.yaml"])
def test_a_generated_file_is_what_the_code_gives_now(path: str) -> None:
    """`python -m docs.generator` writes it."""
    assert pages()[ROOT / path] == (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PAGES)
def test_a_generated_page_names_no_version_and_no_path_of_the_machine(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert str(Path.home()) + "/" not in text
    assert not re.search(r"\bv?\d+\.\d+\.\d+\b", text)


def test_links_between_generated_pages_lead_to_a_heading() -> None:
    folder = ROOT / "docs" / "reference"
    headings = {
        page: {
            re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).strip().replace(" ", "-")
            for line in (folder / page).read_text(encoding="utf-8").splitlines()
            if line.startswith("#")
        }
        for page in ("parameters.md", "metrics.md")
    }
    text = (folder / "stages.md").read_text(encoding="utf-8")
    links = re.findall(r"\(([a-z]+\.md)#([\w-]+)\)", text)
    assert links
    assert [(page, anchor) for page, anchor in links if anchor not in headings[page]] == []
