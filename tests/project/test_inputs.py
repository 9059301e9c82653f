"""DVC runs again exactly the stages that read what has changed."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.config import Section
from rlhf_tasks.config.types import sections
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, hashing, inputs, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import auto, checkpoint
from tests import small
from tests.conftest import Command
from tests.flows import toy
from tests.flows.chain import Chain, times

ROOT = Path(__file__).parents[2]
MODEL_STAGES = ("base", "sft", "preferences", "reward", "ppo", "judge")


def set_values(root: Path, changes: Mapping[str, Any]) -> None:
    """Change parameters in params.yaml, by dotted key."""
    file, yaml = root / "params.yaml", YAML()
    tree = yaml.load(file.read_text(encoding="utf-8"))
    for key, value in changes.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    yaml.dump(tree, file)


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files with their folders."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


@pytest.mark.e2e
def test_dvc_runs_the_stages_that_read_a_changed_value_and_no_others(tmp_path: Path) -> None:
    """The programs write the same outs again, so that what follows needs no run. The report reads lineage."""
    chain = Chain(toy.make(tmp_path / "project"))

    def repro() -> set[str]:
        """Which stages `dvc repro` runs."""
        before = Counter(chain.ran()) if (chain.home / "ran").exists() else Counter()
        dvc_cli.run(chain.root, "repro")
        return {*(Counter(chain.ran()) - before)}

    assert repro() == {*times(1)}
    default = [{"kind": "reward_model", "weight": 1.0, "path": None, "name": None}]
    how = {"service.retries": 1, "resume.keep": 1, "launch.precision": "fp32"}
    set_values(chain.root, {"ppo.scorers": default, **how})
    assert repro() == set(), "defaults that are written out, and what changes no result"
    set_values(chain.root, {"ppo.kl_coef": 0.05})
    diff = json.loads(dvc_cli.run(chain.root, "params", "diff", "--json", "HEAD"))
    assert diff["params.yaml"]["ppo.kl_coef"]["new"] == 0.05, "although no stage depends on params.yaml"
    assert repro() == {"ppo", "report"}
    write(chain.root, {"own.py": "import near\nf = near.f\n", "near.py": "f = len\n"})
    reward = {"kind": "function", "weight": 1.0, "function": "own:f"}
    set_values(chain.root, {"ppo.scorers": [*default, reward]})
    assert repro() == {"ppo", "report"}
    write(chain.root, {"near.py": "f = max\n"})
    assert repro() == {"ppo", "report"}, "a file that the function's file imports"
    write(chain.root, {"ready/weights": "1", "ready/config.json": "{}"})
    set_values(chain.root, {"sft.from": "ready"})
    repro()
    write(chain.root, {"ready/weights": "2"})
    assert repro() == {"sft", "report"}
    write(chain.root, {"unread.py": "", "ready/weights": "1"})
    assert repro() == set(), "from the run cache"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command) -> Path:
    """A project with its inputs files; the machine has no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(auto, "gpus", list)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    toy.write_params(tmp_path)
    (tmp_path / "given").mkdir(exist_ok=True)
    rlhf("inputs")
    return tmp_path


@pytest.fixture
def rerun(record: Path) -> Callable[..., set[str]]:
    """Change values and files: which stages but report have other inputs then, so that DVC would run them."""

    def apply(values: Mapping[str, Any] | None = None, **files: str) -> set[str]:
        before = {file.stem: file.read_text(encoding="utf-8") for file in Path("inputs").glob("*.json")}
        set_values(record, values or {})
        write(record, files)
        auto.write_inputs(Paths(record), config.load(Path("params.yaml")))
        after = {file.stem: file.read_text(encoding="utf-8") for file in Path("inputs").glob("*.json")}
        return {name for name, text in after.items() if text != before.get(name)} - {"report"}

    return apply


