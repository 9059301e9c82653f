"""Scorers, against functions of our own and a real HTTP server on loopback that misbehaves as told."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.batches import encode
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling import scorers
from rlhf_tasks.modeling.scorers import DummyScorer, FunctionScorer, HttpScorer, ScorerError, build
from tests import small
from tests.small import EOS

PROMPTS = ["w0 w1", "w2", "w3 w4 w5"]
ANSWERS = ["w6 w7", "w8", ""]
QUERIES = encode(small.tokenizer(), PROMPTS)
RESPONSES = [ids + [EOS] * (i != 1) for i, ids in enumerate(encode(small.tokenizer(), ANSWERS))]


# ------------------------------------------------------------------------------------- functions


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module into the current directory, which is not on the path; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])

    def write(text: str) -> str:
        name = f"rewards_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def function(name: str) -> FunctionScorer:
    return FunctionScorer(name, small.tokenizer())


def test_a_function_of_the_current_directory_gets_texts_without_eos(module: Callable[[str], str]) -> None:
    name = module("seen = []\ndef score(p, r):\n    seen.append((p, r))\n    return [len(x) for x in r]\n")
    found = function(f"{name}:score")(QUERIES, RESPONSES)
    assert found.dtype == torch.float32
    assert found.tolist() == [5.0, 2.0, 0.0]
    assert sys.modules[name].seen == [(PROMPTS, ANSWERS)]


def test_only_the_last_eos_is_left_out(module: Callable[[str], str]) -> None:
    name = module("def score(p, r):\n    return [x.count('<eos>') for x in r]\n")
    assert function(f"{name}:score")([[3]], [[EOS, 4, EOS]]).tolist() == [1.0]


@pytest.mark.parametrize(
    "made", ["torch.tensor(n)", "numpy.array(n)", "(x for x in n)", "[bool(x) for x in n]"]
)
def test_whatever_holds_numbers_is_read(module: Callable[[str], str], made: str) -> None:
    name = module(f"import numpy, torch\ndef score(p, r):\n    n = [1.0, 0.0, 1.0]\n    return {made}\n")
    assert function(f"{name}:score")(QUERIES, RESPONSES).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("[1.0, 2.0]", "gave 2 scores for 3 answers"),
        ("[1.0, float('nan'), 2.0]", r"gave nan for answer 1 of 3 \(1 are no finite numbers\)"),
        ("[1.0, 2.0, -float('inf')]", "gave -inf for answer 2"),
        ("[1.0, 2.0, 1e300]", "gave inf for answer 2"),  # beyond float32
        ("[1.0, None, 2.0]", "one number per answer is needed"),
        ("['1', '2', '3']", "text is no number"),
        ("'123'", "text is no number"),
        ("[10**400, 1, 2]", "one number per answer is needed"),
        ("None", "gave None: .* one number per answer is needed"),
    ],
)
def test_what_a_function_must_not_give_is_named(module: Callable[[str], str], made: str, why: str) -> None:
    name = module(f"def score(p, r):\n    return {made}\n")
    with pytest.raises(ScorerError, match=f"^function {name}:score .*{why}"):
        function(f"{name}:score")(QUERIES, RESPONSES)


@pytest.mark.parametrize("made", ["[1.0]", "None", "['1', '2', '3']"])
def test_a_function_of_the_wrong_kind_is_the_user_s_to_mend(module: Callable[[str], str], made: str) -> None:
    """One message and exit code 2; a NaN is a matter of PPO's guards."""
    name = module(f"def score(p, r):\n    return {made}\n")
    with pytest.raises(UserError, match=f"^function {name}:score gave "):
        function(f"{name}:score")(QUERIES, RESPONSES)


