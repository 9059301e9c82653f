"""`make`'s installation: which build of torch, from where, with which libraries; what is refused."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "infra/requirements.lock"
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
LINUX = "x86_64-manylinux_2_28"
PLATFORMS = {LINUX: "x86_64", "aarch64-manylinux_2_28": "aarch64", "aarch64-apple-darwin": "arm64"}
SOURCES_ONLY = ["antlr4-python3-runtime", "deepspeed", "rouge-score"]  # which compile nothing


spec = importlib.util.spec_from_file_location("install", ROOT / "infra/install.py")
assert spec is not None
assert spec.loader is not None
install: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


def pins(platform: str, python: str) -> dict[str, str]:
    """Name → version of the lock's lines for a platform."""
    markers = {"platform_machine": PLATFORMS[platform], "python_full_version": f"{python}.0"}
    markers["sys_platform"] = "darwin" if "darwin" in platform else "linux"
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found: dict[str, str] = {}
    for needed in map(Requirement, lines):
        if needed.marker is None or needed.marker.evaluate(markers):
            (pin,) = needed.specifier
            assert (pin.operator, needed.url, Version(pin.version).local) == ("==", None, None)
            assert found.setdefault(needed.name, pin.version) == pin.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_lock_pins_what_pyproject_names_and_cuda_only_on_linux(platform: str, python: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    named = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    found = pins(platform, python)
    for needed in map(Requirement, [*named, *extras["dev"], *extras["docs"]]):
        assert needed.specifier.contains(found[needed.name.lower().replace(".", "-")]), needed
    assert any(name.startswith(install.CUDA_NAMES) for name in found) == ("linux" in platform)


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_resolver_finds_the_lock_and_wheels_on_each_platform(platform: str, python: str) -> None:
    words = ["uv", "pip", "compile", "pyproject.toml", "--extra", "dev", "--extra", "docs", "-c", str(LOCK)]
    words += ["--python-platform", platform, "--python-version", python, "--no-header", "--no-annotate"]
    words += ["--only-binary", ":all:", *(word for name in SOURCES_ONLY for word in ("--no-binary", name))]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0", "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if "error sending request" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    assert dict(line.split("==") for line in done.stdout.splitlines()) == pins(platform, python)


@pytest.mark.parametrize(
    ("file", "gpu", "expected"),
    [
        ("Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64", False, "CUDA: in all about 3.1 GB"),
        ("Using cached torch-2.13.0-cp314-cp314-manylinux_2_28_aarch64", True, "CUDA"),
        ("Processing ./a/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64", False, "CPU: in all about 0.5"),
        ("Downloading torch-2.13.0-cp312-cp312-macosx_14_0_arm64", False, "CPU"),
        ("Downloading torch-2.13.0+cu126-cp312-cp312-manylinux_2_28_x86_64", True, "cu126"),
    ],
)
def test_the_build_and_its_size_are_said_before_it_is_downloaded(
    file: str, gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: gpu)
    text = install.describe_build(f"  {file}.whl (9 MB)")
    assert text.startswith(f"torch 2.13.0, build for {expected}")
    assert ("TORCH=cpu" in text) == (expected.startswith("CUDA") and not gpu)
    assert pins(LINUX, "3.11")["torch"] == install.MEASURED_TORCH, "measure GIGABYTES again"


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (("Linux", "x86_64", ("glibc", "2.28"), ""), ""),
        (("Linux", "aarch64", ("glibc", "2.39"), ""), ""),
        (("Darwin", "arm64", ("", ""), "14.5"), ""),
        (("Linux", "x86_64", ("glibc", "2.17"), ""), "Linux on x86_64 with glibc 2.17"),
        (("Linux", "x86_64", ("", ""), ""), "Linux on x86_64 with no glibc"),
        (("Darwin", "x86_64", ("", ""), "15.1"), "Darwin on x86_64"),
        (("Darwin", "arm64", ("", ""), "13.6"), "Darwin 13.6"),
    ],
)
def test_a_machine_without_a_build_of_torch_is_refused(machine: tuple[Any, ...], words: str) -> None:
    reason = install.find_unsupported(*machine)
    assert words in reason
    assert bool(reason) == bool(words)


