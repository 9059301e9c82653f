"""Small examples of a user's data and models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rlhf_tasks import config
from rlhf_tasks.config import Split
from rlhf_tasks.data import tokenizer
from rlhf_tasks.data.chat import Rendering, Unusable
from rlhf_tasks.data.readers import files
from rlhf_tasks.data.readers.readings import Line, Reading
from rlhf_tasks.data.readers.tables import Part, assemble
from rlhf_tasks.data.rows import Corpus, Problems, Role, Row, Writer
from rlhf_tasks.data.splits import fill_splits

NAMED = config.Columns(
    prompt="prompt", completion="completion", chosen="chosen", rejected="rejected", keep=()
)


class Converted(NamedTuple):
    """What a reading makes of the records of its table."""

    rows: list[tuple[Line, dict[str, Any]]]
    left_out: list[tuple[str, str]]
    bad: list[tuple[Line, Unusable]]


def converted(reading: Reading) -> Converted:
    found = Converted([], [], [])
    for line, made in reading.made():
        if isinstance(made, str):
            found.left_out.append((line.where, made))
        elif isinstance(made, Unusable):
            found.bad.append((line, made))
        else:
            found.rows.append((line, made))
    return found


def load(path: Path, data: config.Data, rendering: Rendering, problems: Problems, **split: Any) -> Corpus:
    """The rows of a file or folder, in splits."""
    return fill_splits(assemble([Part(files.tables_of(path, problems), data)], rendering, problems), **split)


def store(rows_by_role: Mapping[Role, Mapping[Split, Iterable[Row]]]) -> Corpus:
    corpus: Corpus = {}
    for role, tables in rows_by_role.items():
        writer = Writer(role)
        for split, rows in tables.items():
            for row in rows:
                writer.add(split, row)
        corpus[role] = writer.finish(tables)
    return corpus


def as_lists(corpus: Corpus) -> dict[Role, dict[Split, list[Row]]]:
    return {role: {split: list(rows) for split, rows in tables.items()} for role, tables in corpus.items()}


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def demonstrations(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i} ?", "completion": f" answer {i}"} for i in range(count)]


def are_disjoint(sets: Iterable[set[Any]]) -> bool:
    every = list(sets)
    return sum(map(len, every)) == len(set().union(*every))


@pytest.fixture
def chat(chat_model: Path) -> Rendering:
    model = config.Model(base=str(chat_model), revision=None, scratch=None)
    return tokenizer.ready_rendering(tokenizer.load_base(model), "chat-model")
