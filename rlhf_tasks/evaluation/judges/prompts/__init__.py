"""What comparing judges are asked: text files beside this one, or the user's own.

A file holds {prompt}, {first} and {second} once each or more; all of it is one message. Models that write
are to end their reply with a line of one letter, A for the first answer or B for the second.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    from rlhf_tasks.evaluation.judges.comparing import Question

FOLDER = Path(__file__).parent
FIELDS = ("prompt", "first", "second")
LETTERS = ("A", "B")  # of a verdict
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")


def shipped() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.txt"))


def load(name: str, key: str) -> str:
    """The text of a shipped prompt, or of a file, that the parameter `key` asks for.

    Raises:
        UserError: if there is none, or it has no place for the prompt or an answer.
    """
    file = FOLDER / f"{name}.txt" if name in shipped() else Path(name)
    try:
        text = file.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{key}: the prompt {name!r} cannot be read ({error}); give {', '.join(shipped())}, or a file"
        ) from None
    missing = [f"{{{field}}}" for field in FIELDS if f"{{{field}}}" not in text]
    if missing:
        raise UserError(f"{key}: the prompt {file} has no {', '.join(missing)}: it must show all three")
    return text


def filled(text: str, question: Question) -> str:
    """In one pass, so that braces in an answer stay what they are."""
    return _FIELD.sub(lambda match: str(getattr(question, match[1])), text)