def project(folder: Path) -> Path:
    (folder / "infra").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "infra/install.py", "infra/requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def run(*words: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    unset = ("PIP_", "MAKE", "TORCH")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    environment = clean | {"PIP_CONFIG_FILE": os.devnull} | variables
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["(3, 10)", "(3, 15)"])
def test_make_refuses_another_python_in_one_sentence(version: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    program = f"import sys; sys.version_info = {version}; exec(sys.argv[2])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    done = run("make", f"PYTHON={python}", "run", folder=project(tmp_path / "project"))
    assert done.returncode == 2
    assert done.stderr.startswith("Python 3.11 to 3.14 on Linux, macOS or WSL is needed")
    assert not (tmp_path / "project/.venv").exists()


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    folder.mkdir(exist_ok=True)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    text = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    text += [f"Requires-Dist: {need}" for need in requires]
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(text))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.e2e
def test_an_environment_keeps_its_build_of_torch_and_has_the_libraries_of_that_build(tmp_path: Path) -> None:
    """Wheels without content stand for torch, its builds and their libraries."""
    root = project(tmp_path / "project")
    index, cpu, other = (tmp_path / name for name in ("index", "cpu", "other"))
    write_wheel(index, "torch", "2.13.0", "nvidia-cublas", "filelock")
    write_wheel(index, "filelock", "1.0")
    write_wheel(index, "nvidia-cublas", "13.1")
    write_wheel(cpu, "torch", "2.13.0+cpu", "filelock")
    write_wheel(other, "torch", "2.13.0+cu126", "nvidia-cublas-cu12", "filelock")
    write_wheel(other, "nvidia-cublas-cu12", "12.6")
    lines = "filelock==1.0\nnvidia-cublas==13.1 ; python_version >= '3'\ntorch==2.13.0\n"
    (root / "infra/requirements.lock").write_text(lines, encoding="utf-8")
    python = root / ".venv/bin/python"
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}

    def packages(torch: Path | str = "") -> set[str]:
        done = run(python, "infra/install.py", folder=root, **settings, TORCH=str(torch))
        assert done.returncode == 0, done.stdout + done.stderr
        listed = {folder.stem for folder in (root / ".venv").rglob("*.dist-info")}
        return {name for name in listed if not name.startswith(("pip-", "setuptools-"))}

    assert run(sys.executable, "-m", "venv", ".venv", folder=root).returncode == 0
    assert packages() == {"torch-2.13.0", "filelock-1.0", "nvidia_cublas-13.1"}
    assert packages(cpu) == {"torch-2.13.0+cpu", "filelock-1.0"}
    assert packages() == {"torch-2.13.0+cpu", "filelock-1.0"}
    assert packages(other) == {"torch-2.13.0+cu126", "filelock-1.0", "nvidia_cublas_cu12-12.6"}
    refused = run(python, "infra/install.py", folder=root, TORCH="gpu")
    assert (refused.returncode, "TORCH=gpu is none of" in refused.stderr) == (2, True)


def test_make_installs_again_only_for_another_value_of_torch(tmp_path: Path) -> None:
    root, calls = project(tmp_path / "project"), tmp_path / "calls"
    python = root / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    version = f'[ "$1" = -c ] && exec {sys.executable} "$@"'
    python.write_text(f'#!/bin/sh\n{version}\necho "$TORCH $1" >>{calls}\n', encoding="utf-8")
    python.chmod(0o755)
    shutil.copy(python, python.with_name("pip"))  # without it, as where ensurepip is missing, it is made anew
    (root / ".venv/.torch").write_text("cpu", encoding="utf-8")
    (root / ".venv/.installed").touch()
    for torch in ("", "cpu", "default"):
        assert not calls.exists()
        run("make", f"PYTHON={sys.executable}", ".venv/.installed", folder=root, TORCH=torch)
    assert calls.read_text(encoding="utf-8").splitlines() == ["default infra/install.py", "default -m"]


def test_make_refuses_another_python_than_that_of_the_environment(tmp_path: Path) -> None:
    root, other = project(tmp_path / "project"), tmp_path / "python"
    for file, version in ((root / ".venv/bin/python", "3.11"), (other, "3.12")):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {version}\n", encoding="utf-8")
        file.chmod(0o755)
    refused = run("make", f"PYTHON={other}", "help", folder=root)
    assert refused.returncode == 2
    assert f".venv has Python 3.11, and not that of PYTHON={other}: 'make clean' removes it" in refused.stderr
    assert run("make", "-n", f"PYTHON={other}", "clean", folder=root).returncode == 0
