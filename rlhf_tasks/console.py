"""Prints lines, tables and progress bars while a stage runs.

A stage of the pipeline prints little: one line of progress, `5/9 reward  62% of 3 epochs  1m10s left`, and
what a person must know. Its tables and remarks go to a log file (`stage`, `log_to`). It prints plain lines if
stdout is not a terminal. The command line makes all ranks but the first quiet: their calls do nothing.

What takes long names itself (`part`), counted if it can be. A thread of the stage calls `show_life` every
second, which says after ten silent seconds what is being done, and how much of it is done:
`6/9 ppo  25% of 8,192 episodes  sampling  12% of 64 responses  20s so far`.

The program that started the stage may follow its own work (not what is inside it, such as an evaluation) by
the file of $RLHF_PROGRESS_FILE: `{"share": 0.62, "work": "62% of 3 epochs", "left": 70.0}`, left in seconds.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

import rich.box
import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

PROGRESS = "RLHF_PROGRESS_FILE"
WRITE_SECONDS = 1.0  # at least this far apart
PLAIN_SHARE = 0.1  # without a terminal, a line per tenth of the work …
PLAIN_SECONDS = 5.0  # … and at least this far apart
SILENT_SECONDS = 10.0  # after which a person wonders whether the process lives
STALLED_SECONDS = 30.0  # after which a meter that has not advanced says so
LONG_PART_SECONDS = 2.0  # after which a part is shown beside a bar; shorter ones would flicker
LONGEST_PAUSE_SECONDS = 300.0
ALMOST = 1 - 1e-9  # the sum of an epoch's fractions is not exactly 1


class Meter:
    """Counts finished work; this class shows nothing, for quiet ranks. `metrics` are the latest values."""

    def advance(self, n: float = 1, **metrics: float) -> None:
        pass

    def skip(self, n: float) -> None:
        """Count work that another process has done, or take back what was undone; no matter of the speed."""

    def restart_speed(self) -> None:
        """Measure the speed from now on: what came before was other work, such as a critic's warm-up."""


