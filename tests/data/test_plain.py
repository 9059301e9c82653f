"""Plain prompts of a model with a chat template: which of them become a user's turn, and who sees that."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_tasks.config import Data, Model
from rlhf_tasks.data import tokenizer
from rlhf_tasks.data.chat import Rendering, marks_of, template
from rlhf_tasks.data.rows import Problems, Role
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import prepare
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.data.conftest import as_lists, jsonl, load

TURN = "<user>hi<eos>\n<assistant>"
Setting = Literal["auto", "always", "never"]


def rendering_of(folder: Path, setting: Setting) -> Rendering:
    ready = tokenizer.load_base(Model(base=str(folder), scratch=None), Data(chat=setting))
    return tokenizer.ready_rendering(ready, "chat-model")


def texts(path: Path, rendering: Rendering, role: Role) -> list[dict[str, Any]]:
    problems = Problems()
    data = Data(source="files", path=str(path))
    sizes = {"validation": 0, "test": 0}
    rows = as_lists(load(path, data, rendering, problems, seed=1, sizes=sizes))[role]["train"]
    assert not problems
    return [
        {key: row[key] for key in row if key in ("prompt", "completion", "chosen", "rejected")}
        for row in rows
    ]


PLAIN: dict[Role, dict[str, Any]] = {
    "sft": {"prompt": "hi", "completion": " yes"},
    "preferences": {"prompt": "hi", "chosen": " yes", "rejected": " no"},
    "prompts": {"prompt": "hi"},
}


@pytest.mark.parametrize("role", PLAIN)
def test_plain_texts_are_read_as_the_same_texts_in_messages(
    role: Role, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendering, plain = rendering_of(chat_model, "auto"), PLAIN[role]
    roles = {"prompt": "user"}
    as_messages = {
        name: [{"role": roles.get(name, "assistant"), "content": text.strip()}]
        for name, text in plain.items()
    }
    found = texts(jsonl(tmp_path / "plain.jsonl", plain), rendering, role)
    assert "1 plain prompt(s) become a user's turn in the chat template of" in capsys.readouterr().out
    assert found == texts(jsonl(tmp_path / "messages.jsonl", as_messages), rendering, role)
    assert found[0]["prompt"] == TURN
    assert "plain prompt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "prompt", "expected"),
    [
        ("auto", "hi", TURN),
        ("auto", TURN, TURN),
        ("always", TURN, f"<user>{TURN}<eos>\n<assistant>"),
        ("never", "hi", "hi"),
        ("never", TURN, TURN),
    ],
)
def test_the_setting_decides_and_what_holds_the_marks_was_rendered_before(
    setting: Setting, prompt: str, expected: str, chat_model: Path, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": prompt})
    assert texts(file, rendering_of(chat_model, setting), "prompts") == [{"prompt": expected}]


def test_a_system_column_stands_above_a_prompt_that_stays_plain(chat_model: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", {"system": "Be brief.", "prompt": "hi"})
    [row] = texts(file, rendering_of(chat_model, "never"), "prompts")
    assert row["prompt"] == "Be brief.\n\nhi"


def test_prompts_whose_reference_is_a_completion_are_counted_too(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path / "prompts.jsonl", {"prompt": "hi", "completion": "yes"})
    assert texts(file, rendering_of(chat_model, "auto"), "prompts") == [{"prompt": TURN}]
    assert "1 plain prompt(s) become a user's turn" in capsys.readouterr().out


def test_messages_are_rendered_whatever_the_setting(chat_model: Path, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": [{"role": "user", "content": "hi"}]})
    assert texts(file, rendering_of(chat_model, "never"), "prompts") == [{"prompt": TURN}]


MARKS = {
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}": ["[INST]", "[/INST]"],
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}": [
        "<|im_end|>",
        "<|im_start|>",
    ],
    "Hi. {% for m in messages %}USER: {{ m.content }} {% endfor %}ASSISTANT:": ["Hi. USER:", "ASSISTANT:"],
    "{{ bos_token }}{{ messages[0].content }}": [],
}


@pytest.fixture
def words(chat_model: Path) -> PreTrainedTokenizerBase:
    words = AutoTokenizer.from_pretrained(chat_model)
    special = ["<|im_start|>", "<|im_end|>", "<s>"]
    words.add_special_tokens({"additional_special_tokens": special, "bos_token": "<s>"})
    return words


@pytest.mark.parametrize("source", MARKS)
def test_the_marks_of_a_template_are_its_special_tokens_or_the_lines_next_to_the_turn(
    source: str, words: PreTrainedTokenizerBase
) -> None:
    words.chat_template = source
    assert marks_of(words, template(words)) == MARKS[source]


def test_always_needs_a_chat_template(words: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    words.chat_template = None
    words.save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"data\.chat: always needs a chat template, .* has none; set it to auto"
    ):
        tokenizer.load_base(Model(base=str(tmp_path), scratch=None), Data(chat="always"))
    assert tokenizer.ready_rendering(words, "m").plain_kind("hi") == "plain"
    assert tokenizer.read_plain(words, ["hi"]) == ["hi"]


def test_a_template_that_rejects_a_turn_leaves_plain_prompts_and_says_so(
    words: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    words.chat_template = "{{ raise_exception('first a system turn') }}"
    assert tokenizer.read_plain(words, ["hi"]) == ["hi"]
    assert "rejects a user's turn alone (first a system turn): plain prompts stay" in capsys.readouterr().out
    words.init_kwargs["data_chat"] = "always"
    with pytest.raises(UserError, match=r"data\.chat: always, but the chat template of m rejects"):
        tokenizer.ready_rendering(words, "m")


@pytest.mark.parametrize(("setting", "expected"), [("auto", TURN), ("always", TURN), ("never", "hi")])
def test_a_prompt_that_somebody_writes_later_is_read_as_the_data_was(
    setting: Setting, expected: str, chat_model: Path, tmp_path: Path
) -> None:
    tokenizer.save(
        tokenizer.load_base(Model(base=str(chat_model), scratch=None), Data(chat=setting)), tmp_path
    )
    again = load_tokenizer(tmp_path)
    assert tokenizer.read_plain(again, ["hi", TURN]) == [expected, TURN]


def prepared(chat_model: Path, changes: dict[str, Any]) -> dict[str, float]:
    given = {"model.base": str(chat_model), "model.scratch": None, "judge.judges": [small.HELDOUT]}
    sizes = {"data.num_test": 2, "data.num_validation": 2, "data.max_prompt_tokens": 200}
    return prepare.run(small.view("prepare", given | sizes | changes), Paths(), NullTracker("prepare"))


def test_prepare_says_what_became_of_plain_prompts_and_counts_it(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = [{"prompt": f"say {n}", "completion": f" {n}"} for n in range(9)]
    jsonl(tmp_path / "my.jsonl", *plain, {"prompt": TURN, "completion": "b"})
    metrics = prepared(chat_model, {"data.source": "files", "data.path": "my.jsonl"})
    said = " ".join(capsys.readouterr().out.split())
    assert "9 plain prompt(s) become a user's turn in the chat template of" in said
    assert "1 plain prompt(s) hold <eos> of the chat template of" in said
    assert metrics["rows/as_turns"] == 9


@pytest.mark.parametrize(("setting", "start"), [("auto", "<user>"), ("never", "")])
def test_a_function_has_plain_prompts_too(
    setting: Setting, start: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "[{'prompt': f'{n} + 1 =', 'completion': f'{n + 1}'} for n in range(20)]"
    (tmp_path / "sums.py").write_text(f"def rows(): return {{'sft': {rows}}}", encoding="utf-8")
    prepared(chat_model, {"data.source": "sums:rows", "data.chat": setting})
    for row in pq.read_table("data/sft/train.parquet").to_pylist():
        assert row["prompt"].startswith(start or tuple("0123456789"))
        assert row["completion"].isdecimal()
