"""Chat templates of the kinds that models have: what a model reads and writes under them; plain prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_tasks.config import Data, Model, Split
from rlhf_tasks.data import tokenizer
from rlhf_tasks.data.chat import DATE, Rendering, marks_of, template
from rlhf_tasks.data.readers.readings import Line, Table
from rlhf_tasks.data.readers.tables import Part, assemble
from rlhf_tasks.data.rows import CONVERSATION, Corpus, Problems, Role, Row, check_texts
from rlhf_tasks.data.splits import complete, fill_splits
from rlhf_tasks.data.tokenizer import load_tokenizer, scratch_rendering
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.contracts import check_same_tokenizer
from tests import small
from tests.data.conftest import as_lists, jsonl, load

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}"
TURN = "<user>hi<eos>\n<assistant>"
Setting = Literal["auto", "always", "never"]
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


def test_of_several_templates_the_default_one_renders(chat_model: Path, tmp_path: Path) -> None:
    words = AutoTokenizer.from_pretrained(chat_model)
    words.chat_template = PLAIN
    alone = tokenizer.ready_rendering(words, "m")
    words.chat_template = {"default": PLAIN, "tool_use": TOOLS}
    words.save_pretrained(tmp_path)
    several = load_tokenizer(tmp_path)
    assert isinstance(several.chat_template, dict)
    found = tokenizer.ready_rendering(several, "m")
    assert found.marks == alone.marks
    assert found.chat is not None
    assert found.chat([user("hi")], True) == TURN
    several.chat_template = {"tool_use": TOOLS}
    with pytest.raises(UserError, match=r"several chat templates \(tool_use\), and none is named default"):
        tokenizer.ready_rendering(several, "m")


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


def only(rendering: Rendering, row: dict[str, Any]) -> Row:
    corpus, report = read(rendering, row)
    assert not report
    [found] = [row for tables in corpus.values() for rows in tables.values() for row in rows]
    return {key: value for key, value in found.items() if key != "source"}


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


HI, YES = user("hi"), assistant("yes")
HI_YES = {"prompt": "<user>hi<eos>\n<assistant>", "completion": "yes"}
PARTS = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]
START = [HI, YES, user("joke?")]
ANSWERS: dict[str, Any] = {"chosen": [assistant("ha")], "rejected": [assistant("no")]}
WHOLE: dict[str, Any] = {name: [*START, *answer] for name, answer in ANSWERS.items()}
PAIR = {
    "prompt": "<user>hi<eos>\n<assistant>yes<eos>\n<user>joke?<eos>\n<assistant>",
    "chosen": "ha",
    "rejected": "no",
}
THOUGHT = HI_YES["prompt"] + "<think>\n"
OLD_THOUGHTS = [HI, assistant("<think>\na\n</think>\n\nyes"), user("so?")]
WARMTH = (
    '<tool>{"type": "function", "function": {"name": "warmth", "parameters": {"type": "object"}}}\n'
    "<user>how warm?<eos>\n<assistant>"
)


@pytest.mark.parametrize(
    ("template", "row", "expected"),
    [
        (PLAIN, {"messages": [HI, YES]}, HI_YES),
        (PLAIN, {"prompt": [HI], "completion": [YES]}, HI_YES),
        (PLAIN, {"prompt": [HI], "completion": "yes"}, HI_YES),
        (PLAIN, {"prompt": "hi", "completion": [YES]}, HI_YES),
        (
            PLAIN,
            {"messages": [user(PARTS), assistant([{"type": "text", "text": "yes"}])]},
            HI_YES | {"prompt": "<user>hi there<eos>\n<assistant>"},
        ),
        (PLAIN, {"prompt": "hi", **ANSWERS}, PAIR | {"prompt": HI_YES["prompt"]}),
        (PLAIN, WHOLE, PAIR),
        (PLAIN, {"prompt": "joke?", **WHOLE}, PAIR),
        (PLAIN, {"prompt": START, **WHOLE}, PAIR),
        (PLAIN, {"prompt": START, **ANSWERS}, PAIR),
        *(
            (OPENS_THOUGHTS, {"messages": [HI, answer]}, {"prompt": THOUGHT, "completion": expected})
            for answer, expected in [
                (YES, "\n</think>\n\nyes"),
                (assistant("<think>\nhm\n</think>\n\nyes"), "hm\n</think>\n\nyes"),
                (assistant("yes", reasoning_content="hm"), "hm\n</think>\n\nyes"),
            ]
        ),
        (
            STRIPS_THOUGHTS,
            {"messages": [*OLD_THOUGHTS, assistant("<think>\nb\n</think>\n\nno")]},
            {
                "prompt": "<user>hi<eos>\n<assistant>yes<eos>\n<user>so?<eos>\n<assistant>",
                "completion": "<think>\nb\n</think>\n\nno",
            },
        ),
        (
            DEFAULT_SYSTEM,
            {"messages": [HI, YES]},
            HI_YES | {"prompt": "<system>Be kind.<eos>\n" + HI_YES["prompt"]},
        ),
        (
            TOOLS,
            {"messages": ASKED, "tools": [TOOL]},
            {
                "prompt": WARMTH + '<call>warmth at=home<eos>\n<tool>"{\\"value\\": 23.5}"<eos>\n<assistant>',
                "completion": "23.5 degrees",
            },
        ),
        (
            TOOLS,
            {"messages": ASKED[:2], "tools": [TOOL]},
            {"prompt": WARMTH, "completion": "<call>warmth at=home"},
        ),
    ],
)
def test_a_row_is_what_the_model_sees_and_what_it_writes(
    template: str, row: dict[str, Any], expected: dict[str, str], rendering: Any
) -> None:
    """Thoughts of the history are left out, those of the answer are kept; no answer has its EOS."""
    assert only(rendering(template), row) == expected


WHOSE = "the chat template of the tokenizer of m"


@pytest.mark.parametrize(
    ("template", "row", "fault"),
    [
        (PLAIN, {"prompt": " ", "completion": [assistant("x")]}, "empty"),
        (PLAIN, {"prompt": [{"role": "user"}], "completion": "x"}, "malformed"),
        (PLAIN, {"prompt": ["hi"], "completion": "x"}, "malformed"),
        (PLAIN, {"prompt": [user(" ")], "completion": "x"}, "empty"),
        (PLAIN, {"prompt": [HI], "completion": [assistant("")]}, "empty"),
        (PLAIN, {"prompt": [HI], "completion": [assistant("\udc80")]}, "not_utf8"),
        (PLAIN, {"messages": [assistant("hi"), {"role": "system", "content": "x"}]}, "malformed"),
        (PLAIN, {"chosen": [user("a"), YES], "rejected": [user("b"), YES]}, "malformed"),
        (
            PLAIN,
            {"messages": [user([*PARTS, {"type": "image_url", "image_url": "x"}]), YES]},
            "malformed: messages[0].content has parts of type image_url, not text",
        ),
        (
            ALTERNATES,
            {"messages": [HI, user("you"), YES]},
            f"malformed: {WHOSE} rejects it: Roles must alternate user/assistant",
        ),
        ("{{ 1 / 0 }}", {"messages": [HI, YES]}, f"malformed: {WHOSE} rejects it: division by zero"),
        ("{{ messages | length }}: {{ messages }}", {"prompt": [HI], "completion": "x"}, "malformed"),
        (
            ONLY_TALK + ASKS.replace("%s", ""),
            {"messages": [HI, {"role": "tool", "content": "23.5"}, YES]},
            f"malformed: {WHOSE} leaves out message 1 (role tool)",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_is_a_bad_row(
    template: str, row: dict[str, Any], fault: str, rendering: Any
) -> None:
    corpus, report = read(rendering(template), row)
    assert not any(len(rows) for tables in corpus.values() for rows in tables.values())
    reason = fault.partition(":")[0]
    assert report.startswith(f"1 row(s) of the data cannot be used (1 {reason}):\n  t:1: {fault}")


def test_a_row_that_a_template_rejects_leaves_the_others(rendering: Any) -> None:
    rows = [{"messages": [HI, user("you"), YES]}, {"messages": [HI, YES]}]
    assert len(read(rendering(ALTERNATES), *rows)[0]["sft"]["train"]) == 1


def test_an_unpaired_label_is_rendered_as_a_side_of_a_pair(rendering: Any, tmp_path: Path) -> None:
    labels, data = [{"messages": [HI, YES], "label": 1}], Data(source="files", format="unpaired_labels")
    file, sizes = jsonl(tmp_path / "rows.jsonl", *labels), {"validation": 0, "test": 0}
    found = as_lists(load(file, data, rendering(PLAIN), Problems(), seed=1, sizes=sizes))
    pair = only(rendering(PLAIN), {"prompt": [HI], "chosen": [YES], "rejected": [YES]})
    assert found["preferences"]["train"] == [pair | {"rejected": None, "source": "rows.jsonl:1"}]


def test_equal_conversations_are_reported_as_chosen_equal_to_rejected(rendering: Any) -> None:
    corpus, _ = read(rendering(PLAIN), {"chosen": [HI, YES], "rejected": [HI, YES]})
    problems = Problems()
    check_texts(corpus, "<eos>", problems)
    assert {name: n for name, n in problems.counts().items() if n} == {"chosen_is_rejected": 1}


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(UserError, match="a tokenizer trained from scratch has no chat template"):
        read(scratch_rendering(), {"messages": [HI, YES]})


def test_eos_text_at_an_answers_end_is_dropped_as_the_token_is_added_later() -> None:
    row = only(scratch_rendering(), {"prompt": "q", "chosen": " a<eos>\n", "rejected": " b <eos> c"})
    assert (row["chosen"], row["rejected"]) == (" a", " b <eos> c")


def test_bos_is_put_before_plain_prompts_once_and_not_before_rendered_ones(rendering: Any) -> None:
    with_bos = Rendering(bos="<s>", eos="<eos>", chat=rendering(PLAIN).chat, tokenizer="t")
    rows = [{"prompt": text, "completion": "x"} for text in ("q", "<s>q")]
    assert [only(with_bos, row)["prompt"] for row in rows] == ["<s>q", "<s>q"]
    assert only(with_bos, {"prompt": [user("q")], "completion": "x"})["prompt"].startswith("<user>")


def test_a_rendered_prompt_begins_with_bos_where_its_template_does(rendering: Any) -> None:
    for written, begins in ((PLAIN, "<user>"), ("<s>" + PLAIN, "<s><user>")):
        known = replace(rendering(written), bos="<s>", plain="auto", marks=["<user>"])
        rows = [{"prompt": text, "completion": "x"} for text in ([user("q")], "<user>q<eos>\n")]
        assert [only(known, row)["prompt"].partition("q")[0] for row in rows] == [begins, begins]


def test_the_blank_before_a_text_is_no_part_of_a_turn(rendering: Any) -> None:
    row = only(rendering(PLAIN), {"prompt": [user("q")], "chosen": " a", "rejected": "  b"})
    assert (row["chosen"], row["rejected"]) == ("a", "  b")


def test_a_function_may_give_the_split(rendering: Any) -> None:
    lines = [Line(f"f:{fold}", {"split": f"fold_{fold}"}) for fold in range(2)]
    part = Part(
        [(None, "train", Table("f", ("split",), lines))],
        Data(),
        lambda record: {
            "prompt": "q",
            "completion": "a",
            "split": "test" if record["split"] == "fold_1" else "train",
        },
    )
    corpus = assemble([part], scratch_rendering(), problems := Problems())
    assert {split: len(rows) for split, rows in corpus["sft"].items() if len(rows)} == {"train": 1, "test": 1}
    assert not problems


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


@pytest.mark.parametrize("row", [{"messages": ASKED}, {"messages": [ASKED[0], ASKED[3]], "tools": [TOOL]}])
def test_tools_that_a_template_does_not_write_are_refused(row: dict[str, Any], rendering: Any) -> None:
    message = r"`tools` or `tool_calls`, which the chat template of the tokenizer of m"
    with pytest.raises(UserError, match=message):
        read(rendering(PLAIN), row)


# ------------------------------------------------------------------------------------------- every turn


def test_every_turn_of_the_assistant_is_a_demonstration_of_what_it_saw(rendering: Any) -> None:
    talk = [*OLD_THOUGHTS, assistant("no")]
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


def made_ready(folder: Path, setting: Setting = "auto") -> Rendering:
    ready = tokenizer.load_base(Model(base=str(folder), scratch=None), Data(chat=setting))
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


# ------------------------------------------------------------------------------------------ plain prompts


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


PLAIN_TEXTS: dict[Role, dict[str, Any]] = {
    "sft": {"prompt": "hi", "completion": " yes"},
    "preferences": {"prompt": "hi", "chosen": " yes", "rejected": " no"},
    "prompts": {"prompt": "hi"},
}


@pytest.mark.parametrize("role", PLAIN_TEXTS)
def test_plain_texts_are_read_as_the_same_texts_in_messages(
    role: Role, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rendering, plain = made_ready(chat_model, "auto"), PLAIN_TEXTS[role]
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
    ("setting", "row", "expected"),
    [
        ("auto", {"prompt": "hi"}, TURN),
        ("auto", {"prompt": TURN}, TURN),
        ("always", {"prompt": TURN}, f"<user>{TURN}<eos>\n<assistant>"),
        ("never", {"prompt": "hi"}, "hi"),
        ("never", {"prompt": TURN}, TURN),
        ("never", {"prompt": [user("hi")]}, TURN),
        ("never", {"prompt": "hi", "system": "Be brief."}, "Be brief.\n\nhi"),
    ],
)
def test_the_setting_decides_but_for_messages_and_what_holds_the_marks_was_rendered_before(
    setting: Setting, row: dict[str, Any], expected: str, chat_model: Path, tmp_path: Path
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", row)
    assert texts(file, made_ready(chat_model, setting), "prompts") == [{"prompt": expected}]


def test_prompts_whose_reference_is_a_completion_are_counted_too(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path / "prompts.jsonl", {"prompt": "hi", "completion": "yes"})
    assert texts(file, made_ready(chat_model, "auto"), "prompts") == [{"prompt": TURN}]
    assert "1 plain prompt(s) become a user's turn" in capsys.readouterr().out


MARKS_WRITTEN = {
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


@pytest.mark.parametrize("source", MARKS_WRITTEN)
def test_the_marks_of_a_template_are_its_special_tokens_or_the_lines_next_to_the_turn(
    source: str, words: PreTrainedTokenizerBase
) -> None:
    words.chat_template = source
    assert marks_of(words, template(words)) == MARKS_WRITTEN[source]


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


PREPARED = {
    "judge.judges": [small.HELDOUT],
    "data.num_test": 2,
    "data.num_validation": 2,
    "data.max_prompt_tokens": 200,
}


def test_prepare_says_what_became_of_plain_prompts_and_counts_it(
    chat_model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [{"prompt": f"say {n}", "completion": f" {n}"} for n in range(9)]
    jsonl(here / "my.jsonl", *plain, {"prompt": TURN, "completion": "b"})
    model = {"model.base": str(chat_model), "model.scratch": None}
    metrics = small.run("prepare", PREPARED | model | {"data.source": "files", "data.path": "my.jsonl"})
    said = " ".join(capsys.readouterr().out.split())
    assert "9 plain prompt(s) become a user's turn in the chat template of" in said
    assert "1 plain prompt(s) hold <eos> of the chat template of" in said
    assert metrics["rows/as_turns"] == 9


@pytest.mark.parametrize(("setting", "start"), [("auto", "<user>"), ("never", "")])
def test_a_function_has_plain_prompts_too(setting: Setting, start: str, chat_model: Path, here: Path) -> None:
    rows = "[{'prompt': f'{n} + 1 =', 'completion': f'{n + 1}'} for n in range(20)]"
    (here / "sums.py").write_text(f"def rows(): return {{'sft': {rows}}}", encoding="utf-8")
    model = {"model.base": str(chat_model), "model.scratch": None}
    small.run("prepare", PREPARED | model | {"data.source": "sums:rows", "data.chat": setting})
    for row in pq.read_table("data/sft/train.parquet").to_pylist():
        assert row["prompt"].startswith(start or tuple("0123456789"))
        assert row["completion"].isdecimal()
