"""Prints lines, tables and progress bars while a stage runs.

It prints plain lines if stdout is not a terminal. The command line makes all ranks but the first quiet:
their calls do nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

import rich.box
import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

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
        self._is_drawing = False  # a bar, which shows itself that the process lives
        self._printed_at, self._pause = time.monotonic(), SILENT_SECONDS

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

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Print a table; without a terminal, one line per row."""
        if self.quiet:
            return
        cells = [[show(cell) for cell in row] for row in rows]
        if not self._rich.is_terminal:
            folded = [" | ".join(" ".join(cell.split()) for cell in row) for row in [list(columns), *cells]]
            self._rich.print("\n".join([title, *folded]), soft_wrap=True)
            return
        table = Table(title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1))
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in cells:
            table.add_row(*row)
        self._rich.print(table)

    @contextmanager
    def progress(self, description: str, total: float, unit: str = "steps") -> Iterator[Meter]:
        """A meter of `total` units, which shows progress, speed, remaining time and the latest metrics."""
        if self.quiet:
            yield Meter()
        elif self._rich.is_terminal:
            self._is_drawing = True
            try:
                with Progress(*_columns(), console=self._rich) as bar:
                    task = bar.add_task(description, total=total, done="", rate="", latest="")
                    yield _Bar(bar, task, total, unit)
            finally:
                self._is_drawing = False
        else:
            lines = _Lines(self, description, total, unit)
            yield lines
            lines.finish()


def _columns() -> tuple[Any, ...]:
    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[done]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[latest]}"),
    )


class _Bar(Meter):
    def __init__(self, bar: Progress, task: TaskID, total: float, unit: str) -> None:
        self._bar, self._task, self._total, self._unit = bar, task, total, unit
        self._done, self._skipped, self._start = 0.0, 0.0, time.monotonic()

    def skip(self, n: float) -> None:
        self._done, self._skipped = self._done + n, self._skipped + n
        self._bar.update(self._task, completed=self._done)

    def advance(self, n: float = 1, **metrics: float) -> None:
        self._done += n
        rate = _rate(self._done - self._skipped, time.monotonic() - self._start, self._unit)
        done = f"{_count(self._done)}/{_count(self._total)} {self._unit}"
        self._bar.update(self._task, advance=n, done=done, rate=rate)
        if metrics:
            self._bar.update(self._task, latest=_latest(metrics))


class _Lines(Meter):
    def __init__(self, console: Console, description: str, total: float, unit: str) -> None:
        self._console, self._description, self._total, self._unit = console, description, total, unit
        self._done = self._shown_done = self._skipped = 0.0
        self._start = self._shown_at = time.monotonic()
        self._metrics: Mapping[str, float] = {}

    def skip(self, n: float) -> None:
        self._done = self._shown_done = self._skipped = self._done + n

    def advance(self, n: float = 1, **metrics: float) -> None:
        self._done += n
        self._metrics = metrics or self._metrics
        due = self._done - self._shown_done >= PLAIN_SHARE * self._total
        if due and time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self._show()

    def finish(self) -> None:
        if self._done > self._shown_done:
            self._show()

    def _show(self) -> None:
        self._shown_done, self._shown_at = self._done, time.monotonic()
        seconds = self._shown_at - self._start
        new = self._done - self._skipped
        left = max(self._total - self._done, 0) * seconds / new
        parts = [
            f"{self._description}: {_count(self._done)}/{_count(self._total)} {self._unit}",
            _rate(new, seconds, self._unit),
            f"{duration(left)} left" if self._done < self._total * ALMOST else f"in {duration(seconds)}",
            _latest(self._metrics),
        ]
        self._console.say(", ".join(part for part in parts if part))


def _count(number: float) -> str:
    """A count as text; fractions of an epoch with two decimals."""
    near = round(number)
    return str(near) if abs(number - near) < 1e-6 else f"{number:.2f}"


def _rate(done: float, seconds: float, unit: str) -> str:
    return f"{done / seconds:.3g} {unit}/s" if seconds > 0 else ""


def _latest(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {show(value)}" for name, value in metrics.items())


def show(value: Any) -> str:
    """A cell as text; floats to four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """3 → `3s`, 75 → `1m15s`, 3700 → `1h01m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


_CONSOLE = Console()


def say(text: str) -> None:
    _CONSOLE.say(text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    _CONSOLE.table(title, columns, rows)


@contextmanager
def progress(description: str, total: float, unit: str = "steps", *, least: float = 0) -> Iterator[Meter]:
    """As `Console.progress`; a total below `least` shows nothing."""
    with _CONSOLE.progress(description, total, unit) if total >= least else nullcontext(Meter()) as meter:
        yield meter


def set_quiet(quiet: bool) -> None:
    _CONSOLE.quiet = quiet


def is_quiet() -> bool:
    """True in a process that prints nothing, such as a rank after the first."""
    return _CONSOLE.quiet


def show_life(text: str) -> None:
    _CONSOLE.show_life(text)