class Console:
    """Writes to `file`, by default to the stdout of the moment."""

    def __init__(self, file: TextIO | None = None, *, quiet: bool = False) -> None:
        self._rich = rich.console.Console(file=file, markup=False, highlight=False, emoji=False)
        self.quiet = quiet
        self._stage = self._label = ""
        self._log: TextIO | None = None
        self._parts: list[_Work] = []  # what is being done, the outermost part first
        self._began_at = self._advanced_at = self._printed_at = time.monotonic()
        self._pause = SILENT_SECONDS

    @contextmanager
    def stage(self, name: str, number: int, count: int) -> Iterator[None]:
        """Within the block, progress is that of a stage, and begins with `5/9 reward`."""
        before = self._stage, self._label
        self._stage, self._label = name, f"{number}/{count} {name}"
        self._began_at = time.monotonic()
        try:
            yield
        finally:
            self._stage, self._label = before

    @contextmanager
    def log_to(self, file: Path) -> Iterator[None]:
        """Within the block, tables and remarks are appended to a file instead, and lines are copied there."""
        if self.quiet:
            yield
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8", buffering=1) as self._log:
            try:
                yield
            finally:
                self._log = None

    def name(self, description: str) -> str:
        """What a line about some work begins with."""
        if not self._label or description == self._stage:
            return self._label or description
        return f"{self._label}  {description}"

    @contextmanager
    def part(self, description: str, total: float | None = None, unit: str = "") -> Iterator[Meter]:
        """Within the block, `show_life` names this part of the work; with a `total` it is counted.

        A part within another one follows it. Only the main thread has parts.
        """
        if self.quiet or threading.current_thread() is not threading.main_thread():
            yield Meter()
            return
        with self._opened(_Work(self, description, total, unit)) as work:
            yield work

    @contextmanager
    def _opened(self, work: W) -> Iterator[W]:
        if not self._parts:
            self._pause = SILENT_SECONDS
        self._parts.append(work)
        self._advanced_at = time.monotonic()
        try:
            yield work
        finally:
            self._parts.remove(work)
            self._advanced_at = time.monotonic()
            if not self._parts:
                self._pause = SILENT_SECONDS

    def show_life(self) -> None:
        """Say what is being done, if nothing was printed for ten seconds.

        A log gets it after ever longer pauses, until another part begins. A meter that has not advanced for
        thirty seconds says so, whatever the pause.
        """
        parts, now = list(self._parts), time.monotonic()
        begun_at, stalled = parts[-1].start if parts else self._began_at, now - self._advanced_at
        is_stalled = bool(parts) and parts[-1].total is not None and stalled >= STALLED_SECONDS
        time_text = (
            f"no advance for {duration(stalled)}" if is_stalled else f"{duration(now - begun_at)} so far"
        )
        if bar := next((part for part in parts if isinstance(part, _Bar)), None):
            inner = [part.text for part in parts[parts.index(bar) + 1 :]]
            is_long = is_stalled or (inner and now - begun_at >= LONG_PART_SECONDS)
            bar.show_inside("  ".join([*inner, time_text]) if is_long else "")
            return
        is_news = is_stalled and self._printed_at < self._advanced_at + STALLED_SECONDS
        silent = now - self._printed_at
        if silent < self._pause and not (is_news and silent >= SILENT_SECONDS):
            return
        pause = SILENT_SECONDS if is_news else self._pause
        if not self._rich.is_terminal:
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        lines = next((part for part in parts if isinstance(part, _Lines)), None)
        is_inside = lines is not parts[-1] and now - begun_at >= LONG_PART_SECONDS if parts else False
        if lines and lines.done > lines.skipped and not is_inside and not is_stalled:
            lines.show()
        else:
            shown = [self._label, *(part.text for part in parts)] if parts else [self._label, "at work"]
            self.say("  ".join([*filter(None, shown), time_text]))
        self._pause = pause

    def say(self, text: str) -> None:
        self._printed_at, self._pause = time.monotonic(), SILENT_SECONDS
        if not self.quiet:
            self._rich.print(text, soft_wrap=True)
        if self._log is not None:
            print(text, file=self._log)

    def remark(self, text: str) -> None:
        """Write a line to the log of a stage; without a log, print it."""
        if self._log is None:
            self.say(text)
        else:
            print(text, file=self._log)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table, or write it to the log; there and without a terminal, one line per row."""
        if self.quiet:
            return
        cells = [[show(cell) for cell in row] for row in rows]
        if self._log is not None or not self._rich.is_terminal:
            folded = [" | ".join(" ".join(cell.split()) for cell in row) for row in [list(columns), *cells]]
            self.remark("\n".join([title, *folded]))
            return
        table = Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1))
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in cells:
            table.add_row(*row)
        self._rich.print(table)

    @contextmanager
    def progress(
        self, description: str, total: float, unit: str = "steps", *, least: float = 0
    ) -> Iterator[Meter]:
        """A meter of `total` units, which shows progress, speed, remaining time and the latest metrics.

        Of a total below `least`, or within another meter, it is a `part`.
        """
        if self.quiet or total < least or any(isinstance(part, _Bar | _Lines) for part in self._parts):
            with self.part(description, total, unit) as meter:
                yield meter
        elif self._rich.is_terminal:
            with Progress(*COLUMNS, console=self._rich, transient=True) as bar:
                task = bar.add_task(self.name(description), total=total, done="", latest="", inside="")
                with self._opened(_Bar(self, description, total, unit, bar, task)) as work:
                    yield work
        else:
            file = os.environ.get(PROGRESS) if description == self._stage else None
            with self._opened(_Lines(self, description, total, unit, file)) as lines:
                yield lines
                lines.finish()


COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    TextColumn("{task.fields[done]}"),
    TimeRemainingColumn(compact=True),
    TextColumn("{task.fields[latest]}"),
    TextColumn("{task.fields[inside]}"),
)


class _Work(Meter):
    """A part of the work, counted if it has a `total`.

    What `skip` adds or takes back is left out of the speed, which is that of all work since `restart_speed`.
    """

    def __init__(self, console: Console, description: str, total: float | None, unit: str) -> None:
        self._console, self.description = console, description
        self.total, self.unit = total, re.sub("(?<=ch)es$|s$", "", unit) if total == 1 else unit
        self.done = self.skipped = 0.0
        self.start = self._timed_from = time.monotonic()

    def advance(self, n: float = 1, **metrics: float) -> None:
        self.done += n
        self._console._advanced_at = time.monotonic()

    def skip(self, n: float) -> None:
        self.done, self.skipped = self.done + n, self.skipped + n

    def restart_speed(self) -> None:
        self._timed_from, self.skipped = time.monotonic(), self.done

    @property
    def text(self) -> str:
        """What is done, and how much of it; the stage's own name stands before it."""
        named = "" if self.description == self._console._stage else self.description
        return "  ".join(filter(None, (named, self.share)))

    @property
    def share(self) -> str:
        """Such as `62% of 8192 episodes  46.5/s`; a speed below one a second is left out."""
        if self.total is None:
            return ""
        percent = 100 * self.done / self.total if self.total else 100.0
        seconds = time.monotonic() - self._timed_from
        rate = (self.done - self.skipped) / seconds if seconds > 0 else 0.0
        speed = f"  {rate:.3g}/s" if rate >= 1 else ""
        return f"{math.floor(percent + 1e-6)}% of {self.total:,.10g} {self.unit}{speed}"


