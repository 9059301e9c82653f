"""`rlhf run`: what it says will run, and how it ends, with real DVC and stages of a line each."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhf_tasks import config, console
from rlhf_tasks.cli import main, run
from rlhf_tasks.project import durations, dvc_cli, inputs
from rlhf_tasks.project.paths import Paths
from tests.conftest import Command
from tests.flows import toy
from tests.promotion import planted

DVC_YAML = """
stages:
  sft:
    cmd: {python} -c "open('made', 'w').write(open('given').read())"
    deps: [given]
    outs: [made]
  report:
    cmd: {python} stage.py
    deps: [made]
    outs: [page]
"""
STAGE = """
import json, os, sys
if open("made").read() == "wrong":
    json.dump({"kind": "user", "message": "no"}, open(os.environ["RLHF_FAILURE_FILE"], "w"))
    sys.exit(2)
open("page", "w").write("x")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy.repository(), tmp_path, dirs_exist_ok=True)
    planted.params(tmp_path)
    Path("dvc.yaml").write_text(DVC_YAML.format(python=sys.executable), encoding="utf-8")
    Path("stage.py").write_text(STAGE, encoding="utf-8")
    Path("given").write_text("one", encoding="utf-8")
    monkeypatch.setattr(inputs, "write", lambda *given: None)
    console.set_quiet(False)
    return tmp_path


def test_a_run_says_what_will_run_and_why(project: Path, rlhf: Command) -> None:
    assert run.explain_changes(Paths()) == {"sft": "it has not run yet", "report": "it has not run yet"}
    head = rlhf("run").out.splitlines()[:3]
    assert re.fullmatch(r"default-[0-9a-f]{4}: 2 of 2 stages run: sft, report", head[0])
    assert "not known yet" in head[1]
    Path("page").write_text("y", encoding="utf-8")
    assert run.explain_changes(Paths()) == {"report": "its results have changed"}
    Path("page").unlink()
    assert run.explain_changes(Paths()) == {"report": "its results are not here"}
    Path("page").write_text("x", encoding="utf-8")
    Path("given").write_text("two", encoding="utf-8")
    for stage in ("sft", "report"):
        durations.record(Paths().home, stage, 40.0)
    shown = rlhf("run --dry").out.splitlines()
    assert shown[2:] == ["sft | given | 40s", "report | after sft | 40s"]
    assert Path("made").read_text(encoding="utf-8") == "one", "nothing ran"


def test_a_runs_name_is_its_preset_and_what_differs(project: Path, rlhf: Command) -> None:
    toy.git(project, "add", "params.yaml")
    toy.git(project, "commit", "-qm", "parameters")
    for changes, name in {
        "": "default",
        "promotion.max_kl=null": "default-max_kl=None",
        "smoke promotion.max_kl=null": "smoke-max_kl=None",
        "n_plus": "n_plus",
        "n_plus ppo.kl_coef=0.07": "n_plus-kl_coef=0.07",
        "ziegler ppo.kl_coef=0.05": "ziegler-kl_coef=0.05",
        "smoke ppo.total_episodes=8192": "smoke-total_episodes=8192",
        "smoke grpo": "smoke_grpo",
    }.items():
        toy.git(project, "checkout", "-q", "params.yaml")
        rlhf(f"preset {changes}")
        assert run.run_name(Paths(), config.load(Paths().params))[:-5] == name
    assert "without --set" in rlhf("preset --set preset=smok", status=2).err
    toy.git(project, "checkout", "-q", "params.yaml")
    file = project / "params.yaml"
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("preset:")]
    file.write_text("\n".join(["preset: smok", *lines]), encoding="utf-8")
    assert "there is no preset 'smok'; give one of" in rlhf("run", status=2).err


def test_a_run_without_changes_shows_the_card(project: Path, rlhf: Command) -> None:
    dvc_cli.run(project, "repro", "--quiet")
    shown = rlhf("run").out
    assert shown.startswith("Nothing has changed")
    assert "Trained" in shown


def test_a_mistake_in_a_stage_ends_with_2_and_a_fault_with_1(project: Path, rlhf: Command) -> None:
    Path("given").write_text("wrong", encoding="utf-8")
    rlhf("run", status=2)
    Path("stage.py").write_text("raise SystemExit(3)", encoding="utf-8")
    rlhf("run", status=1)


def test_each_sigterm_reaches_the_stage_of_a_run_in_the_background_of_a_script(
    project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """There SIGINT, which the run sends to DVC and its stages, is ignored from the start."""
    Path("stage.py").write_text(
        "import pathlib, time\n"
        "for name in ('first', 'second'):\n"
        "    try:\n        pathlib.Path('before ' + name).touch(); time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        pathlib.Path(name).touch()\n"
        "raise SystemExit(130)\n",
        encoding="utf-8",
    )

    def stop() -> None:
        for name in ("first", "second"):
            while not Path(f"before {name}").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        threading.Thread(target=stop, daemon=True).start()
        assert main.main(["run"]) == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGINT, before)
    assert Path("second").exists()
    assert "rlhf: SIGTERM; DVC and its stage get it as Ctrl-C" in capfd.readouterr().err
