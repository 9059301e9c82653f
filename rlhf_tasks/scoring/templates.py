"""The prompts of language models that judge or score: texts with fields such as {prompt}. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from rlhf_tasks.errors import UserError


def list_templates(folder: Path) -> list[str]:
    """The names of the shipped texts in a folder."""
    return sorted(file.stem for file in folder.glob("*.txt"))


def load_template(name: str, key: str, root: Path, shipped: Path, fields: Collection[str]) -> str:
    """The text of a prompt in the folder `shipped`, or of a file below `root`; `key` is its parameter.

    Raises:
        UserError: if the file cannot be read, or lacks one of the `fields`.
    """
    file = shipped / f"{name}.txt" if name in list_templates(shipped) else root / name
    try:
        text = file.read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{key}: the prompt {name!r} cannot be read ({error}); give "
            f"{', '.join(list_templates(shipped))}, or a file"
        ) from None
    missing = [f"{{{field}}}" for field in fields if f"{{{field}}}" not in text]
    if missing:
        raise UserError(f"{key}: the prompt {file} lacks {', '.join(missing)}; add each of them to the file")
    return text


def fill_template(text: str, values: Mapping[str, str]) -> str:
    """The text with its fields replaced, in one pass: braces in a value stay as they are."""
    return re.sub("{(" + "|".join(values) + ")}", lambda match: values[match[1]], text)
