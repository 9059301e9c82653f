"""The run of a whole flow, under which MLflow shows its stages. No torch here, nor MLflow.

Told through a spool of its own, as a stage's: delivered as it grows, later if MLflow cannot be reached,
and shown as FAILED if the flow's process vanishes. Its courier delivers its stages too, and is started here:
MLflow is imported by the time that the first stage ends. At its end the flow waits until the courier has
delivered all of them, with their figures, or has left them for `rlhf sync`.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil

from rlhf_tasks import console
from rlhf_tasks.config import Tracking
from rlhf_tasks.project import git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, rendezvous
from rlhf_tasks.tracking.rendezvous import Post
from rlhf_tasks.tracking.spool import Spool

WAIT_SECONDS, KILLED_WAIT_SECONDS = 10.0, 1.0  # for the courier, at the flow's end
STAGE = "pipeline"  # in the spool's first line


class Pipeline(Protocol):
    def tags(self, values: Mapping[str, str]) -> None:
        """What is to be found of the run."""

    def artifact(self, path: Path, folder: str | None = None) -> None:
        """Keep a copy of a file with the run."""

    def trouble(self) -> str | None:
        """Why MLflow does not have all that was sent of the run and of its stages; None if it does."""


class NullPipeline:
    """For `tracking.enabled: false`."""

    def tags(self, values: Mapping[str, str]) -> None:
        pass

    def artifact(self, path: Path, folder: str | None = None) -> None:
        pass

    def trouble(self) -> str | None:
        return None


class SpoolPipeline:
    def __init__(self, spool: Spool, post: Post) -> None:
        self._spool, self._post = spool, post

    def tags(self, values: Mapping[str, str]) -> None:
        self._spool.append("tags", values=dict(values))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        kept = self._spool.files / path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        self._spool.append("artifact", file=path.name, folder=folder)

    def trouble(self) -> str | None:
        for spool, header in self._post.runs():
            if (reason := spool.reason) is not None:
                return reason
            if spool != self._spool and not self._is_followed(spool, header):
                return f"nobody delivers {spool.name}"
        return None

    def _is_followed(self, spool: Spool, header: Mapping[str, Any]) -> bool:
        try:
            manned = rendezvous.has_shared_courier(header) and self._post.is_manned()
            return manned or spool.is_followed()
        except OSError:
            return False  # who cannot lock cannot deliver


def key(flow_run: str) -> str:
    """By which stages find their parent (`RLHF_PARENT_RUN`, tag `rlhf.pipeline`)."""
    return f"prefect-{flow_run}"


@contextmanager
def open_run(flow_run: str, settings: Tracking, tags: Mapping[str, str]) -> Iterator[Pipeline]:
    """FINISHED when the block ends, FAILED with the reason on an error, KILLED on a signal."""
    if not settings.enabled:
        yield NullPipeline()
        return
    spool = Spool.next_part(Paths().home / "spool", f"flow-{flow_run}")
    spool.append("run", **_header(flow_run, settings))
    post = Post.of(spool)
    courier = _start_courier(post)
    pipeline = SpoolPipeline(spool, post)
    pipeline.tags(tags)
    status, reason = "FINISHED", ""
    try:
        yield pipeline
    except Exception as error:
        status, reason = "FAILED", f"{type(error).__name__}: {error}"
        raise
    except BaseException as error:
        status, reason = "KILLED", str(error) or "cancelled"
        raise
    finally:
        spool.append("end", status=status, reason=reason)
        seconds = KILLED_WAIT_SECONDS if status == "KILLED" else WAIT_SECONDS
        rendezvous.await_delivery(lambda: _are_delivered_or_left(post), post, courier, seconds)


def _start_courier(post: Post) -> subprocess.Popen[bytes] | None:
    try:
        return rendezvous.start_courier(post)
    except OSError as error:
        console.say(f"MLflow is told nothing before `rlhf sync`: no courier could be started: {error}")
        return None


def _are_delivered_or_left(post: Post) -> bool:
    return all(spool.is_left for spool, header in post.runs() if post.delivers(header))


def _header(flow_run: str, settings: Tracking) -> dict[str, object]:
    process = psutil.Process()
    return {
        "key": f"flow-{flow_run}",
        "stage": STAGE,
        "home": str(Paths().home),
        "uri": context.uri(settings),
        "experiment": settings.experiment,
        "process": context.process_name(process),
        "parent": {"key": key(flow_run), "owner": "flow", "prefect.flow_run_id": flow_run},
        "courier": context.SHARED,
        "parameters": {},
        "tags": {"git.rev": git.revision(Paths().root) or "none"},
    }
