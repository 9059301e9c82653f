"""The MLflow dashboard over the embedded store, on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.config import UserError
from rlhf_tasks.tracking import context
from rlhf_tasks.tracking.courier import sync

HOST = "127.0.0.1"
PORTS_TRIED = 20


def serve(home: Path, port: int) -> int:
    """Deliver what is pending, then serve until Ctrl-C, on `port` or the next free one.

    Raises:
        UserError: without a store, or without a free port.
    """
    sync(home)
    database = home / "mlflow.db"
    if not database.exists():
        raise UserError(f"there is no MLflow store yet ({database}); run `make run` first")
    free = next((p for p in range(port, port + PORTS_TRIED) if _is_free(p)), None)
    if free is None:
        raise UserError(f"ports {port} to {port + PORTS_TRIED - 1} are all in use; give another one")
    console.say(f"MLflow: http://{HOST}:{free} (Ctrl-C ends it)")
    words = ["-m", "mlflow", "server", "--host", HOST, "--port", str(free), "--workers", "1"]
    store = [
        "--backend-store-uri",
        f"sqlite:///{database}",
        "--default-artifact-root",
        str(home / "mlartifacts"),
    ]
    environment = context.courier_environment(os.environ)
    return subprocess.run([sys.executable, *words, *store], env=environment, check=False).returncode


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
