"""For a Prefect server that others run: register this project's deployments, and be a worker for them.

No torch here; Prefect is imported only after its environment is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from flows import settings
from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files


def command(pool: str, environment: Mapping[str, str] = os.environ) -> list[str]:
    """The command of a worker. It answers health checks if the environment has a port for them."""
    health = ["--with-healthcheck"] if "PREFECT_WORKER_WEBSERVER_PORT" in environment else []
    words = ["worker", "start", "--pool", pool, "--type", "process", *health]
    return [sys.executable, "-P", "-m", "prefect", *words]


@contextmanager
def check_login(variable: str, server: str) -> Iterator[None]:
    """Raises UserError if the server refuses the login within the block; `variable` has it."""
    from prefect.exceptions import PrefectHTTPStatusError

    try:
        yield
    except PrefectHTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise UserError(f"{server} refuses the login: set {variable} to its USER:PASSWORD") from None


def register(pool: str, *, makes_pool: bool) -> None:
    """Register this project's deployments at the server of PREFECT_API_URL.

    Args:
        makes_pool: Make a process pool of this name if there is none.

    Raises:
        UserError: if no server is named, it does not answer or refuses the login, the pool does not exist, or
            another project has deployments of the same names.
    """
    address = os.environ.get("PREFECT_API_URL")
    if not address:
        raise UserError(
            "PREFECT_API_URL is not set; set it to the address of the server, such as http://127.0.0.1:4200/api"
        )
    dvc_files.graph(Path.cwd())  # refuses a folder without a project
    settings.check_server(address)
    for variable, value in {**settings.QUIET, **settings.HEARTBEAT}.items():
        os.environ.setdefault(variable, value)
    from flows import deployments

    with check_login(settings.CLIENT_LOGIN, f"the server of PREFECT_API_URL={address}"):
        deployments.apply(Path.cwd(), None, pool, makes_pool=makes_pool, is_shared=True)
    console.say(f"deployments are registered at {address} for the pool {pool}")
