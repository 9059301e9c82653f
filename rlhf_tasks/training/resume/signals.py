"""Defers SIGTERM and SIGINT to the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from rlhf_tasks.training import launch

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Within the block, stores SIGTERM or SIGINT in `received`; `act` then ends the stage by it.

    A second signal acts at the end of the micro-batch, except in a launched worker, which gets the same
    signal from the terminal and from its launcher. After a failure of another worker the first signal acts
    at once: the step would never end.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._restore()
        if kind is None and self.received:
            signal.raise_signal(self.received)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.received) and not launch.is_worker()
        self.received = number
        if again or launch.reported() is not None:
            self.act()

    def act(self) -> None:
        """End the stage as the signal does without this class."""
        number = self.received
        self.received = 0
        self._restore()
        signal.raise_signal(number)
