"""What the commands share: how they are added to the parser, and checks of their arguments."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import LAST_PORT

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run: TypeAlias = Callable[[argparse.Namespace], int]


def add_command(
    commands: Commands, name: str, run: Run, summary: str, description: str = ""
) -> argparse.ArgumentParser:
    """A parser for one command, which calls `run` with the parsed options."""
    parser = commands.add_parser(name, help=summary, description=description or summary)
    parser.set_defaults(command=run, summary=summary)
    return parser


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more (given: {text})")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be above 0 (given: {text})")
    return value


def port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= LAST_PORT:
        raise argparse.ArgumentTypeError(f"ports go from 1 to {LAST_PORT} (given: {text})")
    return value


def web_address(text: str) -> str:
    """An address of a web server, or an empty text."""
    if text and not re.fullmatch(r"https?://[^/\s]+\S*", text):
        raise argparse.ArgumentTypeError(f"must begin with http:// or https:// and a host (given: {text})")
    return text


def check_output_file(out: Path) -> None:
    """Check that a file can be written, before anything is sampled or paid for. Makes its folder.

    Raises:
        UserError: if the file cannot be written.
    """
    if out.is_dir():
        raise UserError(f"--out {out}: this is a folder; give the name of a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: its folder cannot be made ({error}); give another name") from None
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: {out.parent} is not writable; give another folder")
