from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from rlhf_tasks import config
from rlhf_tasks.data.rows import REASONS, ROLES, SPLITS, TEXTS
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import prepare, runner
from rlhf_tasks.training import auto
from tests import small
from tests.data.conftest import demonstrations, jsonl

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("here")


def table(role: str, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(f"data/{role}/{split}.parquet").to_pylist()
    return rows


def run(changes: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of the stage with the shipped parameters and these changes."""
    return small.run("prepare", {"judge.judges": [small.HELDOUT], **changes})


SYNTHETIC = {
    **{f"prepare.synthetic_{name}_rows": 60 for name in ("prompt", "sft")},
    **{"prepare.synthetic_preference_rows": 30, "data.num_validation": 10, "data.num_test": 20},
}


def test_synthetic_rows_are_written_by_role_and_split_and_counted() -> None:
    metrics = run(SYNTHETIC)
    for role in ROLES:
        for split in SPLITS:
            rows = table(role, split)
            assert len(rows) == metrics[f"rows/{role}/{split}"]
            assert all(tuple(row) == (*TEXTS[role], "source") for row in rows)
    assert [metrics[f"rows/sft/{split}"] for split in SPLITS] == [60, 10, 20]
    assert (metrics["quarantined"], metrics["duplicates"]) == (0, 0)
    words = AutoTokenizer.from_pretrained("data/tokenizer")
    seen = [len(words(row["prompt"])["input_ids"]) for r in ROLES for s in SPLITS for row in table(r, s)]
    assert metrics["tokens/prompt_max"] == max(seen)
    assert metrics["tokens/prompt_mean"] == pytest.approx(sum(seen) / len(seen))
    assert Path("data/quarantine/rows.jsonl").read_text(encoding="utf-8") == ""


def test_a_second_run_writes_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run(SYNTHETIC)
        written.append({str(f): f.read_bytes() for f in Path("data").rglob("*") if f.is_file()})
    assert len(written[0]) == 9 + 2 + 1
    assert written[0] == written[1]


def test_the_tokenizer_sees_no_held_out_text(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "sft.train.jsonl", *demonstrations(5))
    jsonl(tmp_path / "in" / "sft.validation.jsonl", {"prompt": "validationword", "completion": "x"})
    jsonl(tmp_path / "in" / "sft.test.jsonl", {"prompt": "testword", "completion": "answer"})
    metrics = run({"data.source": "files", "data.path": "in"})
    vocabulary = AutoTokenizer.from_pretrained("data/tokenizer").get_vocab()
    assert "question" in vocabulary
    assert {"validationword", "testword"}.isdisjoint(vocabulary)
    assert metrics["tokens/unknown"] == 3 / 4


BAD = [
    {"prompt": "", "completion": " x"},
    {"prompt": "question 3 ?", "completion": " answer 3"},
    {"prompt": "long " * 30, "completion": " x"},
    {"prompt": "long answer", "completion": " x" * 10},
]


def bad_files(folder: Path) -> None:
    jsonl(folder / "sft.train.jsonl", *demonstrations(8), *BAD)
    with (folder / "sft.train.jsonl").open("a", encoding="utf-8") as handle:
        handle.write('{"prompt": \n')
    jsonl(folder / "sft.validation.jsonl", *demonstrations(20)[10:12])
    jsonl(folder / "sft.test.jsonl", *demonstrations(20)[7:10])
    jsonl(
        folder / "preferences.train.jsonl", {"prompt": "q", "chosen": "a", "rejected": "a"}, {"prompt": "q"}
    )


FOUND = {
    "sft.train.jsonl:9": "empty",
    "sft.train.jsonl:10": "duplicate",
    **{f"sft.train.jsonl:{line}": "too_long" for line in (11, 12)},
    "sft.train.jsonl:13": "malformed",
    "sft.test.jsonl:1": "leak",
    "preferences.train.jsonl:1": "chosen_is_rejected",
    "preferences.train.jsonl:2": "malformed",
}
LIMITS = {
    "data.source": "files",
    "data.path": "in",
    "data.max_prompt_tokens": 20,
    "data.max_completion_tokens": 10,
    "ppo.response_length": 8,
}


def test_bad_input_of_every_kind_is_in_one_report_and_nothing_is_written(tmp_path: Path) -> None:
    bad_files(tmp_path / "in")
    with pytest.raises(UserError) as error:
        run(LIMITS)
    for where, reason in FOUND.items():
        assert f"  {where}: {reason}: " in str(error.value)
    assert str(error.value).startswith("8 row(s) of the data cannot be used")
    assert "longer ones (data.max_prompt_tokens: 30, data.max_completion_tokens: 11)" in str(error.value)
    assert str(error.value).endswith("set data.on_bad_row: quarantine to leave them out.")
    assert not Path("data").exists()


def test_quarantine_writes_bad_rows_with_reasons_and_counts_them(tmp_path: Path) -> None:
    bad_files(tmp_path / "in")
    metrics = run(LIMITS | {"data.on_bad_row": "quarantine"})
    text = Path("data/quarantine/rows.jsonl").read_text(encoding="utf-8")
    lines = {line["where"]: line for line in map(json.loads, text.splitlines())}
    assert {where: line["problems"][0]["reason"] for where, line in lines.items()} == FOUND
    assert lines["sft.train.jsonl:13"]["row"] == {"line": '{"prompt": '}
    assert [len(table("sft", split)) for split in SPLITS] == [8, 2, 2]
    assert metrics["quarantined"] == 8
    counts = Counter(FOUND.values())
    assert {reason: metrics[f"quarantined/{reason}"] for reason in REASONS} == {r: counts[r] for r in REASONS}


def test_data_that_changes_while_they_are_read_are_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rows of the new file would stand in DVC's cache under the hash of the old one."""
    jsonl(tmp_path / "in" / "sft.jsonl", *demonstrations(40))
    changes = {"data.source": "files", "data.path": "in", "judge.judges": [small.HELDOUT]}
    small.write_params(tmp_path, changes | {"tracking.enabled": False})
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    auto.write_inputs(Paths(), config.load())

    def slowly(*given: Any) -> dict[str, float]:
        metrics = plain(*given)
        with (tmp_path / "in/sft.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n")
        return metrics

    plain = prepare.run
    monkeypatch.setattr(prepare, "run", slowly)
    with pytest.raises(UserError, match=r"in.* changed since inputs/prepare\.json was written"):
        runner.run("prepare", Paths())


def test_a_name_of_data_columns_that_no_table_has_is_refused(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "sft.jsonl", *demonstrations(30))
    changes = {"data.source": "files", "data.path": "in", "data.num_validation": 5, "data.num_test": 5}
    with pytest.raises(UserError, match=r"\(completion: 'answr'\); the columns are 'prompt', 'completion'$"):
        run({**changes, "data.columns.completion": "answr"})
    with pytest.raises(UserError, match=r"data\.columns names what no table has"):
        run({**changes, "data.columns.completion": "Completion"})


def test_roles_without_comparisons_still_have_their_columns(tmp_path: Path) -> None:
    jsonl(tmp_path / "in" / "sft.jsonl", *demonstrations(8))
    metrics = run({"data.source": "files", "data.path": "in"})
    assert metrics["rows/preferences/train"] == 0
    empty = pq.read_table("data/preferences/train.parquet")
    assert empty.column_names == ["prompt", "chosen", "rejected", "source"]
    assert {str(kind) for kind in empty.schema.types} == {"string"}


def test_a_base_models_tokenizer_is_copied_and_its_template_applied(tmp_path: Path, chat_model: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": "x"}]}
        for n in range(8)
    ]
    jsonl(tmp_path / "talks.jsonl", *rows)
    files = {"data.source": "files", "data.path": "talks.jsonl", "data.max_prompt_tokens": 200}
    run(files | {"model.base": str(chat_model), "model.scratch": None})
    ours, theirs = (AutoTokenizer.from_pretrained(path) for path in ("data/tokenizer", chat_model))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.chat_template == theirs.chat_template
    written = table("sft", "train")
    assert all(r["prompt"].endswith("<eos>\n<assistant>") and r["completion"] == "x" for r in written)


def test_rows_that_merge_with_their_prompts_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = demonstrations(40)
    for number, row in enumerate(rows):
        row["prompt"] += "\nx"
        row["completion"] = "x" * (number < 7) + " xx xx"
    jsonl(tmp_path / "rows.jsonl", *rows)
    files = {"data.source": "files", "data.path": "rows.jsonl", "data.num_validation": 4, "data.num_test": 4}
    metrics = run({**files, "model.scratch.tokenizer": "bpe", "model.scratch.vocab_size": 400})
    assert metrics["tokens/merged_rows"] == 7
    assert "in 7 rows the tokenizer would join" in capsys.readouterr().out
