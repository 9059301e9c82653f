"""An isolated run sees the commit, its parameters and the data of now; the working tree stays as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from flows import watch
from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, git, workspaces
from rlhf_tasks.project.workspaces import Workspace
from tests.flows import toy

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = toy.make(tmp_path / "project")
    monkeypatch.chdir(made)
    return made


def create(
    root: Path, name: str = "one", overrides: dict[str, Any] | None = None, revision: str = "HEAD"
) -> Workspace:
    text, settings, _ = Request(overrides=overrides).resolve(git.committed(root, "params.yaml"))
    return workspaces.create(root, name, text, settings, revision)


def test_a_run_becomes_an_experiment_and_does_not_change_the_working_tree(root: Path) -> None:
    place = create(root, overrides={"ppo.kl_coef": 0.25})
    assert config.load(place.folder / "params.yaml").ppo.kl_coef == 0.25
    dvc_cli.run(place.folder, "repro")
    users = "refs/exps/exec/EXEC_BASELINE"  # of a `dvc exp run` in the checkout
    toy.git(root, "update-ref", users, "HEAD")
    name, revision = place.save("mine", instead="other")
    assert name == "mine"
    assert toy.git(root, "rev-parse", users) == toy.git(root, "rev-parse", "HEAD")
    toy.git(root, "update-ref", "-d", users)
    place.remove()
    assert not place.top.exists()
    assert toy.git(root, "worktree", "list").count("\n") == 1
    assert toy.git(root, "status", "--porcelain") == ""
    assert not (root / "second.txt").exists()
    assert git.find_experiment(root, "mine") == revision
    assert (revision, "mine") in git.experiments(root)
    assert git.files(root, revision, "metrics/") == ["metrics/first.json"]
    dvc_cli.run(root, "exp", "apply", "mine")
    assert (root / "second.txt").read_text(encoding="utf-8").split()[:3] == ["rows", "kl_coef:", "0.25"]


def test_a_workspace_leaves_the_users_worktree_on_a_disk_that_is_not_mounted(
    root: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "usb/mine"
    toy.git(root, "worktree", "add", "--detach", str(mine))
    mine.parent.rename(tmp_path / "away")
    create(root).remove()
    (tmp_path / "away").rename(mine.parent)
    assert toy.git(mine, "status", "--porcelain") == ""


def test_a_second_workspace_has_the_first_ones_outs_from_the_shared_cache(root: Path) -> None:
    first, second = create(root, "one"), create(root, "two")
    dvc_cli.run(first.folder, "repro")
    output = dvc_cli.run(second.folder, "repro")
    assert output.count("is cached - skipping run") == 2
    assert (second.folder / "second.txt").read_bytes() == (first.folder / "second.txt").read_bytes()


def test_a_workspace_has_the_present_data_and_other_changes_are_listed(root: Path) -> None:
    (root / "given/rows.txt").write_text("newer\n", encoding="utf-8")
    (root / "second.sh").write_text("exit 1\n", encoding="utf-8")
    assert workspaces.unseen(root, config.load(root / "params.yaml")) == ["second.sh"]
    place = create(root)
    assert (place.folder / "given/rows.txt").read_text(encoding="utf-8") == "newer\n"
    assert (place.folder / "second.sh").read_text(encoding="utf-8") == toy.SECOND


def test_the_workspace_of_a_killed_run_is_replaced(root: Path) -> None:
    left = create(root)
    (left.folder / "rubbish").touch()
    left.lock.release()  # as the kernel does for a killed process
    again = create(root)
    assert again.top == left.top
    assert not (again.folder / "rubbish").exists()
    again.lock.release()
    shutil.rmtree(again.top)  # somebody tidied up by hand
    create(root).remove()


def test_only_workspaces_of_dead_processes_are_removed(root: Path) -> None:
    kept, left = create(root, "kept"), create(root, "left")
    left.lock.release()
    elsewhere = root / ".rlhf/workspaces/elsewhere"  # another machine may work in it
    elsewhere.mkdir()
    elsewhere.with_name("elsewhere@another-host.lock").touch()
    assert workspaces.remove_left(root) == ["left"]
    assert kept.folder.exists()
    assert elsewhere.exists()
    workspaces.remove(root, "elsewhere")
    with pytest.raises(UserError, match="another process uses the workspace kept"):
        create(root, "kept")
    kept.remove()
    assert list((root / ".rlhf/workspaces").iterdir()) == []


def test_a_workspace_has_the_given_commit(root: Path) -> None:
    before = git.resolve(root, None)
    toy.write_script(root, ["exit 1"])
    place = create(root, revision=before)
    assert (place.folder / "second.sh").read_text(encoding="utf-8") == toy.SECOND
    with pytest.raises(UserError, match="revision='no-such' is not a commit, branch or tag"):
        git.resolve(root, "no-such")


def test_a_relative_remote_is_the_same_in_a_workspace(root: Path) -> None:
    dvc_cli.run(root, "remote", "add", "--default", "store", "../store")
    dvc_cli.run(root, "remote", "add", "--local", "own", "own-store")
    toy.commit(root)
    place = create(root)
    dvc_cli.run(place.folder, "repro")
    dvc_cli.run(place.folder, "push")
    dvc_cli.run(place.folder, "push", "--remote", "own")
    assert (root.parent / "store/files").is_dir()
    assert (root / "own-store/files").is_dir()
    assert "config" not in toy.git(place.folder, "status", "--porcelain"), "no experiment holds such paths"


def test_links_to_files_in_the_data_are_followed_and_those_to_folders_are_not(root: Path) -> None:
    """As where the project itself is: neither prepare nor DVC's hash follows them."""
    outside = root.parent / "corpus"
    (outside / "more").mkdir(parents=True)
    (outside / "rows.txt").write_text("linked\n", encoding="utf-8")
    (outside / "more/rows.txt").write_text("more\n", encoding="utf-8")
    (root / "given/rows.txt").unlink()
    (root / "given/rows.txt").symlink_to("../../corpus/rows.txt")
    (root / "given/more").symlink_to("../../corpus/more")
    place = create(root)
    assert (place.folder / "given/rows.txt").read_text(encoding="utf-8") == "linked\n"
    assert not (place.folder / "given/rows.txt").is_symlink()
    assert not (place.folder / "given/more").exists()


