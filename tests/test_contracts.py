"""dvc.yaml, params.yaml, config, code and presets agree with each other.

`python -m tests.test_contracts` prints the code that each stage of dvc.yaml must have among its deps;
with `--write` it puts that list into dvc.yaml.
"""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from rlhf_tasks import config, presets
from rlhf_tasks.config import STAGES, VIEWS, Config, Section, Stage
from rlhf_tasks.config.stages import RUNTIME_SECTIONS
from rlhf_tasks.project import dvc_files
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import catalogue, curves
from tests.imports import (
    CONFIG,
    ROOT,
    all_modules,
    config_values,
    file_of,
    imports,
    modules_of_types,
    tree_of,
)

# No result depends on these: they decide where and how a stage runs, and what it prints and records.
# `code_of` adds the parts of config that a stage depends on.
NO_RESULT = (
    "config",
    "cli",
    "stages.runner",
    "tracking",
    "console",
    "training.launch",
    "training.resume",
    "project.lineage",
    "project.dvc_files",
    "project.git",
    "project.paths",
    "errors",
)
CATALOGUE = "tracking.catalogue"  # the report draws its figures by it
BESIDE = (".html", ".css", ".js", ".toml", ".txt")  # texts that a module reads from its folder, or below


# -------------------------------------------------------------------------------- code of a stage


def is_own_code(dep: str) -> bool:
    """Whether a dep is code of this project. A user's reward function is code too, but not of the project."""
    return dvc_files.is_code(dep) and dep.startswith("rlhf_tasks/")


def code_of(stage: Stage) -> list[str]:
    """The files whose change must run a stage again, as dvc.yaml is to list them.

    They are the modules that the stage imports, directly or not, and the parts of `config` that decide its
    values. Not all of `config`: `params` imports every section, and a judge's rule would retrain the policy.
    A stage depends on the modules that define the sections in its view, whose validators can change its
    values, on those which these import, and on those whose functions or constants its own code uses. The
    view's choice of keys needs no dep: it is compared with the stage's `params` in dvc.yaml.
    """
    modules = _imported([runner.MODULES[stage]], is_left_out)
    sections = {
        name: annotation
        for name, annotation in get_type_hints(VIEWS[stage]).items()
        if name not in (*RUNTIME_SECTIONS, "declared", "stage")
    }
    own = modules_of_types(sections) | {name for module in modules for name in config_values(module)}
    modules |= _imported(own, lambda module: not module.startswith(f"{CONFIG}."))
    files = {file for module in modules if (file := file_of(module)) and _has_code(module)}
    folders = {file.parent for file in files} - {ROOT / "rlhf_tasks"}
    folders |= {folder for module in modules for folder in _folders_of_texts(module)}
    files |= {file for folder in folders for file in folder.iterdir() if file.suffix in BESIDE}
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def _folders_of_texts(module: str) -> list[Path]:
    """The folders without code beside a module that the module names."""
    file = file_of(module)
    if file is None:
        return []
    nodes = ast.walk(tree_of(module))
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    beside = [folder for folder in file.parent.iterdir() if folder.is_dir() and folder.name in words]
    return [folder for folder in beside if not any(folder.glob("*.py"))]


def _imported(start: Iterable[str], leaves_out: Callable[[str], bool]) -> set[str]:
    """Some modules and all that they import, directly or not."""
    todo, seen = list(start), set[str]()
    while todo:
        module = todo.pop()
        if module not in seen and not leaves_out(module):
            seen.add(module)
            todo += imports(module)
    return seen


def is_left_out(module: str) -> bool:
    name = module.removeprefix("rlhf_tasks.")
    return not name.startswith(CATALOGUE) and any(
        name == part or name.startswith(f"{part}.") for part in NO_RESULT
    )


def _has_code(module: str) -> bool:
    """False for a package file of nothing but a docstring."""
    body = tree_of(module).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def dvc_stage(stage: str) -> Mapping[str, Any]:
    tree = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    node: Mapping[str, Any] = tree["stages"][stage]
    return node


# -------------------------------------------------------------------------------------- dvc.yaml


def test_dvc_yaml_has_every_stage_in_order() -> None:
    assert tuple(dvc_files.graph(ROOT)) == STAGES


def test_every_stage_reads_what_the_one_before_it_made() -> None:
    """So no two stages could run side by side, and the flow runs one after the other."""
    nodes = list(dvc_files.graph(ROOT).values())
    for before, after in itertools.pairwise(nodes):
        assert {*before.outs} & {*after.deps}, f"{after.deps} could be there before {before.outs}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_only_its_command(stage: str) -> None:
    """No value is templated into a command: that would be a shell injection."""
    assert dvc_stage(stage)["cmd"] == f"rlhf {stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_the_code_a_stage_imports_is_among_its_deps(stage: Stage) -> None:
    deps = dvc_files.graph(ROOT)[stage].deps
    declared = [dep for dep in deps if is_own_code(dep)]
    assert sorted(declared) == code_of(stage), "see python -m tests.test_contracts"


