"""`rlhf promote EXPERIMENT` judges a run that DVC keeps, and does not touch the working tree."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.judging.judges.build import build_judges
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, git, hashing, workspaces
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking.store import embedded_uri
from tests.conftest import Command
from tests.flows import toy
from tests.promotion import planted
from tests.promotion.conftest import Measured

pytestmark = [pytest.mark.usefixtures("measured"), pytest.mark.e2e]
NAME = "rlhf-policy"
STAGES = f"""\
stages:
  inputs:
    cmd: {sys.executable} -m rlhf_tasks.cli inputs
    always_changed: true
    outs: [inputs/ppo.json, inputs/judge.json]
  ppo:
    cmd: sh given/ppo.sh
    deps: [given, inputs/ppo.json]
    outs: [models/policy, models/reward_heldout, models/lineage/ppo.json]
    metrics: [{{metrics/ppo.json: {{cache: false}}}}]
  judge:
    cmd: mkdir -p evaluation/judge && cp given/results.json evaluation/judge/results.json
    deps: [models/policy, given, inputs/judge.json]
    outs: [evaluation/judge]
"""
PPO = """\
mkdir -p models/policy models/reward_heldout models/lineage metrics
grep '^seed:' params.yaml | cut -d' ' -f2 | tr -d '\\n' > models/policy/weights
echo '{}' > models/policy/config.json
echo its own > models/reward_heldout/w
cp given/lineage.json models/lineage/ppo.json
cp given/ppo.json metrics/ppo.json
"""


RUBRIC = "{prompt} {first} {second}"
OWN_FILES: dict[str, Any] = {
    "data.path": "given",
    "judge.labels": "given/labels.jsonl",
    "judge.judges": [
        {"kind": "gold", "name": "gold"},
        {"kind": "reward_model", "name": "reward_model", "path": "models/reward_heldout"},
        {"kind": "reward_model", "name": "elsewhere", "path": "elsewhere"},
        {"kind": "function", "name": "own", "function": "opinion_of_here:scores"},
        {
            "kind": "llm", "name": "gpt", "base_url": "http://127.0.0.1:9/v1", "model": "m",
            "key_variable": None, "prompt": "rubric.txt", "logprobs": False, "max_reply_tokens": 4,
            "concurrency": 1, "timeout_seconds": 1.0, "max_retries": 0, "budget": None,
        },
    ],
    "judge.retention.general": "general.txt",
    "judge.retention.tasks": {"names": ["x"], "folder": "tasks", "num_examples": None, "batch_size": 1},
}  # fmt: skip


def write_own_files(root: Path, text: str, score: int) -> None:
    """What the judges and retention tests of OWN_FILES read, which a text and a score identify."""
    for folder in ("elsewhere", "tasks"):
        (root / folder).mkdir(exist_ok=True)
    texts = {"rubric.txt": f"{text} {RUBRIC}", "elsewhere/w": text, "general.txt": text, "tasks/x.yaml": text}
    for name, content in texts.items():
        (root / name).write_text(content, encoding="utf-8")
    code = f"def scores(prompts, answers):\n    return [{score} if a == 'good' else 0 for a in answers]\n"
    (root / "opinion_of_here.py").write_text(code, encoding="utf-8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed project with the experiments one and two, to be copied. A policy is the seed as text."""
    root = tmp_path_factory.mktemp("made")
    shutil.copytree(toy.repository(), root, dirs_exist_ok=True)
    given = root / "given"
    given.mkdir()
    (given / "ppo.sh").write_text(PPO, encoding="utf-8")
    planted.put(given / "ppo.json", {"selected_episode": 256.0, "selected_kl": planted.KL})
    planted.put(given / "lineage.json", {"rlhf.run": "ppo-of-it", "git.rev": "c" * 40})
    planted.BETTER.write(given / "results.json")
    (given / "labels.jsonl").touch()
    planted.params(root, OWN_FILES)
    write_own_files(root, "then", -1)
    (root / "dvc.yaml").write_text(STAGES, encoding="utf-8")
    (root / ".gitignore").write_text(".rlhf/\n", encoding="utf-8")
    (root / ".dvcignore").write_text(".rlhf\n", encoding="utf-8")
    shutil.copy(planted.ROOT / ".dvc/config", root / ".dvc/config")  # else DVC's daemon writes files later
    dvc_cli.run(root, "remote", "add", "--default", "store", "../store")  # which nobody has made
    toy.commit(root)
    run(root, "one", seed=11)
    run(root, "two", seed=12, promotion=None)
    shutil.rmtree(root / ".rlhf")
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test: a copy of that project, with an empty MLflow store."""
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "project"
    shutil.copytree(made, root, symlinks=True)
    (root / ".rlhf").mkdir()
    shutil.copyfile(empty_store, root / ".rlhf/mlflow.db")
    monkeypatch.chdir(root)
    console.set_quiet(False)
    return root


def run(root: Path, name: str, **changes: Any) -> None:
    """Leave an experiment of this name, as the service does."""
    text, settings, _ = Request(overrides=changes).resolve(git.committed(root, "params.yaml"))
    place = workspaces.create(root, name, text, settings)
    try:
        dvc_cli.run(place.folder, "repro")
        place.save(name, instead=f"{name}-2")
    finally:
        place.remove()


def tags(root: Path, number: str) -> dict[str, str]:
    return dict(MlflowClient(embedded_uri(root / ".rlhf")).get_model_version(NAME, number).tags)


def champion(root: Path) -> str:
    aliases = MlflowClient(embedded_uri(root / ".rlhf")).get_registered_model(NAME).aliases
    return str(aliases["champion"])


def seen(root: Path) -> dict[str, str]:
    """The text of every file of the working tree, without what git, DVC and the pipeline keep there."""
    beside = {".git", ".rlhf"}
    files = (file.relative_to(root) for file in sorted(root.rglob("*")) if file.is_file())
    own = [file for file in files if file.parts[0] not in beside and ".dvc/cache" not in file.as_posix()]
    return {
        str(file): (root / file).read_text(encoding="utf-8") for file in own if ".dvc/tmp" not in str(file)
    }


def test_an_experiment_is_promoted_and_the_working_tree_is_not_touched(
    root: Path, measured: Measured, rlhf: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a folder of the same name, and without a git identity."""
    (root / "one").mkdir()
    for key in ("user.name", "user.email"):
        toy.git(root, "config", "--unset", key)
    for variable in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(root.parent))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    first, second = git.find_experiment(root, "one"), git.find_experiment(root, "two")
    (root / "given/results.json").write_text("a change of the user's\n", encoding="utf-8")
    before = seen(root)
    assert f"{NAME} version 1 (models/policy of one) is champion now" in rlhf("promote one").out
    tagged = tags(root, "1")
    assert (tagged["dvc.exp"], tagged["dvc.rev"], tagged["dvc.path"]) == ("one", first, "models/policy")
    assert (tagged["rlhf.run"], tagged["verdict"]) == ("ppo-of-it", "passed")
    assert "rlhf.folder" not in tagged, "the cache has it, and its folder is removed"
    rlhf("promote two")
    assert measured.compared == ["11"], "its results count, and only the champion is compared"
    assert (champion(root), tags(root, "2")["dvc.rev"]) == ("2", second)
    assert seen(root) == before
    assert Path.cwd() == root
    assert list((root / ".rlhf/workspaces").iterdir()) == []
    assert toy.git(root, "worktree", "list").count("\n") == 1
    rlhf("promote --rollback")
    assert champion(root) == "1"


