"""A Slurm of one node on this machine, for the block that uses it: Debian's slurmctld, slurmd and munged.

All of it is in one folder: configuration, key, logs, state. It needs root, and its own free ports. The
partition `high` pre-empts jobs of `low`, which Slurm then queues again.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf_tasks.project import processes
from tests.flows import toy

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun", "scancel")
PACKAGES = "slurmctld slurmd slurm-client munge"
HOST = "localhost"
END_SECONDS = 20.0
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus}
PartitionName=low Nodes={host} Default=YES PriorityTier=1 State=UP
PartitionName=high Nodes={host} PriorityTier=2 State=UP
"""
"""cred_expire is also the time after which a job that was queued again may start."""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install {PACKAGES}"
    return None


@dataclass(frozen=True)
class Slurm:
    """A running cluster; `environment` leads its commands to it."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.root / "slurm.conf")}

    def call(self, *words: str, folder: Path | None = None) -> str:
        environment = toy.environment() | self.environment
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job, `JobState` among it."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def jobs(self) -> Sequence[str]:
        """The ids of the jobs that wait or run."""
        return self.call("squeue", "--noheader", "--format=%i").split()


@contextmanager
def cluster(root: Path, cpus: int = 2) -> Iterator[Slurm]:
    """Start the daemons in the foreground; end them and all jobs at the end of the block."""
    for name in ("state", "spool"):
        (root / name).mkdir(parents=True)
    root.chmod(0o755)
    key = root / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    controller = processes.free_port(26000 + os.getpid() % 900)
    node = processes.free_port(controller + 1)
    text = CONFIG.format(host=HOST, root=root, controller=controller, node=node, cpus=cpus)
    (root / "slurm.conf").write_text(text, encoding="utf-8")
    found = Slurm(root)
    with ExitStack() as stack:
        for words in _daemons(root):
            stack.enter_context(_running(root, words))
            if words[0] == "munged":
                toy.until((root / "munge.socket").exists, "munged")
        toy.until(lambda: "idle" in found.call("sinfo", "--noheader", "--format=%T"), "an idle node")
        try:
            yield found
        finally:
            for job in found.jobs():
                found.call("scancel", "--full", "--signal=KILL", job)
                found.call("scancel", job)
            toy.until(lambda: not found.jobs(), "the end of all jobs")


def _daemons(root: Path) -> Sequence[Sequence[str]]:
    config = str(root / "slurm.conf")
    munge = [
        "--foreground",
        "--force",
        f"--key-file={root}/munge.key",
        f"--socket={root}/munge.socket",
        f"--pid-file={root}/munge.pid",
        f"--seed-file={root}/munge.seed",
        f"--log-file={root}/munge.log",
    ]
    return (
        ["munged", *munge],
        ["slurmctld", "-D", "-f", config],
        ["slurmd", "-D", "-f", config, "-N", HOST],
    )


@contextmanager
def _running(root: Path, words: Sequence[str]) -> Iterator[None]:
    with (root / f"{words[0]}.out").open("wb") as log:
        daemon = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
