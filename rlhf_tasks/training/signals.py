"""Ctrl-C and SIGTERM: within a second, a stage says what it does about them and how long that takes.

    outside a training loop   it ends at once
    in a training loop        it finishes its step, saves a snapshot, and ends
    a second signal           it ends at once, whatever it is doing

Python calls a signal's handler in the main thread between two of its instructions, and so not during a long
call of torch. Hence a thread reads the signals as they arrive. It says what happens, and ends the process
where the main thread does not. It also ends a worker whose launcher was killed, and shows what the stage
does, and how far it is.

A worker may get one signal several times, from the terminal, a scheduler and its launcher: it acts on the
first one, and the launcher counts. A process that is forked, such as one of a reward's pool, hears its own
signals as if there were no stage. No torch here.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import psutil

from rlhf_tasks import console
from rlhf_tasks.project import imports, processes
from rlhf_tasks.tracking import context
from rlhf_tasks.training import failures

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
LAUNCHER = "RLHF_LAUNCHER"  # the process that started the workers of this machine
POLL_SECONDS = 1.0
END = b"\0"  # in the pipe of signals: no signal has this number
CLOSING_SECONDS = 10.0  # for what is to be closed after the first signal: the run in MLflow, a vLLM server
AT_ONCE_SECONDS = 1.0  # for the same after the second one


class Stopped(KeyboardInterrupt):
    """A signal ends the stage. It unwinds like Ctrl-C, so that the run is closed as KILLED."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted" if number == signal.SIGINT else "terminated (SIGTERM)")
        self.status = 128 + number


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """The handler of SIGTERM outside of a stage: one signal is enough."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped(number)


class PeerFailed(RuntimeError):
    """Another process of this stage failed, and the launcher ends this one."""


class Listener:
    """Hears the signals of one process that runs a stage."""

    def __init__(self, stage: str) -> None:
        self.received = 0
        """The signal that is acted on after this step."""
        self.next_run: Callable[[], str] = lambda: ""
        """What the next run begins with: `; the next run resumes from step 120`; empty if it is not known."""
        self.shows_life = True
        """False in a process whose workers say what they do."""
        self._stage = stage
        self._plan: Callable[[], str] | None = None
        self._tell: Callable[[], object] = lambda: None
        self._is_ending = False
        self._num_heard, self._last, self._deadline = 0, int(signal.SIGTERM), math.inf  # of the thread

    @contextmanager
    def deferring(self, plan: Callable[[], str], tell: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Within the block, the first signal calls `tell` and is left in `received`; the end acts on it.

        `plan` is what the process does meanwhile, and how long that takes: `finishing this step, about 9s`.
        """
        self._plan, self._tell = plan, tell
        try:
            yield
        finally:
            self._plan = None
        if self.received:
            self.act(self.received)

    def act(self, number: int) -> NoReturn:
        """End the stage by a signal.

        Raises:
            Stopped: in order to unwind.
            PeerFailed: instead, in a worker that is ended because another one has failed.
        """
        self._is_ending = True
        if failures.has_failed_elsewhere():
            raise PeerFailed("another process of this stage failed")
        raise Stopped(number)

    def handle(self, number: int, frame: FrameType | None = None) -> None:
        """The handler of both signals, in the main thread."""
        if self._is_ending:
            return  # what is being closed may need its time: the thread limits it
        is_again, self.received = bool(self.received) and not context.is_worker(), number
        if self._plan is None or is_again or failures.has_failed_elsewhere():
            self.act(number)
        self._tell()

    # ------------------------------------------------------------------------------- in the thread

    def watch(self, reader: int) -> None:
        """Read the signals from a pipe as they arrive, until END."""
        has_been_orphaned = False
        while True:
            seconds = min(POLL_SECONDS, max(0.0, self._deadline - time.monotonic()))
            if select.select([reader], [], [], seconds)[0]:
                numbers = os.read(reader, 64)
                if END in numbers:
                    os.close(reader)
                    return
                for number in numbers:
                    self._hear(number)
            if time.monotonic() >= self._deadline:
                kill_descendants()
                os._exit(128 + self._last)
            launcher = os.environ.get(LAUNCHER)
            if launcher is not None and not has_been_orphaned and not processes.is_alive(launcher):
                has_been_orphaned = True  # nothing else would end it
                os.kill(os.getpid(), signal.SIGTERM)
            if self.shows_life and not self._num_heard:
                console.show_life()

    def _hear(self, number: int) -> None:
        if number not in NAMES:
            return
        self._num_heard, self._last = self._num_heard + 1, number
        if self._num_heard > 1 and not context.is_worker():
            self._say(f"ending stage {self._stage} at once")
            self._deadline = min(self._deadline, time.monotonic() + AT_ONCE_SECONDS)
            return
        plan, name = self._plan, NAMES[signal.Signals(number)]
        if plan is None or failures.has_failed_elsewhere():
            self._deadline = min(self._deadline, time.monotonic() + CLOSING_SECONDS)
        if self._num_heard > 1:
            return
        what = f"ending stage {self._stage} now"
        if plan is not None:
            what = f"stage {self._stage} is {plan()}; {name} again ends it at once"
        self._say(f"{name}: {what}{self.next_run()}")

    def _say(self, text: str) -> None:
        if not console.is_quiet() and not failures.has_failed_elsewhere():
            with suppress(OSError, ValueError):  # nobody reads it any more
                print(f"rlhf: {text}", file=sys.stderr, flush=True)


