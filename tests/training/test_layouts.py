"""Stages on two real processes, in every layout: the numbers of one process, and an end when one fails."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import layouts
from rlhf_tasks.modeling.load import load_causal
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import launch
from rlhf_tasks.training.runtime import Runtime
from tests import small, toy
from tests.ppo.toy import started
from tests.training import chunked_steps
from tests.training.stages import rlhf

pytestmark = pytest.mark.e2e

STEPS = {"schedule": "constant", "learning_rate": 3e-3, "total_episodes": 48}
ALONE: dict[str, Any] = {}
"""What one process wrote, by the name of its features: they do not depend on the layout."""


def launched(layout: str, **changes: Any) -> dict[str, Any]:
    return {"num_processes": 2, "parallelism": layout, **changes}


def assert_same_as_one_process(toy_project: Path, layout: str, name: str, features: dict[str, Any]) -> None:
    layouts.partition_small_weights(toy_project)
    if name not in ALONE:
        shutil.copytree(toy_project, toy_project.parent / "alone")
        os.chdir(toy_project.parent / "alone")
        toy.write_params(ppo=STEPS | features)
        rlhf("ppo")
        ALONE[name] = layouts.Written.of(Path(), "ppo")
        os.chdir(toy_project)
    toy.write_params(launch=launched(layout), ppo=STEPS | features)
    rlhf("ppo")
    found = layouts.Written.of(toy_project, "ppo")
    assert found.weights.keys() == ALONE[name].weights.keys(), "the checkpoint is whole"
    difference = layouts.compared(ALONE[name], found)
    assert difference.weights < layouts.TOLERANCE
    assert difference.losses < layouts.TOLERANCE
    assert difference.metrics < layouts.METRICS_TOLERANCE
    load_causal("models/policy")


def test_ppo_under_fsdp2_learns_what_one_process_does(toy_project: Path) -> None:
    assert_same_as_one_process(toy_project, "fsdp2", "plain", {})


def test_ppo_under_zero3_learns_what_one_process_does(toy_project: Path) -> None:
    assert_same_as_one_process(toy_project, "zero3", "plain", {})


@pytest.mark.parametrize("layout", ["ddp", "zero3", "fsdp2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_logits_in_chunks_take_the_steps_of_whole_logits(
    toy_project: Path, layout: str, precision: str
) -> None:
    """Two ranks train the same model twice: the logits of all tokens at once, and of four at a time."""
    layouts.partition_small_weights(toy_project)
    settings = toy.write_params(launch=launched(layout, precision=precision))
    words = launch.command(Paths(), "sft", settings.launch, os.environ)
    words[words.index("--module") :] = ["--module", "tests.training.chunked_steps"]
    own = {"PYTHONPATH": str(small.ROOT)} | launch.variables(settings.launch, cuda=False)
    done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    whole, chunked = (torch.load(f"{name}.pt") for name in ("whole", "chunked"))
    alone = chunked_steps.steps(Runtime(toy.write_params().launch, seed=1), chunked_steps.CHUNKED)
    pairs = [(whole, chunked)] + ([(alone, chunked)] if precision == "fp32" else [])
    # in bfloat16 the gradient of sharded weights is a sum of the chunks' rounded ones; a step is 1e-3 at most
    norm_error, weight_error = (1e-4, 1e-5) if precision == "fp32" else (5e-3, 5e-3)
    for one, other in pairs:
        assert other["norms"] == pytest.approx(one["norms"], rel=norm_error)
        assert other["weights"].keys() == one["weights"].keys()
        for name, value in one["weights"].items():
            torch.testing.assert_close(other["weights"][name], value, rtol=1e-4, atol=weight_error)


def engine(*options: str, **changes: Any) -> dict[str, Any]:
    """An engine that the stage starts: the stand-in, with these options."""
    return {"sampler": started(*options, **changes)}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_ppo_with_an_engine_learns_on_two_processes_what_it_learns_on_one(
    toy_project: Path, layout: str
) -> None:
    assert_same_as_one_process(toy_project, layout, "engine", engine())
    assert not list(processes_of(toy_project)), "no server is left"
    assert sorted(file.suffix for file in Path(".rlhf/engine").iterdir()) == [".log"]


def test_an_engine_that_is_killed_is_started_again_for_both_processes(toy_project: Path) -> None:
    marker = toy_project.parent / "marker"
    again = engine("--fault", "die", "--marker", str(marker))
    marker.touch()
    toy.write_params(launch=launched("ddp"), ppo=STEPS | again)
    rlhf("ppo")
    undisturbed = layouts.Written.of(toy_project, "ppo")
    marker.unlink()
    rlhf("ppo")
    assert marker.exists()
    assert layouts.compared(undisturbed, layouts.Written.of(toy_project, "ppo")).is_rounding


def test_an_engine_that_ends_again_ends_both_processes_with_one_message(toy_project: Path) -> None:
    toy.write_params(launch=launched("fsdp2"), ppo=STEPS | engine("--fault", "die"))
    shutil.rmtree("models/policy", ignore_errors=True)
    done = failed(toy_project)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("rlhf: ")]
    assert len(said) == 1, done.stderr
    assert "started again once before, and its log is" in said[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_of_two_machines_the_first_one_has_the_engine(toy_project: Path) -> None:
    """Two launches stand for the machines. The other one's responses come over their own connection."""
    toy.write_params(ppo=STEPS | engine())
    rlhf("ppo")
    one = layouts.Written.of(toy_project, "ppo")
    toy.write_params(launch=launched("fsdp2", num_machines=2), ppo=STEPS | engine())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    machines = [
        subprocess.Popen(
            [sys.executable, "-m", "rlhf_tasks.cli", "ppo"], env=os.environ | where | {"MACHINE_RANK": rank}
        )
        for rank in ("0", "1")
    ]
    assert [machine.wait(SECONDS) for machine in machines] == [0, 0]
    assert layouts.compared(one, layouts.Written.of(toy_project, "ppo")).is_rounding


