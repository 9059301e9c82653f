"""Functions of the user's, named by their import path: loaded, and called."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.errors import UserError

MARK = "rlhf: "
"""Where a message begins, after what a module may print."""


def load_function(function: str, key: str, root: Path) -> Callable[..., Any]:
    """`module:function` from a file below `root`, or else from an installed module; `key` names it.

    Raises:
        UserError: if it cannot be imported or called.
    """
    module_name, _, name = function.partition(":")
    try:
        module = _import(module_name, root.resolve())
    except (Exception, SystemExit) as error:  # the user's module can raise anything: one message names it
        raise UserError(
            f"{key}: {function} cannot be imported: {type(error).__name__}: {error} "
            f"(tried files below {root.resolve()} and installed packages)"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        what = "has no such function" if found is None else f"holds a {type(found).__name__} of that name"
        raise UserError(f"{key}: {function}: {getattr(module, '__file__', module_name)} {what}")
    return found  # type: ignore[no-any-return]


def check_importable(functions: Sequence[tuple[str, str]], root: Path) -> None:
    """Check that (key, `module:function`) can be imported, in a process that gives back what modules hold.

    Raises:
        UserError: as `load_function`, for the first that cannot.
    """
    if functions:
        words = [sys.executable, "-P", "-m", "rlhf_tasks.project.imports", str(root)]
        with console.part("importing the functions of params.yaml"):
            done = subprocess.run(
                [*words, *itertools.chain(*functions)], capture_output=True, text=True, check=False
            )
        if done.returncode == 2:
            raise UserError(done.stderr.partition(MARK)[2].strip())


def call(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns; `name` is its name in messages.

    Raises:
        UserError: whatever the function raises, with the place in it; out-of-memory stays as it is.
    """
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        if "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError):
            raise  # the caller may try with less
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this one
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise UserError(f"{name} raised {type(error).__name__}: {error}{place}") from error


def _import(name: str, root: Path) -> ModuleType:
    path = root.joinpath(*name.split("."))
    file = next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)
    if file is None:
        return importlib.import_module(name)
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if str(root) not in sys.path:
        sys.path.append(str(root))  # the module may import its neighbors, also while it runs
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and relative imports look the module up while it runs; an installed one keeps its name.
    is_first = sys.modules.setdefault(name, module) is module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_first:
            del sys.modules[name]
        raise
    return module


if __name__ == "__main__":  # of `check_importable`
    where, *named = sys.argv[1:]
    try:
        for own_key, own_function in zip(named[::2], named[1::2], strict=True):
            load_function(own_function, own_key, Path(where))
    except UserError as error:
        print(f"{MARK}{error}", file=sys.stderr)
        sys.exit(2)
