"""The files for compose, the image, Kubernetes and Slurm, as far as their engines are not needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values
from ruamel.yaml import YAML

from rlhf_tasks.training import auto
from tests.flows import toy

INFRA = Path(__file__).parents[1] / "infra"
SECRET = re.compile(r"PASSWORD|SECRET|KEY|AUTH_STRING")


def yaml(path: Path) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all(path.read_text(encoding="utf-8")))


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml(INFRA / "compose.yaml")[0]
    return found


def test_compose_waits_for_what_it_needs_to_be_healthy() -> None:
    services = compose()["services"]
    assert set(services) == {"postgres", "s3", "buckets", "prefect", "mlflow", "worker"}
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            condition = how["condition"]
            assert needed in services, name
            assert condition == "service_completed_successfully" or "healthcheck" in services[needed]
    ones_that_stay = set(services) - {"buckets"}
    assert all("healthcheck" in services[name] for name in ones_that_stay)


def test_every_prefect_server_has_our_order_of_events() -> None:
    """Without it, the end of a scheduled run is notified 15 minutes late."""
    name = "PREFECT_SERVER_EVENTS_CAUSAL_ORDERING"
    (deployment,) = [one for one in yaml(INFRA / "kubernetes/servers.yaml") if is_prefect(one)]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    in_pod = {one["name"]: one.get("value") for one in container["env"]}[name]
    in_compose = compose()["services"]["prefect"]["environment"][name]
    assert in_pod == in_compose == "flows.server"


def is_prefect(document: dict[str, Any]) -> bool:
    return bool((document["kind"], document["metadata"]["name"]) == ("Deployment", "prefect"))


def test_compose_binds_to_loopback_and_holds_no_secret() -> None:
    text = (INFRA / "compose.yaml").read_text(encoding="utf-8")
    needed = set(re.findall(r"\$\{(\w+):\?", text))
    given = re.findall(r"^(\w+)=(.*)$", (INFRA / "env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert needed <= {name for name, _ in given}
    assert [name for name, value in given if value and SECRET.search(name)] == []
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("${RLHF_BIND:-127.0.0.1}:"), name
        for variable, value in service.get("environment", {}).items():
            if SECRET.search(variable) and not variable.startswith("MLFLOW_AUTH_CONFIG"):
                assert ":?" in str(value), f"{name} has {variable} from nowhere"


def test_compose_as_docker_reads_it() -> None:
    docker = shutil.which("docker")
    has = docker and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    if not has:
        pytest.skip("docker compose is not installed")
    names = re.findall(r"\$\{(\w+):\?", (INFRA / "compose.yaml").read_text(encoding="utf-8"))
    environment = dict(os.environ) | dict.fromkeys(names, "x") | {"RLHF_PROJECT": "/project"}
    words = ["docker", "compose", "-f", str(INFRA / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_image_runs_without_root_and_copies_existing_files() -> None:
    lines = (INFRA / "Dockerfile").read_text(encoding="utf-8").splitlines()
    words = [line.split() for line in lines if line and not line.startswith(("#", " "))]
    assert words[0][0] == "ARG"
    assert words[0][1].startswith("BASE=")
    assert ["FROM", "${BASE}"] in words
    users = [line[1] for line in words if line[0] == "USER"]
    assert users == ["rlhf"]
    copied = [path for line in words if line[0] == "COPY" for path in line[1:-1]]
    allowed = (INFRA.parent / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for path in copied:
        assert (INFRA.parent / path).exists(), path
        assert f"!{path}" in allowed, path


def test_every_image_has_a_version_and_ours_is_the_projects() -> None:
    text = (INFRA.parent / "pyproject.toml").read_text(encoding="utf-8")
    own = f"rlhf:{tomllib.loads(text)['project']['version']}"
    images = [service["image"] for service in compose()["services"].values()]
    defaults = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", image) for image in images]
    base = re.search(r"ARG BASE=(\S+)", (INFRA / "Dockerfile").read_text(encoding="utf-8"))
    assert base is not None
    for image in [*defaults, base[1]]:
        assert re.search(r":\w*\.?\d+\.\d+", image) or re.search(r"RELEASE\.\d{4}-", image), image
    kustomized = yaml(INFRA / "kubernetes/kustomization.yaml")[0]["images"][0]
    assert own == f"{kustomized['newName']}:{kustomized['newTag']}"
    assert own == template()["variables"]["properties"]["image"]["default"]
    assert own in defaults
    assert compose()["x-image"]["build"]["args"]["BASE"] == f"${{RLHF_BASE:-{base[1]}}}"


def template() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((INFRA / "kubernetes/job-template.json").read_text(encoding="utf-8"))
    return found


def test_prefect_accepts_the_job_template() -> None:
    made = WorkPoolCreate(name="gpus", type="kubernetes", base_job_template=template())
    assert made.base_job_template["variables"]["properties"]["gpus"]["default"] == 1
    broken = template()
    broken["job_configuration"]["job_manifest"]["spec"]["backoffLimit"] = "{{ no_such_variable }}"
    with pytest.raises(ValueError, match="no_such_variable"):
        WorkPoolCreate(name="gpus", type="kubernetes", base_job_template=broken)


def job(**values: Any) -> dict[str, Any]:
    """The manifest of a flow run's job, with the template's defaults."""
    properties = template()["variables"]["properties"]
    given = {name: field["default"] for name, field in properties.items() if "default" in field}
    given |= {"name": "run", "command": "python -m prefect.engine", **values}
    made: dict[str, Any] = apply_values(template()["job_configuration"], given)["job_manifest"]
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["args"] = container["args"].split()  # as Prefect's worker does
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    return made


def test_a_job_requests_its_gpus_or_rdma_and_has_restricted_rights() -> None:
    manifest = job(gpus=4)
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["resources"]["requests"]["nvidia.com/gpu"] == 4
    assert "rdma/hca" not in container["resources"]["limits"]
    assert manifest["spec"]["backoffLimit"] == 0, "Prefect retries, not Kubernetes"
    assert {"parallelism", "completions"} <= set(pod), "Prefect's worker refuses a template without them"
    assert_restricted(pod)
    (container,) = job(rdma=1)["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["rdma/hca"] == container["resources"]["requests"]["rdma/hca"] == 1


def assert_restricted(pod: dict[str, Any]) -> None:
    """Check what the namespace's `restricted` level requires of every pod."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }


