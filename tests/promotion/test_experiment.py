"""`rlhf promote EXPERIMENT`: a run that DVC keeps is put to the gate, and the working tree stays as it is."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow.tracking import MlflowClient

from rlhf_tasks import console
from rlhf_tasks.cli import main
from rlhf_tasks.evaluation.judges import making
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, git, hashing, workspaces
from rlhf_tasks.promotion import command
from rlhf_tasks.tracking.store import embedded_uri
from tests.flows import toy
from tests.project.test_workspaces import repro
from tests.promotion import planted

pytestmark = [pytest.mark.usefixtures("contests"), pytest.mark.e2e]
NAME = "rlhf-policy"
STAGES = """\
stages:
  ppo:
    cmd: sh given/ppo.sh
    params: [seed]
    deps: [given]
    outs: [models/policy, models/lineage/ppo.json, plots/ppo.csv: {cache: false}]
    metrics: [{metrics/ppo.json: {cache: false}}]
  judge:
    cmd: mkdir -p metrics && cp given/judge.json metrics/judge.json
    params: [seed, judge]
    deps: [models/policy, given]
    metrics: [{metrics/judge.json: {cache: false}}]
"""
PPO = """\
mkdir -p models/policy models/lineage metrics plots
grep '^seed:' params.yaml | cut -d' ' -f2 | tr -d '\\n' > models/policy/weights
echo '{}' > models/policy/config.json
cp given/lineage.json models/lineage/ppo.json
cp given/ppo.json metrics/ppo.json
cp given/ppo.csv plots/ppo.csv
"""


@pytest.fixture
def root(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A committed project that has run nothing here; its policy holds nothing but the seed."""
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN"):
        monkeypatch.delenv(name, raising=False)
    given = tmp_path / "given"
    given.mkdir()
    (given / "ppo.sh").write_text(PPO, encoding="utf-8")
    (given / "ppo.csv").write_text(f"episode,{planted.CURVE}\n256,0.5\n512,{planted.KL}\n", encoding="utf-8")
    planted.put(given / "ppo.json", {"selected_episode": 256.0})
    planted.put(given / "lineage.json", {"rlhf.run": "ppo-of-it", "git.rev": "c" * 40})
    planted.put(given / "judge.json", planted.BETTER)
    planted.params(tmp_path, {"data.path": "given"})
    (tmp_path / "dvc.yaml").write_text(STAGES, encoding="utf-8")
    (tmp_path / ".gitignore").write_text(".rlhf/\n", encoding="utf-8")
    (tmp_path / ".dvcignore").write_text(".rlhf\n", encoding="utf-8")
    toy.git(tmp_path, "init", "-q")
    toy.identify(tmp_path)
    dvc_cli.run(tmp_path, "init", "-q")
    shutil.copy(planted.ROOT / ".dvc/config", tmp_path / ".dvc/config")  # or DVC's daemon writes behind
    toy.commit(tmp_path)
    monkeypatch.chdir(tmp_path)
    console.set_quiet(False)
    return tmp_path


def run(root: Path, name: str, *, push: bool = False, **changes: Any) -> str:
    """As the service's run of this name leaves it; its commit."""
    text, settings, _ = Request(overrides=changes).resolve(git.committed(root, "params.yaml"))
    place = workspaces.create(root, name, text, settings)
    try:
        repro(place.folder)
        dvc = partial(dvc_cli.run, place.folder)
        if push:
            dvc("push", "--quiet")
        return place.save(name, dvc)
    finally:
        place.remove()


def tags(root: Path, number: str) -> dict[str, str]:
    return dict(MlflowClient(embedded_uri(root / ".rlhf")).get_model_version(NAME, number).tags)


def champion(root: Path) -> str:
    found = MlflowClient(embedded_uri(root / ".rlhf")).get_registered_model(NAME).aliases
    return str(found["champion"])


