"""The scorer that asks a service, against a real server on loopback with scripted faults."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.http import LONGEST_WAIT_SECONDS, NUM_TRIES, ScoringService
from rlhf_tasks.scoring.protocol import Responses, ScorerError, UnusableScores
from tests.loopback import serving
from tests.scoring.server import Handler, Server, hangs_up, hung, replies, slow, status

ROWS = Responses.of_texts(["w0 w1", "w2", "w3 w4 w5"], ["w6 w7", "w8", ""])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("rlhf_tasks.scoring.http.BACK_OFF_SECONDS", 0.001)
    with serving(Server()) as made:
        yield made


def http(url: str, timeout_seconds: float = 5.0, **settings: Any) -> ScoringService:
    return ScoringService(
        config.HttpScorer(kind="http", url=url, timeout_seconds=timeout_seconds, **settings)
    )


def test_a_service_gets_texts_and_columns_in_batches_and_its_scores_come_in_order(server: Server) -> None:
    columns: Columns = {"answer": [1, "two", [3.5]], "note": [None, True, {"a": 1}]}
    scorer = http(server.url, batch_size=2)
    assert scorer(Responses.of_texts([], [])).shape == (0,)
    assert server.requests == [], "nothing is sent for no responses"
    assert scorer(ROWS).tolist() == scorer(replace(ROWS, columns=columns)).tolist() == [5.0, 2.0, 0.0]
    plain = [
        {"prompts": ROWS.prompts[:2], "responses": ROWS.texts[:2]},
        {"prompts": ROWS.prompts[2:], "responses": ROWS.texts[2:]},
    ]
    with_columns = [
        plain[0] | {"columns": {"answer": [1, "two"], "note": [None, True]}},
        plain[1] | {"columns": {"answer": [[3.5]], "note": [{"a": 1}]}},
    ]
    assert server.requests == plain + with_columns


@pytest.mark.parametrize(
    ("fault", "times", "timeout"),
    [
        *((one, NUM_TRIES - 1, 5.0) for one in (status(429), status(500), status(503), slow, hangs_up)),
        *((one, 1, 0.3) for one in (hung, Handler.drip)),  # a silent and an endless reply
    ],
)
def test_requests_are_repeated_after_temporary_faults(
    server: Server, fault: Callable[[Handler], None], times: int, timeout: float
) -> None:
    server.script = [fault] * times
    assert http(server.url, timeout)(ROWS).tolist() == [5.0, 2.0, 0.0]
    assert fault is slow or len(server.requests) == times + 1, "a slow reply is one"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (status(429), "status 429: not now"),
        (status(502), "status 502: not now"),
        (hung, "no complete reply after 0.1 s"),
    ],
)
def test_a_permanent_fault_is_an_error_after_the_last_try(
    server: Server, fault: Callable[[Handler], None], why: str
) -> None:
    server.script = [fault] * 99
    with pytest.raises(ScorerError, match=rf"http scorer {server.url} returned no scores in 5 tries.*{why}"):
        http(server.url, timeout_seconds=0.1)(ROWS)
    assert len(server.requests) == NUM_TRIES


def test_the_error_names_a_service_that_cannot_be_reached(server: Server) -> None:
    url = server.url
    server.server_close()
    with pytest.raises(ScorerError, match=rf"{url} returned no scores in 5 tries; the last error: Connect"):
        http(url)(ROWS)


def test_waits_double_unless_the_reply_has_retry_after(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("rlhf_tasks.scoring.http.BACK_OFF_SECONDS", 1.0)
    monkeypatch.setattr("rlhf_tasks.scoring.http.time.sleep", waits.append)
    server.script = [status(500), status(429, Retry_After="7"), status(503, Retry_After="9999"), status(500)]
    http(server.url)(ROWS)
    assert waits == [1.0, 7.0, LONGEST_WAIT_SECONDS, 8.0]


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        *((code, f"rejected the request: status {code}: not now") for code in (301, 400, 401, 404, 422)),
        ("<html>", "must return JSON, but returned <html>"),
        ("", "must return JSON"),
        ('{"scores": [1, 2', "must return JSON"),
        ("[1, 2, 3]", "must return .*scores.*, but returned"),
        ('{"score": [1, 2, 3]}', "must return .*scores.*, but returned"),
        ('{"scores": 1}', "must return .*scores.*, but returned"),
        ('{"scores": [1, 2]}', "must return one number per response, but gave 2 for 3"),
        ('{"scores": [1, 2, 3, 4]}', "must return one number per response, but gave 4 for 3"),
        ('{"scores": [1, 2, null]}', "must return one number per response, but returned"),
        ('{"scores": [1, 2, "3"]}', "text is not a number"),
    ],
)
def test_a_reply_without_scores_is_an_error_and_the_request_is_not_repeated(
    server: Server, reply: str | int, why: str
) -> None:
    server.script = [status(reply) if isinstance(reply, int) else replies(reply)]
    with pytest.raises(UnusableScores, match=rf"^http scorer {server.url} .*{why}"):
        http(server.url)(ROWS)
    assert len(server.requests) == 1


def test_a_score_that_is_not_finite_is_passed_on_to_the_sum_which_names_it(server: Server) -> None:
    server.script = [replies('{"scores": [1, NaN, Infinity]}')]
    assert http(server.url)(ROWS).isfinite().tolist() == [True, False, False]


def test_a_key_of_the_environment_is_sent_and_never_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(UserError, match="the environment variable SCORER_KEY holds no key"):
        http(server.url, key_variable="SCORER_KEY")
    monkeypatch.setenv("SCORER_KEY", "two\nlines")  # no request can carry it, and its error would show it
    with pytest.raises(UserError, match="the environment variable SCORER_KEY holds no key"):
        http(server.url, key_variable="SCORER_KEY")
    monkeypatch.setenv("SCORER_KEY", "planted")
    assert http(server.url, key_variable="SCORER_KEY")(ROWS).tolist() == [5.0, 2.0, 0.0]
    assert server.logins == ["Bearer planted"]
    server.script = [status(401)]
    with pytest.raises(ScorerError, match="401") as raised:
        http(f"{server.url}?key=hidden", key_variable="SCORER_KEY")(ROWS)
    assert not re.search("planted|hidden", str(raised.value))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://", "name a host"),
        ("http://here:99999/", "Port out of range"),
        ("http://here:there/", "Port could not be cast"),
        ("http://me:secret@here/score", "holds a login"),
    ],
)
def test_an_invalid_address_is_refused(url: str, why: str) -> None:
    """A login would be stored with every run."""
    with pytest.raises(ValidationError, match=why):
        http(url)
