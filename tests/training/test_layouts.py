"""Stages on two real processes, in every layout: the numbers of one process, and an end when one fails.

Workers are started as a user starts them, by `rlhf STAGE` with a `launch` section; on a CPU they use gloo.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks.config import Stage
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.training import launch
from rlhf_tasks.training.distributed import Distributed
from tests import small, toy
from tests.ppo.toy import started, without_critic
from tests.training import chunked_steps, layouts
from tests.training.stages import curve, faulty, metrics, rlhf, weights

pytestmark = pytest.mark.e2e

LAYOUTS = ("ddp", "zero2", "zero3", "fsdp2")
OFFLOADED = ("zero2 offload", "zero3 offload", "fsdp2 offload")
STEPS = {"schedule": "constant", "learning_rate": 3e-3, "total_episodes": 48}
SUPERVISED: dict[str, Any] = {
    "batch_size": 26,
    "num_epochs": 2,
    "micro_batch_tokens": 8,
    "max_grad_norm": 1e-4,
}
"""Every row is a micro-batch, and in an epoch's last batch one process has a row less. Gradients are clipped
to about Adam's eps."""
ALONE: dict[str, tuple[layouts.Written, list[float]]] = {}
"""What one process wrote, by the stage and its settings: they do not depend on the layout."""


def cases(*parts: Iterable[str], quick: Collection[tuple[str, ...]]) -> list[Any]:
    """All combinations; those that are not quick are slow tests."""
    slow = pytest.mark.slow
    return [pytest.param(*case, marks=() if case in quick else slow) for case in itertools.product(*parts)]


def launched(layout: str, **changes: Any) -> dict[str, Any]:
    parallelism, _, offload = layout.partition(" ")
    sizes = {"num_processes": 4, "num_machines": 2} if parallelism == "hsdp" else {"num_processes": 2}
    return {**sizes, "parallelism": parallelism, "offload": bool(offload), **changes}


