"""The launch section becomes one `accelerate launch` command."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlhf_tasks.config import STAGES, Config, Launch
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.tracking import context
from rlhf_tasks.training import auto, failures, launch, signals
from tests import small

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def become_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in context.GROUP:
        monkeypatch.setenv(name, "1")


def section(**values: Any) -> Launch:
    return Launch.model_validate({"precision": "fp32", **values})


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({"precision": "bf16"}, []),
        ({"num_processes": 2}, ["base", "sft", "reward", "dpo", "value", "ppo"]),
        ({"parallelism": "zero2"}, ["base", "sft", "reward", "dpo", "value", "ppo"]),
        ({"num_machines": 2}, ["base", "sft", "reward", "dpo", "value", "ppo"]),
    ],
)
def test_only_training_stages_are_launched_and_only_for_several_processes(
    values: dict[str, Any], needed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [stage for stage in STAGES if launch.is_needed(stage, section(**values))] == needed
    become_worker(monkeypatch)
    assert not launch.is_needed("ppo", section(**values)), "a worker launches nothing"


@pytest.mark.parametrize(
    ("threads", "values", "expected"),
    [
        ("4", {}, True),
        ("1", {}, False),
        ("4", {"reward.side_by_side": False}, False),
        ("4", {"launch.num_processes": 2}, False),
    ],
)
def test_reward_models_are_trained_side_by_side_on_several_threads(
    threads: str, values: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "gpus", list)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    settings = Config.model_validate(small.params({"reward.side_by_side": True, **values}))
    assert launch.trains_side_by_side("reward", settings) == expected
    assert not launch.trains_side_by_side("sft", settings)


@pytest.mark.parametrize(
    ("values", "environment", "expected"),
    [
        (
            {"num_processes": 4},
            {"OMP_NUM_THREADS": "3"},
            {"--num_processes": "4", "--num_cpu_threads_per_process": "3", "--main_process_port": "0"},
        ),
        ({"num_processes": 4}, {}, {"--num_cpu_threads_per_process": "2"}),  # of the eight that are given
        (
            {"num_processes": 16, "num_machines": 2},
            {"MASTER_ADDR": "10.0.0.1", "MACHINE_RANK": "1"},
            {"--num_machines": "2", "--machine_rank": "1"}
            | {"--main_process_ip": "10.0.0.1", "--main_process_port": "29500"},
        ),
    ],
)
def test_the_command_of_each_machine(
    values: dict[str, Any],
    environment: dict[str, str],
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    words = launch.command(Paths(), "sft", section(**values), environment)
    assert words[:4] == [sys.executable, "-P", "-m", "rlhf_tasks.training.launch"]
    assert "--multi_gpu" in words
    assert {name: option(words, name) for name in expected} == expected
    assert words[-6:] == ["--no_python", sys.executable, "-uP", "-m", "rlhf_tasks.cli", "sft"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_processes": 4, "num_machines": 2}, "needs MASTER_ADDR and MACHINE_RANK in the environment"),
        ({"num_processes": 3, "num_machines": 2}, "num_processes=3 is not divisible by"),
        ({"num_processes": 1, "num_machines": 2}, "counts the processes of all machines"),
        ({"parallelism": "fsdp2"}, r"and 2 with launch\.parallelism=fsdp2"),
    ],
)
def test_an_impossible_launch_is_an_error_with_advice(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        launch.command(Paths(), "sft", section(**values), {})


def test_only_the_first_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failures.FAILURE, str(tmp_path / "failure.json"))
    monkeypatch.setenv("RANK", "1")
    failures.running("sft")
    assert failures.read_failure() is None
    failures.report(MemoryError("full"))
    failures.report(UserError("later"))
    failures.running("")
    failure = {"kind": "fault", "message": "rank 1: MemoryError: full", "process": str(os.getpid())}
    assert failures.read_failure() == failure
    assert not failures.has_failed_elsewhere()
    become_worker(monkeypatch)
    assert not failures.has_failed_elsewhere()
    (tmp_path / "failure.json").write_text(json.dumps(failure | {"process": "1"}), encoding="utf-8")
    assert failures.has_failed_elsewhere()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            OSError(errno.EACCES, "Denied", "models"),
            "[Errno 13] Denied: 'models'; give this user the right to ",
        ),
        (OSError(errno.EROFS, "No", f"{ROOT}/none/sft/.partial"), f"{ROOT} is read-only ([Errno 30] No"),
        (OSError(errno.EROFS, "No"), "a file system is read-only ([Errno 30] No); mount it"),
        (torch.OutOfMemoryError("Tried 2 GiB.\nMore"), "the GPU is out of memory (Tried 2 GiB.); lower "),
        (OSError(errno.ENOSPC, "No space"), "a disk is full ([Errno 28] No space). Make room"),
        (OSError(errno.ENOSPC, "No space", "none/sft"), f"the disk of {ROOT / 'none'} is full: "),
    ],
)
def test_faults_of_the_machine_are_mistakes_that_a_user_can_fix(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(failures.FAILURE, str(tmp_path / "failure.json"))
    failures.report(error)
    report = failures.read_failure()
    assert report is not None
    assert report["kind"] == "user"
    assert report["message"].startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RLHF_MACHINES": "1"}, r"the job has 1 machine\(s\), and launch.num_machines=2"),
        ({"RLHF_MACHINES": "3"}, r"the job has 3 machine\(s\)"),
        ({"MACHINE_RANK": "2"}, "MACHINE_RANK=2 is not below launch.num_machines=2"),
        ({"RLHF_MACHINES": "2", "MACHINE_RANK": "1"}, None),
        ({}, None),
    ],
)
def test_machines_that_the_launch_does_not_know_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], message: str | None
) -> None:
    """A machine too many would train the whole stage by itself, and write the same files."""
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = section(num_machines=2, num_processes=2)
    with nullcontext() if message is None else pytest.raises(UserError, match=message):
        launch.check_machines("ppo", settings)
    launch.check_machines("judge", settings)


@pytest.mark.parametrize(
    ("gpus", "processes", "machines", "is_refused"),
    [
        (8, 8, 1, False),
        (8, 9, 1, True),
        (8, 16, 2, False),
        (8, 32, 2, True),
        (1, 1, 1, False),
        (0, 64, 1, False),
    ],
)
def test_a_machine_with_gpus_starts_at_most_one_process_for_each(
    gpus: int, processes: int, machines: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on one GPU would fail in NCCL. Without GPUs they meet by gloo, as many as there are."""
    monkeypatch.setattr(auto, "gpus", lambda: [object()] * gpus)
    settings = section(num_processes=processes, num_machines=machines)
    message = rf"launch.num_processes={processes} .* {gpus} GPU\(s\).*at most {gpus * machines}"
    with pytest.raises(UserError, match=message) if is_refused else nullcontext():
        launch.check_machines("ppo", settings)


