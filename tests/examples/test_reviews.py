"""The source and the labels of preset reviews, with an archive of forty sentences."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import reviews
from rlhf_tasks.data.rows import SPLITS
from rlhf_tasks.errors import UserError
from tests.data.conftest import are_disjoint
from tests.examples.conftest import of_split


def packed(name: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    return archive.getvalue()


@pytest.fixture(autouse=True)
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    words = [("a wonderful and moving", "2.5"), ("a tedious and stupid", "-2.5")]
    lines = [
        f"{i}\t{rating}\tNumber {i} is  {text} film{'' if i % 3 else ', and long'}"
        for i, (text, rating) in enumerate(words * 20)
    ]
    lines += ["98\t1.0\tToo short.", "99\t0.5\tNumber 7 is a second one that begins alike"]
    inner, name = reviews.RATED
    ratings = packed(f"hutto_ICWSM_2014/{name}", "\r\n".join(lines).encode())
    file = tmp_path / "vaderSentiment-3.3.2.tar.gz"
    file.write_bytes(packed(f"vaderSentiment-3.3.2/{inner}", ratings))
    monkeypatch.setattr(reviews, "ARCHIVE", file)
    forget()
    yield file
    forget()


def forget() -> None:
    reviews.rated_sentences.cache_clear()
    reviews.regression.cache_clear()


def test_no_beginning_is_in_two_splits_and_no_train_sentence_in_two_roles() -> None:
    rows = reviews.reviews(1, 4, 6)
    beginnings = {
        role: {split: {row["prompt"] for row in of_split(some, split)} for split in SPLITS}
        for role, some in rows.items()
    }
    for splits in beginnings.values():
        assert [len(splits[split]) for split in SPLITS] == [15, 4, 6]
        assert are_disjoint(splits.values())
    assert beginnings["sft"]["train"].isdisjoint(beginnings["prompts"]["train"])
    assert beginnings["sft"]["test"] == beginnings["prompts"]["test"]
    assert {row["prompt"].startswith(reviews.HEADING) for row in rows["sft"] + rows["prompts"]} == {True}
    whole = {row["prompt"].removeprefix(reviews.HEADING) + row["completion"] for row in rows["sft"]}
    assert whole <= {text for text, _ in reviews.rated_sentences()}
    assert reviews.reviews(1, 4, 6) == rows != reviews.reviews(2, 4, 6)


def test_what_people_liked_has_the_higher_score() -> None:
    good, bad = reviews.people(["This is"] * 2, [" a wonderful film", " a tedious film"])
    assert -4 < bad < 0 < good < 4
    assert reviews.people([f"{reviews.HEADING}This is"], [" a wonderful film"]) == [good]


def test_a_missing_archive_is_named_with_the_command_that_fetches_it(archive: Path) -> None:
    assert [*reviews.reads()] == [archive.name]
    archive.unlink()
    assert reviews.reads() == {}
    with pytest.raises(
        UserError,
        match=r"3\.3\.2\.tar\.gz is missing; fetch it with: pip download .* vaderSentiment==3\.3\.2$",
    ):
        reviews.reviews(1, 4, 6)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.9])
def test_an_archive_that_was_cut_off_is_one_message(archive: Path, share: float) -> None:
    content = archive.read_bytes()
    archive.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="is damaged; delete it, and fetch it with: pip download"):
        reviews.reviews(1, 4, 6)
