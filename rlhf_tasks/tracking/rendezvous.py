"""Where runs and the courier that delivers them find each other. No torch here, nor MLflow.

The runs of one parent (a flow, a dvc process; a stage on its own is its own parent) on one machine have one
courier, which holds a lock in the spool's folder as long as it lives: `couriers/PARENT@HOST.lock`. The
machine is in the name since not every shared disk tells locks to others, and since only from its own machine
a process is seen to live. A run first begins its spool and then looks at the lock; a courier first lets go
of the lock and then looks at the spools once more. So no run is left between the two.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from filelock import FileLock, Timeout

from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.spool import Spool, pending

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Post:
    """The place of one parent's courier on this machine."""

    folder: Path
    """Of the spools."""
    parent: str

    @classmethod
    def of(cls, spool: Spool) -> Post:
        """Of a spool that has begun."""
        header = spool.header()
        assert header is not None
        return cls(spool.folder, parent_of(header))

    @property
    def lock(self) -> Path:
        """Held by the courier."""
        return self._file("lock")

    @property
    def log(self) -> Path:
        """What couriers print; stays only where something could not be delivered."""
        return self._file("log")

    def _file(self, ending: str) -> Path:
        return self.folder / "couriers" / f"{quote(self.parent, safe='')}@{platform.node()}.{ending}"

    def is_manned(self) -> bool:
        """Whether the courier lives."""
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.lock, timeout=0):
                return False
        except Timeout:
            return True

    def runs(self) -> list[tuple[Spool, dict[str, Any]]]:
        """The spools of this parent's runs, on any machine, that are not closed, with their first lines."""
        headers = ((spool, spool.header()) for spool in pending(self.folder))
        return [(s, header) for s, header in headers if header and parent_of(header) == self.parent]

    def delivers(self, header: Mapping[str, Any]) -> bool:
        """Whether it is this courier that is to deliver the run."""
        return (
            parent_of(header) == self.parent
            and has_shared_courier(header)
            and context.is_local(header["process"])
        )


def has_shared_courier(header: Mapping[str, Any]) -> bool:
    """False for stages of old commits: each starts a courier that delivers it, and no other."""
    return header.get("courier") == context.SHARED


def parent_of(header: Mapping[str, Any]) -> str:
    """The name that runs delivered by one courier share. MLflow's own id of a run makes no such name."""
    return str(header["parent"].get("key", f"alone-{header['key']}"))


def start_courier(post: Post) -> subprocess.Popen[bytes] | None:
    """Start the courier for a spool that has begun; None if it lives already.

    In a session of its own: Ctrl-C for the stage leaves it time to report just that.
    """
    if post.is_manned():
        return None
    command = [sys.executable, "-m", "rlhf_tasks.tracking.courier", str(post.folder), post.parent]
    with post.log.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=context.courier_environment(os.environ),
        )


def await_delivery(
    is_done: Callable[[], bool], post: Post, courier: subprocess.Popen[bytes] | None, seconds: float
) -> bool:
    """Wait until runs that are over are delivered or left; False if it is known that nobody is at it.

    `is_done` tells when. `courier`: as `start_courier` gave it at the run's begin. If it has gone since
    (killed?), another one is started, once. True as well if the time is up while a courier is at it: it
    goes on by itself.
    """
    deadline, is_second = time.monotonic() + seconds, False
    try:
        while time.monotonic() < deadline:
            manned = post.is_manned()  # asked first: who delivers and goes does it in this order
            if is_done():
                return True
            if not manned and (courier is None or courier.poll() is not None):
                if is_second:
                    return False
                courier, is_second = start_courier(post), True
            time.sleep(POLL_SECONDS)
    except OSError:  # as at the start: no lock can be asked for
        return False
    finally:
        if courier is not None and courier.poll() is None:
            courier.returncode = 0  # the interpreter is not to warn of a lost child
    return True
