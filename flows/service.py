"""The service of a project on this machine: Prefect server, MLflow server, worker and deployments.

All of it listens on loopback. Its data is under the main checkout's `.rlhf/`: `service/` (pids, ports, logs),
`prefect/` (the server's database), and the MLflow store that `dvc repro` writes to. No torch here; Prefect
is imported only after its server has started.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from filelock import FileLock

from flows import settings, worker
from rlhf_tasks import config, console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, dvc_files, processes, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import HOST, Daemon, free_port
from rlhf_tasks.tracking import context, dashboard, local_pages
from rlhf_tasks.tracking.record import pending
from rlhf_tasks.tracking.sync import sync

READY_SECONDS = 180.0  # a busy machine needs minutes where a resting one needs seconds
END_SECONDS = {"worker": 35.0, "mlflow": 5.0, "prefect": 10.0}  # the worker's runs save their state first
HEALTH = {"prefect": "/api/health", "mlflow": "/health", "worker": "/health"}
PORTS: Mapping[str, int] = {"prefect": 4200, "mlflow": 5000}  # of the first start
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)  # or not from our server


@dataclass(frozen=True)
class ProjectService:
    """The programs of one project."""

    root: Path
    home: Path
    ready_seconds: float = READY_SECONDS

    @classmethod
    def here(cls) -> ProjectService:
        """The service of the project in the working folder.

        Raises UserError if there is no project here, or this is a git worktree, not the main checkout.
        """
        root = Path.cwd()
        dvc_files.graph(root)
        home = Paths(root).home
        if home.parent != root:
            raise UserError(f"the service belongs to the main checkout; run this command in {home.parent}")
        return cls(root, home)

    def daemon(self, name: str) -> Daemon:
        """One of the programs: prefect, mlflow or worker."""
        return Daemon(name, self.home / "service")

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.daemon(name).record()['port']}"

    def _lock(self) -> FileLock:
        return FileLock(self.home / "service/lock")

    def up(
        self, requested: Mapping[str, int | None], gpu_slots: int | None, webhook: str | None = None
    ) -> None:
        """Start what does not run yet, and bring the deployments up to date.

        Args:
            requested: The port of each server; None: the last one, or the next free one.
            gpu_slots: The size of the limit `gpu`; None: unchanged.
            webhook: The address that is notified of the ends of runs; None: unchanged; empty: none.

        Raises UserError for a requested port that a server cannot have, and if a program does not start.
        """
        with self._lock():
            self._refuse_elsewhere()
            for name, port in self.choose_ports(requested).items():
                self._start_server(name, port)
            if os.environ.get("PREFECT_API_URL", "") not in ("", f"{self.url('prefect')}/api"):
                console.say(
                    f"PREFECT_API_URL={os.environ['PREFECT_API_URL']} is another server than the one that "
                    "starts here; `rlhf up --work` registers the project there and works for it"
                )
            own = settings.prefect(self.home, self.url("prefect")) | {context.MLFLOW_URL: self.url("mlflow")}
            if settings.SERVER_LOGIN in os.environ:  # the client of our own server logs in as it requires
                own[settings.CLIENT_LOGIN] = os.environ[settings.SERVER_LOGIN]
            path = {"PATH": processes.environment_path(os.environ)}
            os.environ.update({**settings.QUIET, **os.environ, **own, **path})
            from flows import automations, deployments  # only now: Prefect reads the environment

            for name in PORTS:
                self.wait_for(name)
                console.say(f"{name}: ready")
            keep_pages_local(self.home / "prefect" / "ui")
            console.say("updating deployments")
            with worker.check_login(settings.SERVER_LOGIN, f"the Prefect server at {self.url('prefect')}"):
                deployments.apply(self.root, gpu_slots)
                automations.notify(webhook)
            if pending(self.home):
                sync(self.home)  # runs whose delivery ended with the service
            addresses = {name: self.url(name) for name in PORTS}
            if not self.daemon("worker").runs_with(**addresses):
                # What an earlier worker left running ends first; or it uses former addresses of the servers.
                self.end_runs()
                self.daemon("worker").stop(END_SECONDS["worker"])
                deployments.crash_lost_runs()
                console.say("worker: starts")
                with socket.create_server((HOST, 0)) as free:
                    port = free.getsockname()[1]
                health = {"PREFECT_WORKER_WEBSERVER_HOST": HOST, "PREFECT_WORKER_WEBSERVER_PORT": str(port)}
                environment = {**os.environ, **health}
                command = worker.command(settings.POOL, environment)
                self.daemon("worker").start(command, environment, self.root, port=port, **addresses)
            workspaces.remove_left(self.root)
            self.wait_for("worker")
            console.say("worker: ready")
        console.say(f"Prefect: {self.url('prefect')}")
        experiment = None
        with suppress(UserError):
            tracking = config.load(self.root / "params.yaml").tracking
            is_ours = tracking.enabled and context.uri(tracking) is None
            experiment = tracking.experiment if is_ours else None
        for name, page in dashboard.runs_pages(self.home, self.url("mlflow"), experiment).items():
            console.say(f"MLflow, runs of {name}: {page}")
        if (report := Paths(self.root).reports / "index.html").exists():
            console.say(f"report: {report.as_uri()}")
        console.say(f"logs: {self.home / 'service'}; `rlhf status` shows what runs, `rlhf down` stops it")

    def _refuse_elsewhere(self) -> None:
        for name in HEALTH:
            machine = self.daemon(name).record().get("process", "").partition(":")[0]
            if machine not in ("", platform.node()):
                raise UserError(
                    f"{name} was started on {machine}, and this is {platform.node()}: `rlhf down` there; "
                    "if that was a name of this machine, here"
                )

    def choose_ports(self, requested: Mapping[str, int | None]) -> dict[str, int]:
        """The port of each server: the requested one, or the last one, so that bookmarks stay valid.

        If the last one is taken, it is the next free one. What an earlier start left is stopped.

        Raises UserError for a requested port that the server cannot have.
        """
        ports: dict[str, int | None] = {name: self.daemon(name).record().get("port") for name in PORTS}
        running = [name for name in PORTS if self.daemon(name).is_running()]
        chosen = {name: ports[name] or PORTS[name] for name in running}
        stopped = [name for name in PORTS if name not in running]
        for name in sorted(stopped, key=lambda name: requested[name] is None):  # the requested ones first
            self.daemon(name).stop(END_SECONDS[name])
            wanted = requested[name] or ports[name] or PORTS[name]
            chosen[name] = free_port(wanted, besides=chosen.values())
        for name, port in requested.items():
            if port not in (None, chosen[name]):
                problem = f"port {port} is in use, so {name} cannot have it; --{name}-port sets another"
                if name in running:
                    problem = f"{name} runs on port {chosen[name]}; `rlhf down` first, to start it on {port}"
                raise UserError(problem)
        return {name: chosen[name] for name in PORTS}

    def _start_server(self, name: str, port: int) -> None:
        daemon = self.daemon(name)
        if daemon.is_running():
            return
        console.say(f"{name}: starting on port {port} (up to a minute)")
        if name == "mlflow":
            from rlhf_tasks.tracking.store import open_store

            open_store(None, self.home)  # a server that is stopped early would leave half a database
            command = dashboard.server_command(self.home, port)
            environment = dashboard.server_environment(self.home, os.environ)
        else:
            words = ["-P", "-m", "flows.server", "server", "start", "--host", HOST, "--port", str(port)]
            command = [sys.executable, *words]
            own = settings.prefect(self.home, f"http://{HOST}:{port}")
            environment = {**settings.QUIET, **os.environ, **own}
        daemon.start(command, environment, self.home, port=port)

    def wait_for(self, name: str) -> None:
        """Wait until a program does its work. Raises UserError if it ends, or takes too long."""

        def is_ready() -> bool:
            console.show_life()
            return self.is_healthy(name)

        with console.part(f"{name} is starting"):
            self.daemon(name).wait_until_ready(is_ready, self.ready_seconds)

    def is_healthy(self, name: str) -> bool:
        """Whether our own program does its work: it is alive, and it is the one that answers on its port."""
        daemon = self.daemon(name)
        try:
            answers = (
                daemon.is_running() and httpx.get(self.url(name) + HEALTH[name], timeout=10.0).is_success
            )
            return answers and daemon.listens(daemon.record()["port"])
        except NO_ANSWER:
            return False

    def status(self) -> int:
        """Show the programs and the flow runs in progress. Returns 0 if all programs do their work."""
        if not any(self.daemon(name).is_running() for name in HEALTH):
            console.say("nothing runs; `rlhf up` starts the service")
            return 1
        healthy = {name: self.is_healthy(name) for name in HEALTH}
        for name, is_well in healthy.items():
            daemon = self.daemon(name)
            if is_well:
                console.say(f"{name}: healthy, {self.url(name)}")
            elif daemon.is_running():
                console.say(f"{name}: runs, but does not answer, {self.url(name)}; see {daemon.log}")
            else:
                console.say(f"{name}: does not run; `rlhf up` starts it")
        if healthy["prefect"]:
            page = f"{self.url('prefect')}{settings.UI}/runs/flow-run"
            try:
                runs = self._runs_in_progress()
                for run in runs:
                    console.say(f"run {run['name']}: {run['state_name']}, {page}/{run['id']}")
                if not runs:
                    console.say("no flow run is in progress")
            except NO_ANSWER:
                console.say("the Prefect server does not list its flow runs")
        return 0 if all(healthy.values()) else 1

    def _runs_in_progress(self, **others: Any) -> list[dict[str, Any]]:
        """The flow runs in progress that match the other filters. Raises one of NO_ANSWER."""
        in_progress = {"state": {"type": {"any_": [*settings.OPEN, "PAUSED"]}}}
        return list(self._post("flow_runs/filter", flow_runs=in_progress, sort="START_TIME_ASC", **others))

    def _post(self, path: str, **body: Any) -> Any:
        """What Prefect's API answers. Raises one of NO_ANSWER."""
        address = f"{self.url('prefect')}/api/{path}"
        response = httpx.post(address, json=body, timeout=10.0, auth=settings.login(os.environ))
        return response.raise_for_status().json()

    def down(self) -> None:
        """Stop all programs. Runs in progress save their state, and are resumed when they are run again.

        An `up` in progress finishes first: it would restart what was just stopped.
        """
        with self._lock():
            if self.is_healthy("worker"):
                with suppress(*NO_ANSWER):  # `end_runs` sends signals to those that are left
                    self._cancel_runs()
            self.end_runs()
            ports = {name: self.daemon(name).record().get("port") for name in PORTS}
            ended = [name for name in END_SECONDS if self.daemon(name).stop(END_SECONDS[name])]
            # The next start takes the same, so that bookmarks stay valid.
            for name in filter(ports.get, ports):
                atomic.write_json(self.daemon(name).file, {"port": ports[name]})
        console.say(f"stopped: {', '.join(ended)}" if ended else "nothing was running")

    def _cancel_runs(self) -> None:
        """Cancel the worker's runs and label them Stopped."""

        def in_progress() -> set[str]:
            pool = {"name": {"any_": [settings.POOL]}}
            return {run["id"] for run in self._runs_in_progress(work_pools=pool)}

        def set_state(run: str, **state: str) -> None:
            self._post(f"flow_runs/{run}/set_state", state=state)

        deadline, runs = time.monotonic() + END_SECONDS["worker"], in_progress()
        for run in runs:
            set_state(run, type="CANCELLING", name="Cancelling")
        with console.part(f"{len(runs)} flow runs save their state"):
            while (left := in_progress()) and time.monotonic() < deadline:
                console.show_life()
                time.sleep(processes.POLL_SECONDS)
        stopped = {"name": settings.STOPPED, "message": "the service was stopped; Retry resumes"}
        for run in runs - left:
            set_state(run, type="CANCELLED", **stopped)

    def end_runs(self) -> None:
        """End the flow runs before their worker, which would kill them before they have saved their state."""
        runs = list[psutil.Process]()
        for process in self.daemon("worker").processes():
            with suppress(psutil.Error):
                runs += [process] if "prefect.engine" in process.cmdline() else []
        processes.send(runs, signal.SIGTERM)
        psutil.wait_procs(runs, END_SECONDS["worker"])


def keep_pages_local(folder: Path) -> None:
    """Give Prefect's pages a policy by which browsers refuse requests to other machines.

    They ask an analytics host at every load, and no setting stops that. `folder`: the server's copy of them.
    """
    meta = f'<meta http-equiv="Content-Security-Policy" content="{local_pages.POLICY}">'
    for page in folder.glob("*/index.html"):
        text = page.read_text(encoding="utf-8")
        if meta not in text:
            page.write_text(text.replace("<head>", f"<head>\n    {meta}", 1), encoding="utf-8")
