"""The service of a project on this machine: Prefect server, MLflow server, worker and deployments.

All of it listens on loopback. Its data is under the main checkout's `.rlhf/`: `service/` (pids, ports, logs),
`prefect/` (the server's database), and the MLflow store that `dvc repro` writes to. No torch here; Prefect
is imported only after its server has started.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from filelock import FileLock

from flows import pages, ports, settings, worker
from rlhf_tasks import config, console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files, processes, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.project.processes import HOST, Daemon, is_free
from rlhf_tasks.tracking import context, dashboard, links
from rlhf_tasks.tracking.outbox import Outbox
from rlhf_tasks.tracking.uploader import sync

READY_SECONDS = 180.0  # a busy machine needs minutes where a resting one needs seconds
END_SECONDS = {"worker": 35.0, "mlflow": 5.0, "prefect": 10.0}  # the worker's runs save their state first
HEALTH = {"prefect": "/api/health", "mlflow": "/health"}
WORKER = "service"  # its name in the pool
IN_PROGRESS = ("RUNNING", "PENDING", "CANCELLING", "PAUSED")
NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError)  # or not from our server


@dataclass(frozen=True)
class Service:
    """The programs of one project."""

    root: Path
    home: Path
    ready_seconds: float = READY_SECONDS

    @classmethod
    def here(cls) -> Service:
        """The service of the project in the working folder.

        Raises:
            UserError: if there is no project here, or this is a git worktree, not the main checkout.
        """
        root = Path.cwd()
        dvc_files.graph(root)
        home = Paths(root).home
        if home.parent != root:
            raise UserError(f"the service belongs to the main checkout; run this command in {home.parent}")
        return cls(root, home)

    def daemon(self, name: str) -> Daemon:
        return Daemon(name, self.home / "service")

    def url(self, name: str) -> str:
        return f"http://{HOST}:{self.daemon(name).record()['port']}"

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of every program that talks to the servers."""
        own = settings.prefect(self.home, self.url("prefect"))
        own[links.MLFLOW_URL] = self.url("mlflow")
        return {**settings.QUIET, **base, **own, "PATH": processes.environment_path(base)}

    # -------------------------------------------------------------------------------------- up

    def up(
        self, requested: Mapping[str, int | None], gpu_slots: int | None, webhook: str | None = None
    ) -> None:
        """Start what does not run yet, and bring the deployments up to date.

        Args:
            requested: The port of each server; None: the last one, or the next free one.
            gpu_slots: The size of the limit `gpu`; None: unchanged.
            webhook: The address that is notified of the ends of runs; None: unchanged; empty: none.

        Raises:
            UserError: for a requested port that a server cannot have, and if a program does not start.
        """
        with self._lock():
            servers = {name: self.daemon(name) for name in HEALTH}
            for name, port in ports.choose(servers, requested).items():
                self._start_server(name, port)
            self.warn_of_another_server()
            os.environ.update(self.environment(os.environ))
            from flows import automations, deployments  # only now: Prefect reads the environment

            for name in HEALTH:
                self.wait_for(name)
                console.say(f"{name}: ready")
            pages.keep_local(self.home / "prefect" / "ui")
            console.say("deployments: are brought up to date")
            deployments.apply(self.root, gpu_slots)
            automations.notify(webhook)
            if Outbox.of(self.home).pending():
                sync(self.home)  # runs whose delivery ended with the service
            addresses = {name: self.url(name) for name in HEALTH}
            if not self.daemon("worker").runs_with(**addresses):
                # What an earlier worker left running ends first; or it uses former addresses of the servers.
                self.end_runs()
                self.daemon("worker").stop(END_SECONDS["worker"])
                deployments.crash_lost_runs()
                console.say("worker: starts")
                command = [*worker.command(settings.POOL), "--name", WORKER]
                facts = {**addresses, "earlier_heartbeat": self._last_heartbeat()}
                self.daemon("worker").start(command, self.environment(os.environ), self.root, **facts)
            workspaces.remove_left(self.root)
            self.wait_for("worker")
            console.say("worker: ready")
        self._show_addresses()
        console.say(f"logs: {self.home / 'service'}; `rlhf status` shows what runs, `rlhf down` stops it")

    def _show_addresses(self) -> None:
        console.say(f"Prefect: {self.url('prefect')}")
        own = self._experiment()
        for name, page in dashboard.runs_pages(self.home, self.url("mlflow"), own).items():
            console.say(f"MLflow, runs of {name}: {page}")
        if (report := Paths(self.root).reports / "index.html").exists():
            console.say(f"report: {report.as_uri()}")

    def _experiment(self) -> str | None:
        """The experiment of params.yaml, if its runs go to the service's own MLflow."""
        with suppress(UserError):
            tracking = config.load(self.root / "params.yaml").tracking
            is_ours = tracking.enabled and context.uri(tracking) is None
            return tracking.experiment if is_ours else None
        return None

    def _lock(self) -> FileLock:
        folder = self.home / "service"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / "lock")

    def _start_server(self, name: str, port: int) -> None:
        daemon = self.daemon(name)
        if daemon.is_running():
            return
        daemon.stop(END_SECONDS[name])  # what is left of it
        console.say(f"{name}: starts on port {port}, which takes up to a minute")
        if name == "mlflow":
            command = dashboard.server_command(self.home, port)
            environment = dashboard.server_environment(os.environ)
        else:
            words = ["-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
            command = [sys.executable, *words]
            own = settings.prefect(self.home, f"http://{HOST}:{port}")
            environment = {**settings.QUIET, **os.environ, **own}
        daemon.start(command, environment, self.root, port=port)

    def warn_of_another_server(self) -> None:
        """If the shell names another server, this one is still the project's own."""
        address = os.environ.get("PREFECT_API_URL")
        if address not in (None, "", f"{self.url('prefect')}/api"):
            console.say(
                f"PREFECT_API_URL={address} is another server than the one that starts here; `rlhf work` "
                "registers the project there and works for it"
            )

    def wait_for(self, name: str) -> None:
        """Wait until a program does its work.

        Raises:
            UserError: if the program ends, takes too long, or another program has its port.
        """
        daemon = self.daemon(name)
        port = daemon.record().get("port")
        try:
            daemon.wait_until_ready(partial(self.is_healthy, name), self.ready_seconds)
        except UserError:
            if port is not None and not is_free(port) and not daemon.listens(port):
                raise UserError(ports.taken(name, port)) from None
            raise

    # ---------------------------------------------------------------------------------- status

    def status(self) -> int:
        """Show the programs and the flow runs in progress. Returns 0 if all programs do their work."""
        if not any(self.daemon(name).is_running() for name in END_SECONDS):
            console.say("nothing runs; `rlhf up` starts the service")
            return 1
        healthy = {name: self.is_healthy(name) for name in ("prefect", "mlflow", "worker")}
        for name, is_well in healthy.items():
            daemon = self.daemon(name)
            address = f", {self.url(name)}" if name in HEALTH and daemon.is_running() else ""
            if is_well:
                console.say(f"{name}: healthy{address}")
            elif daemon.is_running():
                console.say(f"{name}: runs, but does not answer{address}; see {daemon.log}")
            else:
                console.say(f"{name}: does not run; `rlhf up` starts it")
        if healthy["prefect"]:
            self._show_runs()
        return 0 if all(healthy.values()) else 1

    def _show_runs(self) -> None:
        states = {"flow_runs": {"state": {"type": {"any_": list(IN_PROGRESS)}}}, "sort": "START_TIME_ASC"}
        try:
            runs, page = self._post("flow_runs/filter", states), f"{self.url('prefect')}{settings.UI}/runs"
            lines = [f"run {run['name']}: {run['state_name']}, {page}/flow-run/{run['id']}" for run in runs]
        except NO_ANSWER:
            lines = ["the Prefect server does not list its flow runs"]
        for line in lines or ["no flow run is in progress"]:
            console.say(line)

    def is_healthy(self, name: str) -> bool:
        """Whether our own program does its work: it is alive, and it is the one that answers on its port.

        The worker has no port: the server knows its heartbeat.
        """
        daemon = self.daemon(name)
        server = self.daemon("prefect") if name == "worker" else daemon
        if not daemon.is_running():
            return False
        try:
            if name == "worker":
                answers = self._last_heartbeat() not in (0.0, daemon.record().get("earlier_heartbeat"))
            else:
                answers = httpx.get(self.url(name) + HEALTH[name], timeout=10.0).is_success
            return answers and server.listens(server.record()["port"])
        except NO_ANSWER:
            return False

    def _last_heartbeat(self) -> float:
        """When the worker was last online, by the server's clock; 0 without an answer that knows it."""
        online = {"workers": {"status": {"any_": ["ONLINE"]}}}
        try:
            workers = self._post(f"work_pools/{settings.POOL}/workers/filter", online)
            times = [one["last_heartbeat_time"] for one in workers if one["name"] == WORKER]
            return max((datetime.fromisoformat(time).timestamp() for time in times), default=0.0)
        except NO_ANSWER:
            return 0.0

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        """What Prefect's API answers. Raises one of NO_ANSWER."""
        response = httpx.post(f"{self.url('prefect')}/api/{path}", json=dict(body), timeout=10.0)
        return response.raise_for_status().json()

    # ------------------------------------------------------------------------------------ down

    def down(self) -> None:
        """Stop all programs. Runs in progress save their state, and are resumed when they are run again.

        An `up` in progress finishes first: it would restart what was just stopped.
        """
        with self._lock():
            if self.is_healthy("worker"):
                self.cancel_runs()
            self.end_runs()
            ended = [name for name in END_SECONDS if self.daemon(name).stop(END_SECONDS[name])]
        console.say(f"stopped: {', '.join(ended)}" if ended else "nothing was running")

    def cancel_runs(self) -> None:
        """Let the worker cancel the runs in progress, and call them Stopped: nobody cancelled them."""
        with suppress(*NO_ANSWER):  # `end_runs` sends signals to those that are left
            for run in self._runs_in_progress():
                self._set_state(run, type="CANCELLING", name="Cancelling")
            deadline, left = time.monotonic() + END_SECONDS["worker"], self._runs_in_progress()
            stopped = list(left)
            while left and time.monotonic() < deadline:
                time.sleep(processes.POLL_SECONDS)
                left = self._runs_in_progress()
            for run in stopped:
                if run not in left:
                    message = "the service was stopped; Retry resumes the run"
                    self._set_state(run, type="CANCELLED", name=settings.STOPPED, message=message)

    def _runs_in_progress(self) -> list[str]:
        """The ids of the flow runs of this worker."""
        states = {"flow_runs": {"state": {"type": {"any_": list(IN_PROGRESS)}}}}
        pool = {"work_pools": {"name": {"any_": [settings.POOL]}}}
        return [str(run["id"]) for run in self._post("flow_runs/filter", states | pool)]

    def _set_state(self, run: str, **state: str) -> None:
        self._post(f"flow_runs/{run}/set_state", {"state": state})

    def end_runs(self) -> None:
        """End the flow runs before their worker, which would kill them before they have saved their state."""
        runs = [process for process in self.daemon("worker").processes() if _is_flow_run(process)]
        processes.send(runs, signal.SIGTERM)
        psutil.wait_procs(runs, END_SECONDS["worker"])


def _is_flow_run(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "prefect.engine" in process.cmdline()
    return False