def test_a_function_of_config_is_found_however_it_is_imported() -> None:
    assert "rlhf_tasks.config.types" in config_values("rlhf_tasks.project.dvc_files")  # from … import flatten
    assert "rlhf_tasks.config.load" in config_values("rlhf_tasks.presets.overlays")  # config.load


def test_a_stage_depends_on_texts_only_if_its_code_reads_them() -> None:
    """Another probe must not train the reward model again, nor another prompt of a judge the SFT model."""
    readers = {"probes/": "evaluation/probe_texts.py", "prompts/": "evaluation/judges/prompt_templates.py"}
    for stage in STAGES:
        code = code_of(stage)
        for texts, reader in readers.items():
            has_texts = any(texts in path for path in code)
            assert has_texts == (f"rlhf_tasks/{reader}" in code), f"{stage}: {texts}"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_the_params_it_declares(stage: config.Stage) -> None:
    assert tuple(dvc_stage(stage).get("params", ())) == VIEWS[stage].reads()


def test_data_deps_are_made_by_an_earlier_stage_or_given() -> None:
    made: set[str] = set()
    given = {*dvc_files.graph(ROOT)["prepare"].inputs, config.load(ROOT / "params.yaml").judge.labels}
    for node in dvc_files.graph(ROOT).values():
        unknown = [path for path in node.inputs if path not in made and path not in given]
        assert not [path for path in unknown if not (ROOT / path).exists()]
        made |= set(node.outs)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_declares_what_the_cli_writes_for_it(stage: config.Stage) -> None:
    outs = dvc_files.graph(ROOT)[stage].outs
    assert f"models/lineage/{stage}.json" in outs
    assert (f"plots/{stage}.csv" in outs) == (stage in curves.CURVES)
    assert (f"metrics/{stage}.json" in outs) == (stage != "report")


@pytest.mark.parametrize("stage", STAGES)
def test_metrics_and_plots_are_kept_by_git_and_all_else_by_dvc(stage: config.Stage) -> None:
    """DVC restores no stage that has an uncached out, unless it is declared as a metric or a plot."""
    for kind, folder in {"outs": "", "metrics": "metrics/", "plots": "plots/"}.items():
        for entry in dvc_stage(stage).get(kind, ()):
            path, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
            assert path.startswith(folder or ("data/", "models/", "evaluation/", "reports"))
            assert options.pop("cache", True) == (folder == "")
            if kind == "plots":
                assert options.pop("x") == curves.axis(stage)
                assert catalogue.find(stage, options.pop("y")) is not None
            assert options == {}


def test_only_the_report_depends_on_lineage() -> None:
    """Lineage holds run keys and commits: a stage that read them would run again for nothing."""
    readers = {s for s, node in dvc_files.graph(ROOT).items() if any("lineage" in dep for dep in node.inputs)}
    assert readers == {"report"}


# ------------------------------------------------------------------------------------ parameters


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


def test_every_field_is_read() -> None:
    """A field counts as read where code outside `config` names it, or uses a function of `config` that does.

    What a validator reads does not count: a field that is only checked changes nothing.
    """
    outside = [tree_of(module) for module in all_modules() if not module.startswith(CONFIG)]
    read = {name for tree in outside for name in _names(tree)}
    inside = [tree_of(module) for module in all_modules() if module.startswith(CONFIG)]
    functions = [node for tree in inside for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    read |= {name for function in functions if function.name in read for name in _names(function)}
    assert sorted(key for key, name in fields(Config) if name not in read) == []


def _names(tree: ast.AST) -> set[str]:
    """The attributes that some code reads, and the names that it imports."""
    nodes = list(ast.walk(tree))
    imported = {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    return imported | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


def test_params_yaml_is_short_has_every_section_and_sets_no_value_but_the_defaults() -> None:
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 70
    assert config.parse(text, "params.yaml").keys() == Config.model_fields.keys()
    assert config.load(ROOT / "params.yaml") == Config()


REVISION = {"revision": "0123456789abcdef0123456789abcdef01234567"}
# What a preset leaves to its user to look up; any hash will do here.
UNPINNED: Mapping[str, Mapping[str, Any]] = {
    "tldr-pythia-1b": {"data": {"hub": {"preferences": REVISION}}, "sft": REVISION, "reward": REVISION}
}


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_parses_and_holds_only_what_differs(name: str) -> None:
    tree = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    shipped, overlay = config.flatten(tree), config.flatten(presets.read(name))
    same = [key for key, value in overlay.items() if key in shipped and shipped[key] == value]
    assert [key for key in same if not key.endswith(".kind")] == []
    config.merge(tree, presets.read(name))
    config.merge(tree, UNPINNED.get(name, {}))
    config.validate(tree, name)
    assert presets.summary(name), "the first line is a comment that says what it is"


# -------------------------------------------------------------------------------------- the list


def main(arguments: list[str]) -> None:
    yaml = YAML()
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    tree = yaml.load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    for name, stage in tree["stages"].items():
        given = [dep for dep in stage["deps"] if not is_own_code(dep)]
        stage["deps"][:] = [*given, *code_of(name)]
        print(f"{name}:", *code_of(name), sep="\n  - ")
    if "--write" in arguments:
        with (ROOT / "dvc.yaml").open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)


if __name__ == "__main__":
    main(sys.argv[1:])
