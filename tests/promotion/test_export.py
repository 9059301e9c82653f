"""`rlhf export` writes a folder that loads alone, and says where its policy comes from."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_tasks import config
from rlhf_tasks.config import Ready
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.project import hashing, ready_models
from rlhf_tasks.project.atomic import write_json
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import export, weights
from rlhf_tasks.promotion.registry import Registry
from tests.conftest import Command
from tests.flows.toy import commit
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
        ("reward", "reward is a reward model; give a policy"),
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