_current: Listener | None = None


def _forget() -> None:
    """In the process that was forked: its signals are not those of the stage."""
    global _current
    ours: list[object] = [terminate]
    if _current is not None:
        signal.set_wakeup_fd(-1)
        ours.append(_current.handle)
        _current = None
    for number, default in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) in ours:
            signal.signal(number, default)
    _release()


def _hold() -> None:
    """Block the signals, until a child has forgotten the stage."""
    _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, NAMES)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.blocked)


_forking = threading.local()  # the signals that a thread which forks had blocked
os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)


@contextmanager
def listening(stage: str) -> Iterator[Listener]:
    """Within the block, this process hears Ctrl-C and SIGTERM as the module says.

    A block within another one has its listener. Outside the main thread nothing is heard.
    """
    global _current
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield _current or Listener(stage)
        return
    listener = _current = Listener(stage)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handled = [number for number in NAMES if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, listener.handle) for number in handled}
    pipe_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=listener.watch, args=(reader,), name="signals", daemon=True)
    thread.start()
    try:
        yield listener
    except Stopped:
        kill_descendants()  # what unwinding has not closed
        raise
    finally:
        if _current is listener:  # not in a forked process that unwinds
            signal.set_wakeup_fd(pipe_before)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.write(writer, END)
            thread.join()
            os.close(writer)
            _current = None


def end_with(status: int) -> None:
    """See that this process ends with a status, though functions of the user's left threads at work in it.

    Python ends pools that are idle. It would wait forever for others.
    """

    def end() -> None:
        time.sleep(CLOSING_SECONDS / 2)
        end_children([f"thread {one.name}" for one in threading.enumerate() if not one.daemon][1:])
        sys.stdout.flush()
        os._exit(status)

    if imports.loaded:
        threading.Thread(target=end, daemon=True).start()


def end_children(left: Sequence[str] = ()) -> None:
    """Kill what functions of the user's have started and left running; name it, and what else is `left`."""
    ended = list(left)
    for child in psutil.Process().children(recursive=True) if imports.loaded else []:
        with suppress(psutil.Error):  # it has ended
            if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):  # it ends by itself
                ended.append(f"process {child.pid} ({child.name()})")
                child.kill()
    if ended:
        whose = "one of " * (len(imports.loaded) > 1) + ", ".join(sorted(imports.loaded))
        print(f"rlhf: left running by {whose} and ended now: {', '.join(ended)}", file=sys.stderr, flush=True)


def kill_descendants() -> None:
    """Kill what this process has started: workers too, and all else in its session.

    Programs with a session of their own see by themselves that it has gone.
    """
    session = os.getsid(0)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session or "LOCAL_RANK" in process.environ():
                process.kill()