W = TypeVar("W", bound=_Work)


class _Bar(_Work):
    def __init__(
        self, console: Console, description: str, total: float, unit: str, bar: Progress, task: TaskID
    ) -> None:
        super().__init__(console, description, total, unit)
        self._bar, self._task = bar, task

    def skip(self, n: float) -> None:
        super().skip(n)
        self._bar.update(self._task, completed=self.done, done=self.share)

    def advance(self, n: float = 1, **metrics: float) -> None:
        super().advance(n)
        self._bar.update(self._task, advance=n, done=self.share)
        if metrics:
            self._bar.update(self._task, latest=_latest(metrics))

    def show_inside(self, text: str) -> None:
        """Show beside the bar what is being done within this work."""
        self._bar.update(self._task, inside=text)


class _Lines(_Work):
    total: float

    def __init__(
        self, console: Console, description: str, total: float, unit: str, file: str | None = None
    ) -> None:
        super().__init__(console, description, total, unit)
        self._name = console.name(description)
        self._file, self._written_at = file, -math.inf
        self._shown_done, self._shown_at = 0.0, self.start
        self._metrics: Mapping[str, float] = {}

    def skip(self, n: float) -> None:
        super().skip(n)
        self._shown_done = self.done if n > 0 else min(self._shown_done, self.done)

    def advance(self, n: float = 1, **metrics: float) -> None:
        super().advance(n)
        self._metrics = metrics or self._metrics
        if self._file and n and time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._written_at = time.monotonic()
            doing = {"share": self.done / self.total, "work": self.share, "left": self.left()}
            with suppress(OSError):  # nobody follows it any more
                Path(self._file).write_text(json.dumps(doing), encoding="utf-8")
        due = self.done - self._shown_done >= PLAIN_SHARE * self.total
        if due and time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self.show()

    def finish(self) -> None:
        if self.done > self._shown_done:
            self.show()

    def left(self) -> float:
        """Seconds until the end, at the speed so far; some work must be done."""
        seconds = time.monotonic() - self._timed_from
        return max(self.total - self.done, 0) * seconds / (self.done - self.skipped)

    def show(self) -> None:
        self._shown_done, self._shown_at = self.done, time.monotonic()
        is_over = self.done >= self.total * ALMOST
        seconds = self._shown_at - self.start
        time_text = f"in {duration(seconds)}" if is_over else f"{duration(self.left())} left"
        parts = [self._name, self.share, time_text, _latest(self._metrics)]
        self._console.say("  ".join(part for part in parts if part))


def _latest(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {show(value)}" for name, value in metrics.items())


def show(value: Any) -> str:
    """A cell as text; floats to four significant digits, whole numbers with all."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """3 → `3s`, 75 → `1m15s`, 3700 → `1h01m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


_CONSOLE = Console()
say, remark, table, name = _CONSOLE.say, _CONSOLE.remark, _CONSOLE.table, _CONSOLE.name
progress, part, show_life = _CONSOLE.progress, _CONSOLE.part, _CONSOLE.show_life
stage, log_to = _CONSOLE.stage, _CONSOLE.log_to


def set_quiet(quiet: bool) -> None:
    _CONSOLE.quiet = quiet


def is_quiet() -> bool:
    """True in a process that prints nothing, such as a rank after the first."""
    return _CONSOLE.quiet
