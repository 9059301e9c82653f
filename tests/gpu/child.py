"""Calls a function of a test module: `python -m tests.gpu.child LIBRARY MODULE FUNCTION FILE WORD …`.

LIBRARY is stub.cpp, compiled: torch looks for CUDA when it is loaded, so that it must be there before. What
the function returns for the words is written to FILE as JSON.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path


def compile_stub(library: Path) -> str:
    """Compile stub.cpp for this torch, without loading it; what is missing for that, or "" if it is done."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    if any(folder.glob("lib/libtorch_cuda.*")):
        return "a GPU is pretended to a CPU build of torch only"
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "c++", "g++", "clang++")), None)
    if compiler is None:
        return "needs a C++ compiler"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{folder / 'include'}"]
    command += ["-o", str(library), str(Path(__file__).with_name("stub.cpp"))]
    command += [f"-L{folder / 'lib'}", f"-Wl,-rpath,{folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ""


def main(library: str, module: str, function: str, file: str, *words: str) -> None:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    call = getattr(importlib.import_module(module), function)
    warnings.simplefilter("error")
    Path(file).write_text(json.dumps(call(*words)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
