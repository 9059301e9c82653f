"""The prompts of judges that compare: the text files in prompts/, or a file of the user.

A file contains {prompt}, {first} and {second}, each at least once; the whole file is one message. A model
that writes must end its reply with a line of one letter: A for the first response, B for the second.
"""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.pairwise import Question

FOLDER = Path(__file__).parent / "prompts"
FIELDS = Question._fields
LETTERS = ("A", "B")
_FIELD = re.compile("{(" + "|".join(FIELDS) + ")}")


def shipped() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.txt"))


def load(name: str, key: str, root: Path) -> str:
    """The text of a shipped prompt, or of a file below `root`; `key` is the parameter that names it.

    Raises:
        UserError: if the file cannot be read, or lacks a field.
    """
    file = FOLDER / f"{name}.txt" if name in shipped() else root / name
    try:
        text = file.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{key}: the prompt {name!r} cannot be read ({error}); give {', '.join(shipped())}, or a file"
        ) from None
    missing = [f"{{{field}}}" for field in FIELDS if f"{{{field}}}" not in text]
    if missing:
        raise UserError(f"{key}: the prompt {file} lacks {', '.join(missing)}; add each of them to the file")
    return text


def fill(text: str, question: Question) -> str:
    """The text with its fields replaced, in one pass: braces in a response stay as they are."""
    return _FIELD.sub(lambda match: str(getattr(question, match[1])), text)
