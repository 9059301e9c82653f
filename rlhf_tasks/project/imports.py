"""Functions of the user's, named by their import path: loaded and called, without changes of this process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from rlhf_tasks import console
from rlhf_tasks.errors import UserError

EXAMPLES = "examples", "rlhf_examples"
"""The folder of the repository whose functions presets name, and its name in an installed wheel."""
loaded: set[str] = set()
"""The functions that this process has loaded."""
_said: set[tuple[str, str]] = set()


def load_function(function: str, key: str, root: Path) -> Callable[..., Any]:
    """`module:function` from a file below `root`, or else from an installed module; `key` names it."""
    module_name, _, name = function.partition(":")
    try:
        with protect(f"{key}: {function}"):
            module = _import(module_name, root.resolve())
    except (Exception, SystemExit) as error:  # the user's module can raise anything: one message names it
        raise UserError(
            f"{key}: {function} cannot be imported: {type(error).__name__}: {error} "
            f"(tried files below {root.resolve()} and installed packages)"
        ) from error
    member = getattr(module, name, None)
    if not callable(member):
        what = "has no such function" if member is None else f"holds a {type(member).__name__} of that name"
        raise UserError(f"{key}: {function}: {getattr(module, '__file__', module_name)} {what}")
    loaded.add(function)
    return member  # type: ignore[no-any-return]


def call(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns; `name` is its name in messages.

    Raises:
        UserError: whatever the function raises, with the place in it; out-of-memory stays as it is.
    """
    try:
        with protect(name):
            return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        if "torch" in sys.modules and isinstance(error, sys.modules["torch"].OutOfMemoryError):
            raise  # the caller may try with less
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this one
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise UserError(f"{name} raised {type(error).__name__}: {error}{place}") from error


def _settings() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], object]]]:
    """What a function may not change for the rest of the stage: its name, what reads it, what sets it."""
    yield "the working folder", psutil.Process().cwd, os.chdir  # which may be deleted
    for one in ("stdout", "stderr"):
        yield f"sys.{one}", partial(getattr, sys, one), partial(setattr, sys, one)
    if threading.current_thread() is threading.main_thread():  # only there signals have handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            read, write = partial(signal.getsignal, number), partial(signal.signal, number)
            yield f"the handler of {number.name}", read, write
    if (torch := sys.modules.get("torch")) is None:
        return
    yield "torch's inference mode", torch.is_inference_mode_enabled, lambda _: None
    yield "torch's default device", torch.get_default_device, lambda _: torch.set_default_device(None)
    for what, reads, sets in (
        ("gradients", "is_grad_enabled", "set_grad_enabled"),
        ("default dtype", "get_default_dtype", "set_default_dtype"),
        ("threads", "get_num_threads", "set_num_threads"),
        ("deterministic mode", "get_deterministic_debug_mode", "set_deterministic_debug_mode"),
        ("detection of anomalies", "is_anomaly_enabled", "set_anomaly_enabled"),
    ):
        yield f"torch's {what}", getattr(torch, reads), getattr(torch, sets)
    set_precision = torch.set_float32_matmul_precision
    yield "torch's precision of matmuls", _matmul_precision, lambda value: value and set_precision(value)
    for device in ("cpu", "cuda"):
        on, switch = torch.is_autocast_enabled, torch.set_autocast_enabled
        yield f"torch's autocast on {device}", partial(on, device), partial(switch, device)


def _matmul_precision() -> str | None:
    """None where each kind of device has its own, which torch's one number cannot say."""
    try:
        return str(sys.modules["torch"].get_float32_matmul_precision())
    except RuntimeError:
        return None


@contextmanager
def protect(name: str) -> Iterator[None]:
    """Put back what the block changes of this process, and say so once; `name` is that of the function.

    A process that the block forks ends with the block, and does not go on with the stage.

    Raises:
        UserError: for a change that cannot be put back.
    """
    process, before = os.getpid(), [(*setting, setting[1]()) for setting in _settings()]
    try:
        yield
    finally:
        if os.getpid() != process:
            error = sys.exc_info()[1]
            if isinstance(error, SystemExit):
                os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))
            traceback.print_exception(error)
            os._exit(1)
        for what, read, write, value in before:
            if read() == value:
                continue
            write(value)
            if read() != value:
                raise UserError(f"{name} leaves {what} changed, which cannot be put back; use a `with` block")
            if (name, what) not in _said:
                _said.add((name, what))
                console.say(f"{name} changed {what} of the whole process, which is put back")


def file_of(module: str, root: Path) -> Path | None:
    """The file of a module, or of a package, below `root`."""
    path = root.joinpath(*module.split("."))
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None)


def installed_name(module: str) -> str:
    """The name that a module has as an installed one."""
    top, dot, rest = module.partition(".")
    return f"{EXAMPLES[1]}{dot}{rest}" if top == EXAMPLES[0] else module


def _import(name: str, root: Path) -> ModuleType:
    file = file_of(name, root)
    if file is None:
        return importlib.import_module(installed_name(name))
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
