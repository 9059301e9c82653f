"""dvc.yaml, params.yaml, config, code and presets agree with each other."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from ruamel.yaml import YAML

from rlhf_tasks import config, presets
from rlhf_tasks.config import STAGES, Config, Section, Stage
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.inputs import NO_RESULT
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import catalogue, curves
from tests.imports import CONFIG, ROOT, all_modules, file_of, imports, tree_of

REPORTED = ("rlhf_tasks/tracking/catalogue.py", "rlhf_tasks/tracking/curves.py")  # of the report's figures
BEFORE_ALL = "inputs"


# -------------------------------------------------------------------------------- code of a stage


def imported(stage: Stage) -> set[str]:
    """The files that a stage imports, directly or not, but for code that changes no result."""
    todo, seen = [runner.module_of(stage)], set[str]()
    while todo:
        module = todo.pop()
        path = path_of(module)
        is_kept = dvc_files.is_in(path, REPORTED) or not dvc_files.is_in(path, NO_RESULT)
        if is_kept and path not in seen:
            seen.add(path)
            todo += imports(module)
    return {path for path in seen if (ROOT / path).read_text(encoding="utf-8").strip()}


def path_of(module: str) -> str:
    file = file_of(module)
    assert file is not None, module
    return file.relative_to(ROOT).as_posix()


def dvc_stage(stage: str) -> Mapping[str, Any]:
    tree = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    node: Mapping[str, Any] = tree["stages"][stage]
    return node


# -------------------------------------------------------------------------------------- dvc.yaml


def test_dvc_yaml_has_every_stage_in_order() -> None:
    assert tuple(dvc_files.graph(ROOT)) == (BEFORE_ALL, *STAGES)


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
    code = [dep for dep in dvc_files.graph(ROOT)[stage].deps if dep.startswith("rlhf_tasks/")]
    files = imported(stage)
    uncovered = {file for file in files if not dvc_files.is_in(file, code)}
    assert uncovered == set(), f"add them, or their folders, to the deps of stage {stage} in dvc.yaml"
    readers = {dep for dep in code if any(dvc_files.is_in(file, [dep]) for file in files)}
    texts = {dep for dep in code if (ROOT / dep).is_dir() and not any((ROOT / dep).rglob("*.py"))}
    assert set(code) == readers | texts, "the stage imports nothing below the others"


def test_every_stage_depends_on_its_inputs_file() -> None:
    graph = dvc_files.graph(ROOT)
    assert graph[BEFORE_ALL].outs == tuple(f"inputs/{stage}.json" for stage in STAGES)
    for stage in STAGES:
        assert [dep for dep in graph[stage].deps if dep.startswith("inputs/")] == [f"inputs/{stage}.json"]
    assert dvc_stage(BEFORE_ALL)["always_changed"] is True


def test_data_deps_are_made_by_an_earlier_stage() -> None:
    made: set[str] = set()
    for node in dvc_files.graph(ROOT).values():
        assert {*node.inputs} <= made
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
        inner = sections_in(field.annotation)
        if inner:
            yield from (pair for kind in inner for pair in fields(kind, f"{key}."))
        else:
            yield key, name


def sections_in(annotation: Any) -> list[type[Section]]:
    """The section types that occur anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections_in(inner)]


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


def test_params_yaml_is_short_and_has_a_comment_with_each_value() -> None:
    """A default stands there only where its line says why a reader wants to see it."""
    lines = (ROOT / "params.yaml").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 50
    values = [line for line in lines if line.strip() and not line.endswith(":") and " - " not in line]
    assert [line for line in values if "#" not in line] == []


REVISION = {"revision": "0123456789abcdef0123456789abcdef01234567"}
# What a preset leaves to its user to look up; any hash will do here.
UNPINNED: Mapping[str, Mapping[str, Any]] = {
    "tldr-pythia-1b": {"data": {"hub": {"preferences": REVISION}}, "sft": REVISION, "reward": REVISION}
}


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_parses_and_holds_only_what_differs(name: str) -> None:
    tree = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    shipped, overlay = config.in_force(Config()), config.flatten(presets.read(name))
    same = [key for key, value in overlay.items() if key in shipped and shipped[key] == value]
    after_others = (
        ["ppo.whiten_advantages"] if name in ("critic", "ppo") else []
    )  # what a preset before it may turn off
    assert [key for key in same if not key.endswith(".kind")] == after_others
    config.merge(tree, presets.read(name))
    config.merge(tree, UNPINNED.get(name, {}))
    config.validate(tree, name)
    assert presets.summary(name), "the first line is a comment that says what it is"
