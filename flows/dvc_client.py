"""DVC in the folder where a run works, kept as one program: starting DVC takes longer than most commands.

What a flow needs from DVC is read as data: exit statuses, `dvc status --json`, the run cache, and the
failure file that a stage writes. No torch here.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from prefect import get_run_logger

from flows import devices, dvc_server
from flows.programs import DRAIN_SECONDS, Logger, Program
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files
from rlhf_tasks.training import failures

FAULT = 1  # the status of a server that ended without an answer


class Server(Program):
    """A program that runs one command after another, and answers each with a line `MARK STATUS`."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], grace_seconds: float
    ) -> None:
        """The mark is random, so that nothing else prints it; it is the last word of the command."""
        self._mark = f"answer-{secrets.token_hex(8)}"
        self._status: int | None = None
        super().__init__([*command, self._mark], folder, environment, grace_seconds, stdin=subprocess.PIPE)

    def call(self, words: Sequence[str], logger: Logger | None, variables: Mapping[str, str | None]) -> int:
        """Run one command with these variables, which None unsets.

        Returns its status, or, without an answer, how the server ended: never 0. `lines` then holds what
        was printed meanwhile.
        """
        self.lines, self._status, self._logger = [], None, logger
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # the server has ended, which `is_alive` shows
                self._process.stdin.write(json.dumps([variables, words]) + "\n")
                self._process.stdin.flush()
            self._wait_until(lambda: self._status is not None)
        except BaseException:
            self.interrupt()
            raise
        ended = FAULT if self._status is not None else self.wait() or FAULT  # an answer may arrive meanwhile
        return ended if self._status is None else self._status

    def close(self) -> None:
        """Close the input, at whose end the server ends."""
        self._close_input()
        try:
            self._process.wait(self._grace)
        except subprocess.TimeoutExpired:
            self.interrupt()
        self._reader.join(DRAIN_SECONDS)

    def interrupt(self) -> None:
        self._close_input()  # DVC ignores interrupts while its stage runs, and would wait for a command
        super().interrupt()

    def _close_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _handle(self, line: str) -> None:
        if answer := re.fullmatch(rf"{self._mark} (-?\d+)", line):
            self._status = int(answer[1])
            self._news.set()
        else:
            super()._handle(line)


class Dvc:
    """`dvc` in a folder, for as long as the block lasts; used by one thread."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        grace_seconds: float,
        logger: Logger | None = None,
    ) -> None:
        """`logger`: by default that of the Prefect run which reproduces a stage."""
        self._scratch = tempfile.TemporaryDirectory(prefix="rlhf-flow-")
        self._failure = Path(self._scratch.name) / "failure.json"
        self.folder, self._grace, self._logger = folder, grace_seconds, logger
        self._environment = {**environment, failures.FAILURE: str(self._failure)}
        self._server: Server | None = None

    def call(self, *words: str, logged: bool = False, gpus: Sequence[str] = ()) -> tuple[int, list[str]]:
        """The exit status of `dvc WORDS`, and what it printed. Its stages see these GPUs; empty: those that
        this process sees."""
        if self._server is None or not self._server.is_alive:
            self._close_server()
            # By its path: the commit in `folder` may not have this file. -P: no module of that folder.
            command = [sys.executable, "-P", dvc_server.__file__]
            self._server = Server(command, self.folder, self._environment, self._grace)
        logger = (self._logger or get_run_logger()) if logged else None
        seen = ",".join(gpus) if gpus else self._environment.get(devices.VISIBLE)
        status = self._server.call(words, logger, {devices.VISIBLE: seen})
        return status, [line for line in self._server.lines if line]

    def run(self, *words: str) -> str:
        """What `dvc WORDS` prints.

        Raises:
            UserError: with DVC's own message, if the command fails.
        """
        status, lines = self.call(*words)
        if status:
            raise UserError(f"`dvc {' '.join(words)}` failed: {' '.join(lines)}")
        return "\n".join(lines)

    def reproduce(self, stage: str, gpus: Sequence[str] = ()) -> tuple[int, list[str]]:
        """Run or restore one stage if it has changed; its output becomes log lines. Status and lines."""
        self._failure.unlink(missing_ok=True)
        return self.call("--wait-for-lock", "repro", "--single-item", stage, logged=True, gpus=gpus)

    def failure(self) -> dict[str, str] | None:
        """Why the last stage failed, as it has written: `kind` (user or fault) and `message`."""
        return failures.reported(self._failure)

    def missing(self, stage: str) -> list[str]:
        """The deps of a stage that do not exist."""
        deps = dvc_files.graph(self.folder)[stage].deps
        return [path for path in deps if not (self.folder / path).exists()]

    def changed(self, *stages: str) -> set[str] | None:
        """Those of the stages (by default all) that `dvc repro` would run or restore; None if DVC fails."""
        status, lines = self.call("--wait-for-lock", "status", "--json", *stages)
        text = next((line for line in reversed(lines) if line.startswith("{")), None)
        return None if status or text is None else set(json.loads(text))

    def is_restorable(self, stage: str) -> bool:
        """Whether the run cache holds the outs of a changed stage, so that it would not run."""
        return self.call("restorable", stage)[0] == 0

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None

    def close(self) -> None:
        self._close_server()
        self._scratch.cleanup()

    def __enter__(self) -> Dvc:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
