"""The settings of infra/compose.yaml with real parts: PostgreSQL, an S3 server, logins; no container engine.

Commands and environments of Prefect, MLflow and the worker are compose's own, with this machine's addresses
in place of its hosts. Needs PostgreSQL's programs and the extra `parts`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from ruamel.yaml import YAML

from rlhf_tasks.project.processes import HOST, Daemon, free_port
from tests.flows import toy
from tests.flows.toy import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INFRA = Path(__file__).parents[2] / "infra"
SECRET = "secret-of-the-test"
LOGIN = ("rlhf", SECRET)
READY_SECONDS = 300.0  # of a very busy machine
PORTS = {"postgres": 5432, "s3": 9000, "prefect": 4200, "mlflow": 5000, "worker": 8080}


def program(name: str) -> str:
    """Of PostgreSQL: on the path, or where Debian keeps it."""
    found = shutil.which(name) or next(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)
    if found is None:
        pytest.skip(f"PostgreSQL's {name} is not installed (Debian: postgresql)")
    return found


@dataclass
class Parts:
    """The parts of compose.yaml as programs of this machine."""

    root: Path
    work: Path
    ports: Mapping[str, int] = field(
        default_factory=lambda: {
            name: free_port(34000 + 100 * (os.getpid() % 90) + 20 * number)
            for number, name in enumerate(PORTS)
        }
    )

    def daemon(self, name: str) -> Daemon:
        return Service(self.root).daemon(name)

    def translated(self, text: str) -> str:
        """A value of compose.yaml with the addresses and folders of this machine."""
        given = {"MLFLOW_HOSTS": f"{HOST}:{self.ports['mlflow']}"}
        text = re.sub(
            r"\$\{(\w+)(?::([?-])([^}]*))?\}",
            lambda m: given.get(m[1], m[3] if m[2] == "-" else SECRET),
            text,
        )
        for name, port in PORTS.items():
            text = text.replace(f"{name}:{port}", f"{HOST}:{self.ports[name]}")
        for there, here in {"/state": "state", "/etc/mlflow-auth.ini": "mlflow-auth.ini"}.items():
            text = re.sub(rf"(?<![\w.]){re.escape(there)}", str(self.work / here), text)
        return text

    def start(self, name: str) -> None:
        """A service of compose.yaml, with its command and environment."""
        service = YAML(typ="safe", pure=True).load((INFRA / "compose.yaml").read_text("utf-8"))["services"][
            name
        ]
        words = shlex.split(self.translated(service["command"]))
        if "--host" in words:
            words[words.index("--host") + 1] = HOST
            words[words.index("--port") + 1] = str(self.ports[name])
        words = [sys.executable, "-m", {"rlhf": "rlhf_tasks.cli"}.get(words[0], words[0]), *words[1:]]
        environment = {
            variable: self.translated(str(value)) for variable, value in service["environment"].items()
        }
        own = {"HOME": str(self.work), "PREFECT_HOME": str(self.work / "state" / name)}
        quick = {"PREFECT_WORKER_QUERY_SECONDS": "2"}
        if "PREFECT_WORKER_WEBSERVER_PORT" in environment:
            environment["PREFECT_WORKER_WEBSERVER_PORT"] = str(self.ports[name])
        self.daemon(name).start(
            words, toy.environment() | own | quick | environment, self.root, port=self.ports.get(name)
        )

    def start_postgres(self, data: Path) -> None:
        """With both databases; not as root, which PostgreSQL refuses."""
        prefix = []
        if os.geteuid() == 0:
            shutil.chown(data, "nobody")
            prefix = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--"]
        password = data / "password"
        password.write_text(SECRET, encoding="utf-8")
        words = ["-D", str(data / "db"), "-U", "rlhf", "--auth=scram-sha-256", f"--pwfile={password}"]
        command = [*prefix, program("initdb"), "--no-sync", *words]
        subprocess.run(command, check=True, cwd=data, stdout=subprocess.DEVNULL)
        port = self.ports["postgres"]
        words = ["-D", str(data / "db"), "-h", HOST, "-p", str(port), "-k", str(data)]
        self.daemon("postgres").start([*prefix, program("postgres"), *words], os.environ, data, port=port)
        import psycopg2

        def connected() -> Any:
            try:
                return psycopg2.connect(host=HOST, port=port, user="rlhf", password=SECRET, dbname="postgres")
            except psycopg2.OperationalError:
                return None

        connection = toy.until(connected, "PostgreSQL")
        connection.autocommit = True
        with connection.cursor() as cursor:
            for name in ("prefect", "mlflow"):
                cursor.execute(f"CREATE DATABASE {name}")
        connection.close()

    def start_s3(self) -> None:
        port = self.ports["s3"]
        words = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)]
        self.daemon("s3").start(words, toy.environment(), self.work, port=port)
        toy.until(lambda: self.daemon("s3").listens(port), "the S3 server")
        for bucket in ("mlflow", "dvc"):
            self.s3().create_bucket(Bucket=bucket)

    def s3(self) -> Any:
        import boto3

        keys = {"aws_access_key_id": SECRET, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=f"http://{HOST}:{self.ports['s3']}", **keys)

    def objects(self, bucket: str) -> list[str]:
        return [entry["Key"] for entry in self.s3().list_objects_v2(Bucket=bucket).get("Contents", [])]

    def await_answer(self, name: str, path: str) -> None:
        address = f"http://{HOST}:{self.ports[name]}{path}"

        def answers() -> bool:
            try:
                return httpx.get(address, auth=LOGIN, timeout=10).is_success
            except httpx.HTTPError:
                return False

        self.daemon(name).wait_until_ready(answers, READY_SECONDS)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    for module in ("psycopg2", "moto.server", "boto3", "dvc_s3", "flask_wtf"):
        pytest.importorskip(module, reason=f"{module} is not installed: `pip install -e '.[parts]'`")
    program("initdb")
    work = tmp_path_factory.mktemp("parts")
    made = Parts(toy.make(work / "project"), work)
    remote = ["sh", str(INFRA / "remotes.sh"), "s3", "s3://dvc/project", f"http://{HOST}:{made.ports['s3']}"]
    keys = {"AWS_ACCESS_KEY_ID": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}
    subprocess.run(remote, cwd=made.root, env=toy.environment() | keys, check=True)
    toy.commit(made.root)
    shutil.copy(INFRA / "kubernetes/mlflow-auth.ini", work)
    ini = work / "mlflow-auth.ini"
    ini.write_text(made.translated(ini.read_text(encoding="utf-8")), encoding="utf-8")
    (work / "state").mkdir()
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlhf-postgres-")))
        for name in ("postgres", "s3", "prefect", "mlflow", "worker"):
            stack.callback(made.daemon(name).stop, 10.0)
        made.start_postgres(data)
        made.start_s3()
        made.start("prefect")
        made.start("mlflow")
        made.await_answer("prefect", "/api/health")
        made.await_answer("mlflow", "/health")
        made.start("worker")
        made.await_answer("worker", "/health")
        yield made


def test_the_servers_require_logins(parts: Parts) -> None:
    for name, path in {
        "prefect": "/api/work_pools/rlhf",
        "mlflow": "/api/2.0/mlflow/experiments/get",
    }.items():
        address = f"http://{HOST}:{parts.ports[name]}{path}"
        assert httpx.get(address, params={"experiment_id": "0"}, timeout=30).status_code == 401


def test_a_sweep_on_postgres_and_s3_ends_in_both_and_its_runs_push(parts: Parts) -> None:
    service = Service(parts.root, LOGIN)
    toy.until(lambda: "id" in service.call("GET", "/deployments/name/rlhf-sweep/sweep"), "the deployments")
    pushed = service.start(name="pushed", push=True)
    state = service.end(pushed)
    assert (state["type"], state["name"]) == ("COMPLETED", "Completed"), service.logs(pushed)
    assert any(key.startswith("project/files/md5/") for key in parts.objects("dvc"))
    parameters = {"grid": {"ppo.kl_coef": [0.3]}, "seeds": [1], "name": "small"}
    swept = service.start("rlhf-sweep/sweep", **parameters)
    assert service.end(swept)["type"] == "COMPLETED", service.logs(swept)
    assert '"setting": "ppo.kl_coef=0.3"' in service.artifact("rlhf-sweep")
    toy.until(lambda: service.mlflow(pushed)["info"]["status"] == "FINISHED", "MLflow")
    assert any(key.endswith("/artifacts/plots/ppo.csv") for key in parts.objects("mlflow"))
    assert toy.tags(service.mlflow(pushed))["dvc.exp"] == "pushed"
