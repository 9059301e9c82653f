"""Variants of public shapes that are easily read wrongly: read right, or refused by name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config import Data
from rlhf_tasks.data import chat
from rlhf_tasks.data.readers import shapes
from rlhf_tasks.data.readers.cells import dialogue
from rlhf_tasks.data.readers.readings import Line, Reading, Table
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import inputs
from tests import small
from tests.conftest import Command
from tests.data.conftest import converted, jsonl

Record = dict[str, Any]
TALK = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "b"},
]


def read(*records: Record, chat: bool = True, **data: Any) -> Reading:
    columns = tuple(dict.fromkeys(key for record in records for key in record))
    lines = [Line(f"f:{number}", record) for number, record in enumerate(records, start=1)]
    [(_, reading)] = shapes.read(
        [(None, "train", Table("f", columns, lines))], Data(source="files", **data), chat=chat
    )
    return reading


def rows(reading: Reading) -> list[Any]:
    return [row for _, row in converted(reading).rows]


def pair(prompt: Any, chosen: Any, rejected: Any) -> Record:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


@pytest.mark.parametrize("votes", [[1.6], [0.9], [0, 1, 0, 1], [-3, 1, 2], ["worse_b"], ["prettier_1"]])
def test_votes_that_name_no_answer_refuse_the_file(votes: list[Any]) -> None:
    two = {"prompt": "q", "response_1": "a", "response_2": "b"}
    with pytest.raises(UserError, match="which names none of the two answers"):
        read(*({**two, "preference": vote} for vote in votes))


def test_headers_may_be_in_capitals() -> None:
    asked = {"Question": "why?", " Answer": "so", "Source": "web"}
    found = read(asked, columns={"keep": ["Source"]})
    assert rows(found) == [{"prompt": "why?", "completion": "so", "Source": "web"}]
    votes = [{"Prompt": "q", "Response_A": "a", "Response_B": "b", "Winner": vote} for vote in "AB"]
    assert rows(read(*votes)) == [pair("q", "a", "b"), pair("q", "b", "a")]
    assert rows(read({"prompt": "q", "Answer": "a"})) == [{"prompt": "q", "completion": "a"}]


def test_a_name_that_is_given_is_read_beside_headers_in_capitals() -> None:
    found = read({"Prompt": "q", "MyAns": "a"}, columns={"completion": "MyAns"})
    assert rows(found) == [{"prompt": "q", "completion": "a"}]
    sides = {"Prompt": "q", "MyGood": "a", "MyBad": "b"}
    assert rows(read(sides, columns={"chosen": "MyGood", "rejected": "MyBad"})) == [pair("q", "a", "b")]


def test_a_column_with_a_dot_in_its_name_is_kept() -> None:
    found = read({"prompt": "q", "answer.value": 4}, columns={"keep": ["answer.value"]})
    assert rows(found) == [{"prompt": "q", "answer.value": 4}]
    assert "answer.value" in found.used


def test_conversations_that_all_end_with_the_user_are_prompts() -> None:
    asked = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "yes?"},
        {"from": "human", "value": "why?"},
    ]
    found = read({"conversations": asked, "source": "web"})
    assert (found.role, rows(found)) == ("prompts", [{"prompt": asked}])
    user = [{"role": "user", "content": "why?"}]
    assert rows(read({"messages": user, "ground_truth": "4"}, columns={"keep": ["ground_truth"]})) == [
        {"prompt": user, "ground_truth": "4"}
    ]
    assert rows(read({"messages": user, "response": "so"})) == [{"prompt": user, "completion": "so"}]
    assert rows(read({"messages": user, "chosen": "a", "rejected": "b"})) == [pair(user, "a", "b")]
    assert rows(read({"conversations": ["why?"]}, {"conversations": ["a", "b", "why?"]}))[0] == {
        "prompt": user
    }
    both = [{"messages": user}, {"messages": [*user, {"role": "assistant", "content": "so"}]}]
    assert read(*both).role == "sft"  # the first row is refused by name
    answered = "\n\nHuman: why?\n\nAssistant: so"
    for talk in answered, dialogue(answered):
        [(_, fault)] = converted(read({"transcript": talk}, columns={"prompt": "transcript"})).bad
        assert str(fault) == "transcript ends with the assistant's message, so it is no prompt"


def test_a_column_counts_as_used_only_where_it_is_read() -> None:
    assert "context" not in read({"messages": TALK, "context": "x"}).used
    answers = {"chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]}
    assert "system" in read({**answers, "system": "x"}).used
    labelled = {"prompt": "q", "input": "below", "system": "s", "completion": "a", "label": True}
    good = read(labelled, format="good_answers")
    assert {"input", "system"} <= {*good.used}
    assert rows(good)[0]["prompt"][-1]["content"] == "q\nbelow"


def test_an_unpaired_label_is_one_side_of_a_pair() -> None:
    labels = [("a", "thumbs_up"), ("a", "thumbs_down"), (None, "good"), ("b", None)]
    given = [{"prompt": "q", "completion": text, "feedback": label} for text, label in labels]
    found = read(*given, format="unpaired_labels")
    assert found.role == "preferences"
    assert rows(found) == [pair("q", "a", None), pair("q", None, "a"), pair("q", "", None)]
    assert converted(found).left_out == [("f:4", "feedback is null")]
    talks = read({"messages": TALK, "label": False}, {"messages": TALK, "label": 1}, format="unpaired_labels")
    assert rows(talks) == [pair(TALK[:3], None, TALK[3:]), pair(TALK[:3], TALK[3:], None)]


@pytest.mark.parametrize("tie", ["tie", "tie (bothbad)", "both_bad", "Both good", "draw"])
def test_a_tie_is_left_out(tie: str) -> None:
    two = {"prompt": "q", "response_a": "a", "response_b": "b"}
    found = read(two | {"winner": "model_a"}, two | {"winner": tie})
    assert rows(found) == [pair("q", "a", "b")]
    assert converted(found).left_out == [("f:2", "a tie")]


def test_a_flag_for_each_answer_is_a_vote_and_turns_may_be_lists_in_a_text() -> None:
    """The Chatbot Arena's 55,000 votes."""

    def vote(first: float, second: float, turns: int = 1, response: str = '["a"]') -> Record:
        asked = json.dumps([f"q{i}" for i in range(turns)])
        winners = {"winner_model_a": first, "winner_model_b": second, "winner_tie": 1 - first - second}
        return {"prompt": asked, "response_a": response, "response_b": '["b"]', **winners, "model_a": "x"}

    found = read(vote(1, 0), vote(0, 1), vote(0, 0), vote(1, 0, turns=2), vote(1, 0, response="[null]"))
    assert rows(found) == [pair("q0", "a", "b"), pair("q0", "b", "a")]
    assert [why for _, why in converted(found).left_out] == [
        "a tie",
        "2 turns: the first answers differ, so the later prompts differ",
        "response_a has no text",
    ]
    odd = read(vote(1, 0), vote(1, 0), vote(1, 0, response="[[[" + "[" * 200_000), vote(1, 1))
    assert [str(fault) for _, fault in converted(odd).bad] == [
        "response_a is no list of turns, as it is in other rows",
        "winner_model_a and winner_model_b name no winner and no tie",
    ]
    as_text = [{key: str(value) for key, value in vote(*two).items()} for two in ((1.0, 0.0), (0.0, 1.0))]
    assert rows(read(*as_text)) == [pair("q0", "a", "b"), pair("q0", "b", "a")]
    own = {"winner": "model_b"}
    empty = read(*[vote(1, 0, response="") | own] * 3, vote(1, 0) | own)
    assert rows(empty) == [pair("q0", "b", "a")], "another vote counts, and empty cells say nothing of lists"
    odd = read(vote(1, 0), vote(1, 0) | {"prompt": "q"}, vote(1, 0) | {"prompt": "r"})
    assert len(rows(odd)) == 3, "the most are no lists"
    shares = read(vote(0.6, 0.4) | {"score_a": 1, "score_b": 2})
    assert rows(shares) == [pair('["q0"]', '["b"]', '["a"]')], "shares are no flags"
    assert {"winner_model_a", "winner_model_b"} <= {*found.used}
    texts = {"prompt": "q", "response_a": '["a"]', "response_b": '["b"]', "winner": "a"}
    assert rows(read(texts | {"prompt": '["q"]'})) == [pair('["q"]', '["a"]', '["b"]')], "a task on lists"


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "x"}',
        '[{"name": "x"}]',
        '[{"text": "x", "rank": 1}, 2, "y"]',
        '["x"]',
        '{"rank": 1, "score": 2}',
        '[{"input": "x", "output": "y"}]',
        '{"role": "Engineer", "content": "x"}',
        '{"from": "a@b.c", "value": "x"}',
        '{"text": "Anna is 5", "schema": {"name": "text"}}',
        '[{"role": "customer", "content": "x"}]',
    ],
)
def test_a_prompt_or_an_answer_may_be_json(text: str) -> None:
    asked = text if "content" not in text else "q"  # else the text of that object is the prompt
    assert rows(read({"prompt": asked, "completion": text})) == [{"prompt": asked, "completion": text}]
    assert rows(read({"prompt": "q", "chosen": text, "rejected": "b"})) == [pair("q", text, "b")]
    assert rows(read({"prompt": "q", "response_a": text, "response_b": "b", "winner": "a"})) == [
        pair("q", text, "b")
    ]
    named = {"prompt": "ask", "completion": "reply"}
    assert rows(read({"ask": "q", "reply": text}, columns=named)) == [{"prompt": "q", "completion": text}]


