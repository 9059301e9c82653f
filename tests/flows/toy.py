"""A project of shell stages in a git repository, and its service as a user runs it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from ruamel.yaml import YAML

from rlhf_tasks.project import processes as daemons
from rlhf_tasks.tracking.context import STAGE_RUN

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 600.0  # of a very busy machine
RECORDED_SECONDS = 1.5  # within which the server has recorded the states of tasks
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

STAGES = """\
stages:
  first:
    cmd: mkdir -p metrics && cat given/rows.txt > first.txt && cp given/metrics.json metrics/first.json
    params: [seed]
    deps: [given]
    outs: [first.txt]
    metrics: [{metrics/first.json: {cache: false}}]
  second:
    cmd: echo $RLHF_PARENT_RUN > /dev/null && sh ./second.sh
    params: [ppo.kl_coef]
    deps: [first.txt, second.sh]
    outs: [second.txt]
    metrics: [{plots/ppo.csv: {cache: false}}]
"""
SECOND = """\
mkdir -p plots && cp given/ppo.csv plots/ppo.csv && grep kl_coef: params.yaml | cat first.txt - > second.txt
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def identify(folder: Path) -> None:
    """DVC commits experiments."""
    git(folder, "config", "user.name", "t")
    git(folder, "config", "user.email", "t@example.org")


@functools.cache
def repository() -> Path:
    """An empty git and DVC repository, made once: starting DVC takes a second."""
    folder = Path(tempfile.mkdtemp(prefix="rlhf-toy-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    git(folder, "init", "-q")
    identify(folder)
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=folder, check=True)
    return folder


def make(folder: Path, **changes: Any) -> Path:
    """A committed project: params.yaml as shipped but for the sections' `changes`, two stages."""
    shutil.copytree(repository(), folder, dirs_exist_ok=True)
    write_params(folder, **changes)
    (folder / "dvc.yaml").write_text(STAGES, encoding="utf-8")
    (folder / "second.sh").write_text(SECOND, encoding="utf-8")
    (folder / ".gitignore").write_text(".rlhf/\n", encoding="utf-8")
    (folder / ".dvcignore").write_text(".rlhf\n", encoding="utf-8")
    given = folder / "given"
    given.mkdir()
    (given / "rows.txt").write_text("rows\n", encoding="utf-8")
    (given / "metrics.json").write_text('{"rows": 1.5}\n', encoding="utf-8")
    (given / "ppo.csv").write_text("episode,objective/kl\n1,0.5\n2,0.7\n", encoding="utf-8")
    commit(folder)
    return folder


def write_params(folder: Path, **changes: Any) -> None:
    yaml = YAML()
    tree = yaml.load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    tree["data"]["path"] = "given"
    tree["service"] = {"stages": {}, "retry_delay_seconds": 0.1, "grace_seconds": 5.0}
    for section, values in changes.items():
        tree.setdefault(section, {}).update(values)
    yaml.dump(tree, folder / "params.yaml")


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "x")