def test_the_gate_and_the_judges_are_those_of_the_working_tree(
    root: Path, measured: Measured, rlhf: Command
) -> None:
    """A sweep's run without a gate can be promoted; other settings of the judges judge it again."""
    planted.params(root, OWN_FILES | {"promotion.max_kl": 1.0})
    assert "KL 1.5 > 1" in rlhf("promote two", status=3).out
    assert measured.compared == []
    planted.params(root, OWN_FILES | {"judge.temperature": 0.5})
    rlhf("promote two")
    assert measured.compared == ["models/sft", "models/base"]


def test_judges_read_files_of_the_working_tree_and_outs_of_the_experiment(
    root: Path, measured: Measured, rlhf: Command
) -> None:
    read: dict[str, Any] = {}

    def check(view: JudgeView, paths: Paths, functions: Path) -> None:
        judges: dict[str, Any] = {judge.name: judge for judge in view.judge.judges}
        assert view.judge.retention is not None
        assert view.judge.retention.tasks is not None
        files = {name: f"{judges[name].path}/w" for name in ("reward_model", "elsewhere")}
        files |= {"gpt": judges["gpt"].prompt, "general": str(view.judge.retention.general)}
        files["task"] = f"{view.judge.retention.tasks.folder}/x.yaml"
        read.update({n: (paths.root / file).read_text(encoding="utf-8").strip() for n, file in files.items()})
        (own,) = build_judges(view.judge, torch.device("cpu"), paths, names=["own"], functions_root=functions)
        read["own"] = own.compare(["p"], ["good"], ["bad"]).outcomes.tolist()

    measured.check = check
    rlhf("promote one")
    assert read == {}, "the files are the same: the experiment's own results count"
    write_own_files(root, "now", 1)
    others = "elsewhere, general.txt, opinion_of_here.py, rubric.txt, tasks"
    said = rlhf("promote two").out
    assert f"the results here were measured with another {others}: the policy" in said
    assert read == {
        "reward_model": "its own", "elsewhere": "now", "gpt": f"now {RUBRIC}", "general": "now",
        "task": "now", "own": [1.0],
    }  # fmt: skip
    assert Path.cwd() == root


