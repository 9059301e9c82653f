"""Write the reference pages from the code: `python -m docs.generator`; `--check` only compares.

The section `plots:` of dvc.yaml is written too. The pages name no version and no path of a machine, so that
the same code gives the same text.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.generator import commands, metrics, parameters, stages
from docs.generator.text import ROOT, Lines

NOTICE = "<!-- Written by `python -m docs.generator`. Do not edit this page: edit the code it describes. -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every page that differs; with `--check` name them and return 1."""
    parser = argparse.ArgumentParser(description="Write the reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    if check and stale:
        print("run `python -m docs.generator`", file=sys.stderr)
    return int(check and bool(stale))


def pages() -> dict[Path, str]:
    """Every generated file with its text."""
    folder = ROOT / "docs" / "reference"
    texts = {
        "parameters": parameters.parameters(),
        "metrics": metrics.metrics(),
        "cli": commands.commands(),
        "stages": stages.stages(),
    }
    written = {folder / f"{name}.md": _page(lines) for name, lines in texts.items()}
    return written | {ROOT / "dvc.yaml": stages.dvc_yaml()}


def _page(lines: Lines) -> str:
    text = "\n".join([*lines, "", NOTICE, ""])
    return re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    sys.exit(main())
