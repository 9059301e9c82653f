"""`rlhf label`: it hides whose a response is, can be stopped and resumed, and loses no label."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_tasks import config, console
from rlhf_tasks.cli import main
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import human_labels, labelling
from rlhf_tasks.judging.human_labels import Label, Pair
from rlhf_tasks.project.paths import Paths

ROOT = Path(__file__).parents[2]
COUNT = 12
PATHS = Paths()


@pytest.fixture
def responses(project: Path) -> Path:
    """Responses `p…` of the policy and `s…` of the SFT model; both give the same to prompt 0."""
    rows = [
        {
            "index": i,
            "prompt": f"ask {i}",
            "reference": f"r{i}",
            "sft": f"s{i}" if i else "p0",
            "policy": f"p{i}",
        }
        for i in range(COUNT)
    ]
    PATHS.judge_results.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), PATHS.judged_responses)
    console.set_quiet(False)
    return project


def label(keys: str, *names: str, **options: int | str | None) -> int:
    """Run `rlhf label` with these keys as its input; the number of new labels."""
    settings: dict[str, Any] = {"most": None, "seed": 1, "by": None, **options}
    return labelling.run(PATHS, names or ["policy_vs_sft"], stream=io.StringIO(keys), **settings)


def written() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PATHS.labels.read_text(encoding="utf-8").splitlines()]


def test_the_side_chosen_is_the_one_that_was_shown_there(
    responses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert label("a" * COUNT) == COUNT - 1, "two equal texts are not shown"
    shown = [line[3:] for line in capsys.readouterr().out.splitlines() if line.startswith("A: ")]
    chosen = [row["answer_a"] if row["outcome"] == 1.0 else row["answer_b"] for row in written()]
    assert chosen == shown
    assert {text[0] for text in shown} == {"p", "s"}, "sides are shuffled"


def test_the_contenders_of_a_pair_are_hidden(responses: Path, capsys: pytest.CaptureFixture[str]) -> None:
    label("ab", "policy_vs_sft", "policy_vs_reference")
    out = capsys.readouterr().out
    assert not [who for who in labelling.CONTENDERS if who in out]


def test_each_key_gives_its_outcome(responses: Path) -> None:
    assert label("A\nb t\nx s q a") == 3, "x is ignored, and nothing is read after q"
    first, second, tie, skipped = (row["outcome"] for row in written())
    sides = [labelling.is_swapped(Pair(*(row[name] for name in human_labels.TEXTS)), 1) for row in written()]
    assert (first, second) == (float(not sides[0]), float(sides[1]))
    assert (tie, skipped) == (0.5, None)


def test_a_labelled_or_skipped_pair_is_not_shown_again(responses: Path) -> None:
    assert label("as") == 1, "the end of a pipe quits"
    assert label("t" * COUNT, seed=2) == COUNT - 3
    assert len({(row["prompt"]) for row in written()}) == len(written()) == COUNT - 1
    assert label("a", "sft_vs_policy") == 0, "swapped contenders are the same pair"


def test_the_seed_decides_the_order_of_the_pairs(responses: Path) -> None:
    result = labelling.pairs(PATHS, labelling.DEFAULT)
    assert len(result) == 2 * COUNT - 1
    one, again, other = (labelling.unlabelled(result, [], seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(pair.prompt for pair in one) == sorted(pair.prompt for pair in other)


def test_name_and_time_are_written_only_if_a_name_is_given(responses: Path) -> None:
    label("a", most=1)
    label("b", most=1, by="ada")
    plain, signed = written()
    assert set(plain) == {*human_labels.TEXTS, "outcome", "seed"}
    assert signed["by"] == "ada"
    assert str(signed["when"]).endswith("+00:00")


def test_a_kill_loses_no_label(responses: Path) -> None:
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
            if PATHS.labels.exists() and PATHS.labels.read_bytes().count(b"\n") == 3:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert [label.outcome == 0.5 for label in human_labels.read(PATHS.labels)] == [False, True, False]


def test_a_terminal_needs_no_enter_and_keeps_its_settings() -> None:
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
    labels = [Label(Pair("p", "a", "b", "x", "y"), outcome) for outcome in (1.0, 1.0, 0.0, 0.5, 1.0)]
    result = human_labels.agreement(labels, np.array([1.0, 0.0, 0.0, 1.0, np.nan]))
    assert result is not None
    assert result.agreement is not None
    assert result.kappa.value == pytest.approx(0.2)
    assert result.agreement.value == pytest.approx(2 / 3)
    assert human_labels.agreement(labels[:1], np.array([np.nan])) is None
    of_tie = human_labels.agreement(labels[3:4], np.array([1.0]))
    assert of_tie is not None
    assert of_tie.agreement is None, "the person did not prefer either"


def test_an_incomplete_last_line_is_left_out_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At whichever byte the line is cut off."""
    console.set_quiet(False)
    file, pair = tmp_path / "labels.jsonl", Pair("é", "a", "b", "x", "y")
    for outcome in (0.5, None):
        human_labels.add(file, Label(pair, outcome))
    whole = file.read_bytes()
    end = whole.index(b"\n") + 1
    for cut in range(end + 1, len(whole) - 1):
        file.write_bytes(whole[:cut])
        assert human_labels.read(file) == [Label(pair, 0.5)]
        assert "labels.jsonl: the last line is incomplete and is left out: '{" in capsys.readouterr().out
        human_labels.remove_incomplete_line(file)
        assert file.read_bytes() == whole[:end]
    for data in (whole, whole[:-1]):
        file.write_bytes(data)
        human_labels.remove_incomplete_line(file)
        assert file.read_bytes() == data, "only the end of the line is missing"
        assert human_labels.read(file) == [Label(pair, 0.5), Label(pair, None)]
    assert human_labels.decided(human_labels.read(file)) == [Label(pair, 0.5)]
    assert capsys.readouterr().out == ""
    assert human_labels.read(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", ['{"prompt": "p", "outcome": 1}', "not JSON", "[]", '{"prompt": "p", "a'])
def test_a_line_that_is_not_a_label_is_named(tmp_path: Path, line: str) -> None:
    file, label = tmp_path / "labels.jsonl", Label(Pair("p", "a", "b", "x", "y"), 1.0)
    human_labels.add(file, label)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{line}\n")
    human_labels.add(file, label)
    with pytest.raises(
        UserError, match=r"labels\.jsonl:3: this line is not a label; it needs the texts prompt"
    ):
        human_labels.read(file)


def test_labelling_replaces_an_incomplete_line(responses: Path) -> None:
    label("ab")
    with PATHS.labels.open("a", encoding="utf-8") as stream:
        stream.write('{"prompt": "ask')
    assert label("t") == 1
    assert [row.outcome == 0.5 for row in human_labels.read(PATHS.labels)] == [False, False, True]


def test_skipped_pairs_do_not_count_towards_the_number_of_labels(responses: Path) -> None:
    assert label("sasbssab", most=3) == 3
    assert [row["outcome"] for row in written()].count(None) == 4
    assert len(written()) == 7, "the last key is left unread"


def test_each_user_error_is_one_message(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["label"]) == 2
    assert "evaluation/judge/answers.parquet does not exist" in capsys.readouterr().err
    PATHS.judge_results.mkdir(parents=True)
    pq.write_table(pa.table({"prompt": ["p"]}), PATHS.judged_responses)
    assert main.main(["label", "--pairs", "policy_vs_gpt"]) == 2
    assert (
        "--pairs policy_vs_gpt is not a pair; give two of policy, sft, reference" in capsys.readouterr().err
    )
    PATHS.judged_responses.write_text("half a table", encoding="utf-8")
    assert main.main(["label"]) == 2
    assert "evaluation/judge/answers.parquet is not a table" in capsys.readouterr().err
    PATHS.labels.parent.mkdir(exist_ok=True)
    PATHS.labels.write_text("no label\n", encoding="utf-8")
    assert main.main(["label"]) == 2
    shown = capsys.readouterr()
    assert f"{PATHS.labels}:1: this line is not a label" in shown.err
    assert shown.out == "", "DVC does not track it"


def test_dvc_tracks_the_labels_and_the_judge_stage_reads_them(
    responses: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, check=True, capture_output=True)
    shutil.copy(ROOT / "params.yaml", "params.yaml")
    monkeypatch.setattr(sys, "stdin", io.StringIO("aq"))
    assert main.main(["label"]) == 0
    assert Path("data/labels.jsonl.dvc").exists()
    assert config.load().judge.labels == "data/labels.jsonl"
    shown = capsys.readouterr().out
    assert "DVC tracks data/labels.jsonl: commit data/labels.jsonl.dvc" in shown
    assert "params.yaml has changed: judge.labels: null → data/labels.jsonl" in shown
    undo = re.search(r"`rlhf (preset --set [^`]*)` undoes it", shown)
    assert undo is not None
    assert main.main(undo[1].split()) == 0
    assert config.load().judge.labels is None