@pytest.mark.parametrize(
    ("text", "asked", "why"),
    [
        ("x = 1\n", "score", "has no such function"),
        ("score = 1\n", "score", "holds a int of that name"),
        ("def score(:\n", "score", "cannot be imported: SyntaxError"),
        ("import no_such_thing\n", "score", "cannot be imported: ModuleNotFoundError: .*no_such_thing"),
        ("1 / 0\n", "score", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_had_is_the_users_mistake(
    module: Callable[[str], str], text: str, asked: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        function(f"{module(text)}:{asked}")


def test_a_module_that_is_nowhere_is_the_users_mistake(module: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match="nowhere_at_all:score cannot be imported"):
        function("nowhere_at_all:score")


# ------------------------------------------------------------------------------------------ HTTP


class Server(ThreadingHTTPServer):
    """Does what `script` says, an entry a request; then answers right: the length of each response."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Callable[[Handler], None]] = []
        self.asked: list[dict[str, Any]] = []
        self.ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/score"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is a part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(json.loads(body))
        script = self.server.script
        if script:
            script.pop(0)(self)
        else:
            scores(self)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def scores(handler: Handler) -> None:
    given = [float(len(text)) for text in handler.server.asked[-1]["responses"]]
    handler.answer(200, json.dumps({"scores": given}).encode())


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(code, b"not now", **headers)


def says(body: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(200, body.encode())


def slow(handler: Handler) -> None:
    handler.server.ended.wait(0.1)
    scores(handler)


def hung(handler: Handler) -> None:
    handler.server.ended.wait(30)


def dripping(handler: Handler) -> None:
    """Never silent for long, and never done."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while not handler.server.ended.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield made
        made.ended.set()
        made.shutdown()
        thread.join()


def http(
    url: str, *, timeout_seconds: float = 5.0, batch_size: int = 8, back_off: float = 0.001
) -> HttpScorer:
    return HttpScorer(
        url,
        small.tokenizer(),
        timeout_seconds=timeout_seconds,
        batch_size=batch_size,
        back_off_seconds=back_off,
    )


def test_a_service_gets_texts_in_batches_and_its_scores_come_in_order(server: Server) -> None:
    assert http(server.url, batch_size=2)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]
    assert server.asked == [
        {"prompts": PROMPTS[:2], "responses": ANSWERS[:2]},
        {"prompts": PROMPTS[2:], "responses": ANSWERS[2:]},
    ]


def test_nothing_is_asked_about_no_answers(server: Server) -> None:
    assert http(server.url)([], []).shape == (0,)
    assert server.asked == []


@pytest.mark.parametrize("trouble", [status(429), status(500), status(503), slow, hangs_up])
def test_passing_trouble_is_waited_out(server: Server, trouble: Callable[[Handler], None]) -> None:
    server.script = [trouble] * (scorers.NUM_TRIES - 1)
    assert http(server.url)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]


@pytest.mark.parametrize("trouble", [hung, dripping])
def test_a_silent_or_endless_answer_is_given_up_and_asked_for_again(
    server: Server, trouble: Callable[[Handler], None]
) -> None:
    server.script = [trouble]
    assert http(server.url, timeout_seconds=0.3)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("trouble", "why"),
    [(status(429), "status 429: not now"), (status(502), "status 502: not now"), (hung, "ReadTimeout")],
)
def test_trouble_that_stays_ends_after_so_many_tries(
    server: Server, trouble: Callable[[Handler], None], why: str
) -> None:
    server.script = [trouble] * 99
    with pytest.raises(ScorerError, match=rf"http scorer {server.url} gave no scores in 5 tries.*{why}"):
        http(server.url, timeout_seconds=0.1)(QUERIES, RESPONSES)
    assert len(server.asked) == scorers.NUM_TRIES


def test_a_service_that_is_not_there_is_named(server: Server) -> None:
    url = server.url
    server.server_close()
    with pytest.raises(ScorerError, match=rf"{url} gave no scores in 5 tries; the last: Connect"):
        http(url)(QUERIES, RESPONSES)


def test_waits_double_unless_the_service_says_how_long(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("rlhf_tasks.modeling.scorers.time.sleep", waits.append)
    server.script = [status(500), status(429, Retry_After="7"), status(503, Retry_After="9999"), status(500)]
    http(server.url, back_off=1.0)(QUERIES, RESPONSES)
    assert waits == [1.0, 7.0, scorers.LONGEST_WAIT_SECONDS, 8.0]


@pytest.mark.parametrize("code", [301, 400, 401, 404, 422])
def test_a_refusal_is_not_asked_again(server: Server, code: int) -> None:
    server.script = [status(code)]
    with pytest.raises(UserError, match=f"refused: status {code}: not now"):
        http(server.url)(QUERIES, RESPONSES)
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("<html>", "answered no JSON but <html>"),
        ("", "answered no JSON"),
        ('{"scores": [1, 2', "answered no JSON"),
        ("[1, 2, 3]", "where .* was asked for"),
        ('{"score": [1, 2, 3]}', "where .* was asked for"),
        ('{"scores": 1}', "where .* was asked for"),
        ('{"scores": [1, 2]}', "gave 2 scores for 3 answers"),
        ('{"scores": [1, 2, 3, 4]}', "gave 4 scores for 3 answers"),
        ('{"scores": [1, NaN, 3]}', "gave nan for answer 1"),
        ('{"scores": [1, 2, Infinity]}', "gave inf for answer 2"),
        ('{"scores": [1, 2, null]}', "one number per answer is needed"),
        ('{"scores": [1, 2, "3"]}', "text is no number"),
    ],
)
def test_an_answer_that_is_none_is_named_and_not_asked_for_again(server: Server, body: str, why: str) -> None:
    server.script = [says(body)]
    with pytest.raises(ScorerError, match=rf"^http scorer {server.url} .*{why}"):
        http(server.url)(QUERIES, RESPONSES)
    assert len(server.asked) == 1


