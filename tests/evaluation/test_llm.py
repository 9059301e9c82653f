"""The `llm` judge and a server that behaves, or misbehaves: what is read, asked again, kept and paid for."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks.config.judge import LlmJudge
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.judges import llm
from rlhf_tasks.evaluation.judges.cache import Cache
from rlhf_tasks.evaluation.judges.comparing import Comparing, Question, Reply
from rlhf_tasks.evaluation.judges.llm import Llm, Malformed, read, reply_of
from tests import small
from tests.evaluation import endpoint
from tests.evaluation.endpoint import KEY, MODEL, Body, Handler, Server, completion

ROOT = Path(__file__).parents[2]
ANY = 1e9  # failures that are allowed


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with endpoint.serving() as made:
        yield made


def settings(server: Server, folder: Path, **changes: Any) -> LlmJudge:
    prompt = folder / "prompt.txt"
    prompt.write_text(endpoint.PROMPT, encoding="utf-8")
    given = {
        "kind": "llm", "name": "gpt", "base_url": server.url, "model": MODEL, "key_variable": "JUDGE_KEY",
        "prompt": str(prompt), "logprobs": False, "max_reply_tokens": 1, "concurrency": 4,
        "timeout_seconds": 10.0, "max_retries": 2, "budget": None,
    }  # fmt: skip
    return LlmJudge.model_validate(given | changes)


def made(server: Server, folder: Path, **changes: Any) -> Llm:
    return Llm(settings(server, folder, **changes), 0.05, folder / "home")


def questions(count: int) -> list[Question]:
    return [
        Question(f"prompt {i}", f"{(i * 7) % count:03d}", f"{(i * 5 + 1) % count:03d}") for i in range(count)
    ]


def right(asked: Sequence[Question]) -> list[Reply]:
    return [Reply(float(q.first > q.second), num_tokens=10) for q in asked]


# ----------------------------------------------------------------------------------- right answers


def test_right_answers_come_in_the_order_of_the_questions(server: Server, tmp_path: Path) -> None:
    asked = questions(20)
    assert made(server, tmp_path)(asked, ANY) == right(asked)
    (body,) = {json.dumps({**b, "messages": None}) for b in server.bodies}
    assert json.loads(body) == {"model": MODEL, "messages": None, "temperature": 0.0, "max_tokens": 1}
    assert server.most_at_once <= 4


def test_both_orders_of_every_pair_are_asked_for(server: Server, tmp_path: Path) -> None:
    judge = Comparing("gpt", made(server, tmp_path), 0.0)
    found = judge.compare(["p", "q"], ["2", "x"], ["1", "y"])
    assert found.outcomes.tolist() == [1.0, 0.0]
    assert {(b["messages"][0]["content"][0], *endpoint.shown(b)) for b in server.bodies} == {
        ("p", "2", "1"), ("p", "1", "2"), ("q", "x", "y"), ("q", "y", "x")
    }  # fmt: skip
    assert (found.num_replies, found.num_tokens) == (4, 40)


def test_a_judge_that_only_says_first_is_all_ties(server: Server, tmp_path: Path) -> None:
    server.reply = lambda body: completion("A")
    found = Comparing("gpt", made(server, tmp_path), 0.0).compare(["p", "q"], ["2", "x"], ["1", "y"])
    assert found.outcomes.tolist() == [0.5, 0.5]


def test_where_the_server_gives_them_the_verdict_is_its_token_probabilities(
    server: Server, tmp_path: Path
) -> None:
    server.reply = lambda body: completion("A", probabilities={"A": 0.6, " A": 0.2, "B": 0.1, "I": 0.1})
    (reply,) = made(server, tmp_path, logprobs=True)(questions(1), ANY)
    assert reply.probability == pytest.approx(0.8 / 0.9)
    assert (server.bodies[0]["logprobs"], server.bodies[0]["top_logprobs"]) == (True, 5)


@pytest.mark.parametrize(
    ("text", "probability"),
    [
        ("A", 1.0), ("B", 0.0), (" B\n", 0.0), ("**A**", 1.0), ("Verdict: B.", 0.0), ("answer: A", 1.0),
        ("Both are short, but the first is true.\n\nBetter: A", 1.0),
    ],
)  # fmt: skip
def test_a_verdict_is_the_last_line_and_one_letter(text: str, probability: float) -> None:
    assert read(reply_of(json.dumps(completion(text)))) == Reply(probability, num_tokens=10)


@pytest.mark.parametrize(
    "text", ["", "a", "C", "AB", "A or B", "A is better", "A\nsince it is true", "Neither A"]
)
def test_anything_else_is_a_failure_that_says_what_came(text: str) -> None:
    reply = read(reply_of(json.dumps(completion(text))))
    assert reply.probability != reply.probability
    assert repr(text) in reply.failure


def test_of_a_reply_that_reasons_the_last_letter_counts() -> None:
    tree = completion("A says more.\nVerdict: B")
    tokens = [("A", 0.9, 0.1), (" says", 0, 0), (" B", 0.3, 0.7)]
    tree["choices"][0]["logprobs"] = {
        "content": [
            {"token": token, "logprob": -0.1,
             "top_logprobs": [{"token": "A", "logprob": math.log(a)},
                              {"token": token, "logprob": math.log(b)}] if a else []}
            for token, a, b in tokens
        ]
    }  # fmt: skip
    tree["choices"][0]["logprobs"]["content"][2]["logprob"] = math.log(0.7)
    assert read(reply_of(json.dumps(tree))).probability == pytest.approx(0.3)


# ------------------------------------------------------------------------------------ misbehaviour


def test_a_busy_server_is_asked_again_when_it_says_so(server: Server, tmp_path: Path) -> None:
    def busy(handler: Handler, body: Body, attempt: int) -> None:
        if attempt <= 2:
            handler.send(429 if attempt == 1 else 503, {"error": {"message": "later"}}, Retry_After="0.02")
        else:
            handler.answer(body)

    server.behaviour = busy
    asked = questions(5)
    assert made(server, tmp_path)(asked, ANY) == right(asked)
    assert set(server.asked.values()) == {3}
    assert set(server.paid.values()) == {1}
    assert sorted(set(server.retries)) == ["0", "1", "2"]


def test_a_server_that_stays_busy_fails_the_verdict(server: Server, tmp_path: Path) -> None:
    server.behaviour = lambda handler, body, attempt: handler.send(
        429, {"error": {"message": "slow down"}}, Retry_After="0.02"
    )
    (reply,) = made(server, tmp_path, max_retries=1)(questions(1), ANY)
    assert reply.failure.startswith("status 429")
    assert "slow down" in reply.failure


def test_a_slow_server_is_waited_for_by_many_at_once_and_no_more(server: Server, tmp_path: Path) -> None:
    def slow(handler: Handler, body: Body, attempt: int) -> None:
        time.sleep(0.1)
        handler.answer(body)

    server.behaviour = slow
    asked = questions(12)
    assert made(server, tmp_path, concurrency=3)(asked, ANY) == right(asked)
    assert server.most_at_once == 3


def test_a_hung_reply_is_given_up_and_the_others_stay(server: Server, tmp_path: Path) -> None:
    def hung(handler: Handler, body: Body, attempt: int) -> None:
        if body["messages"][0]["content"].startswith("prompt 1\n"):
            handler.hang()
        else:
            handler.answer(body)

    server.behaviour = hung
    asked = questions(4)
    found = made(server, tmp_path, timeout_seconds=2.0, max_retries=0)(asked, ANY)
    assert "APITimeoutError" in found[1].failure
    assert [r for i, r in enumerate(found) if i != 1] == [r for i, r in enumerate(right(asked)) if i != 1]


def test_a_reply_that_drips_for_ever_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "LONGEST_WAIT_SECONDS", 0.2)
    server.behaviour = lambda handler, body, attempt: handler.drip()
    (reply,) = made(server, tmp_path, timeout_seconds=0.3, max_retries=0)(questions(1), ANY)
    assert "TimeoutError" in reply.failure


@pytest.mark.parametrize("ends", ["half", "close"])
def test_a_line_that_dies_halfway_is_tried_again(server: Server, tmp_path: Path, ends: str) -> None:
    server.behaviour = lambda handler, body, attempt: (
        getattr(handler, ends)() if attempt == 1 else handler.answer(body)
    )
    asked = questions(2)
    assert made(server, tmp_path)(asked, ANY) == right(asked)
    assert set(server.asked.values()) == {2}


def test_a_hung_reply_is_tried_again(server: Server, tmp_path: Path) -> None:
    server.behaviour = lambda handler, body, attempt: handler.hang() if attempt == 1 else handler.answer(body)
    asked = questions(2)
    assert made(server, tmp_path, timeout_seconds=2.0, max_retries=1)(asked, ANY) == right(asked)
    assert set(server.asked.values()) == {2}


@pytest.mark.parametrize(
    "reply",
    [
        b"<html>gateway</html>",
        b'{"choices": []}',
        b"[]",
        b"null",
        b'{"choices": [{"message": {"content": [1]}}]}',
    ],
)
def test_a_malformed_reply_is_a_failure_and_not_kept(server: Server, tmp_path: Path, reply: bytes) -> None:
    server.behaviour = lambda handler, body, attempt: (
        handler.send(200, reply) if attempt == 1 else handler.answer(body)
    )
    judge = made(server, tmp_path)
    (failed,) = judge(questions(1), ANY)
    assert "Malformed: no chat completion but" in failed.failure
    assert judge(questions(1), ANY) == right(questions(1))
    with pytest.raises(Malformed):
        reply_of(reply.decode())


def test_a_refusal_is_a_failure_that_was_paid_for_and_is_kept(server: Server, tmp_path: Path) -> None:
    server.reply = lambda body: completion(None, refusal="I will not compare these.")
    judge = made(server, tmp_path)
    for _ in range(2):
        (reply,) = judge(questions(1), ANY)
        assert "a refusal: I will not compare these." in reply.failure
    assert list(server.paid.values()) == [1]


def test_a_question_that_the_server_refuses_fails_alone(server: Server, tmp_path: Path) -> None:
    def too_long(handler: Handler, body: Body, attempt: int) -> None:
        if "prompt 0" in body["messages"][0]["content"]:
            handler.send(400, {"error": {"message": "context length exceeded"}})
        else:
            handler.answer(body)

    server.behaviour = too_long
    asked = questions(3)
    found = made(server, tmp_path)(asked, ANY)
    assert found[0].failure.startswith("status 400")
    assert found[1:] == right(asked)[1:]


def test_a_wrong_model_or_key_stops_at_once_without_telling_the_key(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"judge gpt: .* answered 404 for model 'judge-2'.*no model judge-2"):
        made(server, tmp_path, model="judge-2", concurrency=1)(questions(50), ANY)
    assert sum(server.asked.values()) == 1
    monkeypatch.setenv("JUDGE_KEY", "wrong-key")
    with pytest.raises(UserError, match=r"answered 401.*the key in \$JUDGE_KEY") as told:
        made(server, tmp_path)(questions(1), ANY)
    assert "wrong-key" not in str(told.value)


def test_a_key_that_is_not_in_the_environment_is_asked_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UserError, match="the environment variable JUDGE_KEY holds no key"):
        made(server, tmp_path)


def test_a_server_that_is_not_there_is_a_failure(server: Server, tmp_path: Path) -> None:
    url = "http://127.0.0.1:9/v1"  # discard: nobody listens
    (reply,) = made(server, tmp_path, base_url=url, max_retries=0)(questions(1), ANY)
    assert "APIConnectionError" in reply.failure


def test_too_many_failures_stop_long_before_the_last_question(server: Server, tmp_path: Path) -> None:
    server.behaviour = lambda handler, body, attempt: handler.send(400, {"error": {"message": "no"}})
    with pytest.raises(UserError, match=r"judge gpt: .* of the replies so far failed.*status 400"):
        made(server, tmp_path)(questions(500), 10)
    assert sum(server.asked.values()) <= 11 + 4  # and what was in flight


# --------------------------------------------------------------------------- nothing is paid twice


def test_a_second_run_asks_for_nothing(server: Server, tmp_path: Path) -> None:
    asked = questions(6)
    first = made(server, tmp_path)(asked, ANY)
    assert made(server, tmp_path)(asked, ANY) == first
    assert sum(server.asked.values()) == 6


def test_the_same_question_twice_is_asked_once(server: Server, tmp_path: Path) -> None:
    assert made(server, tmp_path)(questions(1) * 3, ANY) == right(questions(1) * 3)
    assert sum(server.asked.values()) == 1


def test_another_model_prompt_or_limit_is_another_question(server: Server, tmp_path: Path) -> None:
    made(server, tmp_path)(questions(1), ANY)
    made(server, tmp_path, max_reply_tokens=2)(questions(1), ANY)
    other = tmp_path / "other.txt"
    other.write_text("Well:\n" + endpoint.PROMPT, encoding="utf-8")
    made(server, tmp_path, prompt=str(other))(questions(1), ANY)
    assert sum(server.asked.values()) == 3


def test_what_one_model_or_endpoint_said_is_not_taken_for_anothers(server: Server, tmp_path: Path) -> None:
    asked = questions(2)
    made(server, tmp_path)(asked, ANY)
    with pytest.raises(UserError, match="404 for model 'another'"):
        made(server, tmp_path, model="another")(asked, ANY)
    with endpoint.serving() as elsewhere:
        elsewhere.reply = lambda body: completion("A")
        found = made(elsewhere, tmp_path)(asked, ANY)
    assert [reply.probability for reply in found] == [1.0, 1.0]
    assert sum(elsewhere.paid.values()) == 2


def test_a_budget_of_requests_stops_cleanly_and_the_next_run_goes_on(server: Server, tmp_path: Path) -> None:
    asked = questions(10)
    budget = {"requests": 6, "tokens": None}
    with pytest.raises(
        UserError, match="its budget of 6 requests is spent, and this comparison asked for 10"
    ):
        made(server, tmp_path, budget=budget)(asked, ANY)
    assert sum(server.paid.values()) == 6
    assert made(server, tmp_path, budget=budget)(asked, ANY) == right(asked)
    assert set(server.paid.values()) == {1}
    assert len(server.paid) == 10


def test_a_budget_of_tokens_is_overshot_by_what_was_in_flight_at_most(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its budget of 30 tokens is spent"):
        made(server, tmp_path, budget={"requests": None, "tokens": 30}, concurrency=2)(questions(20), ANY)
    assert 3 <= sum(server.paid.values()) <= 4


def test_a_budget_of_tokens_that_cannot_be_counted_is_refused(server: Server, tmp_path: Path) -> None:
    server.reply = lambda body: {**endpoint.preferring(body), "usage": None}
    with pytest.raises(UserError, match="does not say how many tokens"):
        made(server, tmp_path, budget={"requests": None, "tokens": 30})(questions(3), ANY)


def test_a_torn_line_of_the_cache_costs_that_line_only(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    cache = Cache(file)
    cache.add("one", {"text": "A"})
    with file.open("ab") as torn:
        torn.write(b'{"key": "two", "te')
    again = Cache(file)
    assert "two" not in again
    again.add("three", {"text": "B"})
    found = Cache(file)
    kept = [found.get(key) or {} for key in ("one", "three")]
    assert [record.get("text") for record in kept] == ["A", "B"]


KILLED = """
import json, sys
from pathlib import Path
from rlhf_tasks.config.judge import LlmJudge
from rlhf_tasks.evaluation.judges.comparing import Question
from rlhf_tasks.evaluation.judges.llm import Llm
settings, asked, home = json.load(open(sys.argv[1]))
judge = Llm(LlmJudge.model_validate(settings), 0.05, Path(home))
print(len(judge([Question(*q) for q in asked], 1e9)))
"""


def test_killed_midway_and_run_again_no_reply_is_paid_for_twice(server: Server, tmp_path: Path) -> None:
    """SIGKILL once 15 of 40 replies are kept and the next four wait at the server, unanswered."""
    kill_at, asked = 15, questions(40)

    def behave(handler: Handler, body: Body, attempt: int) -> None:
        if killed or handler.number <= kill_at:
            handler.answer(body)
        else:
            handler.hang()

    killed = False
    server.behaviour = behave
    given, home = tmp_path / "given.json", tmp_path / "home"
    given.write_text(json.dumps([settings(server, tmp_path).model_dump(), asked, str(home)]))
    command = [sys.executable, "-c", KILLED, str(given)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL) as process:
        kept, deadline = home / llm.FILE, time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            if kept.exists() and kept.read_bytes().count(b"\n") == kill_at and len(server.asked) > kill_at:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert sum(server.paid.values()) == kill_at
    killed = True
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "40"
    assert "25 were asked for" in done.stdout
    assert len(server.paid) == 40
    assert set(server.paid.values()) == {1}


@pytest.mark.slow
@pytest.mark.e2e
def test_the_stage_killed_midway_and_run_again_pays_for_nothing_twice(
    server: Server, models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rlhf judge` itself: SIGKILL while replies are waited for, and the same command again."""
    kill_at, killed = 15, threading.Event()

    def behave(handler: Handler, body: Body, attempt: int) -> None:
        if killed.is_set() or handler.number <= kill_at:
            handler.answer(body)
        else:
            handler.hang()

    server.behaviour = behave
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(models_here.parent))
    judge = settings(server, models_here).model_dump(mode="json")
    changes = {"judge.judges": [small.GOLD, judge], "judge.num_examples": 12, "judge.retention": None}
    tree = small.params({**small.WITHOUT_REWARD, **changes, "tracking.enabled": False})
    with (models_here / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(tree, file)
    shutil.copy(ROOT / "dvc.yaml", models_here)
    shutil.copytree(
        ROOT / "rlhf_tasks/evaluation", models_here / "rlhf_tasks/evaluation"
    )  # the labels, and the deps
    command = [sys.executable, "-P", "-m", "rlhf_tasks.cli", "judge"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    kept = models_here / ".rlhf" / llm.FILE
    with subprocess.Popen(command, cwd=models_here, env=environment, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            if kept.exists() and kept.read_bytes().count(b"\n") == kill_at and len(server.asked) > kill_at:
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    paid = dict(server.paid)
    assert sum(paid.values()) == kill_at
    assert not (models_here / "metrics/judge.json").exists()
    killed.set()
    subprocess.run(command, cwd=models_here, env=environment, check=True, stdout=subprocess.DEVNULL)
    assert "gpt/policy_vs_sft/win_rate" in json.loads((models_here / "metrics/judge.json").read_text("utf-8"))
    assert set(server.paid.values()) == {1}, "no reply was paid for twice"
    assert set(paid) < set(server.paid)


@pytest.mark.parametrize(
    ("tokens", "probability"),
    [
        (["A", " short", " text", ".", "\n", "Verdict", ":", " (", "B)"], 0.25),
        (["Verdict", ":", " **", "B", "**", "<|end|>"], 0.25),
        (["A", " is", " worse", ".", "\n", "Verdict: B"], 0.0),
    ],
    ids=["a letter with a bracket", "what ends a reply is no letter", "no token of its own: 1 or 0"],
)
def test_the_probability_is_that_of_the_verdicts_own_token(tokens: list[str], probability: float) -> None:
    """An article is no verdict. Its rivals stand at B's place with ¾ to ¼; at A's it is certain."""

    def rivals(token: str) -> list[dict[str, Any]]:
        own, other = (0.75, 0.25) if "B" in token else (1.0, 0.0)
        named = [{"token": token, "logprob": math.log(own)}]
        return named + ([{"token": "A", "logprob": math.log(other)}] if other else [])

    listed = [{"token": t, "logprob": rivals(t)[0]["logprob"], "top_logprobs": rivals(t)} for t in tokens]
    text = "".join(token for token in tokens if token != "<|end|>")
    body = {"choices": [{"message": {"content": text}, "logprobs": {"content": listed}}]}
    assert llm.read(llm.reply_of(json.dumps(body))).probability == pytest.approx(probability)


# -------------------------------------------------------------------------------------- traces


def test_the_first_replies_are_traced_once_with_what_was_asked_and_said(
    server: Server, tmp_path: Path
) -> None:
    """A reply that is kept is shown at the time it was asked for; a failure says why."""
    told: list[dict[str, Any]] = []

    def trace(
        name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], *, start: int, end: int
    ) -> None:
        told.append({"name": name, "inputs": inputs, "outputs": outputs, "start": start, "end": end})

    asked = questions(3)
    server.reply = lambda body: endpoint.completion("B" if "prompt 0" in str(body["messages"]) else "Hm")
    for _ in range(2):
        judge = Llm(settings(server, tmp_path), 1.0, tmp_path / "home", trace=trace, num_traces=2)
        judge(asked, ANY)
        judge(asked, ANY)
    first, failed, *again = told
    assert again == [first, failed], "the second process showed what was kept, and two of it"
    assert first["name"] == "judge gpt"
    assert first["inputs"]["messages"][0]["content"].startswith("prompt 0")
    assert first["outputs"] == {"text": "B", "tokens": 10, "first_is_better": 0.0}
    assert failed["outputs"]["failure"] == "no verdict but 'Hm'"
    assert 0 <= first["end"] - first["start"] < 60_000


def test_the_client_is_loaded_for_those_alone_who_have_such_a_judge() -> None:
    code = (
        "import sys, rlhf_tasks.evaluation.head_to_head, rlhf_tasks.stages.judge, rlhf_tasks.stages.ppo\n"
        "sys.exit('openai is loaded' if 'openai' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
