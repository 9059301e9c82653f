"""Texts and questions that show what a language model still knows: the files in probes/, or a user's file.

A file of texts holds paragraphs with an empty line between two. A question is a paragraph too: a line with
its beginning, one with the right ending, and one for each wrong ending.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlhf_tasks.errors import UserError

FOLDER = Path(__file__).parent / "probes"
SHIPPED = {"texts": "english_texts.txt", "questions": "english_questions.txt"}
ENGLISH = "english"


class Choice(NamedTuple):
    """A beginning and its endings, the right one first."""

    beginning: str
    endings: tuple[str, ...]


def texts(name: str, root: Path) -> list[str]:
    """The paragraphs of `english`, or of a file below `root`, each on one line.

    Raises:
        UserError: if the file cannot be read, or holds no text.
    """
    lines = [" ".join(lines) for lines in _paragraphs(name, "texts", root)]
    if not lines:
        raise UserError(f"judge.retention.general: {name} holds no text; give paragraphs")
    return lines


def questions(name: str, root: Path) -> list[Choice]:
    """The questions of `english`, or of a file below `root`. An ending begins with a space.

    Raises:
        UserError: if the file cannot be read, or a question has no wrong ending.
    """
    paragraphs = _paragraphs(name, "questions", root)
    short = [" ".join(lines) for lines in paragraphs if len(lines) < 3]
    if short or not paragraphs:
        problem = f"{short[0]!r} has fewer lines" if short else "it holds no question"
        raise UserError(
            f"judge.retention.questions: {name} must hold questions of three lines or more, with an empty "
            f"line between two: a beginning, the right ending, wrong endings; {problem}"
        )
    return [Choice(lines[0], tuple(f" {line}" for line in lines[1:])) for lines in paragraphs]


def _paragraphs(name: str, kind: str, root: Path) -> list[list[str]]:
    file = FOLDER / SHIPPED[kind] if name == ENGLISH else root / name
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"judge.retention: {name!r} cannot be read ({error}); give {ENGLISH}, or a file"
        ) from None
    paragraphs: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return [lines for lines in paragraphs if lines]
