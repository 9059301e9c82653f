"""Calls a function of a test module: `python -m tests.gpu.child LIBRARY MODULE FUNCTION FILE WORD …`.

LIBRARY is stub.cpp, compiled: torch looks for CUDA when it is loaded, so that it must be there before. What
the function returns for the words is written to FILE as JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import warnings
from pathlib import Path


def main(library: str, module: str, function: str, file: str, *words: str) -> None:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    call = getattr(importlib.import_module(module), function)
    warnings.simplefilter("error")
    Path(file).write_text(json.dumps(call(*words)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
