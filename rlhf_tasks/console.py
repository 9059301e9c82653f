"""Prints lines, tables and progress bars while a stage runs.

A stage of the pipeline prints little: one line of progress, `5/9 reward  62% of 3 epochs  1m10s left`, and
what a person must know. Its tables and remarks go to a log file (`stage`, `log_to`). It prints plain lines if
stdout is not a terminal. The command line makes all ranks but the first quiet: their calls do nothing.

The program that started the stage may follow its own work (not what is inside it, such as an evaluation) by
the file of $RLHF_PROGRESS_FILE: `{"share": 0.62, "work": "62% of 3 epochs", "left": 70.0}`, left in seconds.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import rich.box
import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

PROGRESS = "RLHF_PROGRESS_FILE"
WRITE_SECONDS = 1.0  # at least this far apart
PLAIN_SHARE = 0.1  # without a terminal, a line per tenth of the work …
PLAIN_SECONDS = 5.0  # … and at least this far apart
SILENT_SECONDS = 10.0  # after which a person wonders whether the process lives
LONGEST_PAUSE_SECONDS = 300.0
ALMOST = 1 - 1e-9  # the sum of an epoch's fractions is not exactly 1


class Meter:
    """Counts finished work; this class shows nothing, for quiet ranks. `metrics` are the latest values."""

    def advance(self, n: float = 1, **metrics: float) -> None:
        pass

    def skip(self, n: float) -> None:
        """Count work that another process has done; it does not count for the speed."""


class Console:
    """Writes to `file`, by default to the stdout of the moment."""

    def __init__(self, file: TextIO | None = None, *, quiet: bool = False) -> None:
        self._rich = rich.console.Console(file=file, markup=False, highlight=False, emoji=False)
        self.quiet = quiet
        self._stage = self._label = ""
        self._log: TextIO | None = None
        self._is_drawing = False  # a bar, which shows itself that the process lives
        self._printed_at, self._pause = time.monotonic(), SILENT_SECONDS

    @contextmanager
    def stage(self, name: str, number: int, count: int) -> Iterator[None]:
        """Within the block, progress is that of a stage, and begins with `5/9 reward`."""
        before = self._stage, self._label
        self._stage, self._label = name, f"{number}/{count} {name}"
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

    def show_life(self, text: str) -> None:
        """Print `text` if nothing was printed for ten seconds; a log gets it after ever longer pauses."""
        if self._is_drawing or time.monotonic() - self._printed_at < self._pause:
            return
        pause = self._pause if self._rich.is_terminal else min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self.say(text)
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

        Of a total below `least` it shows nothing.
        """
        if self.quiet or total < least:
            yield Meter()
        elif self._rich.is_terminal:
            self._is_drawing = True
            try:
                with Progress(*COLUMNS, console=self._rich, transient=True) as bar:
                    task = bar.add_task(self.name(description), total=total, done="", latest="")
                    yield _Bar(bar, task, total, unit)
            finally:
                self._is_drawing = False
        else:
            file = os.environ.get(PROGRESS) if description == self._stage else None
            lines = _Lines(self, description, total, unit, file)
            yield lines
            lines.finish()


COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=24),
    TextColumn("{task.fields[done]}"),
    TimeRemainingColumn(compact=True),
    TextColumn("{task.fields[latest]}"),
)


class _Work(Meter):
    """Work that is counted. `skip` is left out of the speed."""

    def __init__(self, total: float, unit: str) -> None:
        self.total, self.unit = total, unit.removesuffix("s") if total == 1 else unit
        self.done = self.skipped = 0.0
        self.start = time.monotonic()

    def skip(self, n: float) -> None:
        self.done, self.skipped = self.done + n, self.skipped + n

    @property
    def share(self) -> str:
        """Such as `62% of 8192 episodes  46.5/s`; a speed below one a second is left out."""
        percent = 100 * self.done / self.total if self.total else 100.0
        seconds = time.monotonic() - self.start
        rate = (self.done - self.skipped) / seconds if seconds > 0 else 0.0
        speed = f"  {rate:.3g}/s" if rate >= 1 else ""
        return f"{math.floor(percent + 1e-6)}% of {self.total:,.10g} {self.unit}{speed}"


class _Bar(_Work):
    def __init__(self, bar: Progress, task: TaskID, total: float, unit: str) -> None:
        super().__init__(total, unit)
        self._bar, self._task = bar, task

    def skip(self, n: float) -> None:
        super().skip(n)
        self._bar.update(self._task, completed=self.done)

    def advance(self, n: float = 1, **metrics: float) -> None:
        self.done += n
        self._bar.update(self._task, advance=n, done=self.share)
        if metrics:
            self._bar.update(self._task, latest=_latest(metrics))


class _Lines(_Work):
    def __init__(
        self, console: Console, description: str, total: float, unit: str, file: str | None = None
    ) -> None:
        super().__init__(total, unit)
        self._console, self._name = console, console.name(description)
        self._file, self._written_at = file, -math.inf
        self._shown_done, self._shown_at = 0.0, self.start
        self._metrics: Mapping[str, float] = {}

    def skip(self, n: float) -> None:
        super().skip(n)
        self._shown_done = self.done

    def advance(self, n: float = 1, **metrics: float) -> None:
        self.done += n
        self._metrics = metrics or self._metrics
        if self._file and n and time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._written_at = time.monotonic()
            doing = {"share": self.done / self.total, "work": self.share, "left": self.left()}
            with suppress(OSError):  # nobody follows it any more
                Path(self._file).write_text(json.dumps(doing), encoding="utf-8")
        due = self.done - self._shown_done >= PLAIN_SHARE * self.total
        if due and time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self._show()

    def finish(self) -> None:
        if self.done > self._shown_done:
            self._show()

    def left(self) -> float:
        """Seconds until the end, at the speed so far."""
        seconds = time.monotonic() - self.start
        return max(self.total - self.done, 0) * seconds / (self.done - self.skipped)

    def _show(self) -> None:
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
progress, show_life, stage, log_to = _CONSOLE.progress, _CONSOLE.show_life, _CONSOLE.stage, _CONSOLE.log_to


def set_quiet(quiet: bool) -> None:
    _CONSOLE.quiet = quiet


def is_quiet() -> bool:
    """True in a process that prints nothing, such as a rank after the first."""
    return _CONSOLE.quiet
