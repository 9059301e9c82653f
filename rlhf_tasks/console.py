"""Prints lines, tables and progress bars while a stage runs; plain lines if stdout is not a terminal.

A stage prints one line of progress, `5/11 reward  62% of 3 epochs  1m10s left`, and what a person must know.
Its tables and remarks go to a log file (`stage`, `log_to`). Ranks but the first are quiet: nothing is shown.

What takes long names itself (`part`), counted if it can be. A thread of the stage calls `show_life` every
second: `8/11 ppo  25% of 8,192 episodes  sampling  12% of 64 responses  20s so far`.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import rich.box
import rich.console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

PROGRESS = "RLHF_PROGRESS_FILE"
WRITE_SECONDS = 1.0  # at least this far apart
PLAIN_SHARE = 0.1  # without a terminal, a line per tenth of the work …
PLAIN_SECONDS = 5.0  # … and at least this far apart
SILENT_SECONDS = 10.0  # after which a person wonders whether the process lives
LONGEST_PAUSE_SECONDS = 60.0  # in a log, where the pauses become longer
STALLED_SECONDS = 30.0  # after which a meter that has not advanced says so
LONG_PART_SECONDS = 2.0  # after which a part is shown beside a bar; shorter ones would flicker
ALMOST = 1 - 1e-9  # the sum of an epoch's fractions is not exactly 1


class Meter:
    """A part of the work, counted if it has a `total`."""

    def __init__(self, description: str = "", total: float | None = None, unit: str = "") -> None:
        self.description, self.total = description, total
        self.unit = re.sub("(?<=ch)es$|s$", "", unit) if total == 1 else unit
        self.done = self.skipped = self.printed = 0.0
        self.start = self.timed_from = self.advanced_at = time.monotonic()
        self.metrics: Mapping[str, float] = {}
        self.inside = ""  # what a bar says of the work within this one
        self.follow: Callable[[], None] | None = None  # called after each advance

    def advance(self, n: float = 1, **metrics: float) -> None:
        self.done, self.advanced_at = self.done + n, time.monotonic()
        self.metrics = metrics or self.metrics
        if self.follow is not None:
            self.follow()

    def skip(self, n: float) -> None:
        """Count work that an earlier process has done, which is no matter of the speed."""
        self.done, self.skipped = self.done + n, self.skipped + n
        self.printed = self.done

    def restart_speed(self) -> None:
        """Measure the speed from now on: what came before was other work, such as a critic's warm-up."""
        self.timed_from, self.skipped = time.monotonic(), self.done

    @property
    def speed(self) -> float:
        """Units a second, up to the last advance; 0 before there is one."""
        seconds = self.advanced_at - self.timed_from
        seconds = seconds if seconds > 0 else time.monotonic() - self.timed_from
        return (self.done - self.skipped) / seconds if seconds > 0 else 0.0

    @property
    def left(self) -> float:
        """Seconds until the end, at the speed so far; infinite before there is one."""
        return max((self.total or 0) - self.done, 0) / self.speed if self.speed > 0 else math.inf

    @property
    def text(self) -> str:
        """Such as `sampling  62% of 8192 responses  46.5/s`; a speed below one a second is left out."""
        if self.total is None:
            return self.description
        percent = math.floor((100 * self.done / self.total if self.total else 100) + 1e-6)
        speed = f"{self.speed:.3g}/s" if self.speed >= 1 else ""
        return _join(self.description, f"{percent}% of {self.total:,.10g} {self.unit}", speed)

    @property
    def line(self) -> str:
        """The text, the time and the latest metrics."""
        time_text = f"{duration(self.left)} left" if self.left < math.inf else ""
        if self.total and self.done >= self.total * ALMOST:
            time_text = f"in {duration(time.monotonic() - self.start)}"
        return _join(self.text, time_text, *(f"{name} {show(x)}" for name, x in self.metrics.items()))


