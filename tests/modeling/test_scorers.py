"""Scorers, against functions of our own and a real HTTP server on loopback with scripted faults."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.batches import encode
from rlhf_tasks.data.columns import Columns
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
    return FunctionScorer(name, small.tokenizer(), Path())


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
def test_any_iterable_of_numbers_is_read(module: Callable[[str], str], made: str) -> None:
    name = module(f"import numpy, torch\ndef score(p, r):\n    n = [1.0, 0.0, 1.0]\n    return {made}\n")
    assert function(f"{name}:score")(QUERIES, RESPONSES).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("[1.0, 2.0]", "must return one number per response, but gave 2 for 3"),
        ("[1.0, float('nan'), 2.0]", r"gave nan for response 1 of 3 \(1 of them are not finite\)"),
        ("[1.0, 2.0, -float('inf')]", "gave -inf for response 2"),
        ("[1.0, 2.0, 1e300]", "gave inf for response 2"),  # beyond float32
        ("[1.0, None, 2.0]", "must return one number per response, but returned"),
        ("['1', '2', '3']", "text is not a number"),
        ("'123'", "text is not a number"),
        ("[10**400, 1, 2]", "must return one number per response, but returned"),
        ("None", "one number per response, but returned None"),
    ],
)
def test_scores_that_are_not_one_finite_number_per_response_are_an_error(
    module: Callable[[str], str], made: str, why: str
) -> None:
    name = module(f"def score(p, r):\n    return {made}\n")
    with pytest.raises(ScorerError, match=f"^function {name}:score .*{why}"):
        function(f"{name}:score")(QUERIES, RESPONSES)


@pytest.mark.parametrize("made", ["[1.0]", "None", "['1', '2', '3']"])
def test_a_function_that_returns_the_wrong_type_is_a_user_error(
    module: Callable[[str], str], made: str
) -> None:
    """It is one message and exit code 2; PPO's guards handle NaN."""
    name = module(f"def score(p, r):\n    return {made}\n")
    with pytest.raises(UserError, match=f"^function {name}:score must return one number per response"):
        function(f"{name}:score")(QUERIES, RESPONSES)


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ("x = 1\n", "score", "has no such function"),
        ("score = 1\n", "score", "holds a int of that name"),
        ("def score(:\n", "score", "cannot be imported: SyntaxError"),
        ("import no_such_thing\n", "score", "cannot be imported: ModuleNotFoundError: .*no_such_thing"),
        ("1 / 0\n", "score", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_user_error(
    module: Callable[[str], str], text: str, name: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        function(f"{module(text)}:{name}")


def test_a_module_below_the_root_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_rewards.py").write_text("WEIGHT = 2.0\n", encoding="utf-8")
    code = "def score(p, r):\n    from neighbour_of_rewards import WEIGHT\n    return [WEIGHT for _ in r]\n"
    (tmp_path / "rewards_with_neighbour.py").write_text(code, encoding="utf-8")
    scorer = FunctionScorer("rewards_with_neighbour:score", small.tokenizer(), tmp_path)
    assert scorer(QUERIES, RESPONSES).tolist() == [2.0, 2.0, 2.0]


DATACLASS = """\
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Weight:
    value: float = 2.0
def score(p, r):
    return [Weight().value for _ in r]
"""


def test_a_module_may_define_dataclasses(module: Callable[[str], str]) -> None:
    """They look up their module in `sys.modules` while it is imported."""
    scorer = function(f"{module(DATACLASS)}:score")
    assert scorer(QUERIES, RESPONSES).tolist() == [2.0, 2.0, 2.0]


def test_a_module_that_failed_is_imported_again(module: Callable[[str], str]) -> None:
    for _ in range(2):
        with pytest.raises(UserError, match="ZeroDivisionError"):
            function(f"{module('1 / 0')}:score")
    name = module("def score(p, r):\n    return [0.0 for _ in r]\n1 / 0\n")
    with pytest.raises(UserError, match="ZeroDivisionError"):
        function(f"{name}:score")
    assert name not in sys.modules


def test_each_root_has_its_own_module_of_one_name(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        code = f"def score(p, r):\n    return [{number}.0 for _ in r]\n"
        (folder / "rewards_of_root.py").write_text(code, encoding="utf-8")
    for number in (1, 2, 1):
        scorer = FunctionScorer("rewards_of_root:score", small.tokenizer(), tmp_path / str(number))
        assert scorer(QUERIES, RESPONSES).tolist() == [float(number)] * 3


def test_a_module_that_does_not_exist_is_a_user_error(module: Callable[[str], str]) -> None:
    with pytest.raises(UserError, match="nowhere_at_all:score cannot be imported"):
        function("nowhere_at_all:score")


# ------------------------------------------------------------------------------------------ HTTP


class Server(ThreadingHTTPServer):
    """Runs an entry of `script` per request; after them it returns the length of each response."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Callable[[Handler], None]] = []
        self.requests: list[dict[str, Any]] = []
        self.logins: list[str | None] = []
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
        self.server.requests.append(json.loads(body))
        self.server.logins.append(self.headers.get("Authorization"))
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
    given = [float(len(text)) for text in handler.server.requests[-1]["responses"]]
    handler.answer(200, json.dumps({"scores": given}).encode())


def status(code: int, **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(code, b"not now", **headers)


def replies(body: str) -> Callable[[Handler], None]:
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
    url: str,
    *,
    timeout_seconds: float = 5.0,
    batch_size: int = 8,
    back_off: float = 0.001,
    sleep: Callable[[float], None] = time.sleep,
) -> HttpScorer:
    return HttpScorer(
        url,
        small.tokenizer(),
        timeout_seconds=timeout_seconds,
        batch_size=batch_size,
        back_off_seconds=back_off,
        sleep=sleep,
    )


def test_a_service_gets_texts_in_batches_and_its_scores_come_in_order(server: Server) -> None:
    assert http(server.url, batch_size=2)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]
    assert server.requests == [
        {"prompts": PROMPTS[:2], "responses": ANSWERS[:2]},
        {"prompts": PROMPTS[2:], "responses": ANSWERS[2:]},
    ]


def test_a_service_gets_the_columns_of_each_batch(server: Server) -> None:
    columns: Columns = {"answer": [1, "two", [3.5]], "note": [None, True, {"a": 1}]}
    assert http(server.url, batch_size=2)(QUERIES, RESPONSES, columns).tolist() == [5.0, 2.0, 0.0]
    assert [request["columns"] for request in server.requests] == [
        {"answer": [1, "two"], "note": [None, True]},
        {"answer": [[3.5]], "note": [{"a": 1}]},
    ]


def test_no_request_is_sent_for_no_responses(server: Server) -> None:
    assert http(server.url)([], []).shape == (0,)
    assert server.requests == []


@pytest.mark.parametrize("fault", [status(429), status(500), status(503), slow, hangs_up])
def test_requests_are_repeated_after_temporary_faults(
    server: Server, fault: Callable[[Handler], None]
) -> None:
    server.script = [fault] * (scorers.NUM_TRIES - 1)
    assert http(server.url)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]


@pytest.mark.parametrize("fault", [hung, dripping])
def test_a_request_with_a_silent_or_endless_reply_is_repeated(
    server: Server, fault: Callable[[Handler], None]
) -> None:
    server.script = [fault]
    assert http(server.url, timeout_seconds=0.3)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("fault", "why"),
    [(status(429), "status 429: not now"), (status(502), "status 502: not now"), (hung, "ReadTimeout")],
)
def test_a_permanent_fault_is_an_error_after_the_last_try(
    server: Server, fault: Callable[[Handler], None], why: str
) -> None:
    server.script = [fault] * 99
    with pytest.raises(ScorerError, match=rf"http scorer {server.url} returned no scores in 5 tries.*{why}"):
        http(server.url, timeout_seconds=0.1)(QUERIES, RESPONSES)
    assert len(server.requests) == scorers.NUM_TRIES


def test_the_error_names_a_service_that_cannot_be_reached(server: Server) -> None:
    url = server.url
    server.server_close()
    with pytest.raises(ScorerError, match=rf"{url} returned no scores in 5 tries; the last error: Connect"):
        http(url)(QUERIES, RESPONSES)


def test_waits_double_unless_the_reply_has_retry_after(server: Server) -> None:
    waits: list[float] = []
    server.script = [status(500), status(429, Retry_After="7"), status(503, Retry_After="9999"), status(500)]
    http(server.url, back_off=1.0, sleep=waits.append)(QUERIES, RESPONSES)
    assert waits == [1.0, 7.0, scorers.LONGEST_WAIT_SECONDS, 8.0]


@pytest.mark.parametrize("code", [301, 400, 401, 404, 422])
def test_a_rejected_request_is_not_repeated(server: Server, code: int) -> None:
    server.script = [status(code)]
    with pytest.raises(UserError, match=f"rejected the request: status {code}: not now"):
        http(server.url)(QUERIES, RESPONSES)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("<html>", "must return JSON, but returned <html>"),
        ("", "must return JSON"),
        ('{"scores": [1, 2', "must return JSON"),
        ("[1, 2, 3]", "must return .*scores.*, but returned"),
        ('{"score": [1, 2, 3]}', "must return .*scores.*, but returned"),
        ('{"scores": 1}', "must return .*scores.*, but returned"),
        ('{"scores": [1, 2]}', "must return one number per response, but gave 2 for 3"),
        ('{"scores": [1, 2, 3, 4]}', "must return one number per response, but gave 4 for 3"),
        ('{"scores": [1, NaN, 3]}', "gave nan for response 1"),
        ('{"scores": [1, 2, Infinity]}', "gave inf for response 2"),
        ('{"scores": [1, 2, null]}', "must return one number per response, but returned"),
        ('{"scores": [1, 2, "3"]}', "text is not a number"),
    ],
)
def test_a_reply_without_scores_is_an_error_and_the_request_is_not_repeated(
    server: Server, body: str, why: str
) -> None:
    server.script = [replies(body)]
    with pytest.raises(ScorerError, match=rf"^http scorer {server.url} .*{why}"):
        http(server.url)(QUERIES, RESPONSES)
    assert len(server.requests) == 1


def test_a_password_in_the_url_is_sent_and_never_shown(server: Server) -> None:
    url = server.url.replace("http://", "http://me:secret@") + "?key=hidden"
    assert http(url)(QUERIES, RESPONSES).tolist() == [5.0, 2.0, 0.0]
    server.script = [status(401)]
    with pytest.raises(ScorerError) as raised:
        http(url)(QUERIES, RESPONSES)
    assert "secret" not in str(raised.value)
    assert "hidden" not in str(raised.value)


def test_a_key_of_the_environment_is_sent_and_never_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config refuses a login in the address, which would be stored with every run."""
    one = {
        "kind": "http", "weight": 1.0, "url": server.url, "key_variable": "SCORER_KEY",
        "timeout_seconds": 5.0, "batch_size": 8,
    }  # fmt: skip

    def parts() -> dict[str, Any]:
        found = build(settings(one), small.tokenizer(), reward_model=None, max_tokens=64, root=Path())
        return found.parts(QUERIES, RESPONSES)

    monkeypatch.delenv("SCORER_KEY", raising=False)
    with pytest.raises(UserError, match="the environment variable SCORER_KEY holds no key"):
        parts()
    monkeypatch.setenv("SCORER_KEY", "planted")
    assert parts()["http"].tolist() == [5.0, 2.0, 0.0]
    assert server.logins == ["Bearer planted"]
    server.script = [status(401)]
    with pytest.raises(ScorerError) as raised:
        parts()
    assert "planted" not in str(raised.value)
    with pytest.raises(ValidationError, match="holds a login"):
        settings(one | {"url": "http://me:secret@here/score"})


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://", "no host"),
        ("http://here:99999/", "no host and port"),
        ("http://here:there/", "is not a URL"),
    ],
)
def test_an_invalid_url_is_a_user_error(url: str, why: str) -> None:
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
        small.tokenizer(), reward_model=model, max_tokens=1000, root=Path(),
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
    found = build(
        settings({"kind": "dummy"}), small.tokenizer(), reward_model=None, max_tokens=10, root=Path()
    )
    assert found.total(found.parts(QUERIES, RESPONSES)).tolist() == [0.0, 0.0, 0.0]
    assert DummyScorer()([], []).shape == found.total(found.parts([], [])).shape == (0,)


def test_the_error_names_a_reward_model_that_gives_nan() -> None:
    broken = small.scores()
    broken.mean = float("nan")
    found = build(
        settings({"kind": "reward_model", "weight": 1.0}), small.tokenizer(),
        reward_model=broken, max_tokens=1000, root=Path(),
    )  # fmt: skip
    with pytest.raises(ScorerError, match="reward_model gave nan for response 0 of 3"):
        found.parts(QUERIES, RESPONSES)


def test_a_function_is_imported_when_the_scorers_are_built(module: Callable[[str], str]) -> None:
    given = settings({"kind": "function", "weight": 1.0, "function": f"{module('x = 1')}:score"})
    with pytest.raises(UserError, match="has no such function"):
        build(given, small.tokenizer(), reward_model=None, max_tokens=10, root=Path())


def test_reward_models_pass_before_a_part_that_raises() -> None:
    """Where they are sharded, a process that raised first would leave the others waiting in their passes."""
    calls = []

    def passes(queries: Any, responses: Any, columns: Any) -> torch.Tensor:
        calls.append(len(queries))
        return torch.zeros(len(queries))

    def raises(*_: Any) -> torch.Tensor:
        raise scorers.NonFiniteScore("NaN")

    parts = [
        scorers.Part("service", 1.0, raises, None),  # type: ignore[arg-type]
        scorers.Part("model", 1.0, passes, torch.nn.Identity()),  # type: ignore[arg-type]
    ]
    with pytest.raises(scorers.NonFiniteScore):
        scorers.WeightedSum(parts).parts([[1]], [[2]])
    assert calls == [1]