def run_on_two_machines(stage: Stage) -> str:
    """Two launches stand for the machines; what they print."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    words = [sys.executable, "-m", "rlhf_tasks.cli", stage]
    machines = [
        subprocess.Popen(
            words, env=os.environ | where | {"MACHINE_RANK": rank}, stdout=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        said = [machine.communicate(timeout=SECONDS)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.terminate()
    assert [machine.returncode for machine in machines] == [0, 0], said
    return "".join(said)


def ran(stage: Stage) -> tuple[layouts.Written, list[float]]:
    """What the stage wrote, and the norms of its gradients: Adam hides a wrong scale."""
    norms = [float(row["train/grad_norm"]) for row in curve(stage) if row["train/grad_norm"]]
    return layouts.Written.of(Path(), stage), norms


def assert_same_as_one_process(
    toy_project: Path, stage: Stage, layout: str, changes: dict[str, Any], **others: dict[str, Any]
) -> None:
    layouts.partition_small_weights(toy_project)
    key = f"{stage} {changes}"
    if key not in ALONE:
        shutil.copytree(toy_project, toy_project.parent / "alone")
        os.chdir(toy_project.parent / "alone")
        toy.write_params(**{stage: changes}, **others)
        assert runner.run(stage, Paths()) == 0
        ALONE[key] = ran(stage)
        os.chdir(toy_project)
    toy.write_params(launch=launched(layout), **{stage: changes}, **others)
    said = run_on_two_machines(stage) if layout == "hsdp" else rlhf(stage).stdout
    assert said.count(f"{stage}  done in") == 1, "the first rank alone speaks"
    found, norms = ran(stage)
    expected, expected_norms = ALONE[key]
    assert norms == pytest.approx(expected_norms, rel=1e-3)
    layouts.assert_equal_but_for_rounding(expected, found)


@pytest.mark.parametrize(
    ("stage", "layout"), cases(("sft", "reward"), (*LAYOUTS, *OFFLOADED), quick={("sft", "fsdp2")})
)
def test_supervised_stages_learn_in_every_layout_what_they_learn_in_one_process(
    toy_project: Path, stage: Stage, layout: str
) -> None:
    assert_same_as_one_process(toy_project, stage, layout, SUPERVISED)


@pytest.mark.parametrize(("stage", "changes"), [("sft", SUPERVISED | {"batch_size": 28}), ("ppo", STEPS)])
@pytest.mark.slow
def test_a_copy_on_each_of_two_machines_learns_what_one_process_learns(
    toy_project: Path, stage: Stage, changes: dict[str, Any]
) -> None:
    """Two processes on each: gradients are added up over both, and their norm counts no shard twice."""
    assert_same_as_one_process(toy_project, stage, "hsdp", changes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.slow
def test_stage_value_learns_in_every_layout_what_it_learns_in_one_process(
    toy_project: Path, layout: str
) -> None:
    changes = SUPERVISED | {"num_prompts": 16, "samples_per_prompt": 2, "learning_rate": 3e-3}
    assert_same_as_one_process(
        toy_project, "value", layout, changes, ppo={"advantages.critic.init": "value", **ALL_ENDS}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [{}, {"loss": "kto"}, {"lora": {"r": 2, "alpha": 4.0}}])
@pytest.mark.slow
def test_stage_dpo_learns_in_every_layout_what_it_learns_in_one_process(
    toy_project: Path, features: dict[str, Any], layout: str
) -> None:
    changes = SUPERVISED | {"train": True, "learning_rate": 3e-3, "adam_eps": 1e-5}
    changes |= {"num_selection_prompts": 8, "evals_per_epoch": 1, **features}
    assert_same_as_one_process(toy_project, "dpo", layout, changes)


def engine(*options: str, **changes: Any) -> dict[str, Any]:
    """An engine that the stage starts: the stand-in, with these options."""
    return {"sampler": started(*options, **changes)}


ALL_ENDS = {"truncation": {"kind": "none"}}
LORA = {"lora": {"r": 2, "alpha": 4.0}, "advantages.critic.lora": {"r": 2, "alpha": 4.0}}
SHORTER = {"kind": "function", "name": "shorter", "function": "shorter:scores"}
OF_CRITIC = {"steps": 2, "max_grad_norm": 0.1, "schedule": "constant", "adam_eps": 1e-6}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "engine": engine(),
    "engine-lora": engine() | LORA,
    "warm-up-penalty-ptx-sync-checkpointing": {
        "advantages.critic.warmup": {"max_updates": 2, "settled": 0.1},
        "kl_penalty": {"beta": 1.0, "target": 1e-3},
        "ptx": {"coef": 0.1, "text": None},
        "reference_sync": {"every": 2, "alpha": 0.5},
        "gradient_checkpointing": True,
    },
    "lora": LORA | {"gradient_checkpointing": True},
    "critic": {f"advantages.critic.{key}": value for key, value in OF_CRITIC.items()},
    "shared": {"advantages.critic.kind": "shared", "ptx": {"coef": 0.1, "text": None}},
    "select-by-judge": {"select_by": {"judge": SHORTER, "max_failure_share": 0.5}},
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *cases([name for name in FEATURES if name != "critic"], LAYOUTS, quick={("plain", "ddp")}),
        *cases(["plain"], OFFLOADED, quick=()),
        *cases(["critic"], ("ddp", "fsdp2"), quick=()),
    ],
)
def test_ppo_learns_in_every_layout_what_it_learns_in_one_process(
    toy_project: Path, name: str, layout: str
) -> None:
    code = "def scores(prompts, answers):\n    return [-float(len(a)) for a in answers]\n"
    Path("shorter.py").write_text(code, encoding="utf-8")
    assert_same_as_one_process(toy_project, "ppo", layout, STEPS | FEATURES[name])
    load_causal("models/policy")
    assert ("selected_win_rate" in metrics("ppo")) == (name == "select-by-judge")
    if name == "engine":
        assert not list(processes_of(toy_project)), "no server is left"
        assert sorted(file.suffix for file in Path(".rlhf/vllm").iterdir()) == [".log"]
    if layout == "ddp":
        assert_written_once()


def assert_written_once() -> None:
    samples = pq.read_table("evaluation/ppo/samples.parquet").to_pylist()
    assert len(samples) == 2 * 4, "before and after, four prompts, one process"
    answers = pq.read_table("evaluation/ppo/answers.parquet").to_pylist()
    prompts = pq.read_table("data/prompts/validation.parquet").column("prompt").to_pylist()[:8]
    found = [(row["episode"], row["prompt"]) for row in answers]
    assert found == [(at, prompt) for at in (0, 48) for prompt in prompts]
    assert curve("ppo")[0]["eval/kl"] == "0.0", "before training the policy is the reference"
    assert not list(Path().rglob("*.partial-*"))


IN_BF16: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm-up-penalty-ptx": {
        "advantages.critic.warmup": {"max_updates": 1, "settled": 0.1},
        "kl_penalty": {"beta": 1.0, "target": 1e-3},
        "ptx": {"coef": 0.1, "text": None},
    },
    "without-critic": without_critic("rloo"),
}


@pytest.mark.slow
@pytest.mark.parametrize("features", IN_BF16)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_takes_steps_in_bf16(toy_project: Path, features: str, layout: str) -> None:
    """The TL;DR preset runs so. Before the first step there is no KL, and all ratios are 1."""
    settings = {"schedule": "constant", "learning_rate": 1e-3, "num_selections": 2} | IN_BF16[features]
    toy.write_params(launch=launched(layout, precision="bf16"), ppo=settings)
    rlhf("ppo")
    first = curve("ppo")[1]
    assert float(first["objective/kl"]) == 0
    assert float(first["val/first_ratio_error"]) == 0
    assert float(curve("ppo")[0]["eval/kl"]) == 0
    assert float(curve("ppo")[-1]["eval/kl"]) != 0, "the steps change the policy"
    before, after = weights("models/sft"), weights("models/policy")
    changed = any(not torch.equal(after[key].bfloat16(), before[key].bfloat16()) for key in before)
    assert changed == (metrics("ppo")["selected_episode"] > 0), "the weights from before training may be best"
    assert all(torch.isfinite(value).all() for value in after.values())


@pytest.mark.parametrize("is_stopped", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reward_models_side_by_side_are_those_made_one_after_the_other(
    toy_project: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    """On one thread each. A stopped run saves the state of both, and goes on from it."""
    outs = ("models/reward", "models/reward_heldout")
    toy.write_params(
        reward={"side_by_side": True, "num_epochs": 4, "batch_size": 4}, resume={"every_seconds": 1e-6}
    )
    with small.threads(1):
        assert runner.run("reward", Paths()) == 0
    expected = [weights(out) for out in outs], curve("reward"), metrics("reward")
    shutil.rmtree(".rlhf/state")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    if is_stopped:
        stop_with_snapshots_of("reward", "reward_heldout")
    assert ("resumed from the snapshot" in rlhf("reward").stdout) == is_stopped
    for out, before in zip(outs, expected[0], strict=True):
        assert all(torch.equal(before[name], value) for name, value in weights(out).items())
    assert (curve("reward"), metrics("reward")) == expected[1:]


def stop_with_snapshots_of(*loops: str) -> None:
    command = [sys.executable, "-m", "rlhf_tasks.cli", "reward"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as stopped:
        while {file.parent.name for file in Path(".rlhf/state").rglob("step-*")} != {*loops}:
            assert stopped.poll() is None, stopped.communicate()[0]
            time.sleep(0.02)
        stopped.terminate()
        output = stopped.communicate()[0]
    assert stopped.returncode == 128 + signal.SIGTERM, output


@pytest.mark.parametrize(
    ("layout", "precision"),
    cases(("ddp", "zero3", "fsdp2"), ("fp32", "bf16"), quick={("zero3", "fp32")}),
)
def test_logits_in_chunks_take_the_steps_of_whole_logits(
    toy_project: Path, layout: str, precision: str
) -> None:
    """Two ranks train the same model twice: the logits of all tokens at once, and of four at a time."""
    layouts.partition_small_weights(toy_project)
    settings = toy.write_params(launch=launched(layout, precision=precision))
    words = launch.command(Paths(), "sft", settings.launch, os.environ)
    words[words.index("rlhf_tasks.cli") :] = ["tests.training.chunked_steps"]
    own = {"PYTHONPATH": str(small.ROOT)}
    done = subprocess.run(words, env=os.environ | own, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    whole, chunked = (torch.load(f"{name}.pt") for name in ("whole", "chunked"))
    alone = chunked_steps.steps(Distributed(toy.write_params().launch, seed=1), chunked_steps.CHUNKED)
    pairs = [(whole, chunked)] + ([(alone, chunked)] if precision == "fp32" else [])
    # in bfloat16 the gradient of sharded weights is a sum of the chunks' rounded ones; a step is 1e-3 at most
    norm_error, weight_error = (1e-4, 1e-5) if precision == "fp32" else (5e-3, 5e-3)
    for one, other in pairs:
        assert other["norms"] == pytest.approx(one["norms"], rel=norm_error)
        assert other["weights"].keys() == one["weights"].keys()
        for name, value in one["weights"].items():
            torch.testing.assert_close(other["weights"][name], value, rtol=1e-4, atol=weight_error)


@pytest.mark.slow
def test_an_engine_that_ends_ends_both_processes_with_one_message(toy_project: Path) -> None:
    toy.write_params(launch=launched("fsdp2"), ppo=STEPS | engine("--fault", "die"))
    done = failed(toy_project)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("rlhf: ")]
    assert len(said) == 1, done.stderr
    assert "does not answer" in said[0]
    assert "its log is" in said[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_of_two_machines_the_first_one_has_the_engine(toy_project: Path) -> None:
    """Two launches stand for the machines. The other one's responses come over their own connection."""
    toy.write_params(ppo=STEPS | engine())
    assert runner.run("ppo", Paths()) == 0
    one = layouts.Written.of(toy_project, "ppo")
    toy.write_params(launch=launched("fsdp2", num_machines=2), ppo=STEPS | engine())
    run_on_two_machines("ppo")
    layouts.assert_equal_but_for_rounding(one, layouts.Written.of(toy_project, "ppo"))


