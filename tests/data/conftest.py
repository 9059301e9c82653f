"""Small examples of a user's data and models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.data import tokenizer
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.tokenizer import scratch_rendering


def jsonl(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def demonstrations(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"question {i} ?", "completion": f" answer {i}"} for i in range(count)]


@pytest.fixture
def plain() -> Rendering:
    return scratch_rendering()


@pytest.fixture
def columns() -> config.Columns:
    return config.Columns(
        prompt="prompt", completion="completion", chosen="chosen", rejected="rejected", keep=()
    )


@pytest.fixture
def chat(chat_model: Path) -> Rendering:
    model = config.Model(base=str(chat_model), revision=None, scratch=None)
    return tokenizer.ready_rendering(tokenizer.ready(model), "chat-model")
