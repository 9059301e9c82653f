"""The requests, replies and faults of vLLM's server, on a stand-in; and the end of its program."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlhf_tasks.config.ppo import VllmSampler as Settings
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.sampling import Samples
from rlhf_tasks.ppo import vllm
from rlhf_tasks.ppo.vllm import Sampling, VllmError, VllmServer
from rlhf_tasks.project import processes
from tests import small
from tests.ppo import standin
from tests.small import EOS

QUERIES = [[4, 5, 6], [7], [8, 9]]
SEEDS = [11, 12, 13]
SAMPLING = Sampling(temperature=0.8, ends=(EOS,), max_tokens=8, longest_query=8, is_float32=True)
SECONDS = 60.0


def make_server(home: Path, **changes: Any) -> VllmServer:
    given = {"max_logprob_diff": 0.01, "start_seconds": SECONDS, "timeout_seconds": SECONDS}
    return VllmServer(Settings.model_validate(given | changes), home, small.tokenizer(), SAMPLING)


@contextmanager
def connected(
    home: Path, backend: standin.Canned | None = None, fault: str | None = None, **changes: Any
) -> Iterator[tuple[VllmServer, standin.Server]]:
    """A server of `url`, and the stand-in behind it."""
    with (
        standin.serving(backend, fault) as program,
        closing(make_server(home, url=program.url, **changes)) as one,
    ):
        yield one, program


def command(*options: str) -> list[str]:
    return standin.command("--canned", *options)


def until(is_true: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def stored(folder: Path) -> list[str]:
    """The versions of weights below a folder."""
    return [path.parent.name for path in folder.rglob("model.safetensors")]


def assert_logprobs_of(model: Any, samples: Samples, queries: Sequence[list[int]]) -> None:
    for query, response, logprobs in zip(queries, samples.responses, samples.logprobs, strict=True):
        alone = (small.logits_alone(model, query, response) / 0.8).log_softmax(-1)
        torch.testing.assert_close(logprobs, alone[range(len(response)), response], atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------- requests and replies


def test_a_request_samples_purely_and_only_the_stop_token_ends_it() -> None:
    sampling = Sampling(temperature=0.7, ends=(9,), max_tokens=32, longest_query=4, is_float32=True)
    body = vllm.completion([4, 5], 3, 17, sampling)
    assert (body["prompt"], body["n"], body["seed"], body["max_tokens"]) == ([4, 5], 3, 17, 32)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 1.0, 0, 0.0)
    assert (body["repetition_penalty"], body["min_tokens"]) == (1.0, 0)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [9])
    assert (body["return_token_ids"], body["add_special_tokens"]) == (True, False)


def test_responses_are_in_the_order_of_their_numbers() -> None:
    def choice(index: int) -> dict[str, Any]:
        return {"index": index, "token_ids": [index], "logprobs": {"token_logprobs": [-float(index)]}}

    found = vllm.read_reply({"choices": [choice(1), choice(0)]}, [4], 2)
    assert found == [([0], [0.0]), ([1], [-1.0])]


@pytest.mark.parametrize(
    ("response", "logprobs", "problem"),
    [
        ([5, EOS], [-1.0, -2.0], None),
        ([5] * 8, [-1.0] * 8, None),
        ([], [], "of 0 tokens that ends neither at its first stop token nor after 8 tokens"),
        ([5, 23, EOS], [-1.0] * 3, "a token that the model does not have"),
        ([-1, EOS], [-1.0] * 2, "a token that the model does not have"),
        ([5] * 9, [-1.0] * 9, "of 9 tokens that ends neither"),
        ([EOS, 5, EOS], [-1.0] * 3, "of 3 tokens that ends neither"),
        ([5, 5], [-1.0] * 2, "of 2 tokens that ends neither"),
        ([5, EOS], [-1.0], "a log-prob that is missing"),
        ([5, EOS], [-1.0, float("nan")], "missing, NaN, infinite or above 0"),
        ([5, EOS], [-1.0, float("-inf")], "missing, NaN, infinite or above 0"),
        ([5, EOS], [-1.0, 0.1], "missing, NaN, infinite or above 0"),
    ],
)
def test_a_response_that_cannot_be_a_sample_is_refused(
    response: list[int], logprobs: list[float], problem: str | None
) -> None:
    if problem is None:
        vllm.check_response(response, logprobs, SAMPLING, small.VOCAB)
    else:
        with pytest.raises(VllmError, match=problem):
            vllm.check_response(response, logprobs, SAMPLING, small.VOCAB)


# ----------------------------------------------------------------------------- a server that runs already


def test_samples_of_the_server_have_the_models_own_log_probs(tmp_path: Path) -> None:
    model = small.causal()
    with connected(tmp_path) as (one, _):
        one.load(model)
        samples = one.sample(QUERIES, 2, SEEDS)
        assert one.name == "vLLM 0.32.0-standin"
    assert_logprobs_of(model, samples, QUERIES * 2)
    assert samples.responses[:3] != samples.responses[3:], "the samples of a prompt differ"


def test_new_weights_are_loaded_while_the_server_is_paused_and_older_ones_are_removed(tmp_path: Path) -> None:
    new = small.causal(seed=1)
    with connected(tmp_path) as (one, program):
        one.load(small.causal())
        program.calls.clear()
        one.load(new)
        renewal = ["/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
        assert program.calls == [*renewal, "/resume"]
        assert_logprobs_of(new, one.sample(QUERIES, 1, SEEDS), QUERIES)
        assert stored(tmp_path) == ["version-2"]
    assert not stored(tmp_path)


def test_a_folder_for_the_weights_holds_those_in_use_and_is_empty_at_the_end(tmp_path: Path) -> None:
    """Such as one in shared memory; the log stays where it is without it."""
    home, shared = tmp_path / "home", tmp_path / "shared"
    with closing(make_server(home, command=command(), weights_folder=str(shared))) as one:
        for version in (1, 2):
            one.load(small.causal(seed=version))
            assert stored(shared) == [f"version-{version}"]
        one.sample(QUERIES, 1, SEEDS)
        assert not stored(home)
    assert list(shared.iterdir()) == []
    assert [path.suffix for path in home.iterdir()] == [".log"]


def test_a_server_sleeps_while_the_policy_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up for new weights, and for an evaluation with those that it has."""
    model = small.causal(seed=1)
    with connected(tmp_path, sleep=True) as (one, program):
        program.is_asleep = True  # as an earlier run has left it
        one.load(small.causal())
        one.sample(QUERIES, 1, SEEDS)
        assert program.is_asleep
        one.load(model)
        for _ in range(2):
            assert_logprobs_of(model, one.sample(QUERIES, 1, SEEDS), QUERIES)
            assert program.is_asleep
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with closing(make_server(tmp_path, command=command(), sleep=True)) as one:
        one.load(model)
        assert one._daemon is not None
        program_of_command = psutil.Process(one._daemon.record()["pid"])
        assert "--enable-sleep-mode" in program_of_command.cmdline()
        assert "PYTORCH_ALLOC_CONF" not in program_of_command.environ(), "with it, nothing would be freed"


