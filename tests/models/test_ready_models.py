"""A ready checkpoint is a reference to its weights: what its folder holds and loads, how it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.filesize import decimal

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.responses import sample
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import copy_checkpoint, load_causal, load_reward, moment_bytes, num_bytes
from rlhf_tasks.project import disk, hashing, ready_models
from rlhf_tasks.project.paths import Paths
from tests import toy

HASH = "0123456789abcdef0123456789abcdef01234567"
READY: Any = {"sft": {"from": "foreign/base"}, "reward": {"from": "foreign/reward"}}
IDS = torch.tensor([[3, 4, 5]])


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with models/base, sft and reward from ready checkpoints of somebody else's."""
    folder = tmp_path_factory.mktemp("ready")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("GIT_CEILING_DIRECTORIES", str(folder.parent))
        toy.write_given()
        toy.foreign("foreign/base", "llama", dtype=torch.bfloat16)
        toy.foreign("foreign/reward", "llama", seed=3, labels=1)
        settings = toy.write_params(**READY)
        toy.run_stages(settings)
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the user's files."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    toy.write_given()
    return tmp_path


@pytest.fixture
def project(ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test, with a copy of that project."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ready, tmp_path, dirs_exist_ok=True)
    return tmp_path


def logits(folder: str) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = load_causal(folder)(IDS).logits
    return found


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    ("name", "key", "source"),
    [("base", "model.base", "base"), ("sft", "sft.from", "base"), ("reward", "reward.from", "reward")],
)
def test_a_reference_holds_all_but_the_weights_and_no_place(
    project: Path, name: str, key: str, source: str
) -> None:
    own, given = Path("models") / name, Path("foreign") / source
    if name == "base":  # an absolute path is not written either
        toy.run("base", toy.write_params(model={"base": str(project / given)}, **READY))
    files = {file.name: file.read_text(encoding="utf-8") for file in own.iterdir()}
    assert files.keys() >= {"config.json", "tokenizer.json", "rlhf.json", "README.md", "reference.json"}
    assert not [file for file in files if file.endswith((".safetensors", ".bin"))]
    known = json.loads(files["reference.json"])
    digest = hashing.sha256_of_files(given)["model.safetensors"]
    assert (known["params"], known["hub"], known["files"]) == (key, None, {"model.safetensors": digest})
    assert contracts.fingerprint(own) == contracts.fingerprint(given)
    assert not [file for file, text in files.items() if "foreign" in text or str(project) in text]


def test_what_is_trained_is_written(project: Path) -> None:
    assert [path.parent.name for path in Path("models").glob("*/*.safetensors")] == ["reward_heldout"]


def test_a_reference_loads_what_its_source_holds(project: Path) -> None:
    assert torch.equal(logits("models/sft"), logits("foreign/base"))
    assert load_causal("models/base").generation_config.eos_token_id == 0
    assert same_weights(load_reward("models/reward"), load_reward("foreign/reward"))


def test_what_is_trained_from_a_reference_equals_what_is_trained_from_a_copy(folder: Path) -> None:
    toy.foreign("foreign/base", "gpt2", dtype=torch.bfloat16)
    found = {}
    for keep in ("copy", "reference"):
        settings = toy.write_params(model={"keep": keep})
        toy.run_stages(settings, "prepare", "base", "sft")
        assert Path("models/base/model.safetensors").exists() == (keep == "copy")
        names = ("model.safetensors", "config.json", "generation_config.json")
        found[keep] = [(Path("models/sft") / name).read_bytes() for name in names]
    assert found["copy"] == found["reference"]


def test_two_references_to_the_same_weights_are_sampled_once(project: Path) -> None:
    how: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "seed": 1, "device": torch.device("cpu")}
    prompts = ["a red cat :", "a blue dog :"]
    sampled = [sample(Path("models") / name, prompts, paths=Paths(), **how) for name in ("base", "sft")]
    assert sampled[0] == sampled[1]
    assert len([*(project / ".rlhf/responses").iterdir()]) == 1


