"""Delivers spools to MLflow: one as it grows (this module run with its path), or all later (`sync`)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.spool import Spool, pending, tell_refused

POLL_SECONDS = 0.25
RETRY_SECONDS = 20.0
VANISHED = "the process vanished without a word (killed? out of memory?)"


def follow(spool: Spool) -> bool:
    """Deliver until the run's end; False if some of it could not be delivered.

    After a failure it tries again every so often, and a last time at the run's end; each later try
    sends only what MLflow lacks.
    """
    spool.lock.parent.mkdir(exist_ok=True)
    with FileLock(spool.lock):  # the courier of the part before may have some to deliver yet
        return _followed(spool)


def _followed(spool: Spool) -> bool:
    reason = _attempt(spool)
    while reason is not None:
        spool.trouble.write_text(reason + "\n", encoding="utf-8")
        if _is_over(spool):
            return False
        _sleep_until_retry(spool)
        reason = _attempt(spool)
    spool.close()
    return True


def sync(home: Path) -> tuple[int, dict[str, str]]:
    """Deliver the runs that are over and not wholly in MLflow: how many were, and why others were not."""
    delivered, failed = 0, {}
    for spool in pending(home / "spool"):
        if not _is_over(spool):
            continue
        spool.lock.parent.mkdir(exist_ok=True)
        try:
            with FileLock(spool.lock, timeout=0):
                reason = _attempt(spool)
                if reason is None:
                    spool.close()
        except Timeout:
            continue  # the run goes on, and its courier is at it
        if reason is None:
            delivered += 1
        else:
            failed[spool.name] = reason
    tell_refused(home / "spool")
    return delivered, failed


def _attempt(spool: Spool) -> str | None:
    """Deliver from the beginning to the run's end; None, or why that failed."""
    context.bound_requests()
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    from rlhf_tasks.tracking.store import Store

    try:
        records, offset = spool.read()
        header, heard, live = records[0], records[-1]["time"], _is_live(spool, records)
        store = Store.open(header)
        run = store.run(header, last=spool.is_last, live=live)
        while not run.send(records, spool.files, last=spool.is_last):
            if records:
                heard = records[-1]["time"]
            elif context.is_alive(header["process"]):
                time.sleep(POLL_SECONDS)
                heard = round(time.time() * 1000)
            else:
                told = {"status": "FAILED", "reason": VANISHED, "device": "unknown", "outs": {}}
                spool.append("end", **told, time=heard)
            records, offset = spool.read(offset)
        if not live:
            store.close_left_parents()
    except (MlflowException, SQLAlchemyError, OSError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return None


def _is_live(spool: Spool, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what the run belongs to goes on: a dvc process, or else the run's own.

    Of a process on another machine only the run's own end tells.
    """
    owner = records[0]["parent"].get("process", records[0]["process"])
    told = context.is_local(owner) or records[-1]["kind"] != "end"
    return spool.is_last and told and context.is_alive(owner)


def _is_over(spool: Spool) -> bool:
    records: list[dict[str, Any]] = spool.read()[0]
    return records[-1]["kind"] == "end" or not context.is_alive(records[0]["process"])


def _sleep_until_retry(spool: Spool) -> None:
    deadline = time.monotonic() + RETRY_SECONDS
    while time.monotonic() < deadline and not _is_over(spool):
        time.sleep(POLL_SECONDS)


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    return 0 if follow(Spool(path.parent, path.stem)) else 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a stage waits for this: no time for taking MLflow's modules apart
