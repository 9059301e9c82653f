"""Write requirements.lock: exact versions of what pyproject.toml needs, as installed here (`make lock`).

Names no index, and no local version (torch+cpu): where a package comes from, and for which accelerator it
is built, is pip's configuration on each machine. Packages for one accelerator are left to torch's own needs.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

HERE = Path(__file__).parent
HEAD = """\
# Exact versions of everything this project needs, development tools included.
# Made by `make lock` from the installed environment; pip finds torch's build for this machine by itself.
"""


def closure(roots: list[Requirement]) -> dict[str, str]:
    """Name → version of the roots and all they need here, extras and markers considered."""
    found: dict[str, str] = {}
    todo, seen = list(roots), set[tuple[str, frozenset[str]]]()
    while todo:
        wanted = todo.pop()
        name, extras = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        package = metadata.distribution(name)
        found[name] = Version(package.version).public
        for line in package.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *extras)):
                todo.append(need)
    return found


def main() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    lines = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["project"]["optional-dependencies"]["docs"],
    ]
    versions = closure([Requirement(line) for line in lines])
    kept = {n: v for n, v in versions.items() if not n.startswith(("nvidia-", "cuda-")) and n != "triton"}
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(kept.items()))
    (HERE / "requirements.lock").write_text(HEAD + pins, encoding="utf-8")


if __name__ == "__main__":
    main()