def test_json_in_a_csv_file_is_what_it_is_elsewhere() -> None:
    """In the columns that may be text too: a prompt as an object, rated answers, messages."""
    rated = json.dumps([{"text": "a", "rank": 2}, {"text": "b", "rank": 1}])
    assert rows(read({"prompt": "q", "response": rated})) == [pair("q", "b", "a")]
    votes = {"answer_0": "a", "answer_1": "b", "score_0": "1", "score_1": "0"}
    assert rows(read({"question": '{"full_text": "q", "id": 1}', **votes})) == [pair("q", "a", "b")]
    asked = TALK[:1]
    found = rows(read({"prompt": json.dumps(asked), "completion": "a"}))
    assert found == [{"prompt": asked, "completion": "a"}]
    called = [*asked, {"role": "ipython", "content": "4"}]
    assert rows(read({"prompt": json.dumps(called), "completion": "a"}))[0]["prompt"] == called
    named = read({"ask": '{"text": "q", "toxicity": 0.1}', "completion": "a"}, columns={"prompt": "ask"})
    assert rows(named) == [{"prompt": "q", "completion": "a"}]
    some = json.dumps([{"text": "a", "score": 2}, {"text": "b", "score": 1}, {"text": "c"}])
    assert rows(read({"prompt": "q", "response": some})) == [pair("q", "a", "b")], "one has no score"
    below = {"instruction": "rate", "input": rated, "output": "x"}
    assert rows(read(below)) == [{"prompt": f"rate\n{rated}", "completion": "x"}]
    talk = json.dumps(TALK[:2])
    assert rows(read({"prompt": "write a dialogue", "completion": talk}))[0]["completion"] == talk


