"""Imports go one way, without cycles; what must be light loads no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.imports import ROOT, all_modules, cycles, file_of, foreign_imports, imports, tree_of

FLOORS: Mapping[str, int] = {
    "errors": 0,
    "console": 0,
    "config": 1,
    "project": 2,
    "data": 3,
    "presets": 3,
    "tracking": 3,
    "models": 4,
    "scoring": 5,
    "judging": 6,
    "training": 6,
    "ppo": 7,  # selects its checkpoint by a judge
    "promotion": 8,
    "report": 8,
    "stages": 9,
    "cli": 11,
}
"""A module imports only from lower floors and from its own package."""
LINES: Mapping[str, int] = {
    "cli": 878,  # that stage dpo is not planned, which signal a run got, the command `methods`
    "config": 2747,  # stage dpo, its labels, a language model as reward, best-of-n, HSDP
    "data": 2627,  # unpaired labels, held-out rows in random order and no turns of theirs, several templates
    "data/readers": 2510,  # unpaired labels; empty or misnamed columns; labels that say nothing
    "models": 2455,  # the output layer by TF32, frozen layers in 16 bits, bytes of moments, kept memory
    "scoring": 1370,  # the client of language models, replies that were cut, judges with another tokenizer
    "training": 3420,  # losses of stage dpo, speed and work of a stage, tokens by layout, HSDP
    "ppo": 3254,  # groups without variance, truncated responses, what stage dpo measures too
    "stages": 2344,  # stage dpo, single labels, best-of-n for pairs; losses and estimators are tried early
    "judging": 2659,  # best-of-n: its responses, its KL and its cost; replies that are neither A nor B
    "promotion": 1294,  # win rates of few prompts without ties
    "tracking": 1897,  # judges by the model that they read; DPO's curves; methods; own names
    "report": 1075,  # the words of card, MLflow and Prefect, of DPO; names of settings; the page of methods
    "project": 2619,  # what a stage reads anew, which flows say too; lost results; peak memory
    "presets": 196,
    "../flows": 2795,  # why a stage runs, a cancellation that is one sentence, GPUs by number; methods
}
"""The most lines of Python of a room; the commit that raises one says what they are for."""
TORCH_FREE = (
    "config",
    "console",
    "errors",
    "tracking",
    "presets",
    *(name.removeprefix("rlhf_tasks.") for name in all_modules() if name.startswith("rlhf_tasks.project.")),
    "models.contracts",
    "training.auto",
    "training.checkpoint",
    "training.failures",
    "training.launch",
    "training.signals",
    "promotion.command",
    "promotion.registry",
    "judging.judges.comparisons",
    "judging.results",
    "report.comparison",
    "cli.main",
    "stages.after",
    "stages.prepare",
    "stages.runner",
    "stages.preflight",
    "stages.verdict",
)
TRAINING_STAGES = [f"rlhf_tasks.stages.{name}" for name in ("base", "sft", "preferences", "reward", "ppo")]
LATE = (
    *("datasets", "deepspeed", "dvc", "fastapi", "matplotlib", "mlflow", "openai", "pandas", "peft"),
    *("prefect", "rouge_score", "sklearn", "sqlalchemy"),
)
OURS = [name for name in all_modules() if name.startswith("rlhf_tasks.")]


def floor(module: str) -> tuple[int, str]:
    """The floor of a module, and the part of the tree that stands on it."""
    name = module.removeprefix("rlhf_tasks.")
    parts = [part for part in FLOORS if name == part or name.startswith(f"{part}.")]
    assert parts, f"{module}: give its package a floor"
    part = max(parts, key=len)
    return FLOORS[part], part


@pytest.mark.parametrize("module", OURS)
def test_a_module_imports_only_its_own_package_and_lower_floors(module: str) -> None:
    """Imports for type checkers count. `flows` is above all: only a command imports it, when it runs."""
    own = floor(module)
    for name in imports(module, for_types=True) - {"rlhf_tasks"}:
        if name.startswith("flows"):
            assert own[1] == "cli", f"{module} imports {name}"
            continue
        is_package_of_both = module.startswith(f"{name}.")
        other = floor(name)
        assert is_package_of_both or other[1] == own[1] or other[0] < own[0], f"{module} imports {name}"


def test_the_floors_stand_in_the_order_of_the_pipeline() -> None:
    """Line counts that are written here by mistake would allow any import."""
    order = ("config", "project", "data", "models", "scoring", "training", "ppo", "report", "stages", "cli")
    assert [*map(FLOORS.get, order)] == sorted({FLOORS[part] for part in order})


@pytest.mark.parametrize("room", LINES)
def test_a_room_has_no_more_lines_than_its_limit(room: str) -> None:
    folder = ROOT / "rlhf_tasks" / room
    files = [file for file in folder.rglob("*.py") if room == "data/readers" or file.parent.name != "readers"]
    num_lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert num_lines <= LINES[room]


def test_every_room_has_a_limit() -> None:
    assert {folder.parent.name for folder in (ROOT / "rlhf_tasks").glob("*/__init__.py")} <= LINES.keys()


def test_a_stage_imports_no_other_stage() -> None:
    """Stages meet through files."""
    for module in OURS:
        if module.startswith("rlhf_tasks.stages.") and module != "rlhf_tasks.stages.runner":
            assert not [n for n in imports(module) if n.startswith("rlhf_tasks.stages.")], module


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(line).name) for group in groups for line in group}
    packages = metadata.packages_distributions()
    for module in all_modules():
        for name in foreign_imports(module):
            assert declared & {canonicalize_name(one) for one in packages.get(name, [name])}, (module, name)


def test_no_modules_import_each_other() -> None:
    assert cycles(all_modules()) == []


def test_a_cycle_would_be_found() -> None:
    assert "rlhf_tasks.project.git" in imports("rlhf_tasks.project.paths", for_types=True)
    assert "rlhf_tasks.training.distributed" in imports("rlhf_tasks.training.checkpoint", for_types=True)
    assert "rlhf_tasks.training.distributed" not in imports("rlhf_tasks.training.checkpoint")


@pytest.mark.parametrize("module", [m for m in all_modules() if str(file_of(m)).endswith("__init__.py")])
def test_a_package_file_only_makes_names_public(module: str) -> None:
    for node in tree_of(module).body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        assert is_docstring or is_list or isinstance(node, (ast.Import, ast.ImportFrom)), ast.unparse(node)


def test_modules_load_no_library_before_they_need_it() -> None:
    """Each of these takes a second or more, and most runs do not use it; a run loads MLflow when it opens."""
    flows = [name for name in all_modules() if name.startswith("flows.")]
    light = [f"rlhf_tasks.{name}" for name in TORCH_FREE] + flows
    assert loaded(light, ["torch"]) == []
    assert loaded(TRAINING_STAGES, LATE) == []


def loaded(modules: Sequence[str], libraries: Sequence[str]) -> list[str]:
    """Which module is the first, imported in this order by a new process, that loads one of the libraries."""
    code = (
        "import importlib, sys\n"
        f"for module in {[*modules]}:\n"
        "    importlib.import_module(module)\n"
        f"    if found := {{*{[*libraries]}}} & sys.modules.keys(): sys.exit(f'{{module}} loads {{found}}')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr.splitlines()
