"""SIGTERM and SIGINT, put off to the end of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from rlhf_tasks.training import launch

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """SIGTERM and SIGINT noted in `asked` while it lasts, and acted on as before by `act`.

    The second one acts at once; not in a launched worker, which gets the same signal from the terminal
    and from its launcher. Nor does it wait when another worker has failed: no step would end.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._restore()
        if kind is None and self.asked:
            signal.raise_signal(self.asked)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = bool(self.asked) and not launch.is_worker()
        self.asked = number
        if again or launch.reported() is not None:
            self.act()

    def act(self) -> None:
        """End as the signal would have ended the stage without snapshots."""
        number = self.asked
        self.asked = 0
        self._restore()
        signal.raise_signal(number)