def test_data_that_cannot_be_copied_is_an_error(root: Path) -> None:
    (root / "given/away.txt").symlink_to("nowhere.txt")
    os.mkfifo(root / "given/pipe")
    with pytest.raises(UserError, match=r"data.path='given' has .*away\.txt.*; remove them") as caught:
        create(root)
    assert "pipe" in str(caught.value)
    assert list((root / ".rlhf/workspaces").iterdir()) == []


def test_inputs_that_only_the_working_tree_has_are_an_error(root: Path) -> None:
    (root.parent / "shared.sh").write_text(toy.SECOND, encoding="utf-8")
    (root / "second.sh").unlink()
    (root / "second.sh").symlink_to("../shared.sh")
    file = root / "dvc.yaml"
    text = file.read_text(encoding="utf-8").replace("deps: [given]", "deps: [given, extra.txt]")
    file.write_text(text, encoding="utf-8")
    toy.commit(root)
    (root / "extra.txt").touch()
    with pytest.raises(UserError, match=r"cannot see extra\.txt, second\.sh: it sees only files in git"):
        create(root)


def test_a_function_that_is_not_committed_is_refused_by_name(root: Path) -> None:
    scorers = [{"kind": "function", "weight": 1.0, "function": "mine:score"}]
    toy.write_params(root, ppo={"scorers": scorers})
    toy.commit(root)
    (root / "mine.py").touch()
    with pytest.raises(UserError, match=r"cannot see mine\.py: it sees only files in git"):
        create(root)
    (root / "mine.py").unlink()
    with pytest.raises(UserError, match="mine:score is neither in a file of the run's commit nor in a pack"):
        create(root)