def test_missing_weights_are_a_user_error_that_says_how_to_get_them(root: Path, rlhf: Command) -> None:
    shutil.rmtree(root / ".dvc/cache")
    message = rlhf("promote one", status=2).err
    assert "the DVC cache lacks files of the experiment one: models/policy (" in message
    assert "`dvc exp push GIT_REMOTE one`" in message
    assert "`dvc exp apply one && dvc repro`" in message
    assert MlflowClient(embedded_uri(root / ".rlhf")).search_registered_models() == []
    assert list((root / ".rlhf/workspaces").iterdir()) == []


def test_weights_of_a_remote_are_pulled(root: Path, rlhf: Command) -> None:
    (root / ".dvc/cache").rename(root.parent / "store")  # a remote has the layout of the cache
    rlhf("promote one")
    assert champion(root) == "1"
    assert tags(root, "1")["rlhf.run"] == "ppo-of-it"


def test_results_that_cannot_be_found_are_measured_again_and_a_missing_lineage_is_only_a_warning(
    root: Path, measured: Measured, rlhf: Command
) -> None:
    for name in ("results", "lineage"):
        planted.blob(root / ".dvc/cache", hashing.dvc_md5(root / f"given/{name}.json")).unlink()
    said = rlhf("promote one").out
    assert "evaluation/judge of one cannot be found: the policy will be judged again" in said
    assert measured.compared == ["models/sft", "models/base"]
    assert "models/lineage/ppo.json of one cannot be found" in said
    assert "rlhf.run" not in tags(root, "1")


def test_an_experiment_without_a_policy_and_an_unknown_name_are_user_errors(
    root: Path, rlhf: Command
) -> None:
    head = toy.git(root, "rev-parse", "HEAD").strip()
    toy.git(root, "update-ref", f"refs/exps/{head[:2]}/{head[2:]}/idle", head)
    message = rlhf("promote idle", status=2).err
    assert "the experiment idle has no models/policy: its stage ppo has not run" in message
    for name in ("none", "o*", "[o]ne", "on?"):
        message = f"{name} is neither a checkpoint (it has no config.json) nor an experiment"
        assert message in rlhf("promote", name, status=2).err


def test_an_experiment_that_the_local_judges_cannot_judge_comes_with_the_remedy(
    root: Path, rlhf: Command
) -> None:
    """The gold judge of the working tree knows the built-in task only."""
    text = (toy.ROOT / "params.yaml").read_text(encoding="utf-8")
    changed, _, _ = Request("docstrings", None, None).resolve(text)
    (root / "params.yaml").write_text(changed, encoding="utf-8")
    toy.git(root, "commit", "-qam", "another task")
    toy.git(root, "update-ref", f"refs/exps/00/{'0' * 38}/other", "HEAD")
    (root / "params.yaml").write_text(text, encoding="utf-8")
    message = rlhf("promote other", status=2).err
    assert "gold only judges the synthetic task" in message
    assert re.search("which `git show [0-9a-f]{10}:params.yaml` prints", message)