def test_a_password_in_the_url_is_sent_and_never_told(server: Server) -> None:
    url = server.url.replace("http://", "http://me:secret@") + "?key=hidden"
    assert http(url)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]
    server.script = [status(401)]
    with pytest.raises(ScorerError) as raised:
        http(url)(QUERIES, RESPONSES)
    assert "secret" not in str(raised.value)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [("http://", "no host"), ("http://here:99999/", "no host and port"), ("http://here:there/", "is no URL")],
)
def test_a_url_that_is_none_is_the_users_mistake(url: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        http(url)


# --------------------------------------------------------------------------------------- the sum


def settings(*given: Mapping[str, Any]) -> Sequence[config.Scorer]:
    found: tuple[config.Scorer, ...] = TypeAdapter(tuple[config.Scorer, ...]).validate_python(given)
    return found


def test_the_sum_is_weighted_and_its_parts_are_not(module: Callable[[str], str], server: Server) -> None:
    name = module("def words(p, r):\n    return [len(x.split()) for x in r]\n")
    model = small.scores()
    found = build(
        settings(
            {"kind": "reward_model", "weight": 2.0},
            {"kind": "function", "weight": -0.5, "function": f"{name}:words"},
            {"kind": "http", "weight": 0.1, "url": server.url, "timeout_seconds": 5.0, "batch_size": 2},
            {"kind": "function", "weight": 3.0, "function": f"{name}:words"},
            {"kind": "dummy"},
        ),
        small.tokenizer(), reward_model=model, max_tokens=1000,
    )  # fmt: skip
    parts = found.parts(QUERIES, RESPONSES)
    assert tuple(parts) == ("reward_model", "function", "http", "function_2", "dummy")
    learnt = small.last_scores_alone(model, QUERIES, RESPONSES)
    torch.testing.assert_close(parts["reward_model"], learnt, atol=1e-5, rtol=0)
    assert parts["function"].tolist() == parts["function_2"].tolist() == [2.0, 1.0, 0.0]
    assert parts["http"].tolist() == [5.0, 2.0, 0.0]
    assert parts["dummy"].tolist() == [0.0, 0.0, 0.0]
    total = learnt * 2 + torch.tensor([-1 + 0.5 + 6, -0.5 + 0.2 + 3, 0])
    torch.testing.assert_close(found.total(parts), total, atol=1e-5, rtol=0)


def test_a_dummy_alone_gives_zeros() -> None:
    found = build(settings({"kind": "dummy"}), small.tokenizer(), reward_model=None, max_tokens=10)
    assert found.total(found.parts(QUERIES, RESPONSES)).tolist() == [0.0, 0.0, 0.0]
    assert DummyScorer()([], []).shape == found.total(found.parts([], [])).shape == (0,)


def test_a_reward_model_that_gives_nan_is_named() -> None:
    broken = small.scores()
    broken.mean = float("nan")
    found = build(
        settings({"kind": "reward_model", "weight": 1.0}), small.tokenizer(),
        reward_model=broken, max_tokens=1000,
    )  # fmt: skip
    with pytest.raises(ScorerError, match="reward_model gave nan for answer 0 of 3"):
        found.parts(QUERIES, RESPONSES)


def test_an_unimportable_function_is_found_before_training(module: Callable[[str], str]) -> None:
    given = settings({"kind": "function", "weight": 1.0, "function": f"{module('x = 1')}:score"})
    with pytest.raises(UserError, match="has no such function"):
        build(given, small.tokenizer(), reward_model=None, max_tokens=10)
