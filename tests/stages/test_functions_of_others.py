"""What a user's function does stays with it: it changes no stage, and fails before anything trains."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import imports
from rlhf_tasks.stages import preflight, runner
from tests import small
from tests.conftest import Command
from tests.flows.toy import until
from tests.stages.test_ppo import SETTINGS

REWARD = {"kind": "function", "weight": 0.1, "function": "stranger:score"}
FORKS = """
import multiprocessing, os, signal, sys, time

def square(x):
    return x * x

def score(prompts, responses):
    with multiprocessing.get_context("fork").Pool(2) as pool:  # which it ends by SIGTERM
        pool.map(square, [1, 2])
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    blocked = lambda: sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())) + 3)
    for end in (lambda: os.kill(os.getpid(), signal.SIGTERM), blocked, lambda: 1 / 0):
        if (forked := os.fork()) == 0:  # as a library may
            end()
        print("ended by", os.waitpid(forked, 0)[1])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    return [len(response) for response in responses]
"""
CHANGES = """
import os, pathlib, signal, torch

torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)

def score(prompts, responses):
    pathlib.Path("elsewhere").mkdir(exist_ok=True)
    os.chdir("elsewhere")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    for response in responses:
        os.chdir("..")
        yield len(response)
"""
LEAVES = """
import subprocess, threading, time

def score(prompts, responses):
    if not threading.current_thread().name.startswith("counter") and threading.active_count() < 50:
        threading.Thread(target=time.sleep, args=(600,), name="counter").start()
    subprocess.Popen(["sleep", "600"])
    return [len(response) for response in responses]
"""


@pytest.fixture
def project_with(models_here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a project whose reward, or another function, is `stranger:score` of this code."""
    monkeypatch.setenv("RLHF_STATE_DIR", "state")
    (models_here / "dvc.yaml").write_bytes((small.ROOT / "dvc.yaml").read_bytes())
    few = {"tracking.enabled": False, "ppo.total_episodes": 16, "ppo.rollout_batch_size": 8}

    def write(code: str, **changes: Any) -> None:
        Path("stranger.py").write_text(code, encoding="utf-8")
        values = {**SETTINGS, **small.WITHOUT_REWARD, **few, "ppo.scorers": [REWARD], **changes}
        YAML().dump(small.params(values), Path("params.yaml"))

    return write


