"""dvc.yaml, config, code and presets agree with each other.

`python -m tests.test_contracts` prints the code that each stage of dvc.yaml must have among its deps;
with `--write` it puts that list into dvc.yaml.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from rlhf_tasks import config, presets
from rlhf_tasks.config import STAGES, VIEWS, Config, Section
from rlhf_tasks.project import dvc_files
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import curves

ROOT = Path(__file__).parents[1]
# What decides only where and with what words a stage runs. Their change leaves every out as it is.
AROUND = (
    "config",
    "cli",
    "stages.runner",
    "tracking",
    "console",
    "training.launch",
    "training.resume",
    "project.lineage",
    "project.dvc_files",
    "project.hashing",
    "project.git",
    "project.paths",
    "errors",
)
BESIDE = (".html", ".css", ".js", ".txt")  # what a package reads of its own folder

# All others: 1. Promotion judges by the code of stage judge.
LAYERS: Mapping[str, int] = {"errors": -1, "config": 0, "promotion": 3, "stages": 4, "cli": 5}
TORCH_FREE = (
    "config",
    "console",
    "tracking",
    "presets",
    "project.atomic",
    "project.lineage",
    "project.processes",
    "project.provenance",
    "project.git",
    "project.dvc_cli",
    "project.dvc_files",
    "project.experiments",
    "project.hashing",
    "project.paths",
    "errors",
    "project.workspaces",
    "modeling.contracts",
    "training.launch",
    "promotion.command",
    "promotion.registry",
    "evaluation.judges",
    "evaluation.labelling",
    "evaluation.results",
    "report.comparison",
    "report.comparison_page",
    "cli.main",
    "stages.prepare",
    "stages.runner",
    "stages.verdict",
)


# ------------------------------------------------------------------------------- reading imports


def file_of(module: str) -> Path | None:
    """The file of one of our modules; None for names that are none."""
    path = ROOT.joinpath(*module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Our modules that a module imports, lazily or not; not those for type checkers only."""
    file = file_of(module)
    assert file is not None, module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
            source = (base + (node.module or "")).rstrip(".")
            found |= {source} | {f"{source}.{name.name}" for name in node.names}
    return frozenset(name for name in found if name.startswith(("rlhf_tasks", "flows")) and file_of(name))


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _executed(node)


def code_of(stage: str) -> list[str]:
    """The files whose change must run a stage again, as dvc.yaml is to list them."""
    todo, seen = [runner.MODULES[stage]], set[str]()  # type: ignore[index]
    while todo:
        module = todo.pop()
        if module in seen or is_around(module):
            continue
        seen.add(module)
        todo += imports(module)
    files = {file for module in seen if (file := file_of(module)) and _says_something(file)}
    folders = {file.parent for file in files} - {ROOT / "rlhf_tasks"}
    files |= {file for folder in folders for file in folder.iterdir() if file.suffix in BESIDE}
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def is_around(module: str) -> bool:
    name = module.removeprefix("rlhf_tasks.")
    return any(name == around or name.startswith(f"{around}.") for around in AROUND)


