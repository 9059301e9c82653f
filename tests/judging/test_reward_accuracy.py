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

from rlhf_tasks.cli import main
from rlhf_tasks.data.batches import load_tokenizer
from rlhf_tasks.data.tokenizer import encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import reward_models
from rlhf_tasks.judging.reward_models import KnownRow, is_right, score
from rlhf_tasks.judging.rows import read_rows
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


def known(prompt: str, chosen: tuple[str, ...], rejected: tuple[str, ...], subset: str = "s") -> KnownRow:
    return KnownRow(prompt=prompt, chosen=chosen, rejected=rejected, subset=subset)


def read(file: Path) -> list[KnownRow]:
    return list(read_rows(file, KnownRow).values())


def test_every_chosen_response_must_score_higher_than_every_rejected_one() -> None:
    row = known("p", ("a", "b"), ("c", "d"))
    assert is_right(row, [2.0, 1.0, 0.5, -3.0])
    assert not is_right(row, [2.0, 0.4, 0.5, -3.0]), "one chosen response is below a rejected one"
    assert not is_right(row, [2.0, 0.5, 0.5, -3.0]), "equal scores decide nothing"


def test_rows_are_read_from_json_lines_and_parquet(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "a.jsonl", ROWS))
    assert rows[0] == known("my post", ("the cat",), ("a", "the dog", "my"), "Focus")
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
        [],
    ],
    ids=str,
)
def test_a_row_of_another_form_is_named_with_what_it_needs(row: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)a\.jsonl:2: .*give `prompt` \(text\)"):
        read(write(tmp_path / "a.jsonl", [ROWS[0], row]))


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "{"), ("a.parquet", "x"), ("a.txt", "x"), ("a.jsonl", "")]
)
def test_a_file_that_cannot_be_read_is_one_message(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=name):
        read(tmp_path / name)
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read"):
        read(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("template", [None, CHAT], ids=["plain", "chat"])
def test_scores_are_the_models_own_of_each_text_alone(
    template: str | None, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "reward"
    shutil.copytree(trained / "models/reward", folder)
    words = load_tokenizer(folder)
    words.chat_template = template
    words.save_pretrained(folder)
    rows = [known("the post", ("my cat",), ("a dog", "my")), known("my", ("the",), ("one",))]
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
    assert {name: one["count"] for name, one in written.items()} == {"Focus": 2, "Ties": 1, "all": 3}
    assert all(0 <= one["low"] <= one["value"] <= one["high"] <= 1 for one in written.values())
    assert "subset | accuracy | low | high | rows" in capsys.readouterr().out
    write(file, [ROWS[0] | {"subset": "all"}])
    assert main.main(["judge", "models/reward", "--rows", str(file)]) == 2
    assert "the subset 'all' stands for all rows" in capsys.readouterr().err


def test_a_model_without_a_head_and_rows_that_are_too_long_are_refused(models_here: Path) -> None:
    rows = [known("my " * 200, ("a",), ("the",))]
    with pytest.raises(UserError, match="models/sft lacks its trained head"):
        reward_models.score(Path("models/sft"), rows, CPU)
    with pytest.raises(UserError, match=r"can read 128 tokens, and 2 of 2 responses are longer"):
        reward_models.score(Path("models/reward"), rows, CPU)