def test_a_prompt_that_holds_its_replies_is_no_message() -> None:
    """The trees of OpenAssistant."""
    replies = [{"text": "a", "role": "assistant", "rank": 0}]
    tree = {"message_tree_id": "1", "prompt": {"text": "q", "role": "prompter", "replies": replies}}
    [(_, fault)] = converted(read(tree)).bad
    assert str(fault) == "the object that is the prompt holds replies too"


@pytest.mark.parametrize(("who", "what"), [("role", "text"), ("speaker", "text"), ("from", "content")])
def test_messages_may_have_other_keys(who: str, what: str) -> None:
    talk = [{who: "User", what: "q"}, {who: "bot", what: "a"}]
    found = converted(read({"messages": talk}))
    assert [row for _, row in found.rows] == [{"messages": talk}]
    assert [chat.message("messages", i, one) for i, one in enumerate(talk)] == TALK[:2]


def test_the_input_is_part_of_the_prompt_in_every_shape() -> None:
    farm = [
        {"instruction": "Translate", "input": word, "output_1": "a", "output_2": "b", "preference": 2}
        for word in ("dog", "cat")
    ]
    assert rows(read(*farm)) == [pair(f"Translate\n{word}", "b", "a") for word in ("dog", "cat")]
    scored = [
        {"instruction": "Classify", "input": word, "output": "x", "score": score}
        for word, score in (("dog", 5), ("crow", 3), ("dog", 1))
    ]
    assert [row["prompt"] for row in rows(read(*scored))] == ["Classify\ndog"]
    given = {"instruction": "i", "input": "x", "chosen": "a", "rejected": "b", "system": "s"}
    assert rows(read(given, chat=False)) == [pair("s\n\ni\nx", "a", "b")]


@pytest.mark.parametrize(
    "marked",
    [
        {"messages": TALK[:2], "label": False},
        {"prompt": "q", "completion": "a", "label": "bad"},
        {"prompt": "q", "completion": "a", "label": "False"},
        {"prompt": "q", "completion": "a", "label": -1},
        {"prompt": "q", "completion": "a", "feedback": "thumbs_down"},
        {"prompt": "q", "completion": "a", "correct": "false"},
    ],
)
def test_a_bad_answer_is_no_demonstration_however_it_is_marked(marked: Record) -> None:
    with pytest.raises(UserError, match="as false, so these single answers are neither"):
        read(marked)
    assert rows(read(marked, format="good_answers")) == []


