"""An engine's requests, replies and faults, on the stand-in of vLLM's server; and the end of its program."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlhf_tasks.config.ppo import VllmSampler as Settings
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling.load import place
from rlhf_tasks.ppo.engines import ipc, wire
from rlhf_tasks.ppo.engines.protocol import Answers, EngineError, EngineGone, Limits, check
from rlhf_tasks.ppo.engines.vllm import Rollouts, VllmEngine, remove_abandoned
from rlhf_tasks.ppo.engines.wire import Sampling
from rlhf_tasks.project import processes
from rlhf_tasks.training import attached
from tests import small
from tests.ppo import standin
from tests.small import EOS

QUERIES = [[4, 5, 6], [7], [8, 9]]
SEEDS = [11, 12, 13]
SAMPLING = Sampling(temperature=0.8, max_tokens=8, stop=EOS)
LIMITS = Limits(stop=EOS, length=8, vocab=small.VOCAB)
STANDIN = Path(standin.__file__)
SECONDS = 60.0


def settings(**changes: Any) -> Settings:
    given = {"max_logprob_diff": 0.01, "start_seconds": SECONDS, "timeout_seconds": SECONDS}
    return Settings.model_validate(given | changes)


def engine(home: Path, **changes: Any) -> VllmEngine:
    rollouts = Rollouts(sampling=SAMPLING, max_tokens=16, is_float32=True)
    return VllmEngine(settings(**changes), home, small.tokenizer(), rollouts)


def command(*options: str) -> list[str]:
    return [sys.executable, str(STANDIN), "--canned", *options, "serve"]


def until(is_true: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ------------------------------------------------------------------------------- requests and replies


def test_a_request_samples_purely_and_only_the_stop_token_ends_it() -> None:
    body = wire.completion([4, 5], 3, 17, Sampling(temperature=0.7, max_tokens=32, stop=9))
    assert (body["prompt"], body["n"], body["seed"], body["max_tokens"]) == ([4, 5], 3, 17, 32)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 1.0, 0, 0.0)
    assert (body["repetition_penalty"], body["min_tokens"]) == (1.0, 0)
    assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [9])
    assert (body["return_token_ids"], body["add_special_tokens"]) == (True, False)


def test_responses_are_in_the_order_of_their_numbers() -> None:
    def choice(index: int) -> dict[str, Any]:
        return {"index": index, "token_ids": [index], "logprobs": {"token_logprobs": [-float(index)]}}

    found = wire.responses({"choices": [choice(1), choice(0)]}, [4], 2)
    assert found == [([0], [0.0]), ([1], [-1.0])]


GOOD = Answers([[5, EOS], [5] * 8], [[-1.0, -2.0], [-1.0] * 8], 3)


def test_answers_that_can_be_samples_pass() -> None:
    check(GOOD, 2, 3, LIMITS)


@pytest.mark.parametrize(
    ("response", "logprobs", "problem"),
    [
        ([], [], "without a token"),
        ([5, 23, EOS], [-1.0] * 3, "a token that the model does not have"),
        ([-1, EOS], [-1.0] * 2, "a token that the model does not have"),
        ([5] * 9, [-1.0] * 9, "of 9 tokens; 8 are allowed"),
        ([EOS, 5, EOS], [-1.0] * 3, "continues after the stop token 1"),
        ([5, 5], [-1.0] * 2, "cut after 2 of 8 tokens"),
        ([5, EOS], [-1.0], "of 2 tokens with 1 log-probs"),
        ([5, EOS], [-1.0, float("nan")], "NaN, infinite or above 0"),
        ([5, EOS], [-1.0, float("-inf")], "NaN, infinite or above 0"),
        ([5, EOS], [-1.0, 0.1], "NaN, infinite or above 0"),
    ],
)
def test_a_response_that_cannot_be_a_sample_is_refused(
    response: list[int], logprobs: list[float], problem: str
) -> None:
    with pytest.raises(EngineError, match=problem):
        check(Answers([response], [logprobs], 3), 1, 3, LIMITS)


def test_answers_of_another_number_or_version_are_refused() -> None:
    with pytest.raises(EngineError, match="2 responses to 3 requests"):
        check(GOOD, 3, 3, LIMITS)
    with pytest.raises(EngineError, match="version 3, and version 4 is in use: the answers are stale"):
        check(GOOD, 2, 4, LIMITS)


# ----------------------------------------------------------------------------- a server that runs already


def test_samples_of_the_server_have_the_models_own_log_probs(tmp_path: Path) -> None:
    model = small.causal()
    with standin.serving() as server:
        one = engine(tmp_path, url=server.url)
        one.load(model, 1)
        answers = one.sample(QUERIES, 2, SEEDS)
        assert one.name == "vLLM 0.32.0-standin"
        one.close()
    check(answers, 6, 1, LIMITS)
    for query, response, logprobs in zip(QUERIES * 2, answers.responses, answers.logprobs, strict=True):
        alone = (small.logits_alone(model, query, response) / 0.8).log_softmax(-1)
        expected = [float(alone[i, token]) for i, token in enumerate(response)]
        assert logprobs == pytest.approx(expected, abs=1e-5)
    assert answers.responses[:3] != answers.responses[3:], "the samples of a prompt differ"


def test_new_weights_are_loaded_while_the_server_is_paused_and_older_ones_are_removed(tmp_path: Path) -> None:
    with standin.serving() as server:
        one = engine(tmp_path, url=server.url)
        one.load(small.causal(), 1)
        first = one.sample(QUERIES, 1, SEEDS)
        server.calls.clear()
        one.load(small.causal(seed=1), 2)
        assert server.calls == [
            "/pause?mode=wait", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume",
        ]  # fmt: skip
        second = one.sample(QUERIES, 1, SEEDS)
        kept = [path.parent.name for path in tmp_path.rglob("model.safetensors")]
        one.close()
    assert (first.version, second.version) == (1, 2)
    assert first.logprobs != second.logprobs
    assert kept == ["version-2"]
    assert not list(tmp_path.rglob("model.safetensors"))


def test_a_folder_for_the_weights_holds_those_in_use_and_is_empty_at_the_end(tmp_path: Path) -> None:
    """Such as one in shared memory; the log stays where it is without it."""
    home, place = tmp_path / "home", tmp_path / "shared"
    one = engine(home, command=command(), weights_folder=str(place))
    for version in (1, 2):
        one.load(small.causal(seed=version), version)
        kept = [path.parent.name for path in place.rglob("model.safetensors")]
        assert kept == [f"version-{version}"]
    assert one.sample(QUERIES, 1, SEEDS).version == 2, "the server could read them"
    assert not list(home.rglob("*.safetensors"))
    one.close()
    assert list(place.iterdir()) == []
    assert [path.suffix for path in home.iterdir()] == [".log"]


# ------------------------------------------------------------------------ weights in a GPU's memory


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handle of a CPU's tensor is the tensor itself, as the stand-in takes it."""
    monkeypatch.setattr(ipc, "_device", lambda weights: torch.device("cuda"))
    monkeypatch.setattr(ipc, "_wait", lambda weights: None)
    monkeypatch.setattr(ipc, "_handle", lambda tensor: {standin.GPU: tensor})