def environment() -> dict[str, str]:
    """For a program outside of the test: this code, and no server but its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "RLHF", "MLFLOW"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    return kept | {"PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}


def run_environment() -> dict[str, str]:
    """The environment that a flow run gives its stages; its mark is unique to this test process."""
    return environment() | {STAGE_RUN: f"test-{os.getpid()}"}


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until the condition is true, and return its value; `what` names it in the failure."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.2)
    return value


@dataclass
class Service:
    """The service of a project, and Prefect's API as its UI uses it."""

    root: Path
    login: tuple[str, str] | None = None
    """For servers that require one."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the shell that starts it, besides those of the test."""

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rlhf_tasks.cli", *words],
            cwd=self.root,
            env={**environment(), **self.variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def up(self) -> subprocess.CompletedProcess[str]:
        """Start what does not run yet, on ports of this process's own."""
        words = []
        for number, name in enumerate(("prefect", "mlflow")):
            if not self.daemon(name).is_running():
                port = daemons.free_port(23000 + 100 * (os.getpid() % 90) + 50 * number)
                words += [f"--{name}-port", str(port)]
        return self.command("up", *words)

    def daemon(self, name: str) -> daemons.Daemon:
        return daemons.Daemon(name, self.root / ".rlhf/service")

    def processes(self) -> list[psutil.Process]:
        """Everything that any program of the service has started."""
        tokens = [self.daemon(name).record().get("token") for name in ("prefect", "mlflow", "worker")]
        return [p for token in tokens if token for p in daemons.find(daemons.TOKEN, token)]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.daemon(name).record()['port']}"

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """The API's answer; repeats while the database is locked (503), as Prefect's own client does."""
        address = f"{self.url('prefect')}/api{path}"

        def answer() -> httpx.Response | None:
            response = httpx.request(method, address, json=body, timeout=WAIT_SECONDS, auth=self.login)
            return None if response.status_code == httpx.codes.SERVICE_UNAVAILABLE else response

        return until(answer, f"{method} {path}").json()

    def start(self, deployment: str = "rlhf-pipeline/pipeline", **parameters: Any) -> str:
        """A run of the deployment, as the UI makes one; its id."""
        identity = self.call("GET", f"/deployments/name/{deployment}")["id"]
        run = self.call("POST", f"/deployments/{identity}/create_flow_run", {"parameters": parameters})
        assert "id" in run, run
        return str(run["id"])

    def run(self, identity: str) -> dict[str, Any]:
        run: dict[str, Any] = self.call("GET", f"/flow_runs/{identity}")
        return run

    def end(self, identity: str) -> dict[str, Any]:
        """The final state of a run."""
        until(lambda: self.run(identity)["state"]["type"] in FINAL, "the end of the run")
        state: dict[str, Any] = self.run(identity)["state"]
        return state

    def tasks(self, identity: str) -> dict[str, str]:
        """`{task: state}` of a run that has ended, in order."""
        time.sleep(RECORDED_SECONDS)
        query = {"flow_runs": {"id": {"any_": [identity]}}, "sort": "EXPECTED_START_TIME_ASC"}
        return {run["name"]: run["state"]["name"] for run in self.call("POST", "/task_runs/filter", query)}

    def logs(self, identity: str) -> str:
        query = {"logs": {"flow_run_id": {"any_": [identity]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        return "\n".join(line["message"] for line in self.call("POST", "/logs/filter", query))

    def artifact(self, key: str) -> str:
        artifacts = self.call("POST", "/artifacts/latest/filter", {"artifacts": {"key": {"any_": [key]}}})
        return str(artifacts[0]["data"])

    def cancel(self, identity: str) -> None:
        self.call("POST", f"/flow_runs/{identity}/set_state", {"state": {"type": "CANCELLING"}})

    def experiments(self) -> list[str]:
        refs = git(self.root, "for-each-ref", "--format=%(refname)", "refs/exps/*/*/*").splitlines()
        return [ref.rpartition("/")[2] for ref in refs]

    def mlflow(self, flow_run: str) -> dict[str, Any]:
        """The pipeline's run in MLflow, once its delivery has begun: `info` and `data`."""
        search = {"experiment_ids": ["1"], "filter": f"tags.`rlhf.pipeline` = 'prefect-{flow_run}'"}
        address = f"{self.url('mlflow')}/api/2.0/mlflow/runs/search"

        def runs() -> list[dict[str, Any]]:
            answer = httpx.post(address, json=search, timeout=30, auth=self.login)
            return list(answer.json().get("runs", []))

        run: dict[str, Any] = until(runs, "the pipeline's run")[0]
        return run


def tags(run: dict[str, Any]) -> dict[str, str]:
    return {tag["key"]: tag["value"] for tag in run["data"]["tags"]}


@contextmanager
def service(root: Path, variables: Mapping[str, str] | None = None) -> Iterator[Service]:
    """The service, which runs while the block lasts."""
    made = Service(root, variables=variables or {})
    try:
        done = made.up()
        assert done.returncode == 0, done.stderr
        yield made
    finally:
        left = made.processes()
        made.command("down")
        for process in left:  # which a failed test left behind
            if process.is_running():
                process.send_signal(signal.SIGKILL)


def write_script(folder: Path, lines: Sequence[str]) -> None:
    """Commit what stage `second` does."""
    (folder / "second.sh").write_text("\n".join(lines) + "\n", encoding="utf-8")
    commit(folder)


def refusal(message: str) -> list[str]:
    """The lines of a script that fails as our stages do for a mistake that the user can fix."""
    report = json.dumps({"kind": "user", "message": message})
    return [f"echo {shlex.quote(report)} > $RLHF_FAILURE_FILE", "exit 2"]


def reset(folder: Path) -> None:
    """Commit the first version of the script again, if it has changed."""
    if (folder / "second.sh").read_text(encoding="utf-8") != SECOND:
        write_script(folder, [SECOND.rstrip()])
