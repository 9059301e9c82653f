"""Starts the workers of a stage with `accelerate launch`, and reads their failures. No torch.

`launch.num_processes` counts the processes of all machines. On several machines the same command runs on
each; MASTER_ADDR, MASTER_PORT and MACHINE_RANK differ.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from rlhf_tasks.config import Launch, Stage
from rlhf_tasks.errors import LESS_MEMORY, UserError
from rlhf_tasks.project import atomic, disk
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context

TRAINING: tuple[Stage, ...] = ("base", "sft", "reward", "ppo")  # other stages run in one process
FAILURE = "RLHF_FAILURE_FILE"  # a failing stage writes the reason there, for its launcher or for the flow
UNWRITABLE = (errno.EACCES, errno.EPERM)
WATCH_SECONDS = 1.0
LAUNCHES = "RLHF_LAUNCHES"  # a folder: machines that wait there join the launches of the first one
MACHINES = "RLHF_MACHINES"  # the number of machines that a cluster's job has
LAUNCHER = "RLHF_LAUNCHER"  # the process that started the workers of this machine
OF_WORKER = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
OF_WORKERS = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
"""Variables by which torch makes a process one of the workers: their names, and how others' names begin."""
STOPPING = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600"}
"""The seconds in which stopped workers may save their snapshot, before torch kills them; its default is 30. A
service or a cluster that stopped them kills them after its own time."""


def is_needed(stage: Stage, launch: Launch) -> bool:
    """True if this process must start workers instead of running the stage itself."""
    several = launch.num_processes > 1 or launch.num_machines > 1 or launch.parallelism != "ddp"
    return stage in TRAINING and several and not is_worker()


def check_machines(launch: Launch) -> None:
    """Check that the machines that a cluster has started are those of `launch`.

    A machine too many would train the whole stage beside the others, and a missing one be waited for.

    Raises:
        UserError: if their number differs, or this machine's number is not below it.
    """
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


def is_deepspeed(launch: Launch) -> bool:
    return launch.parallelism in ("zero2", "zero3")


def is_worker() -> bool:
    return "LOCAL_RANK" in os.environ


def without_worker(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a worker without those of its group: a program that it starts may have its own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in OF_WORKER and not name.startswith(OF_WORKERS)
    }


def is_orphan() -> bool:
    """True in a worker whose launcher was killed: nothing else would end it."""
    return LAUNCHER in os.environ and not context.is_alive(os.environ[LAUNCHER])


@contextmanager
def ending_orphans() -> Iterator[None]:
    """Within the block, this worker ends at once if its launcher was killed, even while it waits in torch.

    The workers meet at an address of `accelerate launch`. If that was killed before, they would try for hours
    to reach it, and hold the lock of the snapshots.
    """
    have_met = threading.Event()

    def watch() -> None:
        while not have_met.wait(WATCH_SECONDS):
            if is_orphan():
                os._exit(1)  # a signal's handler would run only after the wait

    if LAUNCHER in os.environ:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        have_met.set()


def command(paths: Paths, stage: Stage, launch: Launch, environment: Mapping[str, str]) -> list[str]:
    """The command that starts the stage's workers.

    Raises:
        UserError: if a setting or a variable that the launch needs is missing.
    """
    words = ["-m", "rlhf_tasks.training.launcher"]
    if is_deepspeed(launch):
        settings = paths.deepspeed / f"{launch.parallelism}.json"
        if not settings.exists():
            raise UserError(
                f"launch.parallelism={launch.parallelism!r} needs {settings}, which does not exist"
            )
        words += ["--use_deepspeed", "--deepspeed_config_file", str(settings)]
        if launch.num_machines > 1:
            words += ["--deepspeed_multinode_launcher", "standard"]
    else:
        words += ["--multi_gpu"]
        if launch.num_processes < max(2, launch.num_machines):
            raise UserError(
                f"launch.num_processes={launch.num_processes} counts the processes of all machines, and must "
                f"be at least launch.num_machines={launch.num_machines}, and 2 with launch.parallelism=fsdp2"
            )
    threads = environment.get("OMP_NUM_THREADS") or _threads(launch)
    words += ["--num_processes", str(launch.num_processes), "--num_machines", str(launch.num_machines)]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no"]  # a worker sets its precision itself
    words += ["--num_cpu_threads_per_process", str(threads), *_rendezvous(launch, environment)]
    return [sys.executable, *words, "--module", "rlhf_tasks.cli", stage]


