"""`rlhf label`: blind, resumable, nothing lost by a kill; agreement worked by hand."""

from __future__ import annotations

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks import config, console
from rlhf_tasks.cli import main
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import labelling, labels
from rlhf_tasks.evaluation.labels import Label, Pair

ROOT = Path(__file__).parents[2]
COUNT = 12


@pytest.fixture
def answers(project: Path) -> Path:
    """Answers of which the policy's are `p…`, the SFT model's `s…`; prompt 0 has the same from both."""
    rows = [
        {"index": i, "prompt": f"ask {i}", "reference": f"r{i}", "sft": f"s{i}" if i else "p0",
         "policy": f"p{i}"}
        for i in range(COUNT)
    ]  # fmt: skip
    labelling.ANSWERS.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), labelling.ANSWERS)
    console.set_quiet(False)
    return project


def label(keys: str, monkeypatch: pytest.MonkeyPatch, *names: str, **options: int | str | None) -> int:
    given = {"most": None, "seed": 1, "by": None, **options}
    monkeypatch.setattr(sys, "stdin", io.StringIO(keys))
    return labelling.run(names or ["policy_vs_sft"], **given)  # type: ignore[arg-type]


def written() -> list[dict[str, object]]:
    return [json.loads(line) for line in labelling.FILE.read_text(encoding="utf-8").splitlines()]