@pytest.mark.parametrize("options", [["--subdir"], []], ids=["its own .dvc", "that of the repository"])
def test_a_project_may_be_below_the_top_of_the_repository(tmp_path: Path, options: list[str]) -> None:
    toy.git(tmp_path, "init", "-q")
    toy.identify(tmp_path)
    inner = tmp_path / "inner"
    inner.mkdir()
    dvc_cli.run(inner if options else tmp_path, "init", "-q", *options)
    toy.write_params(inner)
    command = "mkdir -p metrics && echo 1 > metrics/one.json"
    text = f"stages: {{one: {{cmd: {command}, metrics: [metrics/one.json]}}}}\n"
    (inner / "dvc.yaml").write_text(text, encoding="utf-8")
    toy.commit(tmp_path)
    place = create(inner)
    assert place.folder == place.top / "inner"
    assert (place.folder / "params.yaml").exists()
    dvc_cli.run(place.folder, "repro")
    assert place.save("mine", instead="other")[0] == "mine"
    place.remove()
    assert not (inner / "metrics").exists()


def test_stages_run_the_code_of_the_workspaces_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "rlhf_tasks").mkdir()
    (root / "rlhf_tasks/__init__.py").write_text("", encoding="utf-8")
    toy.commit(root)
    monkeypatch.setenv("PYTHONPATH", "given-before")
    place = create(root)
    assert place.environment() == {"PYTHONPATH": os.pathsep.join([str(place.folder), "given-before"])}


def test_relative_data_outside_of_the_project_is_an_error(root: Path) -> None:
    outside = root.parent / "corpus"
    outside.mkdir()
    (outside / "sft.jsonl").write_text("the user's own", encoding="utf-8")
    with pytest.raises(UserError, match=r"data.path='../corpus' leads out of the project.*absolute path"):
        create(root, overrides={"data.path": "../corpus"})
    assert (outside / "sft.jsonl").read_text(encoding="utf-8") == "the user's own"
    assert not (root / ".rlhf/workspaces/one").exists()


def test_a_workspace_has_the_sets_of_a_mixture_as_they_are_now(root: Path) -> None:
    (root / "chat.jsonl").write_text("committed\n", encoding="utf-8")
    toy.commit(root)
    (root / "chat.jsonl").write_text("edited\n", encoding="utf-8")
    mix = {"data.source": "mix", "data.mix": [{"name": "chat", "path": "chat.jsonl"}]}
    judge = {"kind": "reward_model", "name": "held_out", "path": "models/reward_heldout"}
    place = create(root, overrides={**mix, "judge.judges": [judge], "promotion": None})
    assert (place.folder / "chat.jsonl").read_text(encoding="utf-8") == "edited\n"
    settings = config.load(place.folder / "params.yaml")
    assert workspaces.unseen(root, settings) == []
    assert watch.fingerprint(root, settings) == watch.fingerprint(place.folder, settings)


def test_a_workspace_starts_from_an_experiment_with_the_same_parameters(root: Path) -> None:
    first = create(root, "one")
    assert first.like is None
    dvc_cli.run(first.folder, "repro")
    ran = sorted(git.list_changes(first.folder))
    _, commit = first.save("before", instead="other")
    first.remove()
    again = create(root, "two")
    assert again.like == (commit, "before")
    output = dvc_cli.run(again.folder, "repro")
    assert output.count("didn't change, skipping") == 2, "not restored one by one"
    assert again.is_like()
    assert sorted(git.list_changes(again.folder)) == ran, "as if it had run there"
    (root / "given/rows.txt").write_text("others\n", encoding="utf-8")
    later = create(root, "four")
    dvc_cli.run(later.folder, "repro")
    assert not later.is_like(), "other data"
    text = (again.folder / "params.yaml").read_text(encoding="utf-8")
    assert git.experiment_with(root, "HEAD", text) == (commit, "before")
    assert git.experiment_with(root, "HEAD", text + "\n") is None, "other parameters"
    toy.write_script(root, ["exit 1"])
    assert git.experiment_with(root, "HEAD", text) is None, "another commit"
