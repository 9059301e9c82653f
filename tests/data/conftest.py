"""Small stands-ins for a user's data, models and parameter files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.config import PrepareView
from rlhf_tasks.data import tokenizer
from rlhf_tasks.data.tables import Rendering
from rlhf_tasks.data.tokenizer import scratch_rendering
from tests import small

ROOT = Path(__file__).parents[2]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


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
    return config.Columns(prompt="prompt", completion="completion", chosen="chosen", rejected="rejected")


@pytest.fixture
def prepare_view() -> Callable[..., PrepareView]:
    """The shipped parameters with some `{"data.source": "files", …}` changed, as stage prepare sees them."""

    def build(changes: Mapping[str, Any]) -> PrepareView:
        tree = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        for key, value in ({"promotion": None, "judge.judges": [small.HELDOUT]} | dict(changes)).items():
            *path, last = key.split(".")
            section = tree
            for part in path:
                section = section[part]
            section[last] = value
        return config.PrepareView.of(config.validate(tree, "test"))

    return build


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("chat-model")
    words = tokenizer.train(
        config.Scratch(
            family="llama", hidden_size=8, num_layers=1, num_heads=2, vocab_size=300, tokenizer="bpe"
        ),
        ["some words to train a tokenizer on", "<user>hello<assistant>"],
        max_length=512,
    )
    words.chat_template = CHAT
    words.save_pretrained(folder)
    return folder


@pytest.fixture
def chat(chat_model: Path) -> Rendering:
    model = config.Model(base=str(chat_model), revision=None, scratch=None)
    return tokenizer.ready_rendering(tokenizer.ready(model), "chat-model")
