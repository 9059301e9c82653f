"""The run of a whole flow, under which MLflow shows its stages. No torch here, nor MLflow.

Told through a spool of its own, as a stage's: delivered as it grows, later if MLflow cannot be reached,
and shown as FAILED if the flow's process vanishes.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from rlhf_tasks import lineage
from rlhf_tasks.config import Tracking
from rlhf_tasks.tracking import context, start_courier
from rlhf_tasks.tracking.spool import Spool, pending

WAIT_SECONDS = 10.0  # for the courier, at the flow's end
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
    def __init__(self, spool: Spool) -> None:
        self._spool = spool

    def tags(self, values: Mapping[str, str]) -> None:
        self._spool.append("tags", values=dict(values))

    def artifact(self, path: Path, folder: str | None = None) -> None:
        kept = self._spool.files / path.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        self._spool.append("artifact", file=path.name, folder=folder)

    def trouble(self) -> str | None:
        parent = self._spool.read()[0][0]["parent"]["key"]
        for spool in [self._spool, *pending(self._spool.folder)]:
            with suppress(FileNotFoundError):  # delivered meanwhile
                if spool.read()[0][0]["parent"].get("key") != parent:
                    continue
                if spool.trouble.exists():
                    return spool.trouble.read_text(encoding="utf-8").strip()
                if spool != self._spool and not spool.is_followed():
                    return f"nobody delivers {spool.name}"
        return None


def key(flow_run: str) -> str:
    """By which stages find their parent (`RLHF_PARENT_RUN`, tag `rlhf.pipeline`)."""
    return f"prefect-{flow_run}"


@contextmanager
def open_run(flow_run: str, settings: Tracking, tags: Mapping[str, str]) -> Iterator[Pipeline]:
    """FINISHED when the block ends, FAILED with the reason on an error, KILLED on a signal."""
    if not settings.enabled:
        yield NullPipeline()
        return
    spool = Spool.next_part(lineage.home() / "spool", f"flow-{flow_run}")
    spool.append("run", **_header(flow_run, settings))
    courier = start_courier(spool)
    pipeline = SpoolPipeline(spool)
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
        try:
            courier.wait(WAIT_SECONDS if status != "KILLED" else 1.0)
        except subprocess.TimeoutExpired:
            courier.returncode = 0  # it goes on by itself; the interpreter is not to warn of a lost child


def _header(flow_run: str, settings: Tracking) -> dict[str, object]:
    process = psutil.Process()
    return {
        "key": f"flow-{flow_run}",
        "stage": STAGE,
        "home": str(lineage.home()),
        "uri": context.uri(settings),
        "experiment": settings.experiment,
        "process": context.process_name(process),
        "parent": {"key": key(flow_run), "owner": "flow", "prefect.flow_run_id": flow_run},
        "parameters": {},
        "tags": {"git.rev": lineage.git_revision() or "none"},
    }
