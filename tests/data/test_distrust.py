"""What a data set makes doubtful itself is not trained on: broken files, one column twice, ties."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import prepare
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.conftest import Command


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
    view = small.view("prepare", {"judge.judges": [small.HELDOUT], **changes})
    with pytest.raises(UserError, match=rf"^{file}:{line}: not CSV: .*quarantine cannot .*") as error:
        prepare.run(view, Paths(), NullTracker("prepare"))
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
        assert "the JSON value that begins in line 1 is broken: " in message
    assert f"rows.json:{torn[: torn.index('q1')].count(chr(10)) + 1}: " in message


def test_json_lines_end_with_their_lines_whatever_they_hold(rlhf: Command) -> None:
    lines = ['{"prompt": "torn', *map(json.dumps, ROWS), '{"prompt": "p", "completion": ["x",', '{"prompt"']
    Path("rows.jsonl").write_text("\n".join(lines), "utf-8")
    assert re.search(r"sft: 4 train(.|\n)*\(3 malformed\)", rlhf("data rows.jsonl").out)
