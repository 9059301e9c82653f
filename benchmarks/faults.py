"""What happens when something breaks: `python -m benchmarks.faults` runs the tests that break it.

docs/results/faults.md has a row for each fault, with its test. Each test runs in a process of its own, the
slow ones too, and its result becomes the last cell of the row. `--quick` leaves out the slow tests, `--only
WORD` those whose name lacks the word: their rows keep the result that they have. All tests together take
about an hour on two cores. Exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[1] / "docs/results/faults.md"
ROW = re.compile(r"^(\| .* \| `(tests/[\w/]+\.py::\w+)` \|) (.*) \|$", re.MULTILINE)
"""A row of the table without its result, the test, and the result."""
FAILED = "**failed**"
NOTHING_SELECTED = 5  # an exit status of pytest


def run(test: str, *, quick: bool) -> str | None:
    """Run a test and return its result; None if it is a slow one, which `quick` leaves out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = "not slow and not gpu" if quick else ""
        words = [sys.executable, "-m", "pytest", test, "-m", chosen, f"--junitxml={report}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == NOTHING_SELECTED:
            return None
        if done.returncode:
            print(done.stdout[-5000:] + done.stderr[-2000:], file=sys.stderr)
            return FAILED
        cases = list(ElementTree.parse(report).iter("testcase"))
    skipped = [each.get("message", "") for case in cases for each in case.iter("skipped")]
    if not skipped:
        return "passed"
    reasons = "; ".join(dict.fromkeys(reason.replace("|", "/").replace("\n", " ") for reason in skipped))
    which = "skipped" if len(skipped) == len(cases) else f"passed, but {len(skipped)} of {len(cases)} skipped"
    return f"{which}: {reasons}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="leave out the slow tests")
    parser.add_argument("--only", metavar="WORD", default="", help="run the tests with WORD in their name")
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for row in list(ROW.finditer(text)):
        if options.only in row[2] and (found := run(row[2], quick=options.quick)):
            print(f"{row[2]}: {found}", flush=True)
            text = text.replace(row[0], f"{row[1]} {found} |")
            PAGE.write_text(text, encoding="utf-8")
    return int(any(result == FAILED for _, _, result in ROW.findall(text)))


if __name__ == "__main__":
    sys.exit(main())
