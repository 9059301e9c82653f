"""Reads the imports of our modules from their source; nothing is executed but `config`."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_origin

ROOT = Path(__file__).parents[1]
CONFIG = "rlhf_tasks.config"


def file_of(module: str) -> Path | None:
    """The file of one of our modules; None for a name that is no module of ours."""
    path = ROOT.joinpath(*module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


def all_modules() -> list[str]:
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("rlhf_tasks", "flows")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


@functools.cache
def tree_of(module: str) -> ast.Module:
    file = file_of(module)
    assert file is not None, module
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def imports(module: str, *, for_types: bool = False) -> frozenset[str]:
    """Our modules that a module imports, lazily or not; with `for_types` those for type checkers too."""
    names: set[str] = set()
    for node in _imports_in(tree_of(module), for_types):
        if isinstance(node, ast.Import):
            names |= {name.name for name in node.names}
        else:
            source = _source(module, node)
            parts = {f"{source}.{name.name}" for name in node.names}
            names |= parts if all(map(file_of, parts)) else {source} | parts
    return frozenset(name for name in names if name.startswith(("rlhf_tasks", "flows")) and file_of(name))


def _imports_in(tree: ast.AST, for_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        yield from _imports_in(node, for_types)


def _source(module: str, node: ast.ImportFrom) -> str:
    """The absolute name of the module that a `from … import …` reads."""
    file = file_of(module)
    package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
    base = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
    return (base + (node.module or "")).rstrip(".")


def cycles(modules: Sequence[str]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not; imports for type checkers count."""
    reached = {module: _reached(module) for module in modules}
    groups = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in modules
        if module in reached[module]
    }
    return sorted(map(list, groups))


def _reached(module: str) -> set[str]:
    """The modules that a module imports, directly or not: itself too, where it is in a cycle."""
    todo, seen = list(imports(module, for_types=True) - {module}), set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += imports(name, for_types=True) - {name}
    return seen


# ---------------------------------------------------------------------------------------- config


def config_values(module: str) -> set[str]:
    """The modules of `config` whose functions and constants a module uses; its types do not count."""
    used: set[str] = set()
    nodes = [n for n in _imports_in(tree_of(module), for_types=False) if isinstance(n, ast.ImportFrom)]
    for source, name in ((_source(module, node), name) for node in nodes for name in node.names):
        part = f"{source}.{name.name}"
        if not f"{part}.".startswith(f"{CONFIG}."):
            continue
        if file_of(part) is not None:
            attributes = _attributes_of(module, name.asname or name.name)
            used |= {_home(part, attribute) for attribute in attributes if _is_value(part, attribute)}
        elif _is_value(source, name.name):
            used.add(_home(source, name.name))
    return used


def _is_value(module: str, name: str) -> bool:
    """True for a function or a constant; a section or another type only names what a view holds."""
    value = getattr(importlib.import_module(module), name, None)
    return value is not None and not isinstance(value, type) and get_origin(value) is None


def _home(module: str, name: str) -> str:
    """The module that defines a name, where `module` may only import it."""
    for node in tree_of(module).body:
        if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}:
            source = _source(module, node)
            return _home(source, name) if source.startswith(CONFIG) else module
    return module


def _attributes_of(module: str, alias: str) -> set[str]:
    """The attributes of an imported module that the code of another reads."""
    nodes = ast.walk(tree_of(module))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == alias
    }


def modules_of_types(annotations: Mapping[str, Any]) -> set[str]:
    """The modules of `config` that define the sections named anywhere in some types."""
    used: set[str] = set()
    todo = list(annotations.values())
    while todo:
        annotation = todo.pop()
        if isinstance(annotation, type) and annotation.__module__.startswith(CONFIG):
            used.add(annotation.__module__)
        todo += getattr(annotation, "__args__", ())
    return used
