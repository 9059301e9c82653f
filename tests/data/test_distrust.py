"""What a data set makes doubtful itself is not trained on: broken files, one column twice, ties."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config import Columns, Data
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import Problems, Row
from rlhf_tasks.data.tokenizer import scratch_rendering
from rlhf_tasks.errors import UserError
from tests import small
from tests.conftest import Command
from tests.data import conftest
from tests.data.conftest import jsonl


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


BROKEN = {
    'bad,"a "stray" note\nINSIDE one,of a note\nend"\nr,b\n': 3,
    'bad,"a stray", then\nINSIDE one,of a note\nend"\nr,b\n': 3,
    'bad,"a note, "\nINSIDE one,of a note\nend"\nr,b\n': 5,
    'bad,"a note\nINSIDE one,of a note\nr,b\n': 3,
    'r,b\nbad,"a note\nINSIDE one,of a note\ns,"b"\n': 4,
    'bad,"a note\nof",two,"lines\nINSIDE one,of a note"\nr,b\n': 3,
    '"bad,a note\nINSIDE one,of a note"\nr,b\n': 3,
}
"""The rest of a CSV file, and the line of its broken record."""


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize(("text", "line"), BROKEN.items())
def test_a_csv_record_without_a_known_end_refuses_the_file(text: str, line: int, separator: str) -> None:
    file = Path(f"sft.{'csv' if separator == ',' else 'tsv'}")
    content = f"prompt,completion\nq,a\n{text}".replace(",", separator)
    file.write_text(content, "utf-8", newline="")
    changes = {"data.source": "files", "data.path": str(file), "data.on_bad_row": "quarantine"}
    with pytest.raises(UserError, match=rf"^{file}:{line}: not CSV: .*quarantine cannot .*") as error:
        small.run("prepare", {"judge.judges": [small.HELDOUT], **changes})
    assert "\n" not in str(error.value)


def test_a_csv_line_of_a_wrong_length_without_quotes_is_a_bad_row(rlhf: Command) -> None:
    text = 'prompt,completion\nq,a\nshort\nan, extra,field\n5" pipe,long\nr,"two\nlines"\n'
    Path("sft.csv").write_text(text, "utf-8")
    out = rlhf("data sft.csv").out
    assert "sft: 3 train" in out
    assert re.findall(r"sft.csv:(\d): malformed: (\d) fields", out) == [("3", "1"), ("4", "3")]


INNER = [{"prompt": "INSIDE one", "completion": "of a note"}]
ROWS = [{"prompt": f"q{i}", "completion": f"a{i}", "notes": INNER} for i in range(4)]


@pytest.mark.parametrize("indent", [None, 0, 2])
@pytest.mark.parametrize("start", ["[", "[\n", '{"data":\n['])
def test_a_broken_json_array_refuses_the_file(indent: int | None, start: str, rlhf: Command) -> None:
    text = start + ",\n".join(json.dumps(row, indent=indent) for row in ROWS)
    torn = text.replace('"prompt": "q1"', '"prompt" "q1"') + {"[": "]", "[\n": "\n]"}.get(start, "]}")
    for broken in text, text[:-20], torn:
        Path("rows.json").write_text(broken, "utf-8")
        message = rlhf("data rows.json", status=2).err
        assert "rows.json: its lines are no rows, and as one JSON document it is broken: " in message
    assert f": line {torn[: torn.index('q1')].count(chr(10)) + 1} column " in message


def test_json_lines_end_with_their_lines_whatever_they_hold(rlhf: Command) -> None:
    lines = ['{"prompt": "torn', *map(json.dumps, ROWS), '{"prompt": "p", "completion": ["x",', '{"prompt"']
    Path("rows.jsonl").write_text("\n".join(lines), "utf-8")
    assert re.search(r"sft: 4 train(.|\n)*\(3 malformed\)", rlhf("data rows.jsonl").out)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{prompt: rejected}", "data.columns: prompt and rejected name the same column, 'rejected'"),
        ("{system: ' Chosen'}", "data.columns: chosen and system name the same column, 'chosen'"),
        ("{prompt: output}", "and input below it, completion = output: 'output' in two roles"),
        ("{completion: instruction}", "'instruction' in two roles"),
        ("{system: output}", "'output' in two roles"),
    ],
)
def test_a_column_has_one_role(columns: str, message: str, rlhf: Command) -> None:
    Path("rows.csv").write_text("instruction,input,output\nq,below,a\n", "utf-8")
    Path("params.yaml").write_text(f"data: {{columns: {columns}}}\n", "utf-8")
    assert message in rlhf("data rows.csv", status=2).err


def test_a_named_role_comes_before_a_known_name_and_kept_columns_may_have_roles(rlhf: Command) -> None:
    Path("rows.csv").write_text("prompt,input,completion\nq,below,a\n", "utf-8")
    Path("params.yaml").write_text("data: {columns: {completion: input, keep: [prompt, input]}}\n", "utf-8")
    assert "prompt = prompt, completion = input; not used: completion" in rlhf("data rows.csv").out


SYSTEM = {"role": "system", "content": "Be  brief.\n"}
USER, ANSWER = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [SYSTEM, USER, ANSWER]},
    "ShareGPT": {"conversations": [{"from": "system", "value": "Be brief."}, USER, ANSWER]},
    "parts": {"messages": [SYSTEM | {"content": [{"type": "text", "text": "Be brief."}]}, USER, ANSWER]},
    "pairs": {"prompt": [SYSTEM, USER], "chosen": [ANSWER], "rejected": "no"},
    "one rejected": {"messages": [SYSTEM, USER, ANSWER], "rejected_response": "no"},
    "marked text": {"prompt": "\n\nSystem: Be brief.\n\nHuman: why?\n\nAssistant:", "completion": "so"},
    "labelled": {"prompt": [SYSTEM, USER], "completion": "so", "label": True},
}


def load(chat: Rendering, *records: Any, problems: Problems | None = None, **data: Any) -> list[Row]:
    """The rows of a file with these records."""
    path, found = jsonl(Path("rows.jsonl"), *records), Problems() if problems is None else problems
    corpus = conftest.load(
        path, Data(source="files", **data), chat, found, seed=1, sizes={"validation": 0, "test": 0}
    )
    return [row for tables in corpus.values() for rows in tables.values() for row in rows]


@pytest.mark.parametrize("column", ["system", "system_prompt", "rules"])
@pytest.mark.parametrize("shape", CONVERSATIONS)
def test_a_system_message_is_in_the_prompt_once(shape: str, column: str, chat: Rendering) -> None:
    row, problems = CONVERSATIONS[shape], Problems()
    columns = Columns(system="rules" if column == "rules" else None)
    data: dict[str, Any] = {"columns": columns, "format": "good_answers" if "label" in row else None}
    [alone] = load(chat, row, **data)
    assert alone["prompt"].count("<system>") == alone["prompt"].count("brief") == 1
    assert load(chat, row | {column: " Be brief."}, **data) == [alone]
    assert load(chat, row | {column: "Be long."}, **data, problems=problems) == []
    assert re.search(rf"{column} is 'Be long\.', and the conversation begins .*brief", problems.report())


def test_a_text_that_begins_with_its_system_message_has_it_once(chat: Rendering) -> None:
    row = {"system": "Be brief.", "prompt": "Be brief.\n\nwhy?", "completion": "so"}
    for rendering in chat, scratch_rendering():
        once, twice = load(rendering, row, row | {"prompt": "Be brief. Why?"})
        assert [one["prompt"].count("Be brief.") for one in (once, twice)] == [1, 2]


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
VOTED = {"prompt": "q", "response_a": "a", "response_b": "b", "winner": "model_a"}
SHAPES: dict[str, tuple[dict[str, Any], ...]] = {
    "chosen and rejected": (PAIR,),
    "conversations": ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "no"}]},),
    "a vote": (VOTED,),
    "scores": ({"prompt": "q", "answers": [{"text": "a", "score": 2}, {"text": "b", "score": 1}]},),
    "rated rows": tuple({"prompt": "q", "response": text, "score": n} for n, text in enumerate("ab")),
}
TIES = "status: tie, status: Tie (both bad), label: both_good, is_tie: true, overall_preference: 0.0"
UNCHOSEN = "response_status: discarded, annotation-status: draft, chosen_by: none, result: no_preference"
CHOSEN = "status: unchanged, status: swapped, is_tie: false, overall_preference: 2, topic: tie, label: none"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mark", f"{TIES}, {UNCHOSEN}".split(", "))
def test_a_pair_that_its_set_calls_a_tie_or_unchosen_is_left_out_by_name(
    shape: str, mark: str, chat: Rendering, capsys: pytest.CaptureFixture[str]
) -> None:
    name, value = mark.split(": ")
    records, count = SHAPES[shape], len(SHAPES[shape])
    others = json.loads(json.dumps(records).replace('"q"', '"r"').replace("why?", "how?"))
    marked = [row | {name: value} for row in records]
    [row] = load(chat, *marked, *others)
    assert row["source"] == f"rows.jsonl:{count + 1}"
    out, why = capsys.readouterr().out, "a tie" if mark in TIES else f"{name} is {value!r}"
    assert f"{count} row(s) make no row: {why} (rows.jsonl:1" in out
    assert f"left out: what {name} calls a tie or unchosen" in out


@pytest.mark.parametrize("mark", CHOSEN.split(", "))
def test_other_words_beside_a_pair_leave_nothing_out(mark: str, chat: Rendering) -> None:
    name, value = mark.split(": ")
    for row in PAIR, VOTED:
        assert len(load(chat, row | {name: value})) == 1


def test_a_pair_counts_by_another_judge_and_an_empty_vote_does_not(rlhf: Command) -> None:
    jsonl(Path("rows.jsonl"), VOTED | {"status": "discarded"}, VOTED, VOTED | {"prompt": "r", "winner": None})
    out = rlhf("data rows.jsonl").out
    assert "preferences: 1 train" in out
    assert "1 row(s) make no row: winner is empty (rows.jsonl:3)" in out
