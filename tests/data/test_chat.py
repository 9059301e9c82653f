"""Chat templates of the kinds that models have, and the texts that a model reads and writes under them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlhf_tasks.config import Data, Model, Split
from rlhf_tasks.data import tokenizer
from rlhf_tasks.data.chat import DATE, Rendering
from rlhf_tasks.data.readers.readings import Line, Table
from rlhf_tasks.data.readers.tables import Part, assemble
from rlhf_tasks.data.rows import CONVERSATION, Corpus, Problems, Row
from rlhf_tasks.data.splits import complete, fill_splits
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.contracts import check_same_tokenizer

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<assistant>%s{% endif %}"
PLAIN = TURNS + ASKS.replace("%s", "")
OPENS_THOUGHTS = (  # as DeepSeek-R1: an answer is written without its thoughts
    "{% for m in messages %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip() %}{% endif %}"
    "<{{ m.role }}>{{ c }}<eos>\n{% endfor %}" + ASKS.replace("%s", "<think>\n")
)
STRIPS_THOUGHTS = OPENS_THOUGHTS.replace("<think>\n{% endif %}", "{% endif %}")
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% endfor %}" + PLAIN
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<system>Be kind.<eos>\n{% endif %}" + PLAIN
TODAY = "<system>Today is {{ strftime_now('%d %b %Y') }}.<eos>\n" + PLAIN
DATE_STRING = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<system>Today is {{ date_string }}.<eos>\n" + PLAIN
)
ONLY_TALK = "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
TOOLS = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson if m.role == 'tool' else m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}{% endfor %}"
    "<eos>\n{% endfor %}" + ASKS.replace("%s", "")
)


@pytest.fixture
def rendering(chat_model: Path) -> Any:
    words = AutoTokenizer.from_pretrained(chat_model)

    def of(template: str, day: str | None = None) -> Rendering:
        words.chat_template = template
        words.init_kwargs.pop(DATE, None)
        if day is not None:
            words.init_kwargs[DATE] = day
        return tokenizer.ready_rendering(words, "m")

    return of


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def read(rendering: Rendering, *rows: dict[str, Any]) -> tuple[Corpus, str]:
    """The rows, and the report of those that are refused."""
    problems = Problems()
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    lines = [Line(f"t:{number}", row) for number, row in enumerate(rows, start=1)]
    corpus = assemble([Part([(None, "train", Table("t", names, lines))], Data())], rendering, problems)
    return corpus, problems.report() if problems else ""


def only(rendering: Rendering, row: dict[str, Any], role: Any = "sft") -> Row:
    corpus, report = read(rendering, row)
    assert not report
    [found] = corpus[role]["train"]
    return {key: value for key, value in found.items() if key != "source"}


def test_parts_of_text_are_one_text_and_other_parts_are_refused(rendering: Any) -> None:
    parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
    row = only(rendering(PLAIN), {"messages": [user(parts), assistant([{"type": "text", "text": "yes"}])]})
    assert row == {"prompt": "<user>hi there<eos>\n<assistant>", "completion": "yes"}
    image = [*parts, {"type": "image_url", "image_url": "x"}]
    _, report = read(rendering(PLAIN), {"messages": [user(image), assistant("yes")]})
    assert "t:1: malformed: messages[0].content has parts of type image_url, not text" in report


def test_a_prompt_as_text_beside_answers_as_messages_is_the_users_message(rendering: Any) -> None:
    expected = {"prompt": "<user>hi<eos>\n<assistant>", "completion": "yes"}
    assert only(rendering(PLAIN), {"prompt": "hi", "completion": [assistant("yes")]}) == expected
    pair = {"prompt": "hi", "chosen": [assistant("yes")], "rejected": [assistant("no")]}
    found = only(rendering(PLAIN), pair, "preferences")
    assert found == {"prompt": expected["prompt"], "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (assistant("yes"), "\n</think>\n\nyes"),
        (assistant("<think>\nhm\n</think>\n\nyes"), "hm\n</think>\n\nyes"),
        (assistant("yes", reasoning_content="hm"), "hm\n</think>\n\nyes"),
    ],
)
def test_a_prompt_that_begins_the_thoughts_is_continued_by_them(
    answer: dict[str, Any], expected: str, rendering: Any
) -> None:
    row = only(rendering(OPENS_THOUGHTS), {"messages": [user("hi"), answer]})
    assert row == {"prompt": "<user>hi<eos>\n<assistant><think>\n", "completion": expected}


def test_thoughts_of_the_history_are_stripped_and_those_of_the_answer_are_kept(rendering: Any) -> None:
    talk = [user("hi"), assistant("<think>\na\n</think>\n\nyes"), user("so?")]
    row = only(rendering(STRIPS_THOUGHTS), {"messages": [*talk, assistant("<think>\nb\n</think>\n\nno")]})
    assert row["prompt"] == "<user>hi<eos>\n<assistant>yes<eos>\n<user>so?<eos>\n<assistant>"
    assert row["completion"] == "<think>\nb\n</think>\n\nno"


def test_a_template_that_demands_alternation_names_itself(rendering: Any) -> None:
    rows = [
        {"messages": [user("hi"), user("you"), assistant("yes")]},
        {"messages": [user("a"), assistant("b")]},
    ]
    corpus, report = read(rendering(ALTERNATES), *rows)
    assert len(corpus["sft"]["train"]) == 1
    expected = "the chat template of the tokenizer of m rejects it: Roles must alternate user/assistant"
    assert f"t:1: malformed: {expected}" in report
    assert "rejects it: division by zero" in read(rendering("{{ 1 / 0 }}"), rows[1])[1]


def test_a_default_system_prompt_is_part_of_the_prompt(rendering: Any) -> None:
    row = only(rendering(DEFAULT_SYSTEM), {"messages": [user("hi"), assistant("yes")]})
    assert row["prompt"] == "<system>Be kind.<eos>\n<user>hi<eos>\n<assistant>"
    assert row["completion"] == "yes"


@pytest.mark.parametrize("template", [TODAY, DATE_STRING])
def test_the_date_of_a_template_is_that_of_the_tokenizer(
    template: str, rendering: Any, chat_model: Path, tmp_path: Path
) -> None:
    row = only(rendering(template, "2024-07-06"), {"messages": [user("hi"), assistant("yes")]})
    assert row["prompt"].startswith("<system>Today is 06 Jul 2024.<eos>\n<user>hi")
    words = AutoTokenizer.from_pretrained(chat_model)
    words.chat_template = template
    words.save_pretrained(tmp_path / "one")
    ready = tokenizer.load_base(Model(base=str(tmp_path / "one"), scratch=None), Data(chat_date="2023-02-01"))
    tokenizer.save(ready, tmp_path / "two")  # the date is that of all stages that load the tokenizer
    loaded = tokenizer.ready_rendering(AutoTokenizer.from_pretrained(tmp_path / "two"), "two")
    assert loaded.chat is not None
    assert "01 Feb 2023" in loaded.chat([user("hi")], True)


CALL = {"id": "c", "type": "function", "function": {"name": "warmth", "arguments": '{"at": "home"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "warmth", "description": None, "parameters": {"type": "object"}},
}
ASKED = [
    user("how warm?"),
    assistant(None, tool_calls=[CALL], name=None),
    {"role": "tool", "tool_call_id": "c", "content": '{"value": 23.5}'},
    assistant("23.5 degrees", tool_calls=None),
]


def test_tools_and_their_calls_reach_the_template(rendering: Any) -> None:
    row = only(rendering(TOOLS), {"messages": ASKED, "tools": [TOOL]})
    assert row["prompt"] == (
        '<tool>{"type": "function", "function": {"name": "warmth", "parameters": {"type": "object"}}}\n'
        "<user>how warm?<eos>\n<assistant><call>warmth at=home<eos>\n"
        '<tool>"{\\"value\\": 23.5}"<eos>\n<assistant>'
    )
    assert row["completion"] == "23.5 degrees"
    called = only(rendering(TOOLS), {"messages": ASKED[:2], "tools": [TOOL]})
    assert called["completion"] == "<call>warmth at=home"


@pytest.mark.parametrize("row", [{"messages": ASKED}, {"messages": [ASKED[0], ASKED[3]], "tools": [TOOL]}])
def test_tools_that_a_template_does_not_write_are_refused(row: dict[str, Any], rendering: Any) -> None:
    message = r"`tools` or `tool_calls`, which the chat template of the tokenizer of m"
    with pytest.raises(UserError, match=message):
        read(rendering(PLAIN), row)


def test_a_message_that_a_template_leaves_out_is_refused(rendering: Any) -> None:
    talk = [user("hi"), {"role": "tool", "content": "23.5"}, assistant("yes")]
    _, report = read(rendering(ONLY_TALK + ASKS.replace("%s", "")), {"messages": talk})
    assert "the chat template of the tokenizer of m leaves out message 1 (role tool)" in report


# ------------------------------------------------------------------------------------------- every turn


def test_every_turn_of_the_assistant_is_a_demonstration_of_what_it_saw(rendering: Any) -> None:
    talk = [user("hi"), assistant("<think>\na\n</think>\n\nyes"), user("so?"), assistant("no")]
    corpus, _ = read(replace(rendering(STRIPS_THOUGHTS), train_on="all"), {"messages": talk})
    first, last = corpus["sft"]["train"]
    assert first["completion"] == "<think>\na\n</think>\n\nyes"
    assert first["prompt"] == "<user>hi<eos>\n<assistant>"
    assert last["prompt"] == "<user>hi<eos>\n<assistant>yes<eos>\n<user>so?<eos>\n<assistant>"
    assert first[CONVERSATION] == last["prompt"]
    assert CONVERSATION not in last


def test_the_turns_of_a_conversation_are_in_one_split_and_only_the_last_is_a_prompt(rendering: Any) -> None:
    begun = [user("hi"), assistant("yes")]
    talks = [{"messages": [*begun, user(f"so {n}?"), assistant(f"no {n}")]} for n in range(12)]
    corpus, _ = read(replace(rendering(PLAIN), train_on="all"), *talks)
    full = complete(fill_splits(corpus, seed=1, sizes={"validation": 3, "test": 3}))
    sizes: dict[Split, int] = {"train": 6, "validation": 3, "test": 3}
    for split, number in sizes.items():
        rows, prompts = full["sft"][split], full["prompts"][split]
        assert len(rows) == 2 * number
        assert len(prompts) == number
        last = {row["prompt"] for row in rows if CONVERSATION not in row}
        assert last == {row[CONVERSATION] for row in rows if CONVERSATION in row}
        assert last == {row["prompt"] for row in prompts}


# --------------------------------------------------------------------------------- laws of odd templates

IM = ("<|im_start|>", "<|im_end|>", "<|eom_id|>")
ASKS_CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + ASKS_CHATML
)
EOS_AT_THE_END = CHATML.replace("assistant\n{% endif %}", "assistant\n{% else %}{{ eos_token }}{% endif %}")
EOS_IN_THE_HISTORY = CHATML.replace(
    "<|im_end|>\n", "<|im_end|>\n{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}", 1
)
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}<|eom_id|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + ASKS_CHATML
)
MARKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.train != false %}"
    "mood: calm\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}" + ASKS_CHATML
)


@pytest.fixture
def base(chat_model: Path, tmp_path: Path) -> Any:
    """A folder whose tokenizer has this template and the tokens of ChatML; its EOS stays `<eos>`."""

    def of(template: str) -> Path:
        words = AutoTokenizer.from_pretrained(chat_model)
        words.add_special_tokens({"additional_special_tokens": list(IM)})
        words.chat_template = template
        words.save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return of


def made_ready(folder: Path) -> Rendering:
    ready = tokenizer.load_base(Model(base=str(folder), scratch=None))
    return tokenizer.ready_rendering(ready, "m")


@pytest.mark.parametrize("template", [EOS_AT_THE_END, EOS_IN_THE_HISTORY, NEEDS_SYSTEM])
def test_an_answer_is_cut_at_the_first_end_and_the_history_keeps_its_bytes(template: str, base: Any) -> None:
    folder = base(template)
    rendering = made_ready(folder)
    assert rendering.eos == "<|im_end|>"
    talk = [{"role": "system", "content": "be"}, user("hi"), assistant("yes"), user("so")]
    row = only(rendering, {"messages": [*talk, assistant("no")]})
    raw = AutoTokenizer.from_pretrained(folder)
    expected = raw.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert row == {"prompt": expected, "completion": "no"}


def test_the_models_own_folder_has_the_tokenizer_that_is_made_of_it(base: Any, tmp_path: Path) -> None:
    folder = base(EOS_IN_THE_HISTORY)
    tokenizer.save(tokenizer.load_base(Model(base=str(folder), scratch=None)), tmp_path / "data")
    check_same_tokenizer(tmp_path / "data", folder)
    assert load_tokenizer(folder).eos_token == load_tokenizer(tmp_path / "data").eos_token == "<|im_end|>"


def test_a_tool_call_loses_the_end_that_is_not_eos(base: Any) -> None:
    row = only(made_ready(base(CALLS)), {"messages": ASKED[:2]})
    assert row["completion"] == 'warmth {"at": "home"}'
    two = {"messages": [ASKED[0], assistant(None, tool_calls=[CALL, CALL])]}
    _, report = read(made_ready(base(CALLS)), two)
    assert "leaves out a tool call of message 1 (role assistant)" in report


def test_marks_for_training_decide_what_a_demonstration_is(base: Any) -> None:
    rendering = replace(made_ready(base(MARKS)), train_on="all")
    talk = [user("a"), assistant("b", train=False), user("c"), assistant("d")]
    row = only(rendering, {"messages": talk})
    assert row["completion"] == "d"
    assert row["prompt"].endswith("<|im_start|>assistant\nmood: calm\n")
    _, report = read(rendering, {"messages": [user("a"), assistant("b", train=False)]})
    assert "marks nothing of the completion for training" in report