def seen(root: Path) -> dict[str, str]:
    """Every file of the working tree but what is kept beside it."""
    beside = {".git", ".rlhf"}
    files = (file.relative_to(root) for file in sorted(root.rglob("*")) if file.is_file())
    own = [file for file in files if file.parts[0] not in beside and ".dvc/cache" not in file.as_posix()]
    return {
        str(file): (root / file).read_text(encoding="utf-8") for file in own if ".dvc/tmp" not in str(file)
    }


def test_an_experiment_is_promoted_and_the_working_tree_stays_as_it_is(
    root: Path, contests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run(root, "one", seed=11), run(root, "two", seed=12)
    (root / "given/judge.json").write_text("a change of the user's\n", encoding="utf-8")
    before = seen(root)
    assert main.main(["promote", "one"]) == 0
    assert f"{NAME} version 1 (models/policy of one) is champion now" in capsys.readouterr().out
    told = tags(root, "1")
    assert (told["dvc.exp"], told["dvc.rev"], told["dvc.path"]) == ("one", first, "models/policy")
    assert (told["rlhf.run"], told["verdict"]) == ("ppo-of-it", "passed")
    assert "rlhf.folder" not in told, "the cache has it, and the folder it lay in is gone"
    assert "kl: 1.5 <= 10, margin +8.5, passed" in told["verdict.criteria"].splitlines()
    assert main.main(["promote", "two"]) == 0
    assert contests["asked"] == [("champion", "11")], "the metrics count, and the champion's weights are had"
    assert (champion(root), tags(root, "2")["dvc.rev"]) == ("2", second)
    assert seen(root) == before
    assert Path.cwd() == root
    assert list((root / ".rlhf/workspaces").iterdir()) == []
    assert toy.git(root, "worktree", "list").count("\n") == 1
    assert main.main(["rollback"]) == 0
    assert champion(root) == "1"


def test_the_gate_and_the_judges_are_those_of_here(
    root: Path, contests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep's cell without a gate can be promoted by hand; other judges than it ran with judge it anew."""
    run(root, "cell", seed=11, promotion=None)
    planted.params(root, {"data.path": "given", "promotion.max_kl": 1.0})
    assert main.main(["promote", "cell"]) == 3
    assert "KL 1.5 > 1" in capsys.readouterr().out
    assert contests["asked"] == []
    planted.params(root, {"data.path": "given", "judge.temperature": 0.5})
    assert main.main(["promote", "cell"]) == 0
    assert contests["asked"] == [("sft", "models/sft")]


RUBRIC = "{prompt} {first} {second}"
OWN_FILES: dict[str, Any] = {
    "data.path": "given",
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
}  # fmt: skip


def write_own_files(root: Path, text: str, score: int) -> None:
    """What the judges and probes of OWN_FILES read, told apart by a text and a score."""
    (root / "elsewhere").mkdir(exist_ok=True)
    for name, told in {"rubric.txt": f"{text} {RUBRIC}", "elsewhere/w": text, "general.txt": text}.items():
        (root / name).write_text(told, encoding="utf-8")
    code = f"def scores(prompts, answers):\n    return [{score} if a == 'good' else 0 for a in answers]\n"
    (root / "opinion_of_here.py").write_text(code, encoding="utf-8")


def test_files_that_judges_read_are_those_of_here_and_models_of_the_pipeline_the_experiments(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = STAGES.replace("outs: [models/policy,", "outs: [models/policy, models/reward_heldout,")
    (root / "dvc.yaml").write_text(stages, encoding="utf-8")
    with (root / "given/ppo.sh").open("a", encoding="utf-8") as file:
        file.write("mkdir -p models/reward_heldout && echo its own > models/reward_heldout/w\n")
    planted.params(root, OWN_FILES)
    write_own_files(root, "then", -1)
    toy.commit(root)
    run(root, "one", seed=11)
    seen: dict[str, Any] = {}

    def contest(settings: Any, *rest: Any) -> dict[str, float]:
        named = {judge.name: judge for judge in settings.judge.judges}
        paths = {name: Path(named[name].path, "w") for name in ("reward_model", "elsewhere")}
        paths |= {"gpt": Path(named["gpt"].prompt), "general": Path(settings.judge.retention.general)}
        seen.update({name: path.read_text(encoding="utf-8").strip() for name, path in paths.items()})
        (own,) = making.build(settings.judge, "synthetic", torch.device("cpu"), ["own"])
        seen["own"] = own.compare(["p"], ["good"], ["bad"]).outcomes.tolist()
        return {**planted.BETTER, **planted.over_champion()}

    monkeypatch.setattr(command, "_contest", contest)
    monkeypatch.setattr(
        "rlhf_tasks.promotion.cost.measured", lambda settings, policy, sft: dict(planted.BETTER)
    )
    assert main.main(["promote", "one"]) == 0
    assert seen == {}, "the files are the same: what the pipeline measured counts"
    write_own_files(root, "now", 1)
    run(root, "two", seed=12)
    assert main.main(["promote", "two"]) == 0
    others = "elsewhere, rubric.txt, general.txt, opinion_of_here.py"
    assert f"the metrics here were measured with another {others}: it is judged" in capsys.readouterr().out
    assert seen == {
        "reward_model": "its own", "elsewhere": "now", "gpt": f"now {RUBRIC}", "general": "now", "own": [1.0],
    }  # fmt: skip


def test_weights_that_are_nowhere_are_told_with_how_to_have_them(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root, "one", seed=11)
    shutil.rmtree(root / ".dvc/cache")
    assert main.main(["promote", "one"]) == 2
    told = capsys.readouterr().err
    assert "the DVC cache here lacks of the experiment one: models/policy (" in told
    assert "`dvc exp push GIT_REMOTE one`" in told
    assert "`dvc exp apply one && dvc repro`" in told
    assert MlflowClient(embedded_uri(root / ".rlhf")).search_registered_models() == []
    assert list((root / ".rlhf/workspaces").iterdir()) == []


def test_weights_that_a_remote_has_are_pulled(root: Path) -> None:
    dvc_cli.run(root, "remote", "add", "--default", "store", str(root.parent / f"{root.name}-store"))
    toy.commit(root)
    run(root, "one", seed=11, push=True)
    shutil.rmtree(root / ".dvc/cache")
    assert main.main(["promote", "one"]) == 0
    assert champion(root) == "1"
    assert tags(root, "1")["rlhf.run"] == "ppo-of-it"


def test_a_lineage_that_is_nowhere_stops_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(root, "one", seed=11)
    md5 = hashing.dvc_md5(root / "given/lineage.json")
    (root / f".dvc/cache/files/md5/{md5[:2]}/{md5[2:]}").unlink()
    assert main.main(["promote", "one"]) == 0
    assert "models/lineage/ppo.json of one is nowhere" in capsys.readouterr().out
    assert "rlhf.run" not in tags(root, "1")


def test_promoting_makes_no_commit_and_asks_for_no_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(root, "one", seed=11)
    for key in ("user.name", "user.email"):
        toy.git(root, "config", "--unset", key)
    for variable in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(root.parent))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    assert main.main(["promote", "one"]) == 0
    assert champion(root) == "1"


def test_a_name_is_taken_by_the_letter_and_no_folder_without_a_checkpoint_hides_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(root, "one", seed=11)
    for pattern in ("o*", "[o]ne", "on?"):
        assert main.main(["promote", pattern]) == 2
        assert (
            f"{pattern} is no checkpoint (it has no config.json), and no experiment"
            in capsys.readouterr().err
        )
    (root / "one").mkdir()
    assert main.main(["promote", "one"]) == 0
    assert champion(root) == "1"


def test_a_run_without_a_policy_and_a_name_of_nothing_are_told(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = toy.git(root, "rev-parse", "HEAD").strip()
    toy.git(root, "update-ref", f"refs/exps/{head[:2]}/{head[2:]}/idle", head)
    assert main.main(["promote", "idle"]) == 2
    assert "the experiment idle has no models/policy: its stage ppo has not run" in capsys.readouterr().err
    assert main.main(["promote", "none"]) == 2
    assert "none is no checkpoint (it has no config.json), and no experiment" in capsys.readouterr().err
