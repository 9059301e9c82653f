"""Reads the imports of our modules from their source; nothing is executed."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

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


def foreign_imports(module: str) -> set[str]:
    """The top-level modules of others, but for Python's own, that a module imports, lazily or not."""
    names: set[str] = set()
    for node in _imports_in(tree_of(module), for_types=True):
        sources = [name.name for name in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        names |= {source.partition(".")[0] for source in sources}
    return names - sys.stdlib_module_names - {"", "rlhf_tasks", "flows"}


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
