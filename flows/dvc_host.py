"""DVC, asked for one thing after another: a line of JSON with the words of a command each, to stdin.

    python -P flows/dvc_host.py MARK

What DVC and its stages print goes to stdout, and after it a line `MARK STATUS`. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys

INTERRUPTED = 130


def main(mark: str) -> None:
    """Answer until the input ends."""
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a stage that reads is not to read the questions
    from dvc.cli import main as dvc

    for line in questions:
        status = int(dvc(json.loads(line)))
        sys.stdout.flush()
        # At once, and after a line's end: what a stage has left running may print, too.
        os.write(1, f"\n{mark} {status}\n".encode())


if __name__ == "__main__":
    status = 0
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        status = INTERRUPTED
    os._exit(status)  # the flow waits for this: no time for taking DVC's modules apart