@pytest.mark.usefixtures("shared_memory")
def test_weights_reach_the_server_from_memory_and_only_the_first_ones_are_written(tmp_path: Path) -> None:
    new = small.causal(seed=1)
    with standin.serving() as server:
        one = engine(tmp_path, url=server.url, transfer="ipc")
        one.load(small.causal(), 1)
        server.calls.clear()
        one.load(new, 2)
        assert server.calls == [
            "/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update",
            "/reset_prefix_cache", "/update_weight_version", "/resume",
        ]  # fmt: skip
        answers = one.sample(QUERIES, 1, SEEDS)
        written = [path.parent.name for path in tmp_path.rglob("model.safetensors")]
        one.close()
    assert answers.version == 2
    assert written == ["version-1"]
    for query, response, logprobs in zip(QUERIES, answers.responses, answers.logprobs, strict=True):
        alone = (small.logits_alone(new, query, response) / 0.8).log_softmax(-1)
        expected = [float(alone[i, token]) for i, token in enumerate(response)]
        assert logprobs == pytest.approx(expected, abs=1e-5)


def test_without_a_gpu_no_handles_are_given_and_no_server_is_started(tmp_path: Path) -> None:
    one = engine(tmp_path, command=command(), transfer="ipc")
    with pytest.raises(UserError, match="transfer=ipc needs a GPU, and PPO runs on: cpu; set it to folder"):
        one.load(small.causal(), 1)
    one.close()
    assert not of_servers(tmp_path)


