"""`data.format: unpaired_labels`: single responses that are good or bad, as rows of pairs with one side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config import Data
from rlhf_tasks.data import rows
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import Corpus, Problems
from rlhf_tasks.data.splits import complete
from rlhf_tasks.data.tokenizer import scratch_rendering
from rlhf_tasks.errors import UserError
from tests import toy
from tests.conftest import Command
from tests.data.conftest import as_lists, jsonl, load

KTO = Path(__file__).parent / "cases/16_kto/train.jsonl"
LABELS = Data(source="files", format="unpaired_labels")


def read(path: Path, problems: Problems, rendering: Rendering | None = None, **sizes: int) -> Corpus:
    split: Any = {"validation": sizes.get("validation", 0), "test": sizes.get("test", 0)}
    return load(path, LABELS, rendering or scratch_rendering(), problems, seed=1, sizes=split)


def test_each_label_is_a_row_with_one_side_in_the_order_of_the_file() -> None:
    problems = Problems()
    corpus = read(KTO, problems)
    found = as_lists(corpus)["preferences"]["train"]
    assert [row["chosen"] is not None for row in found] == [
        True,
        False,
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert all((row["chosen"] is None) != (row["rejected"] is None) for row in found)
    assert found[3]["rejected"] == "The heaviest gear you have."
    rows.check_texts(corpus, "<eos>", problems)
    rows.check_duplicates(corpus, problems)
    assert not problems
    have = [len(corpus["preferences"]["train"].that_have(*names)) for names in (["chosen"], ["rejected"])]
    assert have == [4, 4]
    assert len(corpus["preferences"]["train"].that_have("chosen", "rejected")) == 0


@pytest.mark.usefixtures("here")
def test_the_preview_counts_both_and_what_it_writes_is_read_again(rlhf: Command) -> None:
    assert "unpaired_labels (each is good or bad by itself" in rlhf("data", KTO, status=2).err
    toy.foreign("foreign/base", "gpt2")
    toy.write_params(data={"format": "unpaired_labels"}, dpo={"train": True, "loss": "kto"})
    for words in ([KTO, "--write", "out"], ["out"]):
        said = rlhf("data", *words).out
        assert "unpaired labels: 4 good and 4 bad; dpo.loss: kto alone learns from both" in said
        assert "preferences: 8 train" in said
        assert said.count("    prompt (") == 3, "the prompt of a bad response is shown too"


def test_a_chat_template_renders_a_response_as_that_of_a_pair(chat: Rendering, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    label = jsonl(tmp_path / "label.jsonl", *({"messages": talk, "label": good} for good in (True, False)))
    pair = jsonl(tmp_path / "pair.jsonl", {"prompt": talk[:1], "chosen": talk[1:], "rejected": talk[1:]})
    [expected] = as_lists(read(pair, Problems(), chat))["preferences"]["train"]
    good, bad = as_lists(read(label, Problems(), chat))["preferences"]["train"]
    assert (good["prompt"], good["chosen"], good["rejected"]) == (
        expected["prompt"],
        expected["chosen"],
        None,
    )
    assert (bad["prompt"], bad["chosen"], bad["rejected"]) == (expected["prompt"], None, expected["rejected"])


def test_bad_rows_are_named_and_a_label_that_says_nothing_makes_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [("a", True), ("a", False), ("a", True), ("", False), (None, True), ("b", None)]
    given = [{"prompt": "q", "completion": text, "label": label} for text, label in labels]
    problems = Problems()
    corpus = read(jsonl(tmp_path / "labels.jsonl", *given), problems)
    rows.check_texts(corpus, "<eos>", problems)
    rows.check_duplicates(corpus, problems)
    said = problems.report()
    assert "labels.jsonl:3: duplicate: the same row as labels.jsonl:1" in said, "and :2 is another label"
    assert "labels.jsonl:4: empty: rejected is empty" in said
    assert "labels.jsonl:5: empty: chosen is empty" in said
    assert len(problems) == 3
    assert "1 row(s) make no row: label is null (labels.jsonl:6)" in capsys.readouterr().out


def test_pairs_may_stand_beside_labels_and_null_is_a_fault_without_the_format(tmp_path: Path) -> None:
    sides: list[tuple[str | None, str | None]] = [("a", "b"), (None, "c"), (None, None)]
    given = [{"prompt": f"q {i}", "chosen": a, "rejected": b} for i, (a, b) in enumerate(sides)]
    file, none = jsonl(tmp_path / "pairs.jsonl", *given), {"validation": 0, "test": 0}
    for data, faults in ((LABELS, {"3"}), (Data(source="files"), {"2", "3"})):
        problems = Problems()
        corpus = load(file, data, scratch_rendering(), problems, seed=1, sizes=none)
        rows.check_texts(corpus, "<eos>", problems)
        assert {place.split(":")[1] for place in problems.report().splitlines()[1:]} == faults


def test_demonstrations_and_prompts_are_made_of_good_responses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [{"prompt": f"q {i}", "completion": f"a {i}", "label": i % 4 > 0} for i in range(40)]
    full = complete(read(jsonl(tmp_path / "labels.jsonl", *given), Problems(), validation=8, test=8))
    good = {row["prompt"] for row in given if row["label"]}
    for role in ("sft", "prompts"):
        assert {row["prompt"] for found in as_lists(full)[role].values() for row in found} == good
    assert "10 bad response(s) without a good one make no demonstration" in capsys.readouterr().out
    bad = jsonl(tmp_path / "bad.jsonl", *({**row, "label": False} for row in given))
    with pytest.raises(UserError, match=r"40 bad responses make no demonstration; give good ones too"):
        complete(read(bad, Problems(), validation=8, test=8))
