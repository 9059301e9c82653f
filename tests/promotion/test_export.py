"""`rlhf export` writes a folder that loads alone, and says where its policy comes from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_tasks import config
from rlhf_tasks.config import Ready
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.project import dvc_cli, hashing, ready_models
from rlhf_tasks.project.atomic import write_json
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import export, weights
from rlhf_tasks.promotion.registry import Registry
from tests.conftest import Command
from tests.flows.toy import commit, git
from tests.promotion import planted
from tests.promotion.conftest import Measured

POLICY = Path("models/policy")


@pytest.fixture
def ready(project: Path, trained: Path, measured: Measured) -> Path:
    """A project whose policy is a real checkpoint, in dvc.lock, the DVC cache and a commit."""
    shutil.rmtree(POLICY)
    shutil.copytree(trained / "models/policy", POLICY)
    planted.lock(project)
    planted.cached(POLICY, project / ".dvc/cache")
    lineage = project / "models/lineage/ppo.json"
    blob = planted.blob(project / ".dvc/cache", hashing.dvc_md5(lineage))
    blob.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(lineage, blob)
    commit(project)
    return project


def test_a_policy_is_exported_with_a_card_and_loads_by_transformers_alone(ready: Path, rlhf: Command) -> None:
    rlhf("export models/policy --to out/given")
    model = AutoModelForCausalLM.from_pretrained("out/given")
    tokenizer = AutoTokenizer.from_pretrained("out/given")
    original = AutoModelForCausalLM.from_pretrained(POLICY)
    ids = tokenizer("the", return_tensors="pt")["input_ids"]
    assert torch.equal(model(ids).logits, original(ids).logits)
    card = Path("out/given/README.md").read_text(encoding="utf-8")
    assert card.startswith((POLICY / "README.md").read_text(encoding="utf-8").rstrip())
    assert "| `data.source` | synthetic |" in card
    assert "The gate has not judged this policy." in card
    assert f"md5 of the original folder: `{hashing.dvc_md5(POLICY)}`" in card
    assert "run ppo-of-better, code of cccc" in card
    assert {path.name for path in Path("out/given").iterdir()} == {p.name for p in POLICY.iterdir()}


def refer() -> str:
    """Make models/sft a reference to a ready model; its weights' fingerprint."""
    shutil.copytree(POLICY, "foreign/sft")
    shutil.rmtree("models/sft", ignore_errors=True)
    shutil.copytree(POLICY, "models/sft")
    file, ready = Path("models/sft/model.safetensors"), Ready("sft.from", "foreign/sft", None)
    digest = contracts.fingerprint(Path("models/sft"))
    write_json(
        Path("models/sft/reference.json"),
        ready_models.describe(file.parent, Path("foreign/sft"), ready, digest),
    )
    file.unlink()
    return digest


def test_a_reference_is_exported_and_promoted_with_its_weights(ready: Path, rlhf: Command) -> None:
    digest = refer()
    rlhf("preset --set sft.from=foreign/sft")
    rlhf("export models/sft --to out")
    assert contracts.fingerprint(Path("out")) == digest
    assert not Path("out/reference.json").exists()
    assert AutoModelForCausalLM.from_pretrained("out").num_parameters() > 0
    rlhf("promote models/sft")
    [challenger] = Path(".rlhf/policies").iterdir()
    assert contracts.fingerprint(challenger) == digest
    registry = Registry.open(config.load().tracking, Paths().home, "rlhf-policy")
    version = registry.find_version(hashing.dvc_md5(challenger))
    shutil.rmtree("foreign")
    assert version is not None
    restored = weights.restore(Path(), Paths().home, version.md5, version.tags)
    assert contracts.fingerprint(restored) == digest


def test_the_champion_is_exported_from_the_cache_with_its_verdict(ready: Path, rlhf: Command) -> None:
    digest = contracts.fingerprint(POLICY)
    rlhf("promote")
    shutil.rmtree(POLICY)
    rlhf("export champion --to out")
    assert contracts.fingerprint(Path("out")) == digest
    card = Path("out/README.md").read_text(encoding="utf-8")
    assert "Passed by the gate: " in card
    assert "| win rate over SFT by the gold judge (95% low) | 0.82 | > 0.5 | +0.32 | passed |" in card
    assert "run ppo-of-better" in card
    assert not (Path("out") / "config.json").is_symlink()