@pytest.mark.parametrize(
    ("rating", "values"),
    [("score", (1, 3)), ("score", ("1", "3")), ("rank", ("2", 1)), ("reward", (-0.5, 2.0))],
)
def test_rated_answers_in_rows_are_pairs(rating: str, values: tuple[Any, Any]) -> None:
    """A CSV file holds numbers as text; of ranks the lower one is better."""
    rated = [{"prompt": "q", "said": text, rating: n} for text, n in zip("ba", values, strict=True)]
    assert rows(read(*rated, columns={"completion": "said"})) == [pair("q", "a", "b")]
    marked = [row | {"if_chosen": row["said"] == "b"} for row in rated]
    assert rows(read(*marked, columns={"completion": "said"}, format=rating)) == [pair("q", "a", "b")]


def test_numbers_of_two_answers_may_be_text() -> None:
    two = {"prompt": "q", "response_1": "a", "response_2": "b"}
    assert rows(read(two | {"score_1": "9", "score_2": "10"})) == [pair("q", "b", "a")]
    signed = read(*(two | {"preference_strength": vote} for vote in ("-2", "0", "1")))
    assert rows(signed) == [pair("q", "a", "b"), pair("q", "b", "a")]
    assert converted(signed).left_out == [("f:2", "a tie")]
    scored = [
        {"prompt": "q", "response": text, "score": n} for text, n in (("a", "2"), ("b", "1"), ("c", "?"))
    ]
    assert rows(read(*scored)) == [pair("q", "a", "b")]
    assert converted(read(*scored)).left_out == [("f:3", "it has no rating")]
    without = [{"prompt": "q", "response": text, "score": ""} for text in "ab"]
    assert read(*without).role == "sft"


@pytest.mark.parametrize(
    "records",
    [
        [*({"prompt": "q", "response": text, "score": ord(text)} for text in "ab"), {"score": 3}],
        [{"prompt": "q", "responses": [{"text": "a", "score": 2}, {"score": 3}]}],
        [
            {"prompt": "q", "responses": [{"text": text, "score": ord(text)} for text in "ab"]},
            {"responses": ["a"]},
        ],
        [{"prompt": "q", "answers": ["a", "b"], "scores": [1, 2]}, {"prompt": "q", "answers": 7}],
        [
            {"prompt": "q", "answers": "?"},
            *[{"prompt": "q", "answers": [{"text": text, "score": ord(text)} for text in "ab"]}] * 2,
        ],
    ],
)
def test_a_record_of_another_form_is_malformed(records: list[Record]) -> None:
    assert converted(read(*records)).bad[0][1].reason == "malformed"


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "best_response": "a", "worst_response": "b"},
        {"problem": "q", "expected_answer": "a"},
        {"prompt": "q", "chosen": "a", "reject": "b"},
        {"prompt": "q", "generations": ["a", "b"], "ratings": [1, 2]},
        {"post": "q", "summary": "a"},
        {"question": "q", "choices": ["a", "b"], "answer": 1},
        {"prompt": "q", "response_0": "a", "response_1": "b", "response_2": "c", "preference": 1},
    ],
)
def test_answers_that_no_shape_has_are_refused_with_an_entry_that_reads_them(
    record: Record, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"has no known shape; its columns are (pro|post|question)") as error:
        read(record)
    (tmp_path / "shapes.yaml").write_text(str(error.value).partition("shapes.yaml\n")[2], "utf-8")
    [row] = rows(read(record, shapes=str(tmp_path / "shapes.yaml")))
    assert row["prompt"] == "q"


