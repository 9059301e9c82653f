"""Texts and questions that show what a language model still knows: files beside this one, or the user's.

Texts are paragraphs, an empty line between two. A question is a paragraph too: its beginning, the right
way to go on, and wrong ones, a line each.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlhf_tasks.errors import UserError

FOLDER = Path(__file__).parent
SHIPPED = {"texts": "english_texts.txt", "questions": "english_questions.txt"}
ENGLISH = "english"


class Choice(NamedTuple):
    """A beginning and ways to go on, the right one first."""

    beginning: str
    endings: tuple[str, ...]


def texts(name: str) -> list[str]:
    """The paragraphs of `english`, or of a file, each on one line.

    Raises:
        UserError: if there is none.
    """
    found = [" ".join(lines) for lines in _paragraphs(name, "texts")]
    if not found:
        raise UserError(f"judge.retention.general: {name} holds no text")
    return found


def questions(name: str) -> list[Choice]:
    """The questions of `english`, or of a file; an ending begins with the space that parts it.

    Raises:
        UserError: if it cannot be read, or a question has no wrong ending.
    """
    paragraphs = _paragraphs(name, "questions")
    short = [" ".join(lines) for lines in paragraphs if len(lines) < 3]
    if short or not paragraphs:
        raise UserError(
            f"judge.retention.questions: {name} must hold questions of three lines or more, an empty line "
            f"between two: a beginning, the right way to go on, wrong ones; {short[0]!r} is none"
            if short
            else f"judge.retention.questions: {name} holds no question"
        )
    return [Choice(lines[0], tuple(f" {line}" for line in lines[1:])) for lines in paragraphs]


def _paragraphs(name: str, kind: str) -> list[list[str]]:
    file = FOLDER / SHIPPED[kind] if name == ENGLISH else Path(name)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"judge.retention: {name!r} cannot be read ({error}); give {ENGLISH}, or a file"
        ) from None
    found: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            found[-1].append(line.strip())
        elif found[-1]:
            found.append([])
    return [lines for lines in found if lines]
