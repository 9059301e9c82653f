"""Conversations as text. `chat` writes a turn as `<ROLE>CONTENT<eos>`, and asks by `<assistant>`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_tasks.config import Data, Split
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.readers.readings import Line, Table
from rlhf_tasks.data.readers.tables import Part, assemble
from rlhf_tasks.data.rows import Problems, Role, Row, check_texts
from rlhf_tasks.data.tokenizer import scratch_rendering
from rlhf_tasks.errors import UserError
from tests.data.conftest import NAMED, as_lists, store


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(
    row: dict[str, Any], rendering: Rendering, problems: Problems | None = None
) -> dict[Role, dict[Split, list[Row]]]:
    found = Problems() if problems is None else problems
    corpus = assemble(
        [Part([(None, "train", Table("t", tuple(row), [Line("t:1", row)]))], Data(columns=NAMED))],
        rendering,
        found,
    )
    assert problems is not None or not found, found.report()
    return as_lists(corpus)


def test_the_prompt_ends_with_the_generation_prompt_and_the_completion_follows_without_eos(
    chat: Rendering,
) -> None:
    expected = {"prompt": "<user>hi<eos>\n<assistant>", "completion": "hello", "source": "t:1"}
    as_messages = read({"prompt": [user("hi")], "completion": [assistant("hello")]}, chat)
    as_text = read({"prompt": [user("hi")], "completion": "hello"}, chat)
    one_column = read({"messages": [user("hi"), assistant("hello")]}, chat)
    assert as_messages["sft"]["train"] == [expected]
    assert as_text["sft"]["train"] == [expected]
    assert one_column["sft"]["train"] == [expected]


def test_the_common_start_of_two_conversations_is_the_prompt(chat: Rendering) -> None:
    start = [user("hi"), assistant("hello"), user("joke?")]
    row: dict[str, Any] = {"chosen": [*start, assistant("ha")], "rejected": [*start, assistant("no")]}
    expected = {
        "prompt": "<user>hi<eos>\n<assistant>hello<eos>\n<user>joke?<eos>\n<assistant>",
        "chosen": "ha",
        "rejected": "no",
        "source": "t:1",
    }
    assert read(row, chat)["preferences"]["train"] == [expected]
    assert read({"prompt": "joke?"} | row, chat)["preferences"]["train"] == [expected]
    assert read({"prompt": start} | row, chat)["preferences"]["train"] == [expected]
    answers = {"prompt": start, "chosen": [assistant("ha")], "rejected": [assistant("no")]}
    assert read(answers, chat)["preferences"]["train"] == [expected]


def test_equal_conversations_are_reported_as_chosen_equal_to_rejected(chat: Rendering) -> None:
    talk = [user("hi"), assistant("hello")]
    corpus = read({"chosen": talk, "rejected": list(talk)}, chat)
    problems = Problems()
    check_texts(store(corpus), chat.eos, problems)
    assert {name: n for name, n in problems.counts().items() if n} == {"chosen_is_rejected": 1}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": " ", "completion": [assistant("x")]}, "empty"),
        ({"prompt": [{"role": "user"}], "completion": "x"}, "malformed"),
        ({"prompt": ["hi"], "completion": "x"}, "malformed"),
        ({"prompt": [user(" ")], "completion": "x"}, "empty"),
        ({"prompt": [user("hi")], "completion": [assistant("")]}, "empty"),
        ({"prompt": [user("hi")], "completion": [assistant("\udc80")]}, "not_utf8"),
        ({"messages": [assistant("hi"), {"role": "system", "content": "x"}]}, "malformed"),
        ({"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]}, "malformed"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_a_bad_row(
    row: dict[str, Any], reason: str, chat: Rendering
) -> None:
    problems = Problems()
    assert read(row, chat, problems) in (
        {"sft": {"train": []}},
        {"preferences": {"train": []}},
    )
    (line,) = problems.lines()
    assert [fault["reason"] for fault in json.loads(line)["problems"]] == [reason]


def test_a_template_that_rewrites_the_prompt_is_a_bad_row() -> None:
    def numbered(messages: list[dict[str, Any]], answer_follows: bool, tools: object = None) -> str:
        return f"{len(messages)}: {messages}"

    problems = Problems()
    read({"prompt": [user("hi")], "completion": "x"}, Rendering("", "<eos>", numbered, "t"), problems)
    assert problems.counts()["malformed"] == 1


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(UserError, match="a tokenizer trained from scratch has no chat template"):
        read({"messages": [user("hi"), assistant("x")]}, scratch_rendering())


def test_eos_text_at_an_answers_end_is_dropped_as_the_token_is_added_later() -> None:
    row = {"prompt": "q", "chosen": " a<eos>\n", "rejected": " b <eos> c"}
    (read_row,) = read(row, scratch_rendering())["preferences"]["train"]
    assert (read_row["chosen"], read_row["rejected"]) == (" a", " b <eos> c")


def test_bos_is_put_before_plain_prompts_once_and_not_before_rendered_ones(chat: Rendering) -> None:
    with_bos = Rendering(bos="<s>", eos="<eos>", chat=chat.chat, tokenizer="t")
    rows = [{"prompt": text, "completion": "x"} for text in ("q", "<s>q")]
    prompts = [read(row, with_bos)["sft"]["train"][0]["prompt"] for row in rows]
    assert prompts == ["<s>q", "<s>q"]
    rendered = read({"prompt": [user("q")], "completion": "x"}, with_bos)
    assert rendered["sft"]["train"][0]["prompt"].startswith("<user>")
