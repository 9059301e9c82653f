"""Install the locked requirements, and say every few seconds how far that is.

`python infra/install.py`, by the Python of the environment; the Makefile says what the variable TORCH may be.
No package is imported: there may be none yet.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from importlib import metadata
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "infra/requirements.lock"
EVERY_SECONDS = 8.0
SHOWN_LINES = 30  # of pip's output, where it fails

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CUDA_NAMES = ("cuda-", "nvidia-", "triton")  # what only torch's CUDA build needs
# GB to download and on disk, all packages of the lock together: measured on Linux x86-64 with MEASURED_TORCH
MEASURED_TORCH = "2.13.0"
GIGABYTES = {"CUDA": (3.1, 6.5), "CPU": (0.5, 2.5)}


def run(*words: str, what: str, total: int = 0, must: bool = True) -> None:
    """Run a module of Python and print what pip is at. What `must` succeed ends this program if it fails."""
    command = [sys.executable, "-P", "-m", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(what, flush=True)
    output, found, now, torch = list[str](), 0, "at work", ""
    start, ended = time.monotonic(), threading.Event()

    def report() -> None:
        said = ""
        while not ended.wait(EVERY_SECONDS):
            so_far = f", {time.monotonic() - start:.0f}s so far" if now == said else ""
            print(f"  {f'{min(found, total)}/{total} ' if total else ''}{now}{so_far}", flush=True)
            said = now

    threading.Thread(target=report, daemon=True).start()
    assert process.stdout is not None
    for line in map(str.rstrip, process.stdout):
        output.append(line)
        if not torch and (torch := describe_build(line)):
            print(f"  {torch}", flush=True)
        if line.startswith("Collecting "):
            found, now = found + 1, f"reading {line.split()[1]}"
        elif line.strip().startswith("Downloading "):
            now = f"downloading {line.split()[1].rsplit('/', 1)[-1]}"
        elif line.startswith("Building wheels"):
            now = "building the packages that have no wheel"
        elif line.startswith("Installing collected packages"):
            found, now = total, "unpacking, which takes minutes"
    ended.set()
    if (status := process.wait()) and must:
        print("\n".join(output[-SHOWN_LINES:]), file=sys.stderr)
        sys.exit(status)


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None


def describe_build(line: str) -> str:
    """What to know of torch's build before its download, if this line of pip's output names it."""
    wheel = re.search(r"(?:^|[\s/])torch-([^-+]+)\+?([^-]*)-\S+\.whl", line)
    if wheel is None:
        return ""
    version, local = wheel.groups()
    kind = "CPU" if local == "cpu" or "macosx" in wheel[0] else local or "CUDA"
    text = f"torch {version}, build for {kind}"
    if kind not in GIGABYTES:
        return f"{text}, with the libraries that it names"
    download, disk = GIGABYTES[kind]
    text += f": in all about {download} GB to download and {disk} GB on disk."
    if kind == "CUDA" and not has_gpu():
        download, disk = GIGABYTES["CPU"]
        text += f" No NVIDIA GPU was found: TORCH=cpu (`make TORCH=cpu run`) needs {download} and {disk} GB."
    return text


def pip_source(torch: str) -> tuple[str, ...]:
    """pip's options that take torch from where a value of TORCH says."""
    if torch in ("", "default"):
        return ()
    if torch == "cpu" or "://" in torch:
        return ("--index-url", CPU_INDEX if torch == "cpu" else torch)
    if Path(torch).is_dir():
        return ("--isolated", "--no-index", "--find-links", torch)  # not from folders of pip's settings
    refuse(f"TORCH={torch} is none of: cpu, default, the address of an index, an existing folder of wheels")


def refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def find_unsupported(system: str, machine: str, libc: tuple[str, str], macos: str) -> str:
    """Why torch cannot be had on this machine; empty where it can."""
    name, version = libc if system == "Linux" else (system, macos)
    oldest = {
        ("Linux", "x86_64", "glibc"): [2, 28],
        ("Linux", "aarch64", "glibc"): [2, 28],
        ("Darwin", "arm64", "Darwin"): [14],
    }.get((system, machine, name))
    if oldest and [int(part) for part in version.split(".")[:2]] >= oldest:
        return ""
    return (
        f"torch has no build for {system} on {machine} with {name or 'no glibc'} {version}; it has them for "
        "Linux on x86-64 and arm64 with glibc 2.28 or newer, and for macOS 14 or newer on Apple silicon"
    )


def main() -> None:
    machine = (platform.system(), platform.machine(), platform.libc_ver(), platform.mac_ver()[0])
    if reason := find_unsupported(*machine):
        refuse(reason)
    remembered = Path(sys.prefix) / ".torch"
    before = remembered.read_text(encoding="utf-8") if remembered.exists() else ""
    choice = os.environ.get("TORCH") or before
    source = pip_source(choice)
    locked = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if "==" in line]
    torch = next(line for line in locked if line.startswith("torch=="))
    cuda = [line for line in locked if line.startswith(CUDA_NAMES)]
    if choice != before:
        names = [package.name for package in metadata.distributions()]
        if old := [name for name in names if name == "torch" or name.startswith(CUDA_NAMES)]:
            run("pip", "uninstall", "--yes", *old, what=f"removing torch's present build for TORCH={choice}")

    # Compiling takes longer than unpacking, and pip would do it on one core.
    install = ("pip", "install", "--progress-bar", "off", "--no-compile")
    run(*install, "--no-deps", *source, torch, what=f"installing {torch}")
    # The lock has the libraries of the default build. A CPU build needs none.
    needs = any(line.startswith(CUDA_NAMES) for line in metadata.requires("torch") or ())
    if needs and choice == "cpu":
        refuse(f"TORCH=cpu, but pip's settings (`pip config list`) lead to torch {metadata.version('torch')}")
    remembered.write_text(choice, encoding="utf-8")
    default = needs and "+" not in metadata.version("torch")
    rest = [line for line in locked if line != torch and (default or line not in cuda)]
    # The lock names all packages, so that pip need not look for what they need.
    what = f"installing {len(rest)} packages of {LOCK.relative_to(ROOT)}"
    run(*install, "--no-deps", *rest, what=what, total=len(rest))
    # Another build names libraries of its own, which may lie beside it.
    beside = {"--index-url": "--extra-index-url"}
    options = [beside.get(word, word) for word in source if word not in {"--isolated", "--no-index"}]
    run(*install, *options, torch, what="looking for what this build of torch needs besides")
    packages = sysconfig.get_path("purelib")
    # fails where a package holds a template with the suffix .py: pip leaves those too
    run("compileall", "-qq", "-j", "0", packages, what="compiling them on all cores", must=False)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
