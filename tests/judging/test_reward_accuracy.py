"""`rlhf judge MODEL --rows FILE` on rows in the shape of RewardBench 2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import binomtest

from rlhf_tasks.cli import main
from rlhf_tasks.data.batches import load_tokenizer
from rlhf_tasks.data.tokenizer import encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import reward_models
from rlhf_tasks.judging.reward_models import Row, accuracies, is_right, read, score
from rlhf_tasks.models.load import load_reward, score_head
from tests.conftest import CHAT

CPU = torch.device("cpu")
ROWS = [
    {"prompt": "my post", "chosen": ["the cat"], "rejected": ["a", "the dog", "my"], "subset": "Focus"},
    {"prompt": "my dog", "chosen": "one", "rejected": ["two"], "subset": "Focus"},
    {"prompt": "the cat", "chosen": ["my", "the"], "rejected": ["dog", "cat"], "subset": "Ties"},
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_chosen_response_must_score_higher_than_every_rejected_one() -> None:
    row = Row("p", ("a", "b"), ("c", "d"), "Ties")
    assert is_right(row, [2.0, 1.0, 0.5, -3.0])
    assert not is_right(row, [2.0, 0.4, 0.5, -3.0]), "one chosen response is below a rejected one"
    assert not is_right(row, [2.0, 0.5, 0.5, -3.0]), "equal scores decide nothing"


def test_accuracy_is_by_subset_with_wilsons_interval() -> None:
    found = accuracies(["b", "a", "b", "b"], [True, False, True, False])
    assert {name: (one.value, one.count) for name, one in found.items()} == {
        "b": (2 / 3, 3),
        "a": (0.0, 1),
        "all": (0.5, 4),
    }
    expected = binomtest(2, 3).proportion_ci(0.95, method="wilson")
    assert (found["b"].low, found["b"].high) == pytest.approx((expected.low, expected.high))


def test_rows_are_read_from_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.jsonl", ROWS))
    assert rows[0] == Row("my post", ("the cat",), ("a", "the dog", "my"), "Focus")
    assert rows[1].responses == ("one", "two")
    lists = [
        row | {"chosen": [row["chosen"]] if isinstance(row["chosen"], str) else row["chosen"]} for row in ROWS
    ]
    pq.write_table(pa.Table.from_pylist(lists), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == rows


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "chosen": "a", "rejected": [], "subset": "s"},
        {"prompt": "p", "chosen": "a", "rejected": ["b"]},
        {"prompt": 1, "chosen": "a", "rejected": ["b"], "subset": "s"},
        {"prompt": "p", "chosen": ["a", 2], "rejected": ["b"], "subset": "s"},
        {"prompt": "p", "chosen": "a", "rejected": ["b"], "subset": "all"},
        [],
    ],
    ids=str,
)
def test_a_row_of_another_form_is_named_with_what_it_needs(row: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jsonl:2: give `prompt` \(text\)"):
        read(write(tmp_path / "a.jsonl", [ROWS[0], row]))


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "{"), ("a.parquet", "x"), ("a.csv", "x"), ("a.jsonl", "")]
)
def test_a_file_that_cannot_be_read_is_one_message(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=name):
        read(tmp_path / name)
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read"):
        read(tmp_path / "nowhere.jsonl")


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    line = json.dumps(ROWS[0] | {"prompt": "my\u2028post"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f'{line}\n\n{{"prompt": }}\n{line}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl:3: this line is not JSON \(Expecting value, column 12\)"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
def test_scores_are_the_models_own_of_each_text_alone(
    template: str | None, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(trained / "models/reward", folder)
    words = load_tokenizer(folder)
    words.chat_template = template
    words.save_pretrained(folder)
    rows = [Row("the post", ("my cat",), ("a dog", "my"), "s"), Row("my", ("the",), ("one",), "s")]
    found, model = score(folder, rows, CPU), load_reward(folder)
    for row, scores in zip(rows, found, strict=True):
        for answer, value in zip(row.responses, scores, strict=True):
            text = f"<user>{row.prompt}<eos>\n<assistant>{answer}<eos>\n"
            ids = (
                encode(words, [text])[0]
                if template
                else words(row.prompt)["input_ids"] + words(answer)["input_ids"] + [words.eos_token_id]
            )
            with torch.no_grad():
                hidden = model.model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
                assert value == pytest.approx(float(score_head(model.model)(hidden)), abs=1e-5)


def test_the_command_shows_and_writes_the_accuracies(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(models_here / "rows.jsonl", ROWS)
    assert main.main(["judge", "models/reward", "--rows", str(file), "--out", "accuracy.json"]) == 0
    written = json.loads(Path("accuracy.json").read_text(encoding="utf-8"))
    assert list(written) == ["Focus", "Ties", "all"]
    assert written["all"]["count"] == 3
    assert "subset | accuracy | low | high | rows" in capsys.readouterr().out


def test_a_model_without_a_head_and_rows_that_are_too_long_are_refused(models_here: Path) -> None:
    rows = [Row("my " * 200, ("a",), ("the",), "s")]
    with pytest.raises(UserError, match="models/sft lacks its trained head"):
        reward_models.score(Path("models/sft"), rows, CPU)
    with pytest.raises(UserError, match=r"can read 128 tokens, and 2 of 2 responses are longer"):
        reward_models.score(Path("models/reward"), rows, CPU)
