"""Two launches that stand for two machines: when one is gone, the other one ends, within SECONDS.

Both run here, and meet on loopback. The system closes the connections of what was killed, and gloo sees it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlhf_tasks.project.processes import free_port
from tests import toy
from tests.training import layouts
from tests.training.stages import faulty

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

START_SECONDS = 300.0  # until both train, on a busy machine
SECONDS = 60.0
"""From the death of one machine to the end of the other one."""


@contextmanager
def machine(rank: int, port: int) -> Iterator[subprocess.Popen[str]]:
    """Stage ppo, started as on a machine of this number; at the end nothing of it is left."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "MACHINE_RANK": str(rank)}
    words = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"]
    with Path(f"machine-{rank}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(words, env=os.environ | where, stdout=log, stderr=log, text=True)
    try:
        yield process
    finally:
        kill(process)


def kill(launch: subprocess.Popen[str]) -> None:
    """All at once, as where a machine goes down."""
    if launch.poll() is None:
        started = psutil.Process(launch.pid).children(recursive=True)
        launch.kill()
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    launch.wait()


def kill_worker(launch: subprocess.Popen[str]) -> None:
    """The training process alone: what launched it lives."""
    found = psutil.Process(launch.pid).children(recursive=True)
    [worker] = [one for one in found if "LOCAL_RANK" in one.environ()]
    worker.kill()


CASES = [("ddp", 0, kill), ("ddp", 1, kill)]
CASES += [(layout, victim, kill_worker) for layout in ("ddp", "zero2", "zero3", "fsdp2") for victim in (0, 1)]


@pytest.mark.parametrize(("layout", "victim", "end"), CASES)
def test_when_a_machine_or_its_process_is_gone_the_other_machine_ends(
    layout: str, victim: int, end: Callable[..., None], toy_project: Path
) -> None:
    """The first machine, too, to which all others have connected."""
    layouts.partition_small_weights(toy_project)
    two = {"num_processes": 2, "num_machines": 2, "parallelism": layout}
    waiting = faulty(victim, "time.sleep(600)")  # the other process waits for this one in an exchange
    toy.write_params(launch=two, ppo={"total_episodes": 48, **waiting})
    port = free_port(24500)
    with machine(0, port) as first, machine(1, port) as second:
        both = [first, second]
        deadline = time.monotonic() + START_SECONDS
        while not Path("reached").exists():
            assert all(one.poll() is None for one in both), logs()
            assert time.monotonic() < deadline, logs()
            time.sleep(0.1)
        killed = time.monotonic()
        end(both[victim])
        assert both[1 - victim].wait(SECONDS) != 0, logs()
        print(f"{layout}: ended after {time.monotonic() - killed:.1f} s")
        assert both[victim].wait(SECONDS) != 0
    assert not Path("models/policy").exists()


def logs() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path().glob("machine-*.log")))
