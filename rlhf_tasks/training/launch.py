"""Starts the workers of a stage with `accelerate launch`, and reads their failures. No torch at import.

`launch.num_processes` counts the processes of all machines. On several machines the same command runs on
each; MASTER_ADDR, MASTER_PORT and MACHINE_RANK differ.

    rlhf STAGE                                    this process: `run` waits, forwards one signal, and reports
      python -P -m rlhf_tasks.training.launch …   `main`: accelerate launch, in a process group of its own
        python -P -m rlhf_tasks.cli STAGE         the workers, each in a session of its own
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from rlhf_tasks import console
from rlhf_tasks.config import Config, Launch, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context
from rlhf_tasks.training import auto, failures, signals

LAUNCHES = "RLHF_LAUNCHES"  # a folder: machines that wait there join the launches of the first one
MACHINES = "RLHF_MACHINES"  # the number of machines that a cluster's job has
RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|(PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_(LOCAL_)?(RANK|SIZE)"
)
"""Variables that number the processes of a group. A cluster's shell may have some."""
OF_WORKERS = ("ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""How the others begin by which torch makes a process one of the workers."""
STOPPING = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}
"""The seconds in which stopped workers may save their snapshot, before torch kills them; its default is 30. A
service or a cluster that stopped them kills them after its own time."""


def is_needed(stage: Stage, launch: Launch) -> bool:
    """True if this process must start workers instead of running the stage itself."""
    several = launch.num_processes > 1 or launch.num_machines > 1 or launch.parallelism != "ddp"
    return stage in auto.TRAINED and several and not context.is_worker()


def trains_side_by_side(stage: Stage, settings: Config) -> bool:
    """Whether the stage's two models are trained at once, in a worker each: `reward.side_by_side`."""
    reward, launch = settings.reward, settings.launch
    return (
        stage == "reward"
        and reward.side_by_side
        and reward.train
        and reward.source is None
        and (launch.num_processes, launch.num_machines, launch.parallelism) == (1, 1, "ddp")
        and num_threads(os.environ) > 1
        and not auto.gpus()
        and not context.is_worker()
    )


def num_threads(environment: Mapping[str, str]) -> int:
    """The threads that a stage in one process has: OMP_NUM_THREADS, or all cores that it may use."""
    # a cluster may have given this process a few of the machine's CPUs
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = environment.get("OMP_NUM_THREADS", "")
    return int(number) if number.isdecimal() else cpus


def check_machines(stage: Stage, launch: Launch) -> None:
    """Check that the machines that a cluster has started for a stage that trains are those of `launch`.

    A machine too many would train the whole stage beside the others, and a missing one be waited for. Two
    processes on one GPU fail in NCCL; without GPUs a machine may start any number.

    Raises:
        UserError: if their number differs, this machine's number is not below it, or it has too few GPUs.
    """
    if stage not in auto.TRAINED:
        return
    started, rank = os.environ.get(MACHINES), os.environ.get("MACHINE_RANK", "0")
    if started is not None and started != str(launch.num_machines):
        raise UserError(
            f"the job has {started} machine(s), and launch.num_machines={launch.num_machines}; give the job "
            "as many, or set launch.num_machines"
        )
    if rank not in map(str, range(launch.num_machines)):
        raise UserError(
            f"MACHINE_RANK={rank} is not below launch.num_machines={launch.num_machines}; machines are "
            "numbered from 0"
        )
    num_gpus, num_local = len(auto.gpus()), math.ceil(launch.num_processes / launch.num_machines)
    if 0 < num_gpus < num_local:
        raise UserError(
            f"launch.num_processes={launch.num_processes} starts {num_local} processes on a machine that "
            f"lets them use {num_gpus} GPU(s) (see CUDA_VISIBLE_DEVICES); each process needs one of its own. "
            f"With launch.num_machines={launch.num_machines} set at most {num_gpus * launch.num_machines}"
        )
    if reason := auto.unusable_gpus():
        if num_local > 1:
            raise UserError(f"{reason}; or set CUDA_VISIBLE_DEVICES to an empty text to train on CPUs")
        console.say(f"{reason}. {stage} trains on the CPU")


