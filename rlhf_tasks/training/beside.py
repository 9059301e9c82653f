"""A second process that computes beside this one, where one model does not use all of a machine's cores.

No torch at import. The other process ends with this one: it gets SIGTERM when the block fails, and `stopping`
tells it when this process was killed.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil

from rlhf_tasks import console
from rlhf_tasks.tracking import context
from rlhf_tasks.training.stopping import LAUNCHER

T = TypeVar("T")
SECONDS_TO_END = 2.0  # Ctrl-C reaches both processes, and a second signal would cost a snapshot


@contextmanager
def beside(compute: Callable[..., T], *arguments: Any) -> Iterator[Callable[[], T]]:
    """Within the block, another process runs `compute(*arguments)`; the yielded function waits for it.

    What `compute` raises, that function raises. All of it is pickled.
    """
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    owner = context.process_name(psutil.Process())
    process = spawning.Process(target=_send, args=(sender, owner, compute, arguments))
    process.start()
    sender.close()

    def result() -> T:
        try:
            value, error = receiver.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"{compute.__name__} ended with status {process.exitcode}") from None
        if error is not None:
            raise error
        found: T = value
        return found

    try:
        yield result
    except BaseException:
        process.join(SECONDS_TO_END)
        process.terminate()
        raise
    finally:
        process.join()


def _send(sender: Connection, owner: str, compute: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ[LAUNCHER] = owner
    console.set_quiet(True)
    outcome: tuple[Any, BaseException | None]
    try:
        outcome = compute(*arguments), None
    except BaseException as error:
        outcome = None, error
    sender.send(outcome)
