"""What the machine, the shell or the project's folder is like: each is withstood, or named in one message."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_tasks.tracking import context
from tests.conftest import ROOT, Command
from tests.flows import toy
from tests.training.test_resume import workspace

KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
DVC_YAML = """
stages:
  prepare:
    cmd: {python} -P stage.py
    outs: [made]
"""


@pytest.fixture
def repository(project: Path) -> Path:
    """A project in a git and DVC repository, whose one stage is stage.py."""
    shutil.copytree(toy.repository(), project, dirs_exist_ok=True)
    (project / "dvc.yaml").write_text(DVC_YAML.format(python=sys.executable), encoding="utf-8")
    (project / "stage.py").write_text("open('made', 'w').write('x')\n", encoding="utf-8")
    toy.git(project, "add", ".")
    toy.git(project, "commit", "-qm", "start")
    return project


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
@pytest.mark.parametrize("command", ["run --dry", "inputs", "prepare", "params", "compare x", "up", "sync"])
def test_params_in_another_encoding_are_one_message(
    command: str, encoding: str, project: Path, rlhf: Command
) -> None:
    text = Path("params.yaml").read_text(encoding="utf-8").encode("ascii", "replace").decode() + "# caf\xe9\n"
    Path("params.yaml").write_text(text, encoding=encoding)
    told = rlhf(command, status=2).err
    assert told.count("\n") == 1
    assert "params.yaml is not UTF-8" in told
    assert "save it as UTF-8" in told


STRAY = {
    **{"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"},
    **{"PMI_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
}
"""What a cluster's shell may set: all but the address of a group."""


@pytest.mark.e2e
def test_a_stage_in_the_shell_of_a_cluster_runs_alone(trained: Path, tmp_path: Path) -> None:
    """In a folder with a file that is named like a module of the standard library, too."""
    folder = workspace(trained, tmp_path / "project")
    (folder / "numbers.py").write_text("raise SystemExit('not this one')\n", encoding="utf-8")
    words, own = [sys.executable, "-P", "-m", "rlhf_tasks.cli", "sft"], {"OMP_NUM_THREADS": "1", **STRAY}
    environment = os.environ | own | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "sft  done in" in done.stdout


@pytest.mark.parametrize("lacks", context.GROUP)
def test_a_process_is_of_a_group_by_a_whole_set_of_variables(
    lacks: str, project: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    for name in context.GROUP:
        monkeypatch.setenv(name, "1")
    assert rlhf("params").out == "", "another rank prints nothing"
    monkeypatch.delenv(lacks)
    assert "seed" in rlhf("params").out


def test_no_program_is_started_where_a_file_of_the_project_could_stand_for_a_module() -> None:
    """`python -m` looks into the working folder first; `-P` is before each `-m` of ours."""
    started = 0
    for file in [path for part in ("rlhf_tasks", "flows", "infra") for path in (ROOT / part).rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List):
                words = [one.value for one in node.elts if isinstance(one, ast.Constant)]
                if "-m" in words:
                    assert words[words.index("-m") - 1] in ("-P", "-uP"), (file, words)
                    started += 1
    assert started >= 10


@pytest.mark.parametrize("command", ["run", "run --flow", "prepare", "lineage given", "up", "sync"])
def test_a_repository_of_another_user_is_named_with_the_remedy(
    command: str, repository: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    """Git's own variable for its tests stands for the other user."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    told = rlhf(command, status=2).err
    assert f"git config --global --add safe.directory {repository}" in told
    assert "git init" not in told


@pytest.mark.parametrize("command", ["run", "run --dry", "run --flow"])
def test_an_archive_of_the_project_is_named_with_the_remedy(
    command: str, repository: Path, rlhf: Command
) -> None:
    shutil.rmtree(repository / ".git")
    told = rlhf(command, status=2).err
    assert f"rlhf: {repository} is in no git repository" in told
    assert "`git init`, `git add .`, `git commit" in told


def test_a_stage_that_was_killed_ends_the_run_with_a_line_that_says_so(
    repository: Path, rlhf: Command
) -> None:
    (repository / "stage.py").write_text(KILLED, encoding="utf-8")
    told = rlhf("run", status=1).err
    assert "was killed (SIGKILL)" in told
    assert "out of memory" in told


STOPPED = """
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.training.signals import Stopped

def stop(*_):
    raise Stopped(15)

runner._run = stop
try:
    runner.run("prepare", Paths())
except Stopped as error:
    raise SystemExit(error.status)
"""


def test_a_stage_that_a_signal_ended_is_not_said_to_have_crashed(repository: Path, rlhf: Command) -> None:
    (repository / "stage.py").write_text(STOPPED, encoding="utf-8")
    told = rlhf("run", status=1).err
    assert "rlhf: stage prepare was terminated (SIGTERM); `dvc repro` shows the status" in told
    assert "crashed" not in told