# ---------------------------------------------------------------------------------------- failures

SECONDS = 150
"""Until a launch whose process failed must have ended; a start takes up to a minute on a busy machine, and
`accelerate launch` kills after 30 s what has not ended after SIGTERM."""
FAULTS = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "rlhf: process 1 was killed by SIGKILL"),
    "nan": ("Distributed.backward = spoilt(Distributed.backward)", "NaN or infinite"),
    "out of memory": ("Distributed.backward = full", "rank 1 is out of memory"),
}
"""What rank 1 does, and what is said of it."""


def processes_of(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.pid != os.getpid():
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


def failed(toy_project: Path) -> subprocess.CompletedProcess[str]:
    """Stage ppo, which must fail, and leave no process."""
    words = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode != 0, done.stdout
    assert not list(processes_of(toy_project)), "no process is left"
    assert not Path("models/policy").exists()
    return done


@pytest.mark.parametrize(
    ("sampler", "layout", "fault"),
    cases(("policy", "engine"), LAYOUTS, FAULTS, quick={("policy", "fsdp2", "killed")}),
)
def test_all_processes_end_when_one_fails(toy_project: Path, sampler: str, layout: str, fault: str) -> None:
    """The engine too."""
    action, said = FAULTS[fault]
    layouts.partition_small_weights(toy_project)
    changes = engine() if sampler == "engine" else {}
    toy.write_params(launch=launched(layout), ppo=STEPS | faulty(1, action) | changes)
    done = failed(toy_project)
    assert Path("reached").exists(), done.stderr
    assert said in done.stdout + done.stderr