def test_a_reward_head_of_another_form_is_read_in_the_same_way_twice(project: Path) -> None:
    """OpenRLHF's mean and deviation are applied once to a reference too."""
    shutil.copytree("foreign/reward", "foreign/scaled")
    config = json.loads(Path("foreign/scaled/config.json").read_text(encoding="utf-8"))
    Path("foreign/scaled/config.json").write_text(json.dumps(config | {"mean": 2.0, "std": 4.0}))
    toy.run("reward", toy.write_params(**{**READY, "reward": {"from": "foreign/scaled"}}))
    own, source = load_reward("models/reward"), load_reward("foreign/scaled")
    assert same_weights(own, source)
    assert own.mean == source.mean == 0.5


def test_a_hash_is_computed_once_for_all_loads(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "LARGE", 1)
    logits("models/base")
    digest, read = hashing._digest, list[str]()

    def counted(file: Path, name: str) -> str:
        read.append(file.name)
        return digest(file, name)

    monkeypatch.setattr(hashing, "_digest", counted)
    logits("models/base")
    logits("models/sft")
    assert read == []
    shutil.copytree("foreign/base", "foreign/again", copy_function=shutil.copy)
    shutil.rmtree("foreign/base")
    Path("foreign/again").rename("foreign/base")  # another inode
    logits("models/base")
    logits("models/base")
    assert read == ["model.safetensors"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("missing", r"refers to sft\.from .*\(given: foreign/base\): model\.safetensors is not there"),
        ("altered", r"model\.safetensors has other bytes \(sha256 [0-9a-f]{64}\)"),
        ("unnamed", r"refers to sft\.from .*params\.yaml does not set it"),
        ("no project", r"no params\.yaml lies above this folder"),
        ("package", r"refers to sft\.from .*'no-such' is not installed"),
    ],
)
def test_a_source_that_is_not_at_hand_is_one_message(project: Path, change: str, words: str) -> None:
    digest = hashing.file_digest(Path("foreign/base/model.safetensors"), "sha256")
    if change == "missing":
        shutil.rmtree("foreign/base")
    elif change == "altered":
        toy.foreign("foreign/base", "llama", seed=9)
    elif change == "unnamed":
        Path("params.yaml").write_text("seed: 1\n", encoding="utf-8")
    elif change == "package":
        Path("params.yaml").write_text("sft: {from: 'package:no-such/x.gguf'}\n", encoding="utf-8")
    else:
        Path("params.yaml").unlink()
    with pytest.raises(UserError, match=words) as error:
        load_causal("models/sft")
    assert f"Expected: model.safetensors (sha256 {digest})" in str(error.value)
    assert "`dvc repro`" in str(error.value)


