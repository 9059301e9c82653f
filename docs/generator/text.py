"""What the pages share: the project's YAML files, and docstrings as sentences."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
Lines = Iterator[str]


def load_yaml(path: str) -> Any:
    """A YAML file of the project, by its path from the root."""
    return YAML(typ="safe", pure=True).load((ROOT / path).read_text(encoding="utf-8"))


def sentence(text: str) -> str:
    """A description as one line: a full stop, a capital unless it starts with a name or a formula."""
    text = " ".join(text.split())
    capital = text[:1].upper() if re.match(r"[a-z-]+[ ,:]", text) else text[:1]
    return f"{capital}{text[1:].rstrip('.')}."


def prose(item: object) -> str:
    """A docstring as paragraphs of one line each."""
    parts = (inspect.getdoc(item) or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)