def test_a_change_of_what_a_value_names_reruns_the_stages_that_read_it(
    rerun: Callable[..., set[str]],
) -> None:
    empty = ("mine/__init__.py", "mine/deep.py", "ready/weights", "text.txt", "questions.txt")
    write(Path(), {"words.py": "f = 1"} | dict.fromkeys(empty, ""))
    # Of this size `micro_batch_tokens: auto` is what it was.
    Path("ready/config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 1}', encoding="utf-8")
    Path("mine/reward.py").write_text("from .deep import x\ndef score(p, r):\n    import words\n", "utf-8")
    reward = {"kind": "function", "weight": 1.0, "function": "mine.reward:score"}
    judges = [{"kind": "gold", "name": "gold"}, {"kind": "function", "name": "own", "function": "words:f"}]
    retention = {**small.params()["judge"]["retention"], "questions": "questions.txt"}
    named = {
        "sft.from": "ready",
        "ppo.scorers": [{"kind": "reward_model", "weight": 1.0}, reward],
        "ppo.ptx": {"coef": 0.1, "text": "text.txt"},
        "judge.retention": retention,
        "judge.judges": [*judges, {"kind": "reward_model", "name": "rm", "path": "models/reward_heldout"}],
        "promotion.second_judge": None,
    }
    assert rerun(named) == {"sft", "ppo", "judge", "verdict"}
    assert rerun() == set()
    assert rerun({"launch.precision": "bf16"}) == {*MODEL_STAGES}
    for file, stages in {
        "ready/weights": {"sft"},
        "mine/deep.py": {"ppo"},
        "words.py": {"ppo", "judge"},
        "text.txt": {"ppo"},
        "questions.txt": {"judge"},
        "unread.py": set[str](),
    }.items():
        assert rerun(**{file: "x = f = 2"}) == stages, file
    assert rerun({"judge.labels": "given/rows.txt"}, **{"given/rows.txt": "labels"}) == {"judge"}
    assert rerun(**{"given/rows.txt": "other labels"}) == {"judge"}
    files = {"data.source": "files", "judge.judges": judges[1:], "promotion.judge": "own"}
    assert rerun(files) >= {"prepare"}


def test_a_change_of_a_models_files_reruns_the_stages_that_load_it(rerun: Callable[..., set[str]]) -> None:
    for name in ("base", "ranker", "scorer", "verdict"):
        config_json = '{"hidden_size": 8, "num_hidden_layers": 1}'
        write(Path(), {f"ready/{name}/config.json": config_json, f"ready/{name}/weights": "1"})
    scorers = [{"kind": "reward_model", "weight": 1.0}]
    scorers += [{"kind": "reward_model", "name": "own", "weight": 1.0, "path": "ready/scorer"}]
    judges = [
        {"kind": "gold", "name": "gold"},
        {"kind": "reward_model", "name": "rm", "path": "ready/verdict"},
    ]
    named: dict[str, Any] = {"model.base": "ready/base", "model.scratch": None, "reward.from": "ready/ranker"}
    rerun({**named, "ppo.scorers": scorers, "judge.judges": judges, "promotion.second_judge": "rm"})
    for name, stages in {
        "base": {"prepare", "base"},
        "ranker": {"reward"},
        "scorer": {"ppo"},
        "verdict": {"judge"},
    }.items():
        assert rerun(**{f"ready/{name}/weights": "2"}) == stages, name


def test_another_default_in_the_code_reruns_the_stages_that_read_it(
    rerun: Callable[..., set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config.load()
    sft = settings.sft.model_copy(update={"weight_decay": 0.5})
    monkeypatch.setattr(config, "load", lambda path: settings.model_copy(update={"sft": sft}))
    assert rerun() == {"sft"}


def test_another_version_of_a_package_reruns_the_stages_that_use_it(
    rerun: Callable[..., set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"

    def install(name: str, version: str) -> None:
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
        (info / "top_level.txt").write_text(f"{name}\n", encoding="utf-8")
        (info / "RECORD").write_text(f"{name}.py,,\n", encoding="utf-8")

    install("their_rewards", "1.0")
    (site / "their_rewards.py").write_text("def score(p, r): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    reward = {"kind": "function", "weight": 1.0, "function": "their_rewards:score"}
    assert rerun({"ppo.scorers": [{"kind": "reward_model", "weight": 1.0}, reward]}) == {"ppo"}
    (site / "their_rewards-1.0.dist-info").rename(site / "left-1.0")
    install("their_rewards", "1.1")
    assert rerun() == {"ppo"}
    recorded = json.loads(Path("inputs/ppo.json").read_text(encoding="utf-8"))
    assert recorded["packages"]["their-rewards"] == "1.1"
    install("torch", "99.0+cpu")
    assert rerun() == {*MODEL_STAGES, "dpo", "value"}
    (site / "torch-99.0+cpu.dist-info").rename(site / "left")
    install("torch", "99.0+cu140")
    assert rerun() == set(), "another build of the same version"


# ------------------------------------------------------------------------------------------- collected


def ppo_values(name: str) -> dict[str, Any]:
    return {"ppo.scorers": [{"kind": "function", "weight": 1.0, "function": name}]}


def test_everything_that_does_not_exist_is_named_in_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    own = {"kind": "function", "name": "gold", "function": "no:f"}
    judge = {"labels": "none.jsonl", "judges": [own, small.HELDOUT]}
    toy.write_params(tmp_path, sft={"from": "nowhere"}, judge=judge, data={"source": "files"})
    message = rlhf("inputs", status=2).err
    parts = ("sft.from=nowhere does not exist", "judge.labels=none.jsonl", "data.path=given", "of no:f is")
    assert [part for part in parts if part not in message] == []
    assert not (tmp_path / "inputs").exists()


def test_a_folder_that_a_later_stage_makes_is_refused_and_a_dep_is_left_to_dvc(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n  ppo: {cmd: x, deps: [rewards], outs: [models/policy]}\n", encoding="utf-8"
    )
    own = {"ppo.scorers": [{"kind": "reward_model", "weight": 1.0, "path": "rewards/second"}]}
    assert inputs.collect(Paths(tmp_path), "ppo", own).files == {}
    own["ppo.scorers"][0]["path"] = "models/policy/best"
    with pytest.raises(UserError, match=r"ppo\.scorers\.0\.path=models/policy/best is made by stage ppo"):
        inputs.collect(Paths(tmp_path), "ppo", own)


def test_a_hub_id_and_the_name_of_something_shipped_are_only_values(tmp_path: Path) -> None:
    hub = {"model.base": "owner/name", "model.revision": "0" * 40, "judge.retention.general": "english"}
    judges = [{"kind": "llm", "prompt": "tldr"}, {"kind": "local", "path": "a/b", "revision": "0" * 40}]
    assert inputs.collect(Paths(tmp_path), "judge", {**hub, "judge.judges": judges}).files == {}


def test_the_code_of_a_function_is_its_file_and_all_project_files_that_it_imports(tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": "import outer",
        "pack/sub/__init__.py": "",
        "pack/sub/reward.py": "from . import near\nfrom ..up import score\nimport json, rlhf_tasks.ppo.x",
        "pack/sub/near.py": "",
        "pack/up.py": "def g():\n    from late import h",
        "late.py": "import pack.sub.reward  # a circle",
        "outer.py": "",
        "unused.py": "",
        "rlhf_tasks/ppo/x.py": "import unused  # a dep of the stage",
    }
    write(tmp_path, {"dvc.yaml": "stages: {ppo: {cmd: x, deps: [rlhf_tasks/ppo]}}\n"})
    write(tmp_path, files)
    found = inputs.collect(Paths(tmp_path), "ppo", ppo_values("pack.sub.reward:score")).files
    assert {*found} == {*files} - {"unused.py", "rlhf_tasks/ppo/x.py"}
    assert found["outer.py"] == hashing.dvc_md5(tmp_path / "outer.py")
    (tmp_path / "late.py").write_text("def f(:", encoding="utf-8")
    with pytest.raises(UserError, match=r"ppo\.scorers\.0\.function: late\.py is not readable as Python"):
        inputs.collect(Paths(tmp_path), "ppo", ppo_values("pack.sub.reward:score"))


def test_the_packages_that_the_files_of_a_function_import_are_known_by_version(tmp_path: Path) -> None:
    """A shipped function's too, though its file is a dep of the stage; but not what other deps import."""
    files = {
        "reward.py": "import json, near\nfrom scipy.stats import norm\nscore = norm.pdf",
        "near.py": "import sklearn",
        "rlhf_tasks/scoring/own.py": "import pandas\nfrom rlhf_tasks.scoring import other as score",
        "rlhf_tasks/scoring/other.py": "import mlflow",
        "dvc.yaml": "stages: {ppo: {cmd: x, deps: [rlhf_tasks/scoring]}}\n",
    }
    write(tmp_path, files)
    none = {*inputs.collect(Paths(tmp_path), "ppo", {}).packages}
    for function, packages in {
        "reward:score": {"scipy", "scikit-learn"},
        "rlhf_tasks.scoring.own:score": {"pandas"},
    }.items():
        assert {*inputs.collect(Paths(tmp_path), "ppo", ppo_values(function)).packages} - none == packages


def test_the_file_of_a_function_is_looked_for_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the module's name is no such file, and does not hide an installed package."""
    files = {
        "mine/__init__.py": "",
        "mine/reward.py": "def score(): ...",
        "numpy/notes.txt": "",
        "mine.py": "",
    }
    write(tmp_path, files)
    inputs.collect(Paths(tmp_path), "ppo", ppo_values("mine.reward:score"))
    for function, message in {
        "mine.rewrd:score": "neither a file below .* nor in an installed package",
        "nowhere.at_all:f": "neither a file below .* nor in an installed package",
        "os.path:join": "nor in an installed package; write os.py",
        "mine.py:score": "write mine:score, without .py",
    }.items():
        with pytest.raises(UserError, match=message):
            inputs.collect(Paths(tmp_path), "ppo", ppo_values(function))
    assert "numpy" in inputs.collect(Paths(tmp_path), "ppo", ppo_values("numpy.linalg:norm")).packages
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/editable.py").write_text("def score(): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # as the .pth file of an editable package does
    inputs.collect(Paths(tmp_path), "ppo", ppo_values("editable:score"))


def test_only_stage_prepare_depends_on_the_code_of_a_source_and_on_what_it_reads(tmp_path: Path) -> None:
    text = "import scipy\ndef rows(): ...\n"
    write(tmp_path, {"mine.py": text, "known.py": f"{text}def reads(): return {{'tickets.csv': 7}}"})
    of = {
        (stage, name): inputs.collect(Paths(tmp_path), stage, {"data.source": f"{name}:rows"})
        for stage in ("prepare", "judge")
        for name in ("mine", "known")
    }
    assert [*of["prepare", "mine"].files] == ["mine.py"]
    assert of["prepare", "known"].packages == {**of["prepare", "mine"].packages, "tickets.csv": "7"}
    assert "scipy" in of["prepare", "mine"].packages
    assert not of["judge", "known"].files
    write(tmp_path, {"wrong.py": "def rows(): ...\ndef reads(): return 7"})
    with pytest.raises(UserError, match=r"^data\.source: wrong:reads raised TypeError: 'int'"):
        inputs.collect(Paths(tmp_path), "prepare", {"data.source": "wrong:rows"})


def test_every_parameter_that_names_a_file_or_a_function_is_known() -> None:
    """Texts that could be a path: a new one must be added to FILES, to FUNCTIONS, or here."""
    others = ("model.scratch", "data.columns", "ppo.engine", "ppo.sampler", "judge.judges.judges")
    elsewhere = ("tracking", "promotion", "service", "launch")
    names = {key.rpartition(".")[2] for key in (*inputs.FILES, *inputs.FUNCTIONS)}
    found = {key for key in _texts_of(config.Config) if key.rpartition(".")[2] in names}
    unknown = {
        key for key in found - {*inputs.FILES, *inputs.FUNCTIONS} if not key.startswith(others + elsewhere)
    }
    assert unknown == set()


def _texts_of(section: type[Section], prefix: str = "") -> set[str]:
    found = set[str]()
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = sections(field.annotation)
        found |= {text for kind in inner for text in _texts_of(kind, f"{key}.")} if inner else {key}
    return found


# ------------------------------------------------------------------------------------- what a stage uses


def test_a_stage_uses_the_recorded_precision_though_another_machine_would_choose_another(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, settings = Paths(record), config.load()
    assert settings.launch.precision == "auto"
    assert auto.resolve_for(paths, "ppo", settings).launch.precision == "fp32"
    file = record / "inputs/ppo.json"
    file.write_text(file.read_text(encoding="utf-8").replace('"fp32"', '"bf16"'), encoding="utf-8")
    monkeypatch.setattr(auto, "cpu_has_amx", lambda: False)
    assert auto.resolve_for(paths, "ppo", settings).launch.precision == "bf16"
    monkeypatch.setattr(auto, "gpus", lambda: [SimpleNamespace(major=n, total_memory=8e10) for n in (9, 8)])
    assert auto.resolve_for(paths, "ppo", settings).launch.precision == "bf16"
    assert auto.resolve_for(paths, "sft", settings).launch.precision == "fp32", "as recorded"
    (record / "inputs/sft.json").unlink()
    assert auto.resolve_for(paths, "sft", settings).launch.precision == "bf16", "without a record"


def test_a_stage_refuses_a_record_that_is_older_than_what_it_reads(record: Path) -> None:
    toy.write_params(record, ppo={"kl_coef": 0.07})
    with pytest.raises(UserError, match=r"^ppo\.kl_coef \(.* → 0\.07\) changed since inputs/ppo\.json was"):
        auto.resolve_for(Paths(record), "ppo", config.load())
    auto.resolve_for(Paths(record), "sft", config.load())


def test_precision_and_named_files_are_part_of_a_stages_identity_and_of_its_lineage(record: Path) -> None:
    paths = Paths(record)
    identity = lineage.fingerprint(paths, "sft", {"sft.patience": 1}).flat()
    assert identity["launch.precision"] == "fp32"
    assert identity["package torch"]
    assert identity["sft.patience"] == 1, "what the caller gives"
    assert "inputs/sft.json" not in identity, "its parts say more"
    written = json.loads(lineage.write(paths, "sft", "sft-k", 1.0).read_text(encoding="utf-8"))
    assert written["launch.precision"] == "fp32"
    assert "torch" in written["packages"]


@pytest.mark.parametrize(
    "there",
    [
        {"launch.precision": "bf16"},
        {"sft.micro_batch_tokens": 1024},
        {"launch.precision": "bf16", "sft.micro_batch_tokens": 2048},
    ],
)
def test_an_unfinished_run_is_refused_by_name_where_auto_stood_for_something_else(
    record: Path, there: Mapping[str, Any]
) -> None:
    """Only where nothing else differs: another value of one's own starts from the beginning."""
    paths, view = Paths(record), config.VIEWS["sft"].of(auto.resolve(config.load(), Path()))
    identity = lineage.fingerprint(paths, "sft", view.declared).flat()
    snapshot = record / ".rlhf/state/sft/other/sft/step-000000001"
    snapshot.mkdir(parents=True)
    manifest: dict[str, Any] = {"identity": {**identity, **there}, "step": 1}
    (snapshot / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    differing = re.escape(", ".join(f"{key} ({there[key]!r} → {identity[key]!r})" for key in there))
    with (
        pytest.raises(UserError, match=rf"had other values for `auto`: {differing}\. Set the former"),
        checkpoint.claim(paths, view, main=True),
    ):
        pass
    # What the message tells to write makes the stage look for that run's snapshots.
    set_values(record, there)
    auto.write_inputs(paths, config.load())
    as_told = config.VIEWS["sft"].of(auto.resolve(config.load(), Path()))
    assert lineage.fingerprint(paths, "sft", as_told.declared).flat() == manifest["identity"]
    manifest["identity"]["sft.patience"] = 99
    (snapshot / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with checkpoint.claim(paths, view, main=True) as claim:
        assert claim.folder is not None


# --------------------------------------------------------------------------------------- runs of a commit


def test_a_function_of_a_run_form_stands_in_the_commit_or_in_a_package_of_pyproject(tmp_path: Path) -> None:
    toy.git(tmp_path, "init", "-q")
    (tmp_path / "kept.py").write_text("def f(p, r): ...\n", encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\ndependencies = ["numpy>=1"]\n', encoding="utf-8"
    )
    toy.commit(tmp_path)
    (tmp_path / "new.py").write_text("def f(p, r): ...\n", encoding="utf-8")
    for allowed in ("kept:f", "numpy.linalg:norm"):
        inputs.check_committed(tmp_path, config.validate(small.params(ppo_values(allowed)), "test"))
    for refused, named in {"new:f": "new.py", "os:system": "os.py", "torch:load": "torch.py"}.items():
        with pytest.raises(UserError, match=rf"{refused} is neither in a file .* commit {named}"):
            inputs.check_committed(tmp_path, config.validate(small.params(ppo_values(refused)), "test"))
