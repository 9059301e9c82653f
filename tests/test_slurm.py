"""Slurm as it really behaves: a cluster of one node is set up and removed here.

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values

from rlhf_tasks.presets import Request
from tests import slurm
from tests.flows import toy
from tests.flows.chain import Chain
from tests.slurm import Slurm

INFRA = toy.ROOT / "infra/slurm"
slow = pytest.mark.slow
needs_slurm = pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the repository with preset smoke, longer in PPO, and the environment that jobs activate."""
    folder = tmp_path / "project"
    toy.git(toy.ROOT, "clone", "-q", str(toy.ROOT), str(folder))
    toy.identify(folder)
    changes = {"ppo.total_episodes": 4096, "resume.every_seconds": 0.5, "tracking.enabled": False}
    text, _, _ = Request("smoke", overrides=changes).resolve((folder / "params.yaml").read_text("utf-8"))
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    programs = Path(sys.executable).parent
    lines = [f'export PATH="{programs}:$PATH" PYTHONPATH="$PWD" OMP_NUM_THREADS=1']
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@slow
@pytest.mark.e2e
@needs_slurm
def test_a_pre_empted_pipeline_is_queued_again_resumes_and_ends(cluster: Slurm, clone: Path) -> None:
    job = cluster.call("sbatch", "--parsable", "--partition=low", "infra/slurm/pipeline.sbatch", folder=clone)
    state = clone / ".rlhf/state/ppo"
    log = clone / f"rlhf-{job}.log"

    def is_in_ppo() -> bool:
        assert cluster.job(job)["JobState"] in ("PENDING", "RUNNING"), log.read_text(encoding="utf-8")
        return any(state.glob("*/*/step-*/manifest.json"))

    toy.until(is_in_ppo, "a snapshot of PPO")
    urgent = cluster.call("sbatch", "--parsable", "--partition=high", "--wrap", "sleep 1", folder=clone)
    toy.until(lambda: cluster.job(urgent)["JobState"] == "COMPLETED", "the job that pre-empts")
    toy.until(
        lambda: cluster.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), "the end of the job"
    )
    found, text = cluster.job(job), log.read_text(encoding="utf-8")
    assert (found["JobState"], found["Restarts"]) == ("COMPLETED", "1"), text
    assert "resumed from the snapshot after step" in text, text
    assert (clone / "reports/index.html").exists()
    assert json.loads((clone / "metrics/ppo.json").read_text(encoding="utf-8"))["episode"] == 4096
    assert toy.git(clone, "status", "--porcelain", "dvc.lock").strip() == "M dvc.lock"


# ------------------------------------------------------------------------------------------- Prefect


def template() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((INFRA / "job-template.json").read_text(encoding="utf-8"))
    return found


def test_prefect_accepts_the_job_template_and_gives_its_options_to_sbatch() -> None:
    made = WorkPoolCreate(name="slurm", type="process", base_job_template=template())
    assert made.base_job_template["job_configuration"]["working_dir"] == "{{ working_dir }}"
    values = {"sbatch_options": "--gpus-per-node=8 --time=1:00:00"}
    found = apply_values(template()["job_configuration"], values)
    assert found["command"] == "bash infra/slurm/flow-run.sh --gpus-per-node=8 --time=1:00:00"
    assert "command" not in template()["variables"]["properties"], "rlhf up would replace the script"


STAND_INS = {
    "sbatch": '#!/bin/bash\necho "$*" >sent; echo "7;test"; exec sleep 60\n',
    "squeue": "#!/bin/bash\necho $STATE\n",
    "scancel": '#!/bin/bash\necho "$*" >>cancelled; kill $(pgrep -f "^sleep 60$" -P $(cat parent))\n',
}


@pytest.mark.parametrize(("state", "sent"), [("PENDING", "7"), ("RUNNING", "--batch --signal=TERM 7")])
def test_a_cancelled_flow_run_ends_its_job(tmp_path: Path, state: str, sent: str) -> None:
    """A running flow gets SIGTERM alone, and ends by itself; a waiting job is removed."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ["bash", str(INFRA / "flow-run.sh"), "--time=1:00"]
    environment = os.environ | {"PATH": path, "STATE": state}
    with subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True) as script:
        (tmp_path / "parent").write_text(str(script.pid), encoding="utf-8")
        toy.until((tmp_path / "sent").exists, "the submission")
        script.terminate()
        assert script.wait(60) == 143
    assert (tmp_path / "cancelled").read_text(encoding="utf-8").strip() == sent
    given = (tmp_path / "sent").read_text(encoding="utf-8")
    assert "--wait" in given
    assert "--time=1:00 --wrap exec python -P -m prefect.engine" in given


@contextmanager
def worker(root: Path, environment: dict[str, str]) -> Iterator[None]:
    words = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "slurm", "--type", "process"]
    with (root / ".rlhf/slurm-worker.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=root, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            child.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:  # on a busy machine a worker of Prefect may miss the signal
            process.kill()
            process.wait()


@slow
@pytest.mark.e2e
@needs_slurm
def test_a_flow_run_is_a_job_of_slurm_and_is_cancelled_with_it(cluster: Slurm, tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    chain = Chain(root)
    shutil.copytree(INFRA, root / "infra/slurm")
    toy.commit(root)
    with toy.service(root) as service:
        environment = toy.environment() | cluster.environment
        environment["PREFECT_API_URL"] = f"{service.url('prefect')}/api"
        make = ["work-pool", "create", "slurm", "--type", "process"]
        make += ["--base-job-template", "infra/slurm/job-template.json"]
        for words in (["prefect", *make], ["rlhf_tasks.cli", "up", "--pool", "slurm"]):
            subprocess.run(
                [sys.executable, "-m", *words], cwd=root, env=environment, check=True, capture_output=True
            )
        with worker(root, environment):
            run = service.start("rlhf-pipeline/pipeline-slurm", seed=5)
            assert service.end(run)["type"] == "COMPLETED", service.logs(run)
            toy.until(lambda: not cluster.jobs(), "the end of the job")
            (job,) = (
                file.stem.removeprefix("slurm-")
                for file in (root / ".rlhf").glob("slurm-*.log")
                if file.stem.removeprefix("slurm-").isdigit()
            )
            assert cluster.job(job)["JobState"] == "COMPLETED"
            chain.hold("ppo")
            run = service.start("rlhf-pipeline/pipeline-slurm", seed=6)
            toy.until(chain.waiting.exists, "the outs of ppo")
            stage = int(chain.waiting.read_text(encoding="utf-8"))
            (job,) = cluster.jobs()
            service.cancel(run)
            assert service.end(run)["type"] == "CANCELLED", service.logs(run)
            toy.until(lambda: not cluster.jobs(), "the end of the cancelled job")
            assert not psutil.pid_exists(stage), "no process of the stage is left"
            assert "CANCELLED" not in cluster.job(job)["JobState"], "the flow ended by itself, in its time"