class Console:
    """Writes to `file`, by default to the stdout of the moment."""

    def __init__(self, file: TextIO | None = None, *, quiet: bool = False) -> None:
        self._rich = rich.console.Console(file=file, markup=False, highlight=False, emoji=False)
        self.quiet = quiet
        self._stage = self._label = ""
        self._log: TextIO | None = None
        self._parts: list[Meter] = []  # what is being done, the outermost part first
        self._meter: Meter | None = None  # that of them which has a bar or lines
        self._bar = Progress(disable=True)
        self._advanced_at = self._printed_at = self._written_at = time.monotonic()
        self._began_at, self._pause = self._printed_at, SILENT_SECONDS

    @contextmanager
    def stage(self, name: str, number: int, count: int) -> Iterator[None]:
        """Within the block, progress is that of a stage, and begins with `5/11 reward`."""
        before = self._stage, self._label
        self._stage, self._label = name, f"{number}/{count} {name}"
        self._began_at, self._pause = time.monotonic(), SILENT_SECONDS
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
        return _join(self._label, description * (description != self._stage))

    @contextmanager
    def part(self, description: str, total: float | None = None, unit: str = "") -> Iterator[Meter]:
        """Within the block, `show_life` names this part of the work; with a `total` it is counted.

        A part within another one follows it. Only the main thread has parts.
        """
        work = Meter(description * (description != self._stage), total, unit)
        if self.quiet or threading.current_thread() is not threading.main_thread():
            yield work
            return
        if not self._parts:
            self._pause = SILENT_SECONDS
        self._parts.append(work)
        work.follow = lambda: self._follow(work)
        self._advanced_at = time.monotonic()
        try:
            yield work
        finally:
            self._parts.remove(work)
            self._advanced_at = time.monotonic()

    @contextmanager
    def progress(
        self, description: str, total: float, unit: str = "steps", *, least: float = 0
    ) -> Iterator[Meter]:
        """A meter of `total` units, which shows progress, speed, remaining time and the latest metrics.

        Of a total below `least`, or within another meter, it is a `part`.
        """
        with self.part(description, total, unit) as meter:
            if self.quiet or total < least or self._meter is not None:
                yield meter
                return
            name, bar = TextColumn("{task.description}", markup=False), BarColumn(bar_width=24)
            line = TextColumn("{task.fields[meter].line}  {task.fields[meter].inside}", markup=False)
            is_plain = not self._rich.is_terminal
            with Progress(name, bar, line, console=self._rich, transient=True, disable=is_plain) as shown:
                shown.add_task(self._label, total=total, meter=meter)
                self._meter, self._bar = meter, shown
                try:
                    yield meter
                finally:
                    self._meter = None
                if is_plain and meter.done > meter.printed:
                    self._print(meter)

    def _follow(self, work: Meter) -> None:
        """Show that some work has advanced, if it has a bar or lines, and write its file."""
        now = self._advanced_at = time.monotonic()
        if work is not self._meter or not work.total:
            return
        self._bar.update(self._bar.task_ids[0], completed=work.done)
        file = "" if work.description else os.environ.get(PROGRESS)
        if file and work.left < math.inf and now >= self._written_at + WRITE_SECONDS:
            self._written_at = now
            doing = {"share": work.done / work.total, "work": work.text, "left": work.left}
            with suppress(OSError):  # nobody follows it any more
                Path(file).write_text(json.dumps(doing), encoding="utf-8")
        is_due = work.done - work.printed >= PLAIN_SHARE * work.total
        if is_due and not self._rich.is_terminal and now >= self._printed_at + PLAIN_SECONDS:
            self._print(work)

    def _print(self, work: Meter) -> None:
        work.printed = work.done
        self.say(_join(self._label, work.line))

    def show_life(self) -> None:
        """Say what is being done, if nothing was printed for ten seconds; a bar says it every second.

        A log gets it after ever longer pauses, of a minute at most, until another part begins. A meter that
        has not advanced for thirty seconds says so.
        """
        parts, meter, now = list(self._parts), self._meter, time.monotonic()
        seconds = now - (parts[-1].start if parts else self._began_at)
        stalled = now - self._advanced_at if parts and parts[-1].total is not None else 0.0
        is_stalled = stalled >= STALLED_SECONDS
        time_text = f"no advance for {duration(stalled)}" if is_stalled else f"{duration(seconds)} so far"
        inner = [part.text for part in parts[parts.index(meter) + 1 if meter in parts else 0 :]]
        is_long = is_stalled or (inner and seconds >= LONG_PART_SECONDS)
        if meter is not None and self._rich.is_terminal:
            meter.inside = _join(*inner, time_text) if is_long else ""
        elif now >= self._printed_at + self._pause:
            pause = self._pause if self._rich.is_terminal else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            if meter is not None and meter.speed > 0 and not is_long:
                self._print(meter)
            else:
                self.say(_join(self._label, *[part.text for part in parts] or ["at work"], time_text))
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
        headers = (Column(name, overflow="fold") for name in columns)
        table = Table(*headers, title=title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for row in cells:
            table.add_row(*row)
        self._rich.print(table)


def _join(*parts: str) -> str:
    return "  ".join(filter(None, parts))


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