def test_the_entry_of_the_docs_is_a_shape_for_prepare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").write_bytes((small.ROOT / "dvc.yaml").read_bytes())
    page = (small.ROOT / "docs/tutorials/your-own-data.md").read_text("utf-8")
    Path("shapes.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0], "utf-8")
    tickets = [{"ticket": f"q{i}", "good_reply": "a", "bad_reply": "b"} for i in range(9)]
    jsonl(Path("tickets.jsonl"), *tickets)
    changes = {"data.source": "files", "data.path": "tickets.jsonl", "judge.judges": [small.HELDOUT]}
    small.write_params(tmp_path, changes | {"tracking.enabled": False})
    assert "tickets.jsonl has no known shape" in rlhf("prepare", status=2).err
    small.write_params(tmp_path, changes | {"tracking.enabled": False, "data.shapes": "shapes.yaml"})
    out = rlhf("prepare").out
    assert "tickets with a good and a bad reply: prompt = ticket, chosen = good_reply" in out
    assert ("data.shapes", "shapes.yaml") in inputs.files_named({"data.shapes": "shapes.yaml"})


def test_votes_of_another_kind_are_read_by_an_entry_that_names_them(tmp_path: Path) -> None:
    votes = [{"prompt": "q", "response_1": "a", "response_2": "b", "winner": name} for name in ("L", "R")]
    with pytest.raises(UserError, match="which names none of the two answers") as error:
        read(*votes)
    entry = str(error.value).partition("shapes.yaml\n")[2].replace("what means the first", "l")
    (tmp_path / "shapes.yaml").write_text(entry.replace("what means the second", "r"), "utf-8")
    found = read(*votes, shapes=str(tmp_path / "shapes.yaml"))
    assert rows(found) == [pair("q", "a", "b"), pair("q", "b", "a")]


def test_an_entry_may_name_two_columns_that_belong_together(tmp_path: Path) -> None:
    two = '"chosen, rejected": {names: [[good, bad]], types: text}'
    entry = f"{{name: x, columns: {{prompt: {{names: [ticket], types: text}}, {two}}}}}"
    (tmp_path / "shapes.yaml").write_text(entry, "utf-8")
    found = read({"ticket": "q", "good": "a", "bad": "b"}, shapes=str(tmp_path / "shapes.yaml"))
    assert rows(found) == [pair("q", "a", "b")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: x", "cannot be read"),
        ("{name: x}", r"is no shape; give a list of shapes with name, columns"),
        (
            "- {name: x, columns: {ticket: text}}",
            "By `makes`, its columns are row: prompt or completion, prompt",
        ),
        *(
            (f"- {{name: x, columns: {{prompt: {spec}}}{more}}}", "is no shape; give a list of shapes")
            for spec, more in [
                ("3", ""),
                ("{names: '[', types: text}", ""),
                ("{names: 3, types: text}", ""),
                ("{nmes: [q], types: text}", ""),
                ("text", ", where: repeated"),
                ("text", ", where: {chosen: answers}"),
                ("text", ", unless: {chosen: 3}"),
                ("text", ", votes: l"),
            ]
        ),
        ("- {name: x, columns: 3}", "is no shape; give a list of shapes"),
        (
            "- {name: x, columns: {prompt: {names: [q], types: txt}}}",
            "x has the type 'txt'; give text, messages",
        ),
    ],
)
def test_a_file_of_shapes_that_holds_none_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "shapes.yaml").write_text(text, "utf-8")
    with pytest.raises(UserError, match=message):
        read({"q": "q", "a": "a"}, shapes=str(tmp_path / "shapes.yaml"))


def test_of_very_many_columns_some_are_named_and_a_format_that_names_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"id39 \(object\) and 960 more\. Name them"):
        read({f"id{i}": {"text": "q"} for i in range(1000)})
    with pytest.raises(UserError, match=r"data\.format=label_pair is no column of .* label_pairs"):
        read({"prompt": "q", "completion": "a"}, format="label_pair")


def test_a_history_of_questions_and_answers_stands_before_the_prompt() -> None:
    record = {"instruction": "r", "input": "", "output": "b", "history": [["q", "a"]]}
    assert rows(read(record)) == [{"prompt": TALK[:3], "completion": "b"}]
    assert rows(read(record, record | {"history": []}))[1]["prompt"] == [{"role": "user", "content": "r"}]


def test_a_signed_preference_is_for_the_first_answer_below_zero() -> None:
    """HelpSteer3: −3 says that the first response is much better, 3 that the second is."""
    record = {"domain": "x", "context": TALK[:3], "response1": "A", "response2": "B"}
    found = read(*(record | {"overall_preference": vote} for vote in (-2, 3, 0)))
    assert rows(found) == [pair(TALK[:3], "A", "B"), pair(TALK[:3], "B", "A")]
    assert converted(found).left_out == [("f:3", "a tie")]


ASKED = TALK[:1]
ANSWERED, WORSE = ([{"role": "assistant", "content": text}] for text in "AB")
TURNS = [{"input": "q", "output": "a"}, {"input": "r", "output": "b"}]
RATED = [{"text": "A", "score": 2}, {"text": "B", "score": 1}]
SOURCES = [{"from": "wiki", "text": "x"}]
DEMONSTRATION = {"prompt": "q", "completion": "A"}
FLAGGED = {"prompt": "q", "response_a": "B", "response_b": "A", "winner_model_a": 1, "winner_model_b": 0}