def _threads(launch: Launch) -> int:
    return max(1, _num_cpus() * launch.num_machines // launch.num_processes)


def _num_cpus() -> int:
    """The CPUs that this process may use; a cluster may have given it a few of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _rendezvous(launch: Launch, environment: Mapping[str, str]) -> list[str]:
    if launch.num_machines == 1:
        return ["--main_process_port", "0"]  # any free port, so that two runs can share a machine
    if launch.num_processes % launch.num_machines:
        raise UserError(
            f"launch.num_processes={launch.num_processes} is not divisible by "
            f"launch.num_machines={launch.num_machines}; every machine runs the same number"
        )
    missing = [name for name in ("MASTER_ADDR", "MACHINE_RANK") if name not in environment]
    if missing:
        raise UserError(
            f"launch.num_machines={launch.num_machines} needs {' and '.join(missing)} in the environment of "
            "each machine: the address of the first machine, and this machine's number from 0"
        )
    port = environment.get("MASTER_PORT", "29500")
    where = ["--main_process_ip", environment["MASTER_ADDR"], "--main_process_port", port]
    return [*where, "--machine_rank", environment["MACHINE_RANK"]]


def variables(launch: Launch, *, cuda: bool) -> dict[str, str]:
    """Environment variables for the workers' libraries; without CUDA, processes communicate by gloo."""
    if cuda:
        return {}
    return {"DS_ACCELERATOR": "cpu"} if is_deepspeed(launch) else {"ACCELERATE_USE_CPU": "true"}


def run(paths: Paths, stage: Stage, launch: Launch) -> int:
    """Start the workers of a stage and wait. Returns their exit status.

    Raises:
        UserError: for a launch that is not possible, or that a worker reported.
    """
    environment = os.environ | variables(launch, cuda=_has_cuda())
    words = command(paths, stage, launch, os.environ)
    if launch.num_machines > 1 and LAUNCHES in os.environ and os.environ["MACHINE_RANK"] == "0":
        announce(Path(os.environ[LAUNCHES]), stage)
    return supervise(words, environment)


def announce(folder: Path, stage: Stage) -> None:
    """Write the next launch for the other machines: its stage, its folder and its PYTHONPATH, a line each."""
    number = 1 + sum(file.name.isdigit() for file in folder.iterdir())
    lines = [stage, str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
    atomic.write_text(folder / str(number), "\n".join(lines) + "\n")


def supervise(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command that starts the workers, forward signals and wait. Returns its exit status.

    Raises:
        UserError: that a worker reported.
    """
    with tempfile.TemporaryDirectory() as folder:
        failure = Path(folder) / "failure.json"
        names = {FAILURE: str(failure), LAUNCHER: context.process_name(psutil.Process())}
        workers = subprocess.Popen(words, env={**STOPPING, **environment, **names})
        try:
            status = workers.wait()
        except KeyboardInterrupt:
            workers.send_signal(signal.SIGTERM)
            workers.wait()
            raise
        failed = reported(failure)
    if failed is not None:
        if failed["kind"] == "user":
            raise UserError(failed["message"])
        _write(failed)
    return status


def _has_cuda() -> bool:
    """Whether torch finds CUDA; another process loads torch, so that this one does not."""
    program = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def mistake(error: BaseException) -> str | None:
    """The message for a mistake that the user can fix; None for a fault of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and disk.is_full(error):
        return disk.explained(error)
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        advice = "mount it for writing, and run the same command again"
        return f"{_folder_of(error)} is read-only ({error}); {advice}"
    if isinstance(error, OSError) and error.errno in UNWRITABLE:
        return f"{error}; give this user the right to read and write there"
    if "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError):
        return f"the GPU is out of memory ({str(error).splitlines()[0]}); {LESS_MEMORY}"
    return None


def _folder_of(error: OSError) -> Path | str:
    """The folder that exists and in which a file or a folder could not be made."""
    if not isinstance(error.filename, str) or not error.filename:
        return "a file system"
    parents = Path(error.filename).absolute().parents
    return next((folder for folder in parents if folder.exists()), "a file system")


def report(error: BaseException) -> None:
    """Write why this stage fails, for the program that started it; only the first report is kept."""
    kind, message = "user", mistake(error)
    if message is None:
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        kind, message = "fault", f"{rank}{type(error).__name__}: {error}"
    _write({"kind": kind, "message": message, "process": str(os.getpid())})


def report_killed(message: str) -> None:
    """Write that a worker was killed; the fault of another one is its consequence, and is replaced."""
    before = reported()
    if before is None or before["kind"] == "fault":
        _write({"kind": "fault", "message": message, "process": str(os.getpid())}, replace=True)


def _write(failure: Mapping[str, str], *, replace: bool = False) -> None:
    """In one step: other processes read the file."""
    if FAILURE not in os.environ:
        return
    where = Path(os.environ[FAILURE])
    whole = where.with_name(f"{where.name}.{os.getpid()}")
    whole.write_text(json.dumps(failure), encoding="utf-8")
    if replace:
        whole.replace(where)
        return
    with suppress(FileExistsError):
        where.hardlink_to(whole)
    whole.unlink()


def reported(failure: Path | None = None) -> dict[str, str] | None:
    """The failure file: `kind` (user or fault), `message` and `process`; None if nothing has failed."""
    where = failure or (Path(os.environ[FAILURE]) if FAILURE in os.environ else None)
    if where is None or not where.exists():
        return None
    report: dict[str, str] = json.loads(where.read_text(encoding="utf-8"))
    return report


def has_failed_elsewhere() -> bool:
    """True in a worker if another one failed first: what fails here then is a consequence."""
    failure = reported() if is_worker() else None
    return failure is not None and failure["process"] != str(os.getpid())
