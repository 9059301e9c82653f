"""Names and environment variables of the service's programs. Does not import Prefect."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import httpx

from rlhf_tasks.errors import UserError

PIPELINE, SWEEP, WATCH = "rlhf-pipeline", "rlhf-sweep", "rlhf-data-watch"
FLOWS = (PIPELINE, SWEEP, WATCH)
POOL = "rlhf"
SLOTS = "gpu"  # the global concurrency limit
STOPPED, OUT_OF_TIME = "Stopped", "Out of time"  # states of runs that the service, or a deadline, has ended
OPEN = ("RUNNING", "PENDING", "CANCELLING")  # types of states of runs that a worker runs
UI = "/v2"  # the path of Prefect's pages that open by default

SERVER_LOGIN, CLIENT_LOGIN = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"  # USER:PASSWORD

QUIET = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
HEARTBEAT = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}  # a run without heartbeats has vanished


def prefect(home: Path, url: str) -> dict[str, str]:
    """Prefect's settings for server, worker and flows; `home` is the project's `.rlhf`."""
    folder = home / "prefect"
    return {
        "PREFECT_HOME": str(folder),
        "PREFECT_PROFILES_PATH": str(folder / "profiles.toml"),
        "PREFECT_API_URL": f"{url}/api",
        "PREFECT_UI_URL": f"{url}{UI}",  # in links
        "PREFECT_UI_STATIC_DIRECTORY": str(folder / "ui"),  # see `service.keep_pages_local`
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{folder / 'prefect.db'}",
        # Leases in memory are not freed after a restart of the server.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING": "flows.server",
        # By default every event is one write to SQLite. It collides with a task's request for slots, which is
        # then refused (503, "database is locked") and repeated after 2 s: every third task waited. The
        # interval takes whole seconds only.
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
        "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
        "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",  # DVC keeps results
        **HEARTBEAT,
        "PREFECT_CLIENT_MAX_RETRIES": "10",  # so that a run waits for a server that restarts
    }


def login(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """The user and the password of the service's Prefect server, if it requires them."""
    text = environment.get(SERVER_LOGIN) or environment.get(CLIENT_LOGIN)
    user, _, password = (text or "").partition(":")
    return (user, password) if text else None


def check_server(address: str) -> None:
    """Raises UserError if no server answers at the address of PREFECT_API_URL."""
    try:
        httpx.get(f"{address.rstrip('/')}/health", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"the server of PREFECT_API_URL={address} does not answer ({error}); start it, or change the "
            "address"
        ) from None