@pytest.mark.parametrize(
    ("record", "row"),
    [
        ({"prompt": "q", "chosen_response": "A", "rejected_response": "B"}, pair("q", "A", "B")),
        (
            {"input": {"messages": ASKED}, "preferred_output": ANSWERED, "non_preferred_output": WORSE},
            pair(ASKED, ANSWERED, WORSE),
        ),
        ({"conversations": ASKED, "chosen": ANSWERED[0], "rejected": WORSE[0]}, pair(ASKED, ANSWERED, WORSE)),
        (
            {"prompt": "q", "response_1": "A", "response_2": "B", "preference_strength": -1},
            pair("q", "A", "B"),
        ),
        (
            {"question": "q", "answers": [{"text": "B", "pm_score": 1}, {"text": "A", "pm_score": 5}]},
            pair("q", "A", "B"),
        ),
        ({"inputs": "q", "targets": "A", "language": "en"}, {"prompt": "q", "completion": "A"}),
        ({"input": "q", "output": "A"}, {"prompt": "q", "completion": "A"}),
        ({"user": "q", "assistant": "A"}, {"prompt": "q", "completion": "A"}),
        ({"input": ASKED, "output": "A"}, {"prompt": ASKED, "completion": "A"}),
        ({"kind": "x", "input": "q", "target": "A"}, {"prompt": "q", "completion": "A"}),
        (
            {"input": "q", "chosen": "A", "rejected": "B", "labelling_prompt": [*TALK, *ASKED]},
            pair("q", "A", "B"),
        ),
        ({"problem": "q", "solution": "so 7", "answer": "7"}, {"prompt": "q", "completion": "so 7"}),
        ({"conversations": ["q", "A"]}, {"messages": [*ASKED, *ANSWERED]}),
        ({"conversation": TURNS}, {"messages": TALK}),
        (
            {"turns": [{"human": one["input"], "assistant": one["output"]} for one in TURNS]},
            {"messages": TALK},
        ),
        ({"messages": json.dumps(TALK)}, {"messages": TALK}),
        ({"dialog": json.dumps(TURNS)}, {"messages": TALK}),
        *(
            ({"prompt": "q", "answers": [keys | answer for answer in RATED]}, pair("q", "A", "B"))
            for keys in ({"from": "gpt4"}, {"role": "assistant"}, {"speaker": "A"})
        ),
        ({"question": "q", "sources": SOURCES}, {"prompt": "q"}),
        ({"conversations": TALK, "sources": SOURCES}, {"messages": TALK}),
        ({"conversations": TALK, "items": [{"role": "user", "text": "x"}]}, {"messages": TALK}),
        (FLAGGED, pair("q", "B", "A")),
        *(
            (FLAGGED | rating, pair("q", "A", "B"))
            for rating in ({"score_a": 1, "score_b": 2}, {"preference": "b"}, {"overall_preference": 2})
        ),
        ({"question": "q", "answer": "A", "contents": ["x", "y"], "scores": [1, 2]}, DEMONSTRATION),
        ({"question": "q", "answer": "A", "responses": ["x", "y"], "scores": [1, 2]}, DEMONSTRATION),
        ({"prompt": "q", "messages": TALK, "answers": ["x", "y"], "scores": [1, 2]}, {"messages": TALK}),
    ],
)
def test_further_public_shapes(record: Record, row: Record) -> None:
    assert rows(read(record)) == [row]


def test_answers_and_their_scores_in_a_list_each_become_pairs() -> None:
    reading = read({"question": "p", "responses": ["a", "b", "c"], "scores": [1, 3, 2]}, pairs="best_worst")
    assert rows(reading) == [pair("p", "b", "a")]
    ranked = read({"prompt": "p", "answers": ["a", "b"], "ranks": [1, 2], "source": "x"})
    assert rows(ranked) == [pair("p", "a", "b")]
    rated = {"prompt": "p", "responses": ["a", "b"], "scores": [1, 2]}
    broken = converted(read(rated, {**rated, "prompt": "q", "scores": [1]}))
    assert [str(fault) for _, fault in broken.bad] == ["responses and scores are no texts with a number each"]


def by_function(own: Any, *records: Record) -> Reading:
    lines = [Line(f"f:{i}", record) for i, record in enumerate(records)]
    settings = Data.model_validate({"source": "files", "format": "own:rows"})
    ((_, reading),) = shapes.read([(None, "train", Table("f", ("q",), lines))], settings, chat=True, own=own)
    return reading


def test_a_function_of_ones_own_returns_a_row_several_or_none() -> None:
    one = {"prompt": "p", "completion": "c"}

    def generator(record: Record) -> Any:
        yield from (one, one)

    for own, count in ((lambda r: one, 1), (lambda r: (one, one), 2), (generator, 2), (lambda r: [], 0)):
        assert rows(by_function(own, {"q": 1}, {"q": 2})) == [one] * 2 * count
    assert "own:rows returns no row" in dict(converted(by_function(lambda r: [], {"q": 1})).left_out).values()
    assert "own:rows returns None" in dict(converted(by_function(lambda r: None, {"q": 1})).left_out).values()


