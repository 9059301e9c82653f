"""Traces of an llm judge's replies, and what the judge and people say of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config.judge import LlmJudge
from rlhf_tasks.judging.human_labels import Label, Pair
from rlhf_tasks.judging.judges.comparisons import Question
from rlhf_tasks.judging.judges.llm import LlmComparer
from rlhf_tasks.project.paths import Paths
from tests.judging import endpoint
from tests.judging.endpoint import Server

ANY = 1e9  # allowed failures
PAIRS = [Question("p0", "good", "bad"), Question("p0", "bad", "good"), Question("p1", "x", "y")]


@pytest.fixture
def server() -> Iterator[Server]:
    with endpoint.serving() as started:
        yield started


class Traced(list[dict[str, Any]]):
    """The traces, as keyword arguments."""

    def __call__(self, name: str, inputs: Any, outputs: Any, **more: Any) -> None:
        self.append({"name": name, "inputs": inputs, "outputs": outputs, **more})

    def said(self, **wanted: str) -> list[list[Any]]:
        """Of each trace, the values of the assessments with these fields."""
        chosen = [[a for a in t["assessments"] if a.items() >= wanted.items()] for t in self]
        return [[one["value"] for one in found] for found in chosen]


def judge(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, traced: Traced, **options: Any
) -> LlmComparer:
    monkeypatch.setenv("JUDGE_KEY", endpoint.KEY)
    (folder / "prompt.txt").write_text(endpoint.PROMPT, encoding="utf-8")
    values = {
        "kind": "llm",
        "name": "gpt",
        "base_url": server.url,
        "model": endpoint.MODEL,
        "key_variable": "JUDGE_KEY",
        "prompt": "prompt.txt",
        "logprobs": False,
        "max_reply_tokens": 1,
        "concurrency": 1,
        "timeout_seconds": 10.0,
        "max_retries": 0,
        "budget": None,
    }
    settings = LlmJudge.model_validate(values)
    return LlmComparer(settings, 1.0, Paths(folder), trace=traced, **options)


def test_the_first_replies_are_traced_once_with_request_and_reply(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept reply is traced at the time of its request; a failure with its reason."""
    traced = Traced()
    server.reply = lambda body: endpoint.completion("B" if "A=good" in str(body["messages"]) else "Hm")
    for _ in range(2):
        compare = judge(server, tmp_path, monkeypatch, traced, num_traces=2)
        compare(PAIRS, ANY)
        compare(PAIRS, ANY)
    first, failed, *again = traced
    assert again == [first, failed], "the second process traces two kept replies"
    assert first["name"] == "judge gpt"
    assert first["inputs"]["messages"][0]["content"].startswith("p0")
    assert first["outputs"] == {"text": "B", "tokens": 10, "first_is_better": 0.0}
    assert failed["outputs"]["failure"] == "the reply does not end with A or B: 'Hm'"
    assert 0 <= first["end"] - first["start"] < 60_000


def test_the_judges_preference_is_feedback_under_its_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = Traced()
    texts = {"A=good": "It names the fact.\nA", "A=bad": "Hm", "A=x": "B"}
    server.reply = lambda body: endpoint.completion(
        next(reply for key, reply in texts.items() if key in str(body["messages"]))
    )
    judge(server, tmp_path, monkeypatch, traced, num_traces=9)(PAIRS, ANY)
    (first,), (failed,), (last,) = (one["assessments"] for one in traced)
    assert (first["name"], first["kind"], first["source"], first["by"]) == (
        "gpt",
        "feedback",
        "LLM_JUDGE",
        endpoint.MODEL,
    )
    assert (first["value"], first["rationale"], first["metadata"]) == (
        "A",
        texts["A=good"],
        {"probability_of_A": "1"},
    )
    assert (failed["value"], failed["metadata"]) == (None, {})
    assert failed["error"] == "the reply does not end with A or B: 'Hm'"
    assert (last["value"], last["rationale"]) == ("B", ""), "one letter is no rationale"
    assert first["time"] == traced[0]["end"]


def test_labels_are_human_feedback_and_expectations_in_the_order_that_the_judge_saw(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anna prefers `good`; a second label of the pair, in the other order, is a tie without a name."""
    labels = [
        Label(Pair("p0", "policy", "sft", "good", "bad"), 1.0, "anna", "2026-01-02T03:04:05+00:00"),
        Label(Pair("p0", "sft", "policy", "bad", "good"), 0.5),
        Label(Pair("another prompt", "policy", "sft", "x", "y"), 1.0),
        Label(Pair("p0", "policy", "sft", "good", "bad"), None),
    ]
    traced = Traced()
    judge(server, tmp_path, monkeypatch, traced, num_traces=9, labels=labels)(PAIRS, ANY)
    for kind in ("feedback", "expectation"):
        assert traced.said(source="HUMAN", kind=kind, name="gpt") == [["A", "tie"], ["B", "tie"], []]
        assert traced.said(by="anna", kind=kind) == [["A"], ["B"], []]
        assert traced.said(by="rlhf label", kind=kind) == [["tie"], ["tie"], []]
    times = [one["time"] for one in traced[0]["assessments"] if one["by"] == "anna"]
    assert times == [1767323045000] * 2


def test_replies_on_labelled_pairs_are_traced_beside_the_first_ones_and_none_if_traces_are_off(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = Label(Pair("p1", "policy", "sft", "y", "x"), 1.0, when="yesterday")
    for most, expected in ((1, ["p0", "p1"]), (0, [])):
        traced = Traced()
        judge(server, tmp_path, monkeypatch, traced, num_traces=most, labels=[label])(PAIRS, ANY)
        assert [one["inputs"]["messages"][0]["content"][:2] for one in traced] == expected
        assert traced.said(source="HUMAN", kind="feedback") == [[], ["B"]][: len(expected)]