def manifests() -> list[dict[str, Any]]:
    names = yaml(INFRA / "kubernetes/kustomization.yaml")[0]["resources"]
    return [tree for name in names for tree in yaml(INFRA / "kubernetes" / name)]


def test_the_manifests_fit_together() -> None:
    found = {(tree["kind"], tree["metadata"]["name"]): tree for tree in manifests()}
    accounts = {name for kind, name in found if kind == "ServiceAccount"}
    claims = {name for kind, name in found if kind == "PersistentVolumeClaim"}
    defaults = {k: v.get("default") for k, v in template()["variables"]["properties"].items()}
    assert defaults["claim"] in claims
    assert defaults["service_account_name"] in accounts
    for (kind, name), tree in found.items():
        if kind == "Deployment":
            spec = tree["spec"]
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
            pod = spec["template"]["spec"]
            assert_restricted(pod)
            assert pod.get("serviceAccountName", "rlhf-worker") in accounts
            texts = [entry["name"] for entry in pod["containers"][0]["env"] if SECRET.search(entry["name"])]
            held = [text for text in texts if not text.endswith(("_SECRET_NAME", "_SECRET_KEY"))]
            assert held == [], f"{name} has secrets in the manifest"
            volumes = [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
            assert {volume["claimName"] for volume in volumes if volume} <= claims, name
        if kind == "Service" and name != "rlhf-nodes":  # whose pods are those of jobs
            deployment = found["Deployment", name]["spec"]["template"]
            assert tree["spec"]["selector"].items() <= deployment["metadata"]["labels"].items()
            ports = [port["containerPort"] for port in deployment["spec"]["containers"][0]["ports"]]
            assert [port["targetPort"] for port in tree["spec"]["ports"]] == ports
            assert tree["spec"].get("type", "ClusterIP") == "ClusterIP", (
                "nothing may listen outside the cluster"
            )


def test_the_pods_of_several_nodes_are_numbered_and_find_the_first_one() -> None:
    made = job(nodes=3)
    spec, pod = made["spec"], made["spec"]["template"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    (service,) = [one for one in manifests() if one["metadata"]["name"] == "rlhf-nodes"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "the first pod is ready before it has an address"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == "rlhf-nodes"
    _, script, nodes = pod["spec"]["containers"][0]["command"]
    assert nodes == "--nodes=3"
    assert f'MASTER_ADDR="$job-0.{pod["spec"]["subdomain"]}"' in (INFRA.parent / script).read_text("utf-8")


@pytest.mark.parametrize("nodes", [1, 2])
def test_jobs_and_manifests_are_valid_by_the_published_schemas(nodes: int) -> None:
    """Strictly: a field that Kubernetes does not know is an error."""
    schemas = pytest.importorskip("kubernetes_validate", reason="needs `pip install -e '.[kubernetes]'`")
    made = job(nodes=nodes)
    pod = made["spec"]["template"]["spec"]
    for name in ("parallelism", "completions"):
        # They belong to the job, which has them too. Prefect's worker refuses a pod without them
        # (`_get_base_job_manifest` of prefect_kubernetes), and Kubernetes drops them with a warning.
        assert name in made["spec"]
        del pod[name]
    for tree in [made, *manifests()]:
        schemas.validate(tree, schemas.latest_version(), strict=True)
    pod["nodeName"] = 7
    with pytest.raises(schemas.ValidationError):
        schemas.validate(made, schemas.latest_version(), strict=True)


def test_further_pods_join_each_launch_of_the_first_and_end_with_it(tmp_path: Path) -> None:
    """The flow launches sft, whose first try fails, and then ppo in a workspace."""
    tools, place = tmp_path / "tools", tmp_path / "workspace"
    tools.mkdir()
    place.mkdir()
    words = "$MACHINE_RANK/$RLHF_MACHINES $1 $MASTER_ADDR $PYTHONPATH $PWD"
    record = f'#!/bin/bash\necho "{words}" >>{tmp_path}/joined\n'
    (tools / "rlhf").write_text(f'{record}[ "$1" = ppo ]\n', encoding="utf-8")
    (tools / "rlhf").chmod(0o755)
    joined = tmp_path / "joined"
    program = (
        "import os, time; from pathlib import Path; from rlhf_tasks.training import launch\n"
        "folder = Path(os.environ[launch.LAUNCHES])\n"
        "launch.announce(folder, 'sft'); os.chdir('workspace'); launch.announce(folder, 'ppo')\n"
        f"joined = Path({str(joined)!r})\n"
        "while not joined.exists() or joined.read_text().count(chr(10)) < 2: time.sleep(0.1)\n"
    )
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    base = os.environ | {"PATH": path, "PYTHONPATH": str(INFRA.parent)}

    def pod(rank: int, *words: str) -> subprocess.Popen[bytes]:
        own = {"JOB_COMPLETION_INDEX": str(rank), "HOSTNAME": f"a-run-{rank}"}
        script = ["bash", str(INFRA / "kubernetes/node.sh"), "--nodes=2", *words]
        return subprocess.Popen(script, cwd=tmp_path, env=base | own)

    with pod(1, "unused") as second, pod(0, sys.executable, "-c", program) as first:
        assert first.wait(60) == 0
        assert second.wait(60) == 0, "a launch that failed is for the first pod to judge"
    lines = joined.read_text(encoding="utf-8").splitlines()
    assert lines == [
        f"1/2 sft a-run-0.rlhf-nodes {INFRA.parent} {tmp_path}",
        f"1/2 ppo a-run-0.rlhf-nodes {INFRA.parent} {place}",
    ]


def test_the_manifests_as_kustomize_reads_them() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    words = ["kubectl", "kustomize", str(INFRA / "kubernetes")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = list(YAML(typ="safe", pure=True).load_all(done.stdout))
    assert {tree["metadata"].get("namespace", "rlhf") for tree in made} == {"rlhf"}
    assert len(made) == len(manifests()) + 2, "and the two config maps"


SRUN = """\
#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do SLURM_PROCID=$rank "$@" & done
wait
"""
DVC = """\
#!/bin/bash
echo "dvc ${MACHINE_RANK:--} ${@: -1}" >> "$CALLS"
"""
PYTHON = """\
#!/bin/bash
case "$*" in
  *stage_plan*data) echo unchanged ;;
  *stage_plan*sft) echo restore ;;
  *stage_plan*) echo run ;;
  *) echo data sft dpo ppo judge ;;
esac
"""
RLHF = '#!/bin/bash\necho "rlhf $MACHINE_RANK $1 $MASTER_ADDR ${SRUN_CPUS_PER_TASK:-as given}" >> "$CALLS"\n'


def test_the_slurm_file_is_valid_and_needs_no_gpu_unless_an_option_requests_one() -> None:
    file = INFRA / "slurm/pipeline.sbatch"
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    text = file.read_text(encoding="utf-8")
    assert tuple(re.findall(r'"run ([a-z]+)"', text)) == auto.TRAINED, "stages that have workers"
    options = re.findall(r"^#SBATCH (--[a-z-]+)=?(.*)$", text, re.MULTILINE)
    assert "--gpus-per-node" not in dict(options)
    assert dict(options)["--nodes"] == "1", "launch.num_machines of the shipped params.yaml"
    docs = (INFRA.parent / "docs/how-to/several-gpus.md").read_text(encoding="utf-8")
    commands = re.findall(r"^sbatch .*$", docs, re.MULTILINE)
    assert len(commands) == 3
    assert [command for command in commands if f"#   {command}\n" not in text] == []


def stand_ins(folder: Path, scripts: dict[str, str], **variables: str) -> dict[str, str]:
    """The environment of a job that has these programs, and an empty virtual environment."""
    tools = folder / "tools"
    tools.mkdir()
    for name, text in scripts.items():
        (tools / name).write_text(text, encoding="utf-8")
        (tools / name).chmod(0o755)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").touch()
    return os.environ | variables | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(("given", "cpus"), [({"SLURM_CPUS_PER_TASK": "32"}, "32"), ({}, "as given")])
def test_slurm_runs_training_stages_on_all_nodes_and_others_on_one(
    given: dict[str, str], cpus: str, tmp_path: Path
) -> None:
    """Since Slurm 22.05 `srun` reads the job's CPUs per task from a variable of its own."""
    scripts = {"srun": SRUN, "dvc": DVC, "rlhf": RLHF, "scontrol": "#!/bin/bash\nprintf 'n1\\nn2\\n'\n"}
    calls = tmp_path / "calls"
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "CALLS": str(calls), **given}
    environment = stand_ins(tmp_path, scripts | {"python": PYTHON}, **slurm)
    words = ["bash", str(INFRA / "slurm/pipeline.sbatch")]
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=60)
    done = calls.read_text(encoding="utf-8").splitlines()
    on_both = [f"{who} {stage}" for stage in ("dpo", "ppo") for who in ("dvc 0", "rlhf 1")]
    done_by = [" ".join(call.split()[:3]) for call in done]
    assert sorted(done_by) == sorted(["dvc - sft", *on_both, "dvc - judge"])
    assert {call.split(maxsplit=3)[3] for call in done if call.startswith("rlhf")} == {f"n1 {cpus}"}
    assert done[0] == "dvc - sft"
    assert done[-1] == "dvc - judge"


STAGE = """\
import pathlib, sys, time
try:
    pathlib.Path("started").touch()
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path("kept").touch()
    sys.exit(1)
"""


def test_slurms_warning_lets_the_stage_save_its_state_and_requeues_the_job(tmp_path: Path) -> None:
    (tmp_path / "stage.py").write_text(STAGE, encoding="utf-8")
    real = shlex.quote(sys.executable)
    scripts = {
        "srun": SRUN,
        "dvc": f'#!/bin/bash\n[[ "$*" == *status* ]] || exec {real} stage.py\n',
        "scontrol": '#!/bin/bash\n[ "$1" = requeue ] && echo "$2" > requeued || echo n1\n',
        "python": '#!/bin/bash\n[[ "$*" != *restorable* ]] || exit 1\necho judge\n',
    }
    slurm = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "7"}
    environment = stand_ins(tmp_path, scripts, **slurm)
    words = ["bash", str(INFRA / "slurm/pipeline.sbatch")]
    with subprocess.Popen(words, cwd=tmp_path, env=environment, preexec_fn=restore_interrupts) as job:
        toy.until((tmp_path / "started").exists, "the start of the stage")
        job.send_signal(signal.SIGINT)  # to the batch shell alone, as --signal=B:INT does
        assert job.wait(60) == 130
    assert (tmp_path / "kept").exists(), "the stage must get the interrupt"
    assert (tmp_path / "requeued").read_text(encoding="utf-8") == "7\n"


def restore_interrupts() -> None:
    """SIGINT works as in a job of Slurm, wherever the tests run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.e2e
def test_a_remotes_secrets_stay_out_of_git(tmp_path: Path) -> None:
    root = toy.make(tmp_path / "project")
    keys = {"AWS_ACCESS_KEY_ID": "name", "AWS_SECRET_ACCESS_KEY": "hidden"}
    words = [str(INFRA / "remotes.sh"), "s3", "s3://dvc/project", "http://127.0.0.1:9000"]
    subprocess.run(words, cwd=root, env=toy.environment() | keys, check=True, capture_output=True)
    config = (root / ".dvc/config").read_text(encoding="utf-8")
    assert "s3://dvc/project" in config
    assert "hidden" not in config
    assert "127.0.0.1" not in config, "other machines reach the store by another name"
    assert "hidden" in (root / ".dvc/config.local").read_text(encoding="utf-8")
    assert ".dvc/config.local" not in toy.git(root, "status", "--porcelain", "--untracked-files=all")
