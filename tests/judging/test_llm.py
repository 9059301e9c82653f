"""The `llm` judge with a server that works or fails: replies, retries, the cache and the budget."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.config.judge import LlmJudge
from rlhf_tasks.errors import OutsideFault, UserError
from rlhf_tasks.judging.judges import llm
from rlhf_tasks.judging.judges.comparisons import PairwiseJudge, Question, Reply
from rlhf_tasks.judging.judges.llm import LlmComparer, read_record, read_reply
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring import chat
from rlhf_tasks.scoring.chat import Cache, Malformed
from tests.judging import endpoint
from tests.judging.endpoint import KEY, MODEL, Body, Handler, Server, completion
from tests.loopback import serving

ROOT = Path(__file__).parents[2]
ANY = 1e9  # allowed failures


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(endpoint.Server()) as started:
        yield started


def settings(server: Server, folder: Path, **changes: Any) -> LlmJudge:
    prompt = folder / "prompt.txt"
    prompt.write_text(endpoint.PROMPT, encoding="utf-8")
    values: dict[str, Any] = {
        "kind": "llm",
        "name": "gpt",
        "base_url": server.url,
        "model": MODEL,
        "prompt": prompt.name,
    }
    values |= {"key_variable": "JUDGE_KEY", "logprobs": False, "max_reply_tokens": 1, "concurrency": 4}
    values |= {"timeout_seconds": 10.0, "max_retries": 2, "budget": None}
    return LlmJudge.model_validate(values | changes)


def comparer(server: Server, folder: Path, **changes: Any) -> LlmComparer:
    return LlmComparer(settings(server, folder, **changes), 0.05, Paths(folder))


def questions(count: int) -> list[Question]:
    return [
        Question(f"prompt {i}", f"{(i * 7) % count:03d}", f"{(i * 5 + 1) % count:03d}") for i in range(count)
    ]


def expected(questions: Sequence[Question]) -> list[Reply]:
    return [Reply(float(q.first > q.second), num_tokens=10) for q in questions]


# ------------------------------------------------------------------------------------------ replies


def test_replies_are_in_order_and_none_is_requested_twice(server: Server, tmp_path: Path) -> None:
    sent = questions(20)
    assert comparer(server, tmp_path)([*sent, *sent], ANY) == expected([*sent, *sent])
    assert comparer(server, tmp_path)(sent, ANY) == expected(sent)
    assert sum(server.requests.values()) == 20, "a kept or repeated question is sent once"
    (body,) = {json.dumps({**b, "messages": None}) for b in server.bodies}
    assert json.loads(body) == {"model": MODEL, "messages": None, "temperature": 0.0, "max_tokens": 1}
    assert server.most_at_once <= 4


def test_every_pair_is_compared_in_both_orders(server: Server, tmp_path: Path) -> None:
    judge = PairwiseJudge("gpt", comparer(server, tmp_path), 0.0)
    result = judge.compare(["p", "q"], ["2", "x"], ["1", "y"])
    assert result.outcomes.tolist() == [1.0, 0.0]
    asked = {(b["messages"][0]["content"][0], *endpoint.shown(b)) for b in server.bodies}
    assert asked == {("p", "2", "1"), ("p", "1", "2"), ("q", "x", "y"), ("q", "y", "x")}
    assert (result.num_replies, result.num_tokens) == (4, 40)


def test_the_probability_comes_from_the_log_probs_if_the_server_gives_them(
    server: Server, tmp_path: Path
) -> None:
    server.reply = lambda body: completion("A", probabilities={"A": 0.6, " A": 0.2, "B": 0.1, "I": 0.1})
    (reply,) = comparer(server, tmp_path, logprobs=True)(questions(1), ANY)
    assert reply.probability == pytest.approx(0.8 / 0.9)
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 5)


@pytest.mark.parametrize(
    ("text", "probability"),
    [
        *(("A", 1.0), ("B", 0.0), (" B\n", 0.0), ("**A**", 1.0), ("Verdict: B.", 0.0), ("answer: A", 1.0)),
        ("Both are short, but the first is true.\n\nBetter: A", 1.0),
    ],
)
def test_the_preference_is_the_letter_on_the_last_line(text: str, probability: float) -> None:
    assert read_reply(read_record(json.dumps(completion(text)))) == Reply(probability, num_tokens=10)


@pytest.mark.parametrize(
    "text", ["", "a", "C", "AB", "A or B", "A is better", "A\nsince it is true", "Neither A"]
)
def test_a_reply_without_a_preference_is_a_failure_that_shows_it(text: str) -> None:
    reply = read_reply(read_record(json.dumps(completion(text))))
    assert reply.probability != reply.probability
    assert repr(text) in reply.failure


# ----------------------------------------------------------------------------------------- failures


def test_a_request_to_a_busy_server_is_repeated_after_retry_after(server: Server, tmp_path: Path) -> None:
    def busy(handler: Handler, body: Body, attempt: int) -> None:
        if attempt <= 2:
            handler.send(429 if attempt == 1 else 503, {"error": {"message": "later"}}, Retry_After="0.02")
        else:
            handler.reply(body)

    server.behaviour = busy
    sent = questions(5)
    assert comparer(server, tmp_path)(sent, ANY) == expected(sent)
    assert set(server.requests.values()) == {3}
    assert set(server.paid.values()) == {1}
    assert sorted(set(server.retries)) == ["0", "1", "2"]


REFUSE = {"error": {"message": "context length exceeded"}}


@pytest.mark.parametrize(
    ("act", "changes", "failure"),
    [
        (lambda one: one.hang(), {"timeout_seconds": 2.0, "max_retries": 0}, "APITimeoutError"),
        (
            lambda one: one.send(400, REFUSE),
            {},
            "status 400: Error code: 400 - context length",
        ),
        (lambda one: one.send(429, REFUSE, Retry_After="0.02"), {"max_retries": 1}, "status 429: Error code"),
    ],
    ids=["hung", "rejected", "busy"],
)
def test_a_question_that_fails_fails_alone(
    server: Server, tmp_path: Path, act: Callable[[Handler], None], changes: dict[str, Any], failure: str
) -> None:
    def behave(handler: Handler, body: Body, attempt: int) -> None:
        is_first = body["messages"][0]["content"].startswith("prompt 0\n")
        act(handler) if is_first else handler.reply(body)

    server.behaviour = behave
    sent = questions(4)
    first, *others = comparer(server, tmp_path, **changes)(sent, ANY)
    assert first.failure.startswith(failure)
    assert others == expected(sent)[1:]


def test_a_reply_that_never_ends_times_out_and_no_server_is_a_failure(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "LONGEST_WAIT_SECONDS", 0.2)
    server.behaviour = lambda handler, body, attempt: handler.drip()
    (reply,) = comparer(server, tmp_path, timeout_seconds=0.3, max_retries=0)(questions(1), ANY)
    assert "TimeoutError" in reply.failure
    url = "http://127.0.0.1:9/v1"  # the discard port: no server listens
    away = comparer(server, tmp_path, base_url=url, max_retries=0)
    (reply,) = away(questions(1), ANY)
    assert "APIConnectionError" in reply.failure
    with pytest.raises(
        OutsideFault, match="APIConnectionError"
    ):  # and no mistake of the user: a flow retries
        away(questions(1), 0)


@pytest.mark.parametrize("ends", ["half", "close"])
def test_a_broken_connection_is_tried_again(server: Server, tmp_path: Path, ends: str) -> None:
    server.behaviour = lambda handler, body, attempt: (
        getattr(handler, ends)() if attempt == 1 else handler.reply(body)
    )
    sent = questions(2)
    assert comparer(server, tmp_path)(sent, ANY) == expected(sent)
    assert set(server.requests.values()) == {2}


@pytest.mark.parametrize(
    "reply",
    [
        *(b"<html>gateway</html>", b'{"choices": []}', b"[]", b"null"),
        b'{"choices": [{"message": {"content": [1]}}]}',
    ],
)
def test_a_malformed_reply_is_a_failure_and_not_kept(server: Server, tmp_path: Path, reply: bytes) -> None:
    server.behaviour = lambda handler, body, attempt: (
        handler.send(200, reply) if attempt == 1 else handler.reply(body)
    )
    judge = comparer(server, tmp_path)
    (failed,) = judge(questions(1), ANY)
    assert "Malformed: this is not a chat completion" in failed.failure
    assert judge(questions(1), ANY) == expected(questions(1))
    with pytest.raises(Malformed):
        read_record(reply.decode())


def test_a_refusal_is_a_failure_that_is_paid_for_once(server: Server, tmp_path: Path) -> None:
    server.reply = lambda body: completion(None, refusal="I will not compare these.")
    judge = comparer(server, tmp_path)
    for _ in range(2):
        (reply,) = judge(questions(1), ANY)
        assert "a refusal: I will not compare these." in reply.failure
    assert list(server.paid.values()) == [1]


def test_a_wrong_model_or_key_stops_at_once_and_hides_the_key_and_so_does_none(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"judge gpt: .* status 404 for model 'judge-2'.*no model judge-2"):
        comparer(server, tmp_path, model="judge-2", concurrency=1)(questions(50), ANY)
    assert sum(server.requests.values()) == 1
    monkeypatch.setenv("JUDGE_KEY", "wrong-key")
    with pytest.raises(UserError, match=r"returned status 401.*the key in \$JUDGE_KEY") as caught:
        comparer(server, tmp_path)(questions(1), ANY)
    assert "wrong-key" not in str(caught.value)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="the environment variable JUDGE_KEY holds no key"):
        comparer(server, tmp_path)


def test_too_many_failures_stop_before_the_last_question(server: Server, tmp_path: Path) -> None:
    server.behaviour = lambda handler, body, attempt: handler.send(400, {"error": {"message": "no"}})
    with pytest.raises(UserError, match=r"judge gpt: .* of the replies so far failed.*status 400"):
        comparer(server, tmp_path)(questions(500), 10)
    assert sum(server.requests.values()) <= 11 + 4  # the requests in flight


# ------------------------------------------------------------------------------ cache and budget


def test_kept_replies_are_those_of_one_model_prompt_limit_and_endpoint(
    server: Server, tmp_path: Path
) -> None:
    sent = questions(2)
    other = tmp_path / "other.txt"
    other.write_text("Well:\n" + endpoint.PROMPT, encoding="utf-8")
    for changes in ({}, {"max_reply_tokens": 2}, {"prompt": str(other)}):
        comparer(server, tmp_path, **changes)(sent[:1], ANY)
    assert sum(server.requests.values()) == 3
    comparer(server, tmp_path)(sent, ANY)
    with pytest.raises(UserError, match="status 404 for model 'another'"):
        comparer(server, tmp_path, model="another")(sent, ANY)
    with serving(endpoint.Server()) as elsewhere:
        elsewhere.reply = lambda body: completion("A")
        result = comparer(elsewhere, tmp_path)(sent, ANY)
    assert [reply.probability for reply in result] == [1.0, 1.0]
    assert sum(elsewhere.paid.values()) == 2


def test_a_spent_budget_of_requests_keeps_the_replies_for_later(server: Server, tmp_path: Path) -> None:
    sent = questions(10)
    budget = {"requests": 6, "tokens": None}
    with pytest.raises(UserError, match="its budget of 6 requests is spent, and 10 replies are needed"):
        comparer(server, tmp_path, budget=budget)(sent, ANY)
    assert sum(server.paid.values()) == 6
    assert comparer(server, tmp_path, budget=budget)(sent, ANY) == expected(sent)
    assert set(server.paid.values()) == {1}
    assert len(server.paid) == 10


def test_a_budget_of_tokens_needs_a_server_that_reports_them(server: Server, tmp_path: Path) -> None:
    server.reply = lambda body: {**endpoint.preferring(body), "usage": None}
    with pytest.raises(UserError, match="does not report the tokens"):
        comparer(server, tmp_path, budget={"requests": None, "tokens": 30})(questions(3), ANY)


def test_an_incomplete_line_of_the_cache_loses_that_line_only(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    cache = Cache(file)
    cache.add("one", {"text": "A"})
    with file.open("ab") as stream:
        stream.write(b'{"key": "two", "te')
    again = Cache(file)
    assert "two" not in again
    again.add("three", {"text": "B"})
    assert [Cache(file)[key]["text"] for key in ("one", "three")] == ["A", "B"]


KILLED = """
import json, sys
from pathlib import Path
from rlhf_tasks.config.judge import LlmJudge
from rlhf_tasks.judging.judges.comparisons import Question
from rlhf_tasks.judging.judges.llm import LlmComparer
from rlhf_tasks.project.paths import Paths
settings, questions, root = json.load(open(sys.argv[1]))
judge = LlmComparer(LlmJudge.model_validate(settings), 0.05, Paths(Path(root)))
print(len(judge([Question(*q) for q in questions], 1e9)))
"""


KILL_AT = 15  # replies that are kept


def test_no_reply_is_paid_for_twice_after_a_kill(server: Server, tmp_path: Path) -> None:
    """SIGKILL once KILL_AT replies are kept and others wait at the server, unanswered; then run it again."""
    arguments, sent, killed = tmp_path / "arguments.json", questions(40), threading.Event()
    arguments.write_text(json.dumps([settings(server, tmp_path).model_dump(), sent, str(tmp_path)]))

    def behave(handler: Handler, body: Body, attempt: int) -> None:
        if killed.is_set() or handler.number <= KILL_AT:
            handler.reply(body)
        else:
            handler.hang()

    server.behaviour = behave
    command = [sys.executable, "-c", KILLED, str(arguments)]
    environment, kept = os.environ | {"PYTHONPATH": str(ROOT)}, Paths(tmp_path).home / llm.FILE
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            if kept.exists() and kept.read_bytes().count(b"\n") == KILL_AT and len(server.requests) > KILL_AT:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert sum(server.paid.values()) == KILL_AT
    killed.set()
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "40"
    assert "25 of 40 replies were requested" in done.stdout
    assert set(server.paid.values()) == {1}, "no reply was paid for twice"
    assert len(server.paid) == 40


@pytest.mark.parametrize(
    ("tokens", "probability"),
    [
        (["A", " short", " text", ".", "\n", "Verdict", ":", " (", "B)"], 0.25),
        (["Verdict", ":", " **", "B", "**", "<|end|>"], 0.25),
        (["A", " is", " worse", ".", "\n", "Verdict: B"], 0.0),
    ],
    ids=["a letter with a bracket", "an end token is not a letter", "without a token of its own: 1 or 0"],
)
def test_the_probability_is_that_of_the_letters_own_token(tokens: list[str], probability: float) -> None:
    """An article is not a preference. B has the probability ¾ at its place; the article A is certain."""

    def rivals(token: str) -> list[dict[str, Any]]:
        own, other = (0.75, 0.25) if "B" in token else (1.0, 0.0)
        named = [{"token": token, "logprob": math.log(own)}]
        named.append({"token": "C", "logprob": None})  # as some servers write −∞
        return named + ([{"token": "A", "logprob": math.log(other)}] if other else [])

    listed = [{"token": t, "logprob": rivals(t)[0]["logprob"], "top_logprobs": rivals(t)} for t in tokens]
    text = "".join(token for token in tokens if token != "<|end|>")
    body = {"choices": [{"message": {"content": text}, "logprobs": {"content": listed}}]}
    assert read_reply(read_record(json.dumps(body))).probability == pytest.approx(probability)
