"""The scorer that asks a language model, against a real server on loopback: scores, failures, the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.config.judge import Judging
from rlhf_tasks.config.scorers import LlmScorer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import find_optimized_judges
from rlhf_tasks.models.contracts import IDENTITY
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import WeightedScorer, WeightedSum
from rlhf_tasks.scoring.protocol import Responses, ScorerError, UnusableScores
from rlhf_tasks.scoring.rubric import FILE, PROMPTS, RubricScorer
from rlhf_tasks.scoring.templates import list_templates
from tests.judging.endpoint import KEY, MODEL, Body, Handler, Server, completion
from tests.loopback import serving
from tests.ppo.toy import Memory, toy, untimed, without_critic
from tests.scoring.test_build import built

ROWS = Responses.of_texts(["p", "q", "p", "p"], ["one", "three", "{prompt}", "one"])
PROMPT = "{prompt}|{response}|{lowest}-{highest}"


def grade(body: Body) -> Any:
    """The length of the response."""
    return completion(f"{len(body['messages'][0]['content'].split('|')[1])}")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("SCORER_KEY", KEY)
    with serving(Server()) as started:
        started.reply = grade
        yield started


def settings(server: Server, **changes: Any) -> dict[str, Any]:
    values = {"kind": "llm", "base_url": server.url, "model": MODEL, "key_variable": "SCORER_KEY"}
    return values | {"prompt": "own.txt", "timeout_seconds": 10.0, "max_retries": 0} | changes


def scorer(server: Server, folder: Path, text: str = PROMPT, **changes: Any) -> RubricScorer:
    (folder / "own.txt").write_text(text, encoding="utf-8")
    return RubricScorer(LlmScorer.model_validate(settings(server, **changes)), "llm", Paths(folder))


# ------------------------------------------------------------------------------------------------ scores


def test_scores_come_in_order_and_no_question_is_asked_twice(server: Server, tmp_path: Path) -> None:
    one = scorer(server, tmp_path, highest=12.5)
    assert one(ROWS).tolist() == [3.0, 5.0, 8.0, 3.0]
    assert one(ROWS).dtype == torch.float32
    assert one(Responses.of_texts([], [])).shape == (0,)
    assert scorer(server, tmp_path, highest=12.5)(ROWS).tolist() == [3.0, 5.0, 8.0, 3.0], "another run"
    assert set(server.requests) == {"p|one|0-12.5", "q|three|0-12.5", "p|{prompt}|0-12.5"}
    assert set(server.requests.values()) == {1}
    for body in server.bodies:
        rest = {"model": MODEL, "max_tokens": 4, "temperature": 0.0}
        assert {key: value for key, value in body.items() if key != "messages"} == rest
    assert KEY not in (Paths(tmp_path).home / FILE).read_text()


def test_the_sum_names_each_model_and_weighs_its_scores(server: Server, tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(PROMPT, encoding="utf-8")
    both = built(settings(server, weight=0.5), settings(server, highest=20.0), root=tmp_path)
    parts = both.parts(ROWS)
    assert list(parts) == ["llm", "llm_2"]
    assert both.total(parts).tolist() == [4.5, 7.5, 12.0, 4.5]
    server.reply = lambda body: completion("15")
    with pytest.raises(UnusableScores, match=r"ppo\.scorers: llm: .* a number from 0 to 10: '15'"):
        both.parts(Responses.of_texts(["p"], ["new"]))


def test_a_right_answer_is_the_rows_own(server: Server, tmp_path: Path) -> None:
    one = scorer(server, tmp_path, "{prompt}|{response}|{reference}", column="answer")
    columns = {"answer": ["a {response}", 355, [1, "é"], 355]}
    assert one(replace(ROWS, columns=columns)).tolist() == [3.0, 5.0, 8.0, 3.0]
    assert set(server.requests) == {"p|one|a {response}", "q|three|355", 'p|{prompt}|[1, "é"]', "p|one|355"}
    with pytest.raises(UserError, match=r"the column answer is null for the prompt 'q'"):
        one(replace(ROWS, columns={"answer": ["a", None, "b", "c"]}))
    with pytest.raises(UserError, match=r"ppo\.scorers: the prompt .*own\.txt lacks {reference}"):
        scorer(server, tmp_path, column="answer")


def test_the_shipped_prompts_have_their_fields(server: Server, tmp_path: Path) -> None:
    assert list_templates(PROMPTS) == ["reference", "rubric"]
    server.reply = lambda body: completion("7")
    for name, column in (("rubric", None), ("reference", "answer")):
        one = scorer(server, tmp_path, prompt=name, column=column)
        one(Responses.of_texts(["PROMPT"], ["RESPONSE"], {"answer": ["RIGHT"]}))
        text = server.bodies[-1]["messages"][0]["content"]
        assert all(word in text for word in ("PROMPT", "RESPONSE", "from 0", "to 10"))
        assert ("RIGHT" in text) == (column is not None)
        assert "{" not in text


@pytest.mark.parametrize(
    ("text", "score"),
    [("7", 7), (" 7.5\n", 7.5), ("**10**", 10), ("Score: 3", 3), ("It is short.\n\nrating: 0.", 0)],
)
def test_the_score_is_the_number_on_the_last_line(
    server: Server, tmp_path: Path, text: str, score: float
) -> None:
    server.reply = lambda body: completion(text)
    assert scorer(server, tmp_path)(ROWS).tolist() == [score] * 4


def test_a_kept_reply_outside_a_new_scale_is_asked_again(server: Server, tmp_path: Path) -> None:
    own = "{prompt}|{response}"  # names no scale, so that the request stays the same
    server.reply = lambda body: completion("7")
    assert scorer(server, tmp_path, own)(ROWS).tolist() == [7.0] * 4
    with pytest.raises(UnusableScores, match=r"a number from 0 to 5: '7'"):
        scorer(server, tmp_path, own, highest=5.0)(ROWS)
    server.reply = lambda body: completion("4")
    assert scorer(server, tmp_path, own, highest=5.0)(ROWS).tolist() == [4.0] * 4
    assert scorer(server, tmp_path, own)(ROWS).tolist() == [4.0] * 4


def test_a_scale_may_have_numbers_below_0(server: Server, tmp_path: Path) -> None:
    server.reply = lambda body: completion("-1")
    assert scorer(server, tmp_path, lowest=-1.0, highest=1.0)(ROWS).tolist() == [-1] * 4


# ---------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "text",
    ["", "good", "7/10", "7 or 8", "11", "-1", "7\nsince it is true", "7 out of 10", "1e1", "nan", "١"],
)
def test_a_reply_without_a_score_is_a_failure_and_never_a_zero(
    server: Server, tmp_path: Path, text: str
) -> None:
    """It is not kept, so that another run asks again."""
    server.reply = lambda body: completion(text)
    with pytest.raises(UnusableScores, match=r"a response has no score, and none is made up") as caught:
        scorer(server, tmp_path, concurrency=1)(ROWS)
    assert repr(text) in str(caught.value)
    assert sum(server.requests.values()) == 1, "the first failure ends the work"
    server.reply = grade
    assert scorer(server, tmp_path)(ROWS).tolist() == [3.0, 5.0, 8.0, 3.0]


def test_a_number_that_may_lack_digits_is_no_score(server: Server, tmp_path: Path) -> None:
    """`Score: 10` is cut to `Score: 1` by servers whose model has a token for each digit."""
    reply = completion("Score: 1")
    reply["choices"][0]["finish_reason"] = "length"
    server.reply = lambda body: reply
    with pytest.raises(UnusableScores, match="the reply was cut at 4 tokens; raise max_reply_tokens"):
        scorer(server, tmp_path)(ROWS)


def test_special_tokens_of_the_policy_do_not_reach_the_model(server: Server, tmp_path: Path) -> None:
    one = scorer(server, tmp_path)
    one._special = {"<end>"}
    one(Responses.of_texts(["PROMPT<end>"], ["RESPONSE<end>"]))
    text = server.bodies[-1]["messages"][0]["content"]
    assert "PROMPT" in text
    assert "<end>" not in text


MESSAGE = {"error": {"message": "no"}}


@pytest.mark.parametrize(
    ("act", "is_mistake", "why"),
    [
        (lambda one: one.send(503, MESSAGE), False, "status 503"),
        (lambda one: one.send(429, MESSAGE), False, "status 429"),
        (lambda one: one.close(), False, "APIConnectionError"),
        (lambda one: one.send(400, MESSAGE), True, "status 400"),
        (lambda one: one.send(200, b"[]"), True, "Malformed: this is not a chat completion"),
        (lambda one: one.send(200, completion(None, refusal="No.")), True, "a refusal: No."),
    ],
)
def test_a_server_that_is_away_is_a_fault_and_a_wrong_reply_a_mistake(
    server: Server, tmp_path: Path, act: Callable[[Handler], None], is_mistake: bool, why: str
) -> None:
    """A fault is tried again by the service; a mistake needs a person."""
    server.behaviour = lambda handler, body, attempt: act(handler)
    with pytest.raises(ScorerError, match=why) as caught:
        scorer(server, tmp_path)(ROWS)
    assert isinstance(caught.value, UserError) is is_mistake


def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path) -> None:
    def busy(handler: Handler, body: Body, attempt: int) -> None:
        is_first = attempt == 1
        handler.send(503, MESSAGE, Retry_After="0.02") if is_first else handler.reply(body)

    server.behaviour = busy
    assert scorer(server, tmp_path, max_retries=1)(ROWS).tolist() == [3.0, 5.0, 8.0, 3.0]


def test_a_wrong_key_is_named_and_never_shown(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "planted")
    with pytest.raises(
        UserError, match=r"^ppo\.scorers: llm: .* status 401 .* key in \$SCORER_KEY"
    ) as caught:
        scorer(server, tmp_path)(ROWS)
    assert "planted" not in str(caught.value)
    monkeypatch.delenv("SCORER_KEY")
    with pytest.raises(UserError, match=r"^ppo\.scorers: llm: the environment variable SCORER_KEY holds"):
        scorer(server, tmp_path)


def test_a_spent_budget_is_refused_and_keeps_the_replies(server: Server, tmp_path: Path) -> None:
    budget = {"requests": 2, "tokens": None}
    one = scorer(server, tmp_path, budget=budget, concurrency=1)
    with pytest.raises(UserError, match=r"llm: its budget of 2 requests is spent, and 3 replies are needed"):
        one(ROWS)
    assert sum(server.paid.values()) == 2
    assert scorer(server, tmp_path, budget=budget)(ROWS).tolist() == [3.0, 5.0, 8.0, 3.0]
    assert set(server.paid.values()) == {1}


# ---------------------------------------------------------------------------------------------- training


def test_a_training_that_a_failure_ends_continues_to_the_same_bytes(server: Server, tmp_path: Path) -> None:
    """The server goes away in the third rollout. No question of either run is paid for twice."""
    changes = without_critic("rloo") | {"learning_rate": 1e-2}

    def scorers(folder: Path) -> WeightedSum:
        folder.mkdir(exist_ok=True)
        return WeightedSum([WeightedScorer("llm", 1.0, scorer(server, folder, highest=100.0))])

    whole = toy(scorers=scorers(tmp_path / "whole"), **changes)
    history = untimed(list(whole.updates))
    server.paid.clear()
    stopped = toy(scorers=scorers(tmp_path / "own"), snapshots=(memory := Memory()), **changes)
    updates = stopped.updates
    assert untimed([next(updates), next(updates)]) == history[:2]
    server.behaviour = lambda handler, body, attempt: handler.send(500, MESSAGE)
    with pytest.raises(ScorerError, match="status 500"):
        next(updates)
    assert list(memory.saved) == [1, 2]
    server.behaviour = lambda handler, body, attempt: handler.reply(body)
    resumed = toy(scorers=scorers(tmp_path / "own"), snapshots=Memory({1: memory.saved[1]}), **changes)
    assert untimed(list(resumed.updates)) == history[1:]
    assert torch.equal(resumed.weights, whole.weights)
    assert set(server.paid.values()) == {1}, "not even those of the update that is made again"


def test_a_judge_by_the_model_that_scored_is_marked(tmp_path: Path) -> None:
    """By the policy's own record, whatever params.yaml says now."""
    (tmp_path / IDENTITY).write_text(json.dumps({"optimized_chat_models": [MODEL]}), encoding="utf-8")
    judges = [
        {"kind": "llm", "name": name, "base_url": "https://elsewhere/v1", "model": model}
        for name, model in (("same", MODEL), ("other", "judge-2"))
    ]
    known = Judging.model_validate({"judges": judges})
    assert find_optimized_judges(known, tmp_path, tmp_path) == {"same": MODEL}