def test_the_side_chosen_is_the_one_that_was_shown_there(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert label("a" * COUNT, monkeypatch) == COUNT - 1, "the same two texts are not asked"
    shown = [line[3:] for line in capsys.readouterr().out.splitlines() if line.startswith("A: ")]
    chosen = [row["answer_a"] if row["outcome"] == 1.0 else row["answer_b"] for row in written()]
    assert chosen == shown
    assert {text[0] for text in shown} == {"p", "s"}, "sides are shuffled"


def test_whose_an_answer_is_is_not_shown(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    label("ab", monkeypatch, "policy_vs_sft", "policy_vs_reference")
    out = capsys.readouterr().out
    assert not [who for who in labelling.CONTENDERS if who in out]


def test_every_key_means_what_it_says(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert label("A\nb t\nx s q a", monkeypatch) == 3, "x is no key, and nothing is read after q"
    first, second, tie, skipped = (row["outcome"] for row in written())
    sides = [labelling._swapped(Pair(*(row[name] for name in labels.TEXTS)), 1) for row in written()]  # type: ignore[arg-type]
    assert (first, second) == (float(not sides[0]), float(sides[1]))
    assert (tie, skipped) == (0.5, None)


def test_what_was_labelled_or_skipped_is_not_asked_again(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert label("as", monkeypatch) == 1, "the end of a pipe is the end"
    assert label("t" * COUNT, monkeypatch, seed=2) == COUNT - 3
    assert len({(row["prompt"]) for row in written()}) == len(written()) == COUNT - 1
    assert label("a", monkeypatch, "sft_vs_policy") == 0, "the other way round is the same pair"


def test_the_same_seed_asks_the_same_in_the_same_order(answers: Path) -> None:
    found = labelling.pairs(labelling.DEFAULT)
    assert len(found) == 2 * COUNT - 1
    one, again, other = (labelling.unlabelled(found, [], seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(pair.prompt for pair in one) == sorted(pair.prompt for pair in other)


def test_who_and_when_are_written_only_if_given(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label("a", monkeypatch, most=1)
    label("b", monkeypatch, most=1, by="ada")
    plain, signed = written()
    assert set(plain) == {*labels.TEXTS, "outcome", "seed"}
    assert signed["by"] == "ada"
    assert str(signed["when"]).endswith("+00:00")


def test_a_kill_loses_no_label(answers: Path) -> None:
    program = "import sys; from rlhf_tasks.cli import main; sys.exit(main.main(['label']))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"atb")
        process.stdin.flush()
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            if labelling.FILE.exists() and labelling.FILE.read_bytes().count(b"\n") == 3:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert [label.outcome == 0.5 for label in labels.read(labelling.FILE)] == [False, True, False]


def test_at_a_terminal_a_key_needs_no_enter_and_the_terminal_is_left_as_it_was() -> None:
    import termios

    master, slave = pty.openpty()
    with os.fdopen(slave, "r", encoding="utf-8") as stream:
        before = termios.tcgetattr(stream)
        with labelling.keys(stream) as next_key:
            os.write(master, b"b")
            assert next_key() == "b"
        assert termios.tcgetattr(stream) == before
    os.close(master)


def test_agreement_is_the_share_of_decisions_and_kappa_counts_ties() -> None:
    """p = 2/4; people say 1, ½, 0 with ½, ¼, ¼, the judge with ½, 0, ½: e = 3/8, κ = (1/8) / (5/8)."""
    given = [Label(Pair("p", "a", "b", "x", "y"), outcome) for outcome in (1.0, 1.0, 0.0, 0.5, 1.0)]
    found = labels.agreement("gold", given, np.array([1.0, 0.0, 0.0, 1.0, np.nan]))
    assert found["human/gold/kappa"] == pytest.approx(0.2)
    assert found["human/gold/agreement"] == pytest.approx(2 / 3)
    assert labels.agreement("gold", given[:1], np.array([np.nan])) == {}
    assert "human/gold/agreement" not in labels.agreement("gold", given[3:4], np.array([1.0]))


def test_a_last_line_that_a_kill_tore_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever in its bytes the kill came."""
    console.set_quiet(False)
    file, pair = tmp_path / "labels.jsonl", Pair("é", "a", "b", "x", "y")
    for outcome in (0.5, None):
        labels.add(file, Label(pair, outcome))
    whole = file.read_bytes()
    end = whole.index(b"\n") + 1
    for cut in range(end + 1, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert labels.read(file) == [Label(pair, 0.5)]
        assert "labels.jsonl: the last line is half written, and left out: '{" in capsys.readouterr().out
        labels.mend(file)
        assert file.read_bytes() == whole[:end]
    for data in (whole, whole[:-1]):
        file.write_bytes(data)
        labels.mend(file)
        assert file.read_bytes() == data, "nothing but the end of the line is lacking"
        assert labels.read(file) == [Label(pair, 0.5), Label(pair, None)]
    assert labels.decided(labels.read(file)) == [Label(pair, 0.5)]
    assert capsys.readouterr().out == ""
    assert labels.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ['{"prompt": "p", "outcome": 1}', "not JSON", "[]", '{"prompt": "p", "a'])
def test_a_line_that_is_no_label_is_named(tmp_path: Path, line: str) -> None:
    file, label = tmp_path / "labels.jsonl", Label(Pair("p", "a", "b", "x", "y"), 1.0)
    labels.add(file, label)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    labels.add(file, label)
    with pytest.raises(UserError, match=r"labels\.jsonl:3: is no label; it needs the texts prompt, a, b"):
        labels.read(file)


def test_labelling_goes_on_behind_a_torn_line(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    label("ab", monkeypatch)
    with labelling.FILE.open("a", encoding="utf-8") as stream:
        stream.write('{"prompt": "ask')
    assert label("t", monkeypatch) == 1
    assert [row.outcome == 0.5 for row in labels.read(labelling.FILE)] == [False, False, True]


def test_so_many_pairs_are_labelled_as_were_asked_for_whatever_is_skipped(
    answers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert label("sasbssab", monkeypatch, most=3) == 3
    assert [row["outcome"] for row in written()].count(None) == 4
    assert len(written()) == 7, "the last key was for a pair that was not asked for"


def test_a_wrong_pair_and_missing_answers_are_one_message(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["label"]) == 2
    assert "evaluation/judge/answers.parquet is not there" in capsys.readouterr().err
    labelling.ANSWERS.parent.mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["p"]}), labelling.ANSWERS)
    assert main.main(["label", "--pairs", "policy_vs_gpt"]) == 2
    assert "--pairs policy_vs_gpt is no pair; give two of policy, sft, reference" in capsys.readouterr().err
    labelling.ANSWERS.write_text("half a table", encoding="utf-8")
    assert main.main(["label"]) == 2
    assert "evaluation/judge/answers.parquet is no table" in capsys.readouterr().err
    labelling.FILE.parent.mkdir(exist_ok=True)
    labelling.FILE.write_text("no label\n", encoding="utf-8")
    assert main.main(["label"]) == 2
    shown = capsys.readouterr()
    assert f"{labelling.FILE}:1: is no label" in shown.err
    assert shown.out == "", "DVC is not to keep it"


def test_labels_are_data_under_dvc_that_the_judge_stage_reads(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, check=True, capture_output=True)
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    monkeypatch.setattr(sys, "stdin", io.StringIO("aq"))
    assert main.main(["label"]) == 0
    assert Path("data/labels.jsonl.dvc").exists()
    assert config.load().judge.labels == "data/labels.jsonl"
    assert "DVC keeps data/labels.jsonl: commit data/labels.jsonl.dvc" in capsys.readouterr().out