def test_a_reference_to_a_hub_model_names_its_id_and_revision(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is replaced by a local folder; then it has lost the model."""
    import huggingface_hub
    from transformers import AutoConfig, AutoModelForCausalLM

    local = toy.foreign("hub/base", "llama").resolve()
    toy.foreign("foreign/base", "llama")
    settings = toy.write_params(sft={"from": "someone/model", "revision": HASH})
    toy.run_stages(settings, "prepare", "base")
    asked = set[tuple[str, str | None]]()
    for owner in (AutoModelForCausalLM, AutoConfig):
        own = owner.from_pretrained

        def loaded(source: Any, own: Any = own, revision: str | None = None, **options: Any) -> Any:
            if source == "someone/model":
                asked.add((source, revision))
                source = local
            return own(source, **options)

        monkeypatch.setattr(owner, "from_pretrained", loaded)

    def snapshot(source: str, revision: str, **_: Any) -> str:
        asked.add((source, revision))
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    toy.run("sft", settings)
    assert asked == {("someone/model", HASH)}
    known = ready_models.read("models/sft")
    assert known is not None
    assert known["hub"] == {"id": "someone/model", "revision": HASH}
    assert torch.equal(logits("models/sft"), logits("hub/base"))

    def lost(*_: Any, **__: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lost)
    with pytest.raises(
        UserError, match=rf"cannot be fetched \(no route\)\. Expected: someone/model at .*{HASH}"
    ):
        load_causal("models/sft")


def test_a_gguf_file_is_converted_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of GGUF is replaced: the file stands for the weights of foreign/base."""
    from transformers import AutoModelForCausalLM

    from rlhf_tasks.models import load

    Path("model.gguf").write_bytes(b"GGUF")
    given, read, converted = load_causal("foreign/base"), AutoModelForCausalLM.from_pretrained, list[str]()

    def from_pretrained(source: Any, gguf_file: str = "", **options: Any) -> Any:
        if gguf_file:
            converted.append(gguf_file)
            return given, {f"{kind}_keys": [] for kind in ("missing", "mismatched", "unexpected")}
        return read(source, **options)

    own = load.load_config

    def of_gguf(source: Any, revision: str | None = None) -> Any:
        return own("foreign/base" if source == "model.gguf" else source)

    monkeypatch.setattr(load, "load_config", of_gguf)
    monkeypatch.setattr(load, "fetch_tokenizer", lambda *_: Path("foreign/base"))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    toy.run("base", toy.write_params(model={"base": "model.gguf"}))
    assert not list(Path("models/base").glob("*.safetensors"))
    assert (ready_models.read("models/base") or {})["files"].keys() == {"model.gguf"}
    same = [torch.equal(logits("models/base"), logits("foreign/base")) for _ in range(2)]
    assert (same, converted) == ([True, True], ["model.gguf"])
    shutil.rmtree(".rlhf/models")  # as on another machine
    same = [torch.equal(logits("models/base"), logits("foreign/base")) for _ in range(2)]
    assert (same, converted) == ([True, True], ["model.gguf"] * 2)


def test_a_reference_to_a_reference_is_refused(project: Path) -> None:
    """Its weights would be sought where its own parameter names them."""
    settings = toy.write_params(**READY)
    Path("other").mkdir()
    for name in ("models", "foreign", "params.yaml"):
        Path(name).rename(Path("other") / name)
    toy.foreign("foreign/base", "llama", dtype=torch.bfloat16)
    toy.run("base", settings)
    with pytest.raises(UserError, match=r"sft\.from=other/models/base holds no weights: .*name that model"):
        toy.run("sft", toy.write_params(sft={"from": "other/models/base"}))


def test_a_copy_of_a_reference_is_a_plain_checkpoint_with_the_bytes_of_the_source(project: Path) -> None:
    copy_checkpoint(Path("models/sft"), Path("copied"))
    assert not Path("copied/reference.json").exists()
    assert contracts.fingerprint(Path("copied")) == contracts.fingerprint(Path("foreign/base"))
    assert {weight.dtype for weight in load_causal("copied").parameters()} == {torch.float32}
    assert torch.equal(logits("copied"), logits("models/sft"))


def test_only_a_stage_that_fetches_a_model_depends_on_how_it_is_kept(folder: Path) -> None:
    from rlhf_tasks.config import VIEWS

    def reading(settings: Any) -> set[str]:
        return {stage for stage, view in VIEWS.items() if "model.keep" in view.of(settings).declared}

    toy.foreign("foreign/base", "llama")
    assert reading(toy.write_params(sft={"from": "foreign/base"})) == {"base", "sft"}
    trained = {"base": "scratch", "scratch": {"hidden_size": 16, "num_heads": 2}}
    assert reading(toy.write_params(model=trained)) == set()


def test_tied_weights_are_counted_once(folder: Path) -> None:
    model = load_causal(toy.foreign("foreign/tied", "gpt2"))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert num_bytes(model) == 4 * model.num_parameters()
    model.get_input_embeddings().requires_grad_(False)
    trained = model.num_parameters(only_trainable=True)
    assert moment_bytes(model) == 8 * trained
    assert moment_bytes(model.bfloat16()) == 12 * trained, "DeepSpeed has float32 weights too"


def test_a_stage_says_the_disk_that_it_needs_and_does_not_begin_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, and three snapshots of weights, best weights and two moments: 13 times the weights."""
    toy.foreign("foreign/base", "llama")
    settings = toy.write_params()
    toy.copy_project()
    toy.run_stages(settings, "prepare", "base")
    size = num_bytes(load_causal("models/base"))
    toy.run("sft", settings)
    assert f"3 snapshots of {decimal(4 * size)}" in capsys.readouterr().out
    monkeypatch.setattr(disk, "free", lambda folder: 13 * size - 1)
    with pytest.raises(disk.DiskFullError, match=f"at least .*{13 * size:,} bytes"):
        toy.run("sft", settings)
