"""`make up`, `make down`: Prefect server, MLflow server, worker and deployments on this machine.

    python -m flows.service up [--prefect-port N] [--mlflow-port N] [--gpu-slots N]
    python -m flows.service down
    python -m flows.service status                    what runs, and whether it does its work
    python -m flows.service deploy [--pool NAME]      to the server of PREFECT_API_URL, wherever it is
    python -m flows.service work [--pool NAME]        the same, and a worker in the foreground

`up` puts all on loopback, all data under the main checkout's `.rlhf/`: `service/` (pids, ports, logs),
`prefect/` (the server's database), and the MLflow store that `dvc repro` writes to. No torch here;
Prefect is imported only once its server starts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import httpx
import psutil
from filelock import FileLock

from flows import settings
from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files, processes, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import HOST, Daemon, free_port, is_free
from rlhf_tasks.tracking import dashboard, links
from rlhf_tasks.tracking.outbox import Outbox
from rlhf_tasks.tracking.uploader import sync

READY_SECONDS = 180.0  # seconds of a machine at rest are minutes of a busy one
END_SECONDS = {"worker": 35.0, "mlflow": 5.0, "prefect": 10.0}  # the worker's runs keep their state first
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
PORTS = {"prefect": 4200, "mlflow": 5000}
WORKER = "service"  # its name in the pool


@dataclass(frozen=True)
class Service:
    """The programs of one project."""

    root: Path
    home: Path

    @classmethod
    def here(cls) -> Service:
        """Of the project in the working folder.

        Raises:
            UserError: if none is here, or this is a git worktree: its service is the main checkout's.
        """
        dvc_files.graph(Path())
        home = Paths().home
        if home.parent != Path.cwd():
            raise UserError(f"the service belongs to the main checkout; run this in {home.parent}")
        return cls(Path.cwd(), home)

    def daemon(self, name: str) -> Daemon:
        return Daemon(name, self.home / "service")

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.daemon(name).known()['port']}"

    def is_healthy(self, name: str) -> bool:
        """Whether our own program does its work: alive, and the one that answers on its port.

        The worker's answer is its heartbeat, of which the server tells.
        """
        daemon = self.daemon(name)
        server = self.daemon("prefect") if name == "worker" else daemon
        if not daemon.is_running():
            return False
        try:
            if name == "worker":
                answers = self._is_heard(daemon.known()["started"])
            else:
                answers = httpx.get(self.url(name) + HEALTH[name], timeout=10.0).is_success
            return answers and server.listens(server.known()["port"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
            return False  # nobody answers, or a stranger does

    def _is_heard(self, since: float) -> bool:
        """Whether the worker has told the server of itself since a time, and lately."""
        wanted = {"workers": {"status": {"any_": ["ONLINE"]}}}
        path = f"{self.url('prefect')}/api/work_pools/{settings.POOL}/workers/filter"
        answer = httpx.post(path, json=wanted, timeout=10.0)
        heard = [
            datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
            for worker in (answer.json() if answer.is_success else [])
            if worker["name"] == WORKER
        ]
        return max(heard, default=0.0) >= since

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """For whatever talks to the servers."""
        told = settings.prefect(self.home, self.url("prefect"))
        told[links.MLFLOW_URL] = self.url("mlflow")
        return {**settings.QUIET, **base, **told, "PATH": processes.environment_path(base)}

    # ---------------------------------------------------------------------------------- starting

    def up(self, ports: Mapping[str, int | None], gpu_slots: int | None) -> None:
        """Start what does not run yet, and bring the deployments up to date.

        Raises:
            UserError: for a port asked for that cannot be had, and if something does not come up.
        """
        folder = self.home / "service"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            for name, port in self._ports(ports).items():
                self._start_server(name, port)
            self._say_other_server()
            os.environ.update(self.environment(os.environ))
            from flows import deployments  # only now: Prefect reads its settings from the environment

            for name in ("prefect", "mlflow"):
                self._await(name)
            deployments.apply(self.root, gpu_slots)
            if Outbox.of(self.home).pending():
                sync(self.home)  # runs whose uploader was ended with the service
            addresses = {name: self.url(name) for name in HEALTH}
            if not self.daemon("worker").runs_as(**addresses):
                # What it left running ends first; or it talks to where the servers no longer are.
                self._end_runs()
                self.daemon("worker").stop(END_SECONDS["worker"])
                deployments.crash_lost_runs()
                self._start_worker(addresses)
            workspaces.remove_left(self.root)
            self._await("worker")
        self.say()

    def _say_other_server(self) -> None:
        """Where a shell names another server, this one is still the project's own."""
        told = os.environ.get("PREFECT_API_URL")
        if told not in (None, "", f"{self.url('prefect')}/api"):
            console.say(
                f"PREFECT_API_URL={told} is another server than the one that is started here; `python -m "
                "flows.service work` registers the project there, and works for it"
            )

    def _await(self, name: str) -> None:
        daemon = self.daemon(name)
        port = daemon.known().get("port")
        try:
            daemon.await_ready(partial(self.is_healthy, name), READY_SECONDS)
        except UserError:
            if port is not None and not is_free(port) and not daemon.listens(port):
                raise UserError(_taken(name, port)) from None
            raise

    def _check_port(self, name: str, asked: int | None) -> None:
        """Raises UserError if a server cannot have the port that is asked for."""
        daemon = self.daemon(name)
        known = daemon.known().get("port")
        if asked is None or (daemon.is_running() and asked == known):
            return
        if daemon.is_running():
            raise UserError(
                f"{name} runs on port {known}; `make down` first, to have it on --{name}-port {asked}"
            )
        if not is_free(asked) and not daemon.listens(asked):
            raise UserError(_taken(name, asked))

    def _ports(self, asked: Mapping[str, int | None]) -> dict[str, int]:
        """The port of each server, told apart before anything starts.

        What is asked for, or the port of before, so that links and bookmarks stay good, or the next free one.

        Raises:
            UserError: for one that is asked for and cannot be had.
        """
        if asked["prefect"] is not None and asked["prefect"] == asked["mlflow"]:
            raise UserError(
                f"--prefect-port and --mlflow-port are both {asked['prefect']}; give each server its own"
            )
        running = {
            name: self.daemon(name).known()["port"] for name in PORTS if self.daemon(name).is_running()
        }
        for name, port in asked.items():
            for other in running:
                if other != name and running[other] == port:
                    raise UserError(f"port {port} is {other}'s; give another --{name}-port")
            self._check_port(name, port)
        found = {name: port for name, port in asked.items() if port is not None} | running
        for name in PORTS:
            if name not in found:
                daemon = self.daemon(name)
                first = daemon.known().get("port") or PORTS[name]
                whose = next((other for other in found if found[other] == first), "another program")
                left = whose not in found and daemon.listens(first)  # by what is left of it
                found[name] = first if left else free_port(first, besides=found.values())
                if found[name] != first:
                    console.say(f"{_taken(name, first, whose)}: now {found[name]}")
        return {name: found[name] for name in PORTS}

    def _start_server(self, name: str, port: int) -> None:
        daemon = self.daemon(name)
        if daemon.is_running():
            return
        daemon.stop(END_SECONDS[name])  # what is left of it
        if name == "mlflow":
            command = dashboard.server_command(self.home, port)
            environment = dashboard.server_environment(os.environ)
        else:
            words = ["-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
            command = [sys.executable, *words]
            told = settings.prefect(self.home, f"http://{HOST}:{port}")
            environment = {**settings.QUIET, **os.environ, **told}
        daemon.start(command, environment, self.root, port=port)

    def _start_worker(self, addresses: Mapping[str, str]) -> None:
        command = [*worker_command(settings.POOL), "--name", WORKER]
        self.daemon("worker").start(command, self.environment(os.environ), self.root, **addresses)

    # ----------------------------------------------------------------------- looking, and ending

    def say(self) -> None:
        console.say(f"Prefect: {self.url('prefect')}")
        console.say(f"MLflow:  {self.url('mlflow')}")
        console.say(f"logs: {self.home / 'service'}; `make down` ends it")

    def status(self) -> int:
        """Say what runs, and whether it does its work; 0 if all does."""
        healthy = {name: self.is_healthy(name) for name in ("prefect", "mlflow", "worker")}
        for name, is_well in healthy.items():
            daemon = self.daemon(name)
            where = f", {self.url(name)}" if name in HEALTH and daemon.is_running() else ""
            if is_well:
                console.say(f"{name}: healthy{where}")
            elif daemon.is_running():
                console.say(f"{name}: runs, and does not answer{where}; see {daemon.log}")
            else:
                console.say(f"{name}: does not run")
        return 0 if all(healthy.values()) else 1

    def down(self) -> None:
        """End all of it; runs in progress keep their state, and go on when they are run again.

        A `make up` in progress comes to its end first: it would start what was just ended.
        """
        folder = self.home / "service"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            self._end_runs()
            ended = [name for name in END_SECONDS if self.daemon(name).stop(END_SECONDS[name])]
        console.say(f"ended: {', '.join(ended)}" if ended else "nothing was running")

    def _end_runs(self) -> None:
        """The flow runs first, so that stages keep their state: their worker would kill them with itself."""
        runs = [process for process in self.daemon("worker").members() if _is_flow_run(process)]
        processes.send(runs, signal.SIGTERM)
        psutil.wait_procs(runs, END_SECONDS["worker"])


def _is_flow_run(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "prefect.engine" in process.cmdline()
    return False


def _taken(name: str, port: int, whose: str = "another program") -> str:
    return f"port {port} is in use by {whose}, so {name} cannot have it; --{name}-port gives another"


def worker_command(pool: str) -> list[str]:
    """A worker that says how it is by HTTP where Prefect is told a port for that, as in a container."""
    tells = ["--with-healthcheck"] if "PREFECT_WORKER_WEBSERVER_PORT" in os.environ else []
    return [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process", *tells]


def elsewhere(pool: str, *, work: bool) -> int:
    """For a server that others run: register this project's deployments, and be their worker if wanted.

    Raises:
        UserError: if no server is named, it does not answer or refuses the login, the pool is not there, or
            the deployments are those of another project.
    """
    if "PREFECT_API_URL" not in os.environ:
        raise UserError("PREFECT_API_URL is not set: it names the server, as http://127.0.0.1:4200/api")
    dvc_files.graph(Path())
    address = os.environ["PREFECT_API_URL"]
    try:
        httpx.get(f"{address}/health", timeout=10.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"the server of PREFECT_API_URL={address} does not answer ({error}); start it, or name another"
        ) from None
    for variable, value in {**settings.QUIET, **settings.HEARTBEAT}.items():
        os.environ.setdefault(variable, value)
    from prefect.exceptions import PrefectHTTPStatusError

    from flows import deployments

    try:
        deployments.apply(Path.cwd(), None, pool, makes_pool=work or pool == settings.POOL, is_shared=True)
    except PrefectHTTPStatusError as error:
        if error.response.status_code != httpx.codes.UNAUTHORIZED:
            raise
        raise UserError(
            f"the server of PREFECT_API_URL={address} refuses the login: set PREFECT_API_AUTH_STRING to its "
            "USER:PASSWORD"
        ) from None
    console.say(f"deployments are registered at {os.environ['PREFECT_API_URL']} for the pool {pool}")
    if work:
        os.execv(sys.executable, worker_command(pool))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.service", description="the service of a project")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start servers, worker and deployments")
    for name, port in PORTS.items():
        told = f"by default where it was before, at first {port}, or the next free one"
        up.add_argument(f"--{name}-port", type=_port, help=told)
    up.add_argument("--gpu-slots", type=_slots, help="of the concurrency limit `gpu` (at first: 1)")
    commands.add_parser("down", help="end all of it")
    commands.add_parser("status", help="what runs, and where")
    deploy = commands.add_parser("deploy", help="register the deployments at the server of PREFECT_API_URL")
    deploy.add_argument("--pool", default=settings.POOL, help="a work pool (default: %(default)s)")
    worker = commands.add_parser("work", help="register the deployments, and be a worker for them")
    told = "a process work pool, made if there is none (default: %(default)s)"
    worker.add_argument("--pool", default=settings.POOL, help=told)
    options = parser.parse_args(arguments)
    try:
        if options.command in ("deploy", "work"):
            return elsewhere(options.pool, work=options.command == "work")
        service = Service.here()
        if options.command == "up":
            ports = {"prefect": options.prefect_port, "mlflow": options.mlflow_port}
            service.up(ports, options.gpu_slots)
        elif options.command == "down":
            service.down()
        else:
            return service.status()
    except UserError as error:
        print(f"rlhf service: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rlhf service: interrupted; `make down` ends what has started", file=sys.stderr)
        return 130
    return 0


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= processes.LAST_PORT:
        raise argparse.ArgumentTypeError(f"ports go from 1 to {processes.LAST_PORT} (given: {text})")
    return value


def _slots(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more (given: {text})")
    return value


if __name__ == "__main__":
    sys.exit(main())