@pytest.mark.usefixtures("shared_memory")
def test_weights_that_a_model_does_not_name_are_refused() -> None:
    with pytest.raises(UserError, match=r"weights that it does not name, such as experts.0; set it"):
        ipc.check(small.causal(), ["experts.0"])


@pytest.mark.usefixtures("shared_memory")
def test_a_server_with_weights_in_memory_only_is_not_started_again(tmp_path: Path) -> None:
    one = engine(tmp_path, command=command("--fault", "die"), transfer="ipc")
    one.load(small.causal(), 1)
    with pytest.raises(EngineGone):
        one.sample(QUERIES, 1, SEEDS)
    one.close()


def test_a_server_that_takes_weights_from_memory_is_started_to_do_so() -> None:
    words = wire.options(Path("m"), 1, max_tokens=16, is_float32=True, by_ipc=True)
    assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": "ipc"}
    plain = wire.options(Path("m"), 1, max_tokens=16, is_float32=True, by_ipc=False)
    assert "--weight-transfer-config" not in plain


OPEN = """
import base64, pickle, sys, torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
total = 0.0
for handle in pickle.loads(base64.b64decode(sys.stdin.read())):
    (arguments,) = handle.values()
    total += float(rebuild_cuda_tensor(*arguments).double().sum())
print(total)
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU whose memory could be shared")
def test_another_process_opens_the_handles_of_a_gpus_memory() -> None:
    model = small.causal()
    place(model, torch.device("cuda"))
    names = list(model.state_dict())
    ipc.check(model, names)
    with ipc.update_of(model, names) as body:
        pickled = body["update_info"]["ipc_handles_pickled"]
        done = subprocess.run(
            [sys.executable, "-c", OPEN], input=pickled, capture_output=True, text=True, check=True
        )
    expected = sum(float(weight.double().sum()) for weight in model.state_dict().values())
    assert float(done.stdout) == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------------ servers that fail


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("count", "0 responses to a prompt, and 1 are needed"),
        ("prompt", "answered another prompt"),
        ("text", "another form than vLLM's"),
        ("no json", "is no JSON"),
        ("500", "status 500"),
        ("hang", "within 1 s"),
        ("nan", "NaN"),
        ("cut", "cut after 1 of 8"),
        ("token", "does not have"),
        ("version", "version 1, and version 2 is in use"),
    ],
)
def test_a_server_that_fails_or_is_wrong_is_an_error_with_one_message(
    fault: str, problem: str, tmp_path: Path
) -> None:
    with standin.serving(standin.Canned(), fault) as server:
        one = engine(tmp_path, url=server.url, timeout_seconds=1.0 if fault == "hang" else SECONDS)
        one.load(small.causal(), 2)
        with pytest.raises(EngineError, match=problem):
            check(one.sample(QUERIES, 1, SEEDS), 3, 2, LIMITS)
        one.close()


def test_weights_that_something_else_loaded_are_refused(tmp_path: Path) -> None:
    with standin.serving(standin.Canned()) as server:
        one = engine(tmp_path, url=server.url)
        one.load(small.causal(), 1)
        server.version = "default"
        with pytest.raises(EngineError, match="version 'default', not 1: it was started anew"):
            one.sample(QUERIES, 1, SEEDS)
        one.close()


def test_a_cache_that_keeps_states_of_older_weights_is_an_error(tmp_path: Path) -> None:
    with standin.serving(standin.Canned(), "cache") as server:
        one = engine(tmp_path, url=server.url)
        with pytest.raises(EngineError, match="could not empty its prefix cache"):
            one.load(small.causal(), 1)
        one.close()


def test_an_address_without_a_server_is_an_error(tmp_path: Path) -> None:
    one = engine(tmp_path, url="http://127.0.0.1:1")
    with pytest.raises(EngineGone, match="does not answer /pause"):
        one.load(small.causal(), 1)
    one.close()


# -------------------------------------------------------------------------- a server that is started here


def of_servers(home: Path) -> list[psutil.Process]:
    """The living processes of every server whose record is below `home`, and of all that it started."""
    found = [
        processes.Daemon(file.stem, file.parent) for file in home.rglob("*.json") if "vllm-" in file.name
    ]
    leaders = [daemon.record()["pid"] for daemon in found]
    others = [process for leader in leaders for process in attached.others_in_session(leader)]
    return [*others, *(psutil.Process(leader) for leader in leaders if psutil.pid_exists(leader))]


def alive(some: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [one for one in some if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_the_server_is_started_with_the_weights_and_ended_with_all_its_processes(tmp_path: Path) -> None:
    one = engine(tmp_path, command=command("--child"))
    one.load(small.causal(), 1)
    running = of_servers(tmp_path)
    assert len(running) == 3, "the server, its child, and what ends them with this process"
    assert one.sample(QUERIES, 1, SEEDS).responses == [[EOS]] * 3
    one.close()
    until(lambda: not alive(running))
    assert [path.suffix for path in tmp_path.iterdir()] == [".log"]
    one.close()


@pytest.mark.parametrize("victims", [["standin"], ["attached"], ["standin", "attached"]])
def test_what_a_killed_server_has_started_ends_too(victims: list[str], tmp_path: Path) -> None:
    one = engine(tmp_path, command=command("--child"))
    one.load(small.causal(), 1)
    running = of_servers(tmp_path)
    for process in running:
        words = " ".join(process.cmdline())
        # the words of the attached process name the server too
        if ("attached" if "attached" in words else "standin" if "standin" in words else "") in victims:
            process.kill()
    one.close()
    until(lambda: not alive(running))


@pytest.mark.parametrize("fault", ["die", "500", "hang"])
def test_a_server_that_has_gone_is_started_again_with_the_same_weights(fault: str, tmp_path: Path) -> None:
    seconds = 2.0 if fault == "hang" else SECONDS
    words = command("--fault", fault, "--marker", str(tmp_path / "marker"))
    one = engine(tmp_path, command=words, timeout_seconds=seconds)
    one.load(small.causal(), 7)
    assert one.sample(QUERIES, 1, SEEDS) == Answers([[EOS]] * 3, [[-1.0]] * 3, 7)
    one.close()


def test_a_server_that_ends_twice_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    one = engine(tmp_path, command=command("--fault", "die"))
    one.load(small.causal(), 1)
    for _ in range(2):
        with pytest.raises(EngineGone, match=r"does not answer.*again once before, and its log is .*\.log"):
            one.sample(QUERIES, 1, SEEDS)
    running = of_servers(tmp_path)
    one.close()
    until(lambda: not alive(running))


def test_a_server_that_does_not_start_is_a_mistake_with_the_end_of_its_log(tmp_path: Path) -> None:
    one = engine(tmp_path, command=[*command()[:-1], "end"])
    with pytest.raises(UserError, match="no such architecture"):
        one.load(small.causal(), 1)
    one.close()
    other = engine(tmp_path, command=["/no/such/vllm", "serve"])
    with pytest.raises(UserError, match=r"ppo\.sampler\.command: /no/such/vllm is no program here"):
        other.load(small.causal(), 1)
    other.close()


PROGRAM = """
    import sys, time
    from pathlib import Path
    from tests.ppo import test_engines as t
    one = t.engine(Path(sys.argv[1]), command=t.command("--child"))
    one.load(t.small.causal(), 1)
    print("started", flush=True)
    time.sleep(600)
"""


def test_a_killed_process_leaves_no_server_and_the_next_one_removes_its_weights(tmp_path: Path) -> None:
    words = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)]
    owner = subprocess.Popen(words, stdout=subprocess.PIPE, cwd=small.ROOT, text=True)
    assert owner.stdout is not None
    lines = iter(owner.stdout.readline, "")
    assert any(line == "started\n" for line in lines)
    running = of_servers(tmp_path)
    assert len(running) == 3
    owner.kill()
    owner.wait()
    owner.stdout.close()
    until(lambda: not alive(running))
    assert list(tmp_path.rglob("model.safetensors"))
    remove_abandoned(tmp_path)
    assert not list(tmp_path.rglob("model.safetensors"))