def test_gpus_that_torch_cannot_use_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where the driver is older than the build's CUDA: then torch says that there is no GPU."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(auto, "gpus", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch.check_machines("ppo", section())
    assert "the driver may be too old" in capsys.readouterr().out
    with pytest.raises(UserError, match="can use no GPU of this machine"):
        launch.check_machines("ppo", section(num_processes=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch.check_machines("ppo", section(num_processes=2))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["user", "fault", "none"])
def test_a_workers_message_reaches_the_launcher(kind: str) -> None:
    body = {"user": "UserError('fix it')", "fault": "ValueError('boom')", "none": "None"}[kind]
    code = (
        "import sys; from rlhf_tasks.errors import UserError; from rlhf_tasks.training import failures\n"
        f"error = {body}\n"
        "error and failures.report(error); sys.exit(1 if error else 0)"
    )
    words = [sys.executable, "-c", code]
    if kind == "user":
        with pytest.raises(UserError, match=r"^fix it$"):
            launch.supervise("sft", words, os.environ)
    else:
        assert launch.supervise("sft", words, os.environ) == (1 if kind == "fault" else 0)
    assert failures.FAILURE not in os.environ


def test_a_worker_whose_launcher_was_killed_before_the_workers_met_ends(tmp_path: Path) -> None:
    """Else it would try for two hours to reach the launcher, and hold the lock of its stage."""
    gone = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = processes.name_of(psutil.Process(gone.pid))
    gone.kill()
    gone.communicate()
    nobody = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(24000)), signals.LAUNCHER: name}
    nobody |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    nobody |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    code = (
        "from rlhf_tasks.config import Launch; from rlhf_tasks.training.distributed import Distributed\n"
        "from rlhf_tasks.training import signals\n"
        "with signals.listening('sft'): Distributed(Launch(num_processes=2, precision='fp32'), 1)"
    )
    words, environment = [sys.executable, "-c", code], os.environ | nobody
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 143
    assert "Traceback" not in done.stderr, "it ended for another reason"


STOPPED = """
import signal, sys, time
from pathlib import Path

def save(*_):
    time.sleep(float(sys.argv[1]))
    (Path(sys.argv[2]) / f"saved {time.monotonic_ns()}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
(Path(sys.argv[2]) / f"ready {time.monotonic_ns()}").touch()
while True:
    time.sleep(0.1)
"""


def test_workers_are_started_with_the_time_to_save_unless_the_user_sets_another() -> None:
    name = next(iter(launch.STOPPING))
    for given, expected in (({}, launch.STOPPING[name]), ({name: "7"}, "7")):
        script = f"import os, sys; sys.exit(os.environ[{name!r}] != {expected!r})"
        assert launch.supervise("sft", [sys.executable, "-c", script], given) == 0


@pytest.mark.parametrize("seconds", [0.5, pytest.param(35.0, marks=pytest.mark.slow)])
def test_stopped_workers_get_the_time_that_they_need_to_save(seconds: float, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(STOPPED)
    words = launch.command(Paths(), "sft", section(num_processes=2), {"OMP_NUM_THREADS": "1"})
    words = [*words[: words.index("--no_python")], str(script), str(seconds), str(tmp_path)]
    environment = os.environ | launch.STOPPING
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob("ready *"))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert len(list(tmp_path.glob("saved *"))) == 2
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in said