def test_a_function_of_ones_own_is_called_once_for_a_record() -> None:
    """One that removes duplicates, or that pays for each call."""
    seen = list[int]()

    def own(record: Record) -> Any:
        is_new = record["q"] not in seen
        seen.append(record["q"])
        return {"prompt": f"p{record['q']}", "completion": "c"} if is_new else None

    found = rows(by_function(own, {"q": 1}, {"q": 2}, {"q": 1}))
    assert [row["prompt"] for row in found] == ["p1", "p2"]
    assert seen == [1, 2, 1]


def test_a_function_of_ones_own_makes_prompts_with_what_a_verifier_reads() -> None:
    found = by_function(lambda record: {"prompt": "p", "answer": record["q"]}, {"q": 1})
    assert found.role == "prompts"


def test_a_column_that_is_empty_in_the_first_rows_is_read() -> None:
    """As in files that were joined, or sorted by a column."""
    plain = [{"instruction": f"i{n}", "input": None, "output": "o"} for n in range(1000)]
    found = rows(read(*plain, {"instruction": "sum", "input": "1 2", "output": "3"}))
    assert "1 2" in found[-1]["prompt"]
    assert rows(read(*plain))[0]["prompt"] == "i0"


def test_a_system_message_stands_before_every_kind_of_conversation() -> None:
    asked, good, bad = (
        {"role": r, "content": c} for r, c in (("user", "q"), *[("assistant", x) for x in "ab"])
    )
    first = {"role": "system", "content": "Be brief."}
    pair = {"chosen": [asked, good], "rejected": [asked, bad]}
    voted = {"conversation_a": pair["chosen"], "conversation_b": pair["rejected"], "winner": "model_a"}
    for record in (pair, voted):
        (row,) = rows(read({"system": "Be brief.", **record}))
        assert [row[side][:2] for side in ("chosen", "rejected")] == [[first, asked]] * 2
    found = read({"system": "Be brief.", "messages": [asked, good], "label": True}, format="good_answers")
    assert rows(found)[0]["prompt"] == [first, asked]


def test_a_few_repeated_prompts_make_no_pairs() -> None:
    scored = [{"prompt": f"p{n}", "response": "r", "score": n} for n in range(8)]
    assert read(*scored, scored[0]).role == "sft"
    both = [{**row, "response": f"s{row['prompt']}", "score": 9} for row in scored]
    assert read(*scored, *both).role == "preferences"


def test_lists_as_python_writes_them_are_refused() -> None:
    talk = str([{"content": "hi", "role": "user"}])
    with pytest.raises(
        UserError, match=r"f: the column 'chosen' holds lists as Python writes them \(\[\{'con"
    ):
        read({"prompt": "p", "chosen": talk, "rejected": talk})


def test_what_a_function_of_ones_own_does_wrong_is_named() -> None:
    def leaves(record: Record) -> Any:
        sys.exit(3)

    for own, message in (
        (lambda r: "text", r"f:0: data\.format: own:rows must return a row, .* but gave 'text'"),
        (lambda r: [{"prompt": "p"}, "x"], r"must return a row, .* but gave 'x'"),
        (lambda r: r["no"], r"f:0: data\.format: own:rows raised KeyError: 'no'"),
        (lambda r: (r["no"] for _ in range(1)), r"raised KeyError"),
        (leaves, r"raised SystemExit: 3"),
    ):
        with pytest.raises(UserError, match=message):
            rows(by_function(own, {"q": 1}))


def test_a_message_of_weight_zero_is_not_trained_on() -> None:
    """OpenAI's fine-tuning format marks the assistant's messages that are only context."""
    last = {"messages": [*ASKED, ANSWERED[0] | {"weight": 0}]}
    found = read(last, {"messages": [*ASKED, ANSWERED[0] | {"weight": 1}]})
    assert converted(found).left_out == [("f:1", "its last message has weight 0")]


def test_rated_answers_in_a_conversation_are_no_demonstration() -> None:
    """PRISM lists all answers to a message, with a score each."""
    answers = [turn | {"score": score} for turn, score in ((ANSWERED[0], 80), (WORSE[0], 20))]
    talks = ({"conversation_history": [*ASKED, *some]} for some in (answers, answers[:1]))
    found = converted(read(*talks))
    [(_, fault)] = found.bad
    assert str(fault) == "its last messages are rated answers to one prompt, no conversation"
    assert len(found.rows) == 1


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"role": None, "content": None, "from": "human", "value": "q"}, "q"),
        ({"role": "user", "content": "q", "from": None, "value": None}, "q"),
        ({"role": "assistant", "content": None, "text": "note", "tool_calls": [{"name": "f"}]}, ""),
    ],
)
def test_keys_of_messages_may_hold_null(given: Record, content: str) -> None:
    """As `datasets` writes rows of two sources; beside a call, content may be null."""
    assert chat.message("messages", 0, given)["content"] == content