FEATURES: dict[str, dict[str, Any]] = {
    "sampler": engine(),
    "engine-ahead-lora": engine(ahead=1)
    | {"lora": {"r": 2, "alpha": 4.0}, "advantages.critic.lora": {"r": 2, "alpha": 4.0}},
    "warm-up-penalty-ptx-sync-checkpointing": {
        "advantages.critic.warmup": {"max_updates": 2, "settled": 0.1},
        "kl_penalty": {"beta": 1.0, "target": 1e-3},
        "ptx": {"coef": 0.1, "text": None},
        "reference_sync": {"every": 2, "alpha": 0.5},
        "gradient_checkpointing": True,
    },
    "lora": {
        "lora": {"r": 2, "alpha": 4.0},
        "advantages.critic.lora": {"r": 2, "alpha": 4.0},
        "gradient_checkpointing": True,
    },
    "shared": {"advantages.critic.kind": "shared", "ptx": {"coef": 0.1, "text": None}},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("name", FEATURES)
def test_ppos_features_learn_in_every_layout_what_they_learn_in_one_process(
    toy_project: Path, layout: str, name: str
) -> None:
    assert_same_as_one_process(toy_project, layout, name, FEATURES[name])


# ---------------------------------------------------------------------------------------- failures

SECONDS = 150
"""Until a launch whose process failed must have ended; a start takes up to a minute on a busy machine, and
`accelerate launch` kills after 30 s what has not ended after SIGTERM."""

FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "nan": """
        for layout in (layouts.Parallel, layouts.DeepSpeed, layouts.Fsdp2):
            layout.backward = spoilt(layout.backward)""",
    "out of memory": "Runtime.backward = full",
}
SAID = {
    "killed": "rlhf: process 1 was killed by SIGKILL",
    "nan": "NaN or infinite",
    "out of memory": "rank 1 is out of memory",
}
PROGRAM = """
import os, pathlib, signal
import torch
from rlhf_tasks.training import layouts
from rlhf_tasks.training.runtime import Runtime

calls = 0

def spoilt(backward):
    return lambda self, model, loss, **named: backward(self, model, loss * float("nan"), **named)

def full(*given):
    raise torch.OutOfMemoryError("no memory is left")

def scores(prompts, responses):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 4:
        pathlib.Path("reached").touch()
        FAULT
    return [float(len(response)) for response in responses]
"""


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.pid != os.getpid():
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def failed(toy_project: Path) -> subprocess.CompletedProcess[str]:
    """Stage ppo, which must fail, and leave no process."""
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_tasks.cli", "ppo"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert not list(processes_of(toy_project)), "no process is left"
    assert not Path("models/policy").exists()
    return done


def assert_all_end(toy_project: Path, layout: str, fault: str, **changes: Any) -> None:
    (toy_project / "faulty.py").write_text(PROGRAM.replace("FAULT", FAULTS[fault].strip()), encoding="utf-8")
    layouts.partition_small_weights(toy_project)
    scorers = [
        {"kind": "reward_model", "weight": 1.0, "path": None},
        {"kind": "function", "function": "faulty:scores", "weight": 0.1},
    ]
    toy.write_params(launch=launched(layout), ppo=STEPS | {"scorers": scorers} | changes)
    done = failed(toy_project)
    assert Path("reached").exists(), done.stderr
    assert SAID[fault] in done.stdout + done.stderr


def test_under_fsdp2_all_processes_end_when_one_is_killed(toy_project: Path) -> None:
    assert_all_end(toy_project, "fsdp2", "killed")


def test_all_processes_and_the_engine_end_when_one_process_is_killed(toy_project: Path) -> None:
    """With a rollout ahead the first process has a thread that waits for the engine."""
    assert_all_end(toy_project, "ddp", "killed", **engine(ahead=1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_all_processes_and_the_engine_end_when_one_process_fails(
    toy_project: Path, layout: str, fault: str
) -> None:
    assert_all_end(toy_project, layout, fault, **engine(ahead=1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("fault", FAULTS)
def test_all_processes_end_when_one_fails(toy_project: Path, layout: str, fault: str) -> None:
    assert_all_end(toy_project, layout, fault)