def without_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker without those of its group: a program that it starts may have its own."""
    return {
        name: value
        for name, value in environment.items()
        if not RANKS.fullmatch(name) and not name.startswith(OF_WORKERS)
    }


def command(paths: Paths, stage: Stage, launch: Launch, environment: Mapping[str, str]) -> list[str]:
    """The command that starts the stage's workers."""
    num_processes, num_machines = launch.num_processes, launch.num_machines
    words = ["--num_processes", str(num_processes), "--num_machines", str(num_machines)]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]  # a worker sets its precision itself
    if launch.parallelism in ("zero2", "zero3"):
        settings = paths.deepspeed / f"{launch.parallelism}.json"
        if not settings.exists():
            raise UserError(
                f"launch.parallelism={launch.parallelism!r} needs {settings}, which does not exist"
            )
        words += ["--use_deepspeed", "--deepspeed_config_file", str(settings)]
        if num_machines > 1:
            words += ["--deepspeed_multinode_launcher", "standard"]
    elif num_processes < max(2, num_machines):
        raise UserError(
            f"launch.num_processes={num_processes} counts the processes of all machines, and must be at "
            f"least launch.num_machines={num_machines}, and 2 with launch.parallelism=fsdp2"
        )
    else:
        words += ["--multi_gpu"]
    threads = environment.get("OMP_NUM_THREADS")
    threads = threads or str(max(1, num_threads(environment) * num_machines // num_processes))
    words += ["--num_cpu_threads_per_process", threads]
    if num_machines == 1:
        words += ["--main_process_port", "0"]  # any free port, so that two runs can share a machine
    elif num_processes % num_machines:
        raise UserError(
            f"launch.num_processes={num_processes} is not divisible by launch.num_machines={num_machines}; "
            "every machine runs the same number"
        )
    elif missing := [name for name in ("MASTER_ADDR", "MACHINE_RANK") if name not in environment]:
        raise UserError(
            f"launch.num_machines={num_machines} needs {' and '.join(missing)} in the environment of each "
            "machine: the address of the first machine, and this machine's number from 0"
        )
    else:
        words += ["--main_process_ip", environment["MASTER_ADDR"]]
        words += ["--main_process_port", environment.get("MASTER_PORT", "29500")]
        words += ["--machine_rank", environment["MACHINE_RANK"]]
    launcher = [sys.executable, "-P", "-m", "rlhf_tasks.training.launch"]
    return [*launcher, *words, "--no_python", sys.executable, "-uP", "-m", "rlhf_tasks.cli", stage]


def run(paths: Paths, stage: Stage, settings: Config) -> int:
    """Start the workers of a stage and wait. Returns their exit status."""
    launch, environment = settings.launch, dict(os.environ)
    if trains_side_by_side(stage, settings):
        launch = launch.model_copy(update={"num_processes": 2})
        environment["OMP_NUM_THREADS"] = str(num_threads(environment) // 2)
    words = command(paths, stage, launch, environment)
    if launch.num_machines > 1 and LAUNCHES in os.environ and os.environ["MACHINE_RANK"] == "0":
        announce(Path(os.environ[LAUNCHES]), stage)
    return supervise(stage, words, environment)


def announce(folder: Path, stage: Stage) -> None:
    """Write the next launch for the other machines: its stage, its folder and its PYTHONPATH, a line each."""
    number = 1 + sum(file.name.isdigit() for file in folder.iterdir())
    lines = [stage, str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    atomic.write_text(folder / str(number), "\n".join(lines) + "\n")


def supervise(stage: str, words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command that starts the workers, and wait. Returns its exit status.

    The first signal goes to the workers, which act on it as their phase demands; the second one kills them.

    Raises:
        UserError: that a worker reported.
        Stopped: after a signal.
    """
    with tempfile.TemporaryDirectory() as folder, signals.listening(stage) as listener:
        failure = Path(folder) / "failure.json"
        variables = {
            failures.FAILURE: str(failure),
            signals.LAUNCHER: processes.name_of(psutil.Process()),
        }
        # a group of its own: a terminal's Ctrl-C must reach it once, from here
        launcher = subprocess.Popen(words, env={**STOPPING, **environment, **variables}, process_group=0)
        listener.shows_life = False
        with listener.deferring(lambda: "stopping its processes", launcher.terminate):
            status = processes.supervise(launcher, signals.kill_descendants)
        failed = failures.read_failure(failure)
    if failed is not None:
        if failed["kind"] == "user":
            raise UserError(failed["message"])
        failures.write(failed)
    return status


def main() -> None:
    """`accelerate launch` without its own traceback when a worker fails or the launch is stopped.

    The worker has said what failed. Only a worker that was killed could not say it.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        for rank, failed in error.failures.items():
            if failed.exitcode < 0 and failed.exitcode != -signal.SIGTERM:
                name = signal.Signals(-failed.exitcode).name
                why = f"; {failures.OUT_OF_MEMORY}" if name == "SIGKILL" else ""
                message = f"process {rank} was killed by {name}{why}"
                print(f"rlhf: {message}", file=sys.stderr)
                failures.report_killed(message)
        sys.exit(1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


if __name__ == "__main__":
    main()