def _says_something(file: Path) -> bool:
    """False for an __init__.py of nothing but a docstring."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def dvc_stage(stage: str) -> Mapping[str, Any]:
    tree = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    node: Mapping[str, Any] = tree["stages"][stage]
    return node


def our_modules() -> list[str]:
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("rlhf_tasks", "flows")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


# -------------------------------------------------------------------------------------- dvc.yaml


def test_dvc_yaml_has_every_stage_in_order() -> None:
    assert tuple(dvc_files.graph(ROOT)) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_only_its_command(stage: str) -> None:
    """No value is templated into a command: that would be a shell injection."""
    assert dvc_stage(stage)["cmd"] == f"rlhf {stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_the_code_a_stage_imports_is_among_its_deps(stage: str) -> None:
    deps = dvc_files.graph(ROOT)[stage].deps
    declared = [dep for dep in deps if dvc_files.is_code(dep) and dep.startswith("rlhf_tasks/")]
    assert sorted(declared) == code_of(stage), "see python -m tests.test_contracts"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_the_params_it_declares(stage: config.Stage) -> None:
    assert tuple(dvc_stage(stage).get("params", ())) == VIEWS[stage].reads()


def test_data_deps_are_made_by_an_earlier_stage_or_given() -> None:
    made: set[str] = set()
    given = {*dvc_files.graph(ROOT)["prepare"].inputs, config.load(ROOT / "params.yaml").judge.labels}
    for node in dvc_files.graph(ROOT).values():
        assert not [path for path in node.inputs if path not in made and path not in given]
        made |= set(node.outs)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_declares_what_the_cli_writes_for_it(stage: config.Stage) -> None:
    outs = dvc_files.graph(ROOT)[stage].outs
    assert f"models/lineage/{stage}.json" in outs
    assert (f"plots/{stage}.csv" in outs) == (stage in curves.CURVES)
    assert (f"metrics/{stage}.json" in outs) == (stage != "report")


def test_metrics_and_plots_are_kept_by_git_and_all_else_by_dvc() -> None:
    for stage in STAGES:
        for kind in ("outs", "metrics", "plots"):
            for entry in dvc_stage(stage).get(kind, ()):
                path, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
                assert options == ({"cache": False} if path.startswith(("metrics/", "plots/")) else {})


def test_only_the_report_depends_on_lineage() -> None:
    """Run keys and commits stand there: a stage that read them would run again for nothing."""
    readers = {s for s, node in dvc_files.graph(ROOT).items() if any("lineage" in dep for dep in node.inputs)}
    assert readers == {"report"}


# --------------------------------------------------------------------------------------- imports


def layer(module: str) -> int:
    return LAYERS.get(module.split(".")[1], 1)


@pytest.mark.parametrize("module", [m for m in our_modules() if m.startswith("rlhf_tasks.")])
def test_imports_go_one_way(module: str) -> None:
    """Stages do not import each other: they meet through files."""
    for name in imports(module) - {"rlhf_tasks"}:
        same_package = name.split(".")[1] == module.split(".")[1]
        lower = layer(name) < layer(module) or (layer(name) == layer(module) == 1)
        assert same_package or lower, f"{module} imports {name}"
        assert not name.startswith("flows")


@pytest.mark.parametrize(
    "module",
    [f"rlhf_tasks.{name}" for name in TORCH_FREE] + [m for m in our_modules() if m.startswith("flows.")],
)
def test_torch_free_modules_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------ values and knobs


def fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key as in params.yaml, Python's name) of every value."""
    for name, field in section.model_fields.items():
        key = prefix + (field.alias or name)
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if _is_section(a)]
        if inner:
            yield from (pair for kind in inner for pair in fields(kind, f"{key}."))
        else:
            yield key, name


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def test_no_knob_is_dead() -> None:
    """Every field is read by name somewhere outside config.py."""
    read: set[str] = set()
    for module in our_modules():
        file = file_of(module)
        if module != "rlhf_tasks.config" and file is not None:
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            read |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert sorted(key for key, name in fields(Config) if name not in read) == []


def test_params_yaml_holds_every_value() -> None:
    values = config.load(ROOT / "params.yaml").model_dump(mode="json", by_alias=True)
    tree = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    assert config.flatten(values).keys() == config.flatten(tree).keys()


REVISION = {"revision": "0123456789abcdef0123456789abcdef01234567"}
# What a preset leaves to its user to look up; any hash will do here.
UNPINNED: Mapping[str, Mapping[str, Any]] = {
    "tldr-pythia-1b": {"data": {"hub": {"preferences": REVISION}}, "sft": REVISION, "reward": REVISION}
}


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_parses_and_holds_only_what_differs(name: str) -> None:
    tree = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    shipped, overlay = config.flatten(tree), config.flatten(presets.read(name))
    assert [key for key, value in overlay.items() if key in shipped and shipped[key] == value] == []
    presets.overlay_onto(tree, presets.read(name))
    presets.overlay_onto(tree, UNPINNED.get(name, {}))
    config.validate(tree, name)
    assert presets.summary(name), "the first line is a comment that says what it is"


# -------------------------------------------------------------------------------------- the list


def main(arguments: list[str]) -> None:
    yaml = YAML()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    for name, stage in tree["stages"].items():
        if file_of(runner.MODULES[name]) is None:
            print(f"{name}: {runner.MODULES[name]} does not exist yet")
            continue
        data = [dep for dep in stage["deps"] if not dvc_files.is_code(dep)]
        stage["deps"][:] = [*data, *code_of(name)]
        print(f"{name}:", *code_of(name), sep="\n  - ")
    if "--write" in arguments:
        with (ROOT / "dvc.yaml").open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)


if __name__ == "__main__":
    main(sys.argv[1:])
