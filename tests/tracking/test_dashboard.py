"""`rlhf mlflow` ends its server as the server wants to be ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhf_tasks.tracking import dashboard

SERVER = """
import pathlib, signal, sys, time

def end(*_):
    pathlib.Path("ended").touch()
    sys.exit()

signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, end)
pathlib.Path("ready").touch()
time.sleep(60)
"""


def test_an_interrupted_dashboard_lets_its_server_end_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mlflow.db").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dashboard, "sync", lambda _: None)
    monkeypatch.setattr(dashboard, "runs_pages", lambda *_: {})
    monkeypatch.setattr(dashboard, "server_command", lambda *_: [sys.executable, "-c", SERVER])

    def interrupt() -> None:
        while not Path("ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell's background job
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            dashboard.serve(tmp_path, 5000)
    finally:
        signal.signal(signal.SIGINT, before)
    assert Path("ended").exists()