def test_an_experiment_is_exported_without_touching_the_working_tree(ready: Path, rlhf: Command) -> None:
    digest = contracts.fingerprint(POLICY)
    subprocess.run(["git", "update-ref", "refs/exps/aa/bb/tidy-oak", "HEAD"], check=True)
    (POLICY / "README.md").write_text("another", encoding="utf-8")
    rlhf("export tidy-oak --to out")
    assert contracts.fingerprint(Path("out")) == digest
    assert (POLICY / "README.md").read_text(encoding="utf-8") == "another"
    assert "experiment tidy-oak" in Path("out/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "'nothing' is neither `champion`, nor a checkpoint's folder, nor an experiment"),
        ("champion", "rlhf-policy has no champion; `rlhf promote` makes one"),
        ("reward", "reward is a reward model or a critic; give a policy"),
        ("broken", "lacks weights"),
    ],
)
def test_what_cannot_be_exported_is_one_message_and_leaves_no_folder(
    ready: Path, trained: Path, name: str, why: str
) -> None:
    shutil.copytree(trained / "models/reward", "reward")
    (Path("reward") / contracts.IDENTITY).write_text('{"kind": "reward"}', encoding="utf-8")
    shutil.copytree(POLICY, "broken")
    from safetensors.torch import load_file, save_file

    tensors = load_file("broken/model.safetensors")
    save_file(dict(list(tensors.items())[1:]), "broken/model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=why):
        export.export(Paths(), name, Path("out"))
    assert not Path("out").exists()


def test_a_folder_is_exported_neither_into_itself_nor_over_files(ready: Path) -> None:
    before = sorted(Path("models/policy").rglob("*"))
    with pytest.raises(UserError, match="this lies in the exported folder models/policy; give another name"):
        export.export(Paths(), "models/policy", Path("models/policy/out"))
    assert sorted(Path("models/policy").rglob("*")) == before
    with pytest.raises(UserError, match="--to metrics: this exists and is not an empty folder"):
        export.export(Paths(), "models/policy", Path("metrics"))
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    export.export(Paths(), "models/policy", Path("link"))
    assert Path("empty/model.safetensors").exists()


# -------------- A champion's weights are restored from the place that has them, and only with the same bytes


def restore(project: Path, md5: str, **tags: str) -> Path:
    named = {"path": weights.PATH, "rev": weights.REVISION, "folder": weights.FOLDER}
    return weights.restore(project, project / ".rlhf", md5, {named[k]: v for k, v in tags.items()})


def test_weights_come_from_the_cache_by_hash(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    assert not weights.is_cached(project, md5)
    planted.cached(POLICY, project / ".dvc/cache")
    assert weights.is_cached(project, md5)
    shutil.rmtree(POLICY)
    folder = restore(project, md5)
    assert (folder / "weights").read_text(encoding="utf-8") == "better"
    assert hashing.dvc_md5(folder) == md5
    assert restore(project, md5) == folder, "the second time it exists"


def test_several_processes_may_restore_the_same_weights_at_once(project: Path) -> None:
    """`rlhf export champion` and `rlhf generate champion` take no lock of each other."""
    for number in range(20):
        (POLICY / f"part-{number}").write_text(str(number), encoding="utf-8")
    md5 = hashing.dvc_md5(POLICY)
    planted.cached(POLICY, project / ".dvc/cache")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: restore(project, md5), range(8)))
    assert {hashing.dvc_md5(folder) for folder in folders} == {md5}


def test_an_altered_cache_is_not_used(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    planted.cached(POLICY, project / ".dvc/cache")
    blob = hashing.dvc_md5(POLICY / "weights")
    planted.blob(project / ".dvc/cache", blob).write_text("worse", encoding="utf-8")
    with pytest.raises(UserError, match="holds other bytes"):
        restore(project, md5)
    planted.blob(project / ".dvc/cache", blob).unlink()
    with pytest.raises(
        UserError, match=rf"the weights {md5} cannot be restored: .* does not hold all of them"
    ):
        restore(project, md5, path=str(POLICY), rev="HEAD")


def test_weights_come_from_a_commit_if_the_cache_is_empty(project: Path) -> None:
    """DVC fetches them from a remote by the commit."""
    for name in ("dvc.yaml", "dvc.lock"):
        Path(name).unlink()
    subprocess.run([sys.executable, "-m", "dvc", "add", "-q", str(POLICY)], check=True)
    commit(project)
    md5 = hashing.dvc_md5(POLICY)
    remote = project.parent / f"{project.name}-remote"
    subprocess.run([sys.executable, "-m", "dvc", "remote", "add", "-d", "r", str(remote)], check=True)
    commit(project)
    subprocess.run([sys.executable, "-m", "dvc", "push", "-q"], check=True)
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(POLICY)
    folder = restore(project, md5, path=str(POLICY), rev="HEAD")
    assert hashing.dvc_md5(folder) == md5


def test_weights_come_from_a_commit_of_a_project_in_a_part_of_its_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    part = tmp_path / "part"
    (part / POLICY).mkdir(parents=True)
    (part / POLICY / "weights").write_text("better", encoding="utf-8")
    for words in (("init", "-q", "--subdir"), ("add", "-q", str(POLICY))):
        subprocess.run([sys.executable, "-m", "dvc", *words], check=True, cwd=part)
    commit(tmp_path)
    md5 = hashing.dvc_md5(part / POLICY)
    monkeypatch.setattr(dvc_cli, "cache", lambda root: tmp_path / "none")
    assert hashing.dvc_md5(restore(part, md5, path=str(POLICY), rev="HEAD")) == md5


def test_weights_come_from_their_first_folder_unless_it_changed(project: Path) -> None:
    md5 = hashing.dvc_md5(POLICY)
    assert restore(project, md5, folder=str(POLICY.resolve())) == POLICY.resolve()
    (POLICY / "weights").write_text("other", encoding="utf-8")
    with pytest.raises(UserError, match="was removed, or has changed"):
        restore(project, md5, folder=str(POLICY.resolve()))


def test_another_run_in_the_way_of_one_place_does_not_hide_the_next(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_words: object) -> str:
        raise UserError("another run is at work")

    monkeypatch.setattr(dvc_cli, "run", busy)
    md5, there = hashing.dvc_md5(POLICY), str(POLICY.resolve())
    assert restore(project, md5, path=str(POLICY), rev="HEAD", folder=there) == POLICY.resolve()
    with pytest.raises(UserError, match=r"does not hold all of them; another run is at work$"):
        restore(project, md5, path=str(POLICY), rev="HEAD")