def start(stage: str) -> subprocess.Popen[str]:
    """`rlhf STAGE` as a program of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_tasks.cli", stage],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(small.ROOT), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def ppo(project_with: Callable[..., None]) -> Callable[[str], str]:
    """Runs `rlhf ppo` with the function `score` of this code; gives what it printed."""

    def run(code: str) -> str:
        project_with(code)
        program = start("ppo")
        said, _ = program.communicate()
        assert program.returncode == 0, said
        assert Path("metrics/ppo.json").exists(), said
        return said

    return run


@pytest.mark.e2e
def test_children_that_a_reward_forks_do_not_hear_the_signals_of_the_stage(ppo: Callable[[str], str]) -> None:
    said = ppo(FORKS)
    assert "SIGTERM:" not in said
    assert "ZeroDivisionError" in said
    assert [int(line.split()[-1]) for line in said.splitlines() if line.startswith("ended")][:3] == [
        signal.SIGTERM,
        4 << 8,
        1 << 8,
    ]


@pytest.mark.e2e
def test_what_a_function_changes_of_the_process_is_put_back_and_named_once(ppo: Callable[[str], str]) -> None:
    said = ppo(CHANGES)
    assert not list(Path("elsewhere").iterdir())
    for what in (
        "torch's gradients",
        "torch's default dtype",
        "torch's default device",
        "torch's deterministic mode",
        "the working folder",
        "the handler of SIGTERM",
    ):
        assert said.count(f"changed {what} of") == 1, said


@pytest.mark.e2e
def test_a_stage_ends_though_its_function_left_something_running_and_names_it(
    ppo: Callable[[str], str],
) -> None:
    said = ppo(LEAVES)
    assert "left running by stranger:score and ended now: thread counter" in said
    assert "(sleep)" in said


@pytest.mark.parametrize(
    ("what", "change", "read"),
    [
        ("torch's threads", "t.set_num_threads(7)", "t.get_num_threads()"),
        (
            "torch's precision of matmuls",
            "t.set_float32_matmul_precision('medium')",
            "t.get_float32_matmul_precision()",
        ),
        ("torch's autocast on cpu", "t.set_autocast_enabled('cpu', True)", "t.is_autocast_enabled('cpu')"),
        ("torch's detection of anomalies", "t.autograd.set_detect_anomaly(True)", "t.is_anomaly_enabled()"),
        ("sys.stdout", "sys.stdout = None", "sys.stdout"),
    ],
)
def test_each_mode_is_put_back_also_after_an_error(
    what: str, change: str, read: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = f"modes_{abs(hash(change))}"
    code = (
        f"import sys\nimport torch as t\ndef read(): return {read}\ndef score(p, r):\n    {change}\n    1 / 0"
    )
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    read_now, function = (imports.load_function(f"{name}:{f}", "k", tmp_path) for f in ("read", "score"))
    before = read_now()
    for _ in range(2):
        with pytest.raises(UserError, match="ZeroDivisionError"):
            imports.call(name, function, [], [])
        assert read_now() == before
    assert capsys.readouterr().out.count(f"{name} changed {what}") == 1


# ------------------------------------------------------------------------------ before it trains


def test_a_key_that_is_not_there_is_asked_for_before_anything_trains(
    project_with: Callable[..., None], rlhf: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    server = {"kind": "http", "url": "http://127.0.0.1:9/", "key_variable": "NO_SUCH_KEY"}
    project_with("", **{"ppo.scorers": [server]})
    said = rlhf("sft", status=2).err
    assert "ppo.scorers.0.key_variable: the environment variable NO_SUCH_KEY holds no key" in said
    assert "launch.try_functions: false" in said


AT_IMPORT = "import faulthandler, os, sys\n{}\nscore = print"
IN_A_CALL = "import os\ndef score(p, r):\n    {}"


@pytest.mark.parametrize(
    ("when", "code", "why"),
    [
        ("{}", "scores = print", r"stranger\.py has no such function"),
        (AT_IMPORT, "os._exit(0)", r"importing stranger:score ended its process \(status 0\)"),
        (AT_IMPORT, "sys.exit(3)", "stranger:score cannot be imported: SystemExit: 3"),
        (AT_IMPORT, "raise KeyboardInterrupt", "importing stranger:score ended its process"),
        (AT_IMPORT, "faulthandler._sigsegv()", r"importing stranger:score ended its process \(SIGSEGV"),
        (IN_A_CALL, "return [1.0]", r"one number per response, but gave 1 for 4 \(tried on 4 rows"),
        (IN_A_CALL, "return r", "text is not a number"),
        (IN_A_CALL, "return open('later.json')", "FileNotFoundError.*launch.try_functions: false"),
        (IN_A_CALL, "os.abort()", r"a call of stranger:score ended its process \(SIGABRT"),
    ],
)
def test_a_function_that_fails_is_found_before_anything_trains(
    when: str, code: str, why: str, project_with: Callable[..., None], rlhf: Command
) -> None:
    project_with(when.format(code))
    assert re.search(why, rlhf("sft", status=2).err)


@pytest.mark.e2e
def test_a_function_that_hangs_ends_with_a_stage_that_is_killed(project_with: Callable[..., None]) -> None:
    project_with(
        "import os, pathlib, time\n"
        "def score(p, r):\n    pathlib.Path('pid').write_text(f'{os.getpid()} ')\n    time.sleep(600)\n"
    )
    stage = start("sft")
    until(lambda: Path("pid").exists() and Path("pid").read_text().endswith(" "), "the call")
    stage.kill()
    until(lambda: not psutil.pid_exists(int(Path("pid").read_text())), "the end of the call")
    stage.communicate()


def test_judges_and_labels_are_tried_too(project_with: Callable[..., None], rlhf: Command) -> None:
    code = "def score(prompts, a, b):\n    return {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}"
    judge = {"kind": "function", "name": "mine", "function": "stranger:score", "pairwise": True}
    project_with(code, **{"ppo.scorers": [{"kind": "dummy"}], "judge.judges": [judge]})
    assert "must return one number per pair" in rlhf("sft", status=2).err
    project_with(code, **{"ppo.scorers": [{"kind": "dummy"}], "preferences.function": "stranger:score"})
    assert "preferences.function: function stranger:score(prompts, a, b)" in rlhf("sft", status=2).err


@pytest.mark.parametrize(
    ("key", "arguments", "returns", "why"),
    [
        ("ppo.loss", "logprobs, batch, config", "-logprobs.sum(), {}", r"the losses must be .* \[16, 4\]"),
        ("ppo.loss", "logprobs, batch, config", "logprobs.sqrt(), {}", "gave NaN or infinity"),
        ("ppo.loss", "logprobs, batch", "-logprobs, {}", "ppo.loss: stranger:score raised TypeError"),
        ("dpo.loss", "pairs, settings", "(pairs.lead - pairs.lead).log()", "gave NaN or infinity"),
        ("dpo.loss", "pairs, settings", "pairs.lead.mean()", "one loss for each pair"),
        ("ppo.advantages", "rewards, rollout, config", "rewards", r"two tensors of \[16, 4\]"),
    ],
)
def test_a_loss_or_an_estimator_that_fails_is_found_before_anything_trains(
    key: str, arguments: str, returns: str, why: str, project_with: Callable[..., None], rlhf: Command
) -> None:
    own: Any = "stranger:score"
    if key == "ppo.advantages":
        own = {"kind": "function", "function": own, "samples_per_prompt": 4}
    changes = {"ppo.scorers": [{"kind": "dummy"}], "ppo.advantages.samples_per_prompt": 4, key: own}
    project_with(f"def score({arguments}):\n    return {returns}", **changes)
    assert re.search(f"{why}.*tried on random numbers, before", rlhf("sft", status=2).err)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("ppo.loss", "examples.cispo:cispo"),
        ("ppo.loss", "examples.gspo:gspo"),
        ("ppo.loss", "examples.whole_response:clip"),
        ("ppo.advantages.function", "examples.estimator:batch_mean"),
    ],
)
def test_the_examples_pass(key: str, name: str, project_with: Callable[..., None]) -> None:
    project_with("")
    preflight._call_on_tensors(preflight.Function(key, name, (), False, True), Path())


def test_a_function_is_tried_once_per_content_of_its_file_unless_it_is_turned_off(
    project_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.setattr(runner, "module_of", lambda stage: "no_stage")
    code = (
        "from pathlib import Path\n"
        "def score(responses, prompts):\n"
        "    with Path('calls').open('a') as file:\n"
        "        file.write(f'{len(prompts)} {len(responses)}\\n')\n"
        "    return [1.0] * len(responses)\n"
    )
    project_with(code, **{"launch.try_functions": False})
    for changed, calls in ((code, 0), (code, 1), (code, 1), (f"{code}#\n", 2), (f"{code}#\n", 2)):
        if calls:
            project_with(changed)
        with pytest.raises(ModuleNotFoundError, match="no_stage"):
            rlhf("sft")
        lines = Path("calls").read_text().splitlines() if Path("calls").exists() else []
        assert lines == ["4 4"] * calls


def test_a_reader_that_ends_the_interpreter_gets_a_message(
    project_with: Callable[..., None], rlhf: Command
) -> None:
    Path("rows.jsonl").write_text('{"prompt": "p"}\n' * 9, encoding="utf-8")
    project_with(
        "import os\nos._exit(3)\nscore = print",
        **{
            "data.source": "files",
            "data.path": "rows.jsonl",
            "data.format": "stranger:score",
            "judge.judges": [{"kind": "function", "name": "mine", "function": "stranger:score"}],
        },
    )
    said = rlhf("prepare", status=2)
    assert "data.format: importing stranger:score ended its process (status 3)" in said.err
