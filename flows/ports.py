"""The ports of the service's servers: which one each gets, decided before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import Daemon, free_port, is_free

FIRST: Mapping[str, int] = {"prefect": 4200, "mlflow": 5000}


def choose(
    daemons: Mapping[str, Daemon], requested: Mapping[str, int | None], first: Mapping[str, int] = FIRST
) -> dict[str, int]:
    """The port of each server.

    That is the requested one, or the last one, so that links and bookmarks stay valid, or the next free one.

    Raises:
        UserError: for a requested port that the server cannot have.
    """
    _check_requested(daemons, requested)
    running = {name: daemon.record()["port"] for name, daemon in daemons.items() if daemon.is_running()}
    chosen = {name: port for name, port in requested.items() if port is not None} | running
    for name, daemon in daemons.items():
        if name in chosen:
            continue
        preferred = daemon.record().get("port") or first[name]
        holder = next((other for other in chosen if chosen[other] == preferred), None)
        is_ours = holder is None and daemon.listens(preferred)  # what is left of it is stopped first
        chosen[name] = preferred if is_ours else free_port(preferred, besides=chosen.values())
        if chosen[name] != preferred:
            console.say(f"{taken(name, preferred, holder)}: it gets {chosen[name]}")
    return {name: chosen[name] for name in daemons}


def _check_requested(daemons: Mapping[str, Daemon], requested: Mapping[str, int | None]) -> None:
    if requested["prefect"] is not None and requested["prefect"] == requested["mlflow"]:
        raise UserError(
            f"--prefect-port and --mlflow-port are both {requested['prefect']}; give each server its own"
        )
    for name, port in requested.items():
        if port is None:
            continue
        for other, daemon in daemons.items():
            if other != name and daemon.is_running() and daemon.record()["port"] == port:
                raise UserError(f"port {port} is used by {other}; give another --{name}-port")
        daemon, current = daemons[name], daemons[name].record().get("port")
        if daemon.is_running():
            if port != current:
                raise UserError(
                    f"{name} runs on port {current}; `rlhf down` first, to start it on --{name}-port {port}"
                )
        elif not is_free(port) and not daemon.listens(port):
            raise UserError(taken(name, port))


def taken(name: str, port: int, holder: str | None = None) -> str:
    """The message for a port that a server cannot have."""
    return (
        f"port {port} is in use by {holder or 'another program'}, so {name} cannot have it; "
        f"--{name}-port sets another"
    )