def test_an_answer_that_is_null_is_not_replaced_by_another_text() -> None:
    with pytest.raises(chat.Unusable, match="no text under 'content'"):
        chat.message("messages", 1, {"from": "gpt", "value": None, "text": "draft"})


# ------------------------------------------------------------------------- labels, votes, contexts


LABELLED = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize("label", ["neutral", 0.5, "3"])
@pytest.mark.parametrize("format", ["good_answers", "label_pairs", "unpaired_labels"])
def test_a_label_that_is_neither_good_nor_bad_is_named_where_labels_are_asked_for(
    format: str, label: Any
) -> None:
    records = [{**LABELLED, "label": one} for one in ("good", label, "bad")]
    with pytest.raises(UserError, match=rf"data.format={format} wants labels, and label is {label!r} in f:2"):
        read(*records, format=format)


def test_labels_may_be_empty_or_numbers_as_a_csv_file_has_them() -> None:
    records = [
        {**LABELLED, "completion": f"a{one}", "label": one} for one in ("1.0", "0.0", "", float("nan"))
    ]
    assert [
        row["completion"] for row in rows(read(*records, format="good_answers")) if isinstance(row, dict)
    ] == ["a1.0"]
    with pytest.raises(UserError, match="marks 1 of 4 rows as false"):
        read(*records)


def test_demonstrations_are_not_taken_for_answers_with_labels_or_votes() -> None:
    with pytest.raises(UserError, match="wants a column of labels: label, labels"):
        read({**LABELLED, "opinion": "fine"}, format="good_answers")
    with pytest.raises(UserError, match="is a column without a vote or score"):
        read({**LABELLED, "topic": "ice"}, format="topic")


def test_conversations_of_two_turns_with_a_vote_keep_both() -> None:
    other = [*TALK[:3], {"role": "assistant", "content": "c"}]
    record = {"conversation_a": TALK, "conversation_b": other, "winner": "a"}
    assert rows(read(record)) == [{"chosen": TALK, "rejected": other}]
    early = [TALK[0], {"role": "assistant", "content": "x"}, *TALK[2:]]
    left_out = converted(read(record | {"conversation_b": early})).left_out
    assert left_out == [("f:1", "the first answers differ, so the prompts differ")]


def test_turns_are_counted_after_a_system_message() -> None:
    system = {"role": "system", "content": "s"}
    other = [*TALK[:1], {"role": "assistant", "content": "c"}, *TALK[2:]]
    record = {"conversation_a": [system, *TALK], "conversation_b": [system, *other], "winner": "b", "turn": 1}
    assert rows(read(record)) == [{"chosen": [system, *other[:2]], "rejected": [system, *TALK[:2]]}]


def test_replies_with_a_vote_answer_the_prompt_beside_them() -> None:
    record = {"prompt": "q", "response_a": TALK[1:2], "response_b": TALK[3:], "vote": "b"}
    assert rows(read(record)) == [pair("q", TALK[3:], TALK[1:2])]


def test_a_context_and_a_history_belong_to_a_prompt_of_messages_too() -> None:
    record = {"prompt": TALK[:1], "context": "c", "completion": "a"}
    below = {"role": "user", "content": "q\nc"}
    assert rows(read(record))[0]["prompt"] == [below]
    old = [{"role": "user", "content": "o"}, {"role": "assistant", "content": "p"}]
    assert rows(read(record | {"history": [["o", "p"]]}))[0]["prompt"] == [*old, below]
    [(_, fault)] = converted(read(record | {"prompt": TALK[:2]})).bad
    assert "does not end with the user's message" in str(fault)


@pytest.mark.parametrize("chat", [True, False])
def test_a_context_stands_before_the_mark_of_the_answer(chat: bool) -> None:
    record = {"prompt": "\n\nHuman: q\n\nAssistant:", "context": "c", "completion": "a"}
    [row] = rows(read(record, chat=chat))
    whole = "\n\nHuman: q\nc\n\nAssistant:"
    assert row["prompt"] == ([{"role": "user", "content": "q\nc"}] if chat else whole)


def test_the_shape_to_begin_with_has_the_vote_of_two_answers() -> None:
    with pytest.raises(UserError, match=r"makes: voted\n(.*\n)*.*vote: \{names: \[\"outcome\"\]"):
        read({"prompt": "q", "response_one": "a", "response_two": "b", "outcome": "one"})