def test_a_server_that_computes_in_bf16_is_given_weights_of_bf16(tmp_path: Path) -> None:
    """Half of the bytes; it would round float32 ones itself."""
    model = small.causal()
    with connected(tmp_path) as (one, _):
        one._sampling = replace(SAMPLING, is_float32=False)
        one.load(model)
        [file] = tmp_path.rglob("model.safetensors")
        found = load_file(file)
        assert found
        for name, x in found.items():
            expected = model.state_dict()[name]
            assert torch.equal(x, expected.bfloat16() if x.dim() > 1 else expected), name
    assert {x.dtype for x in model.parameters()} == {torch.float32}


# ------------------------------------------------------------------------ servers that fail


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("count", "0 responses to a prompt, and 1 are needed"),
        ("prompt", "answered another prompt"),
        ("text", "an unknown form"),
        ("no json", "is no JSON"),
        ("500", "status 500"),
        ("hang", "within 1 s"),
        ("nan", "NaN"),
        ("cut", "of 1 tokens that ends neither"),
        ("token", "does not have"),
        ("version", "weights of version '7', not 1: it was started anew, or something else uses it"),
    ],
)
def test_a_server_that_fails_or_is_wrong_is_an_error_with_one_message(
    fault: str, problem: str, tmp_path: Path
) -> None:
    seconds = 1.0 if fault == "hang" else SECONDS
    with connected(tmp_path, standin.Canned(), fault, timeout_seconds=seconds) as (one, _):
        one.load(small.causal())
        with pytest.raises(VllmError, match=problem):
            one.sample(QUERIES, 1, SEEDS)


def test_an_address_without_a_server_is_an_error(tmp_path: Path) -> None:
    one = make_server(tmp_path, url="http://127.0.0.1:1")
    with closing(one), pytest.raises(VllmError, match="does not answer /pause"):
        one.load(small.causal())


# -------------------------------------------------------------------------- a server that is started here


def of_servers(home: Path) -> list[psutil.Process]:
    """The living processes of every server whose record is below `home`, and of all that it started."""
    daemons = [processes.Daemon(file.stem, file.parent) for file in home.rglob("vllm-*.json")]
    leaders = [daemon.record()["pid"] for daemon in daemons]
    others = [process for leader in leaders for process in processes.others_in_session(leader)]
    return [*others, *(psutil.Process(leader) for leader in leaders if psutil.pid_exists(leader))]


def alive(some: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [one for one in some if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("victims", [[], ["standin", "attached"]])
def test_the_server_is_ended_with_all_its_processes_even_if_some_were_killed(
    victims: list[str], tmp_path: Path
) -> None:
    one = make_server(tmp_path, command=command("--child"))
    one.load(small.causal())
    running = of_servers(tmp_path)
    assert len(running) == 3, "the server, its child, and what ends them with this process"
    assert one.sample(QUERIES, 1, SEEDS).responses == [[EOS]] * 3
    for process in running:
        words = " ".join(process.cmdline())
        # the words of the attached process name the server too
        if (
            "attached" if "project.processes" in words else "standin" if "standin" in words else ""
        ) in victims:
            process.kill()
    one.close()
    until(lambda: not alive(running))
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]
    one.close()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([*command()[:-1], "end"], "no such architecture"),
        (["/no/such/vllm", "serve"], "No such file or directory: '/no/such/vllm'"),
    ],
    ids=["it ends", "no program"],
)
def test_a_server_that_does_not_start_is_a_mistake_with_the_end_of_its_log(
    words: list[str], problem: str, tmp_path: Path
) -> None:
    with closing(make_server(tmp_path, command=words)) as one, pytest.raises(UserError, match=problem):
        one.load(small.causal())


PROGRAM = """
    import sys, time
    from pathlib import Path
    from tests.ppo import test_vllm as t
    one = t.make_server(Path(sys.argv[1]), command=t.command("--child"))
    one.load(t.small.causal())
    print("started", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_leaves_no_server_and_the_next_one_removes_its_weights(tmp_path: Path) -> None:
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=small.ROOT, text=True) as owner:
        assert owner.stdout is not None
        assert any(line == "started\n" for line in owner.stdout)
        running = of_servers(tmp_path)
        assert len(running) == 3
        owner.kill()
    until(lambda: not alive(running))
    assert stored(tmp_path)
    vllm.remove_abandoned(tmp_path)
    assert not stored(tmp_path)
