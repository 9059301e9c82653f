"""Compares two finished runs: `python -m benchmarks.identity BEFORE AFTER`.

BEFORE and AFTER are projects in which the pipeline has run with the same parameters, seed and number of
threads. The md5 of every model.safetensors under models/ and every number under metrics/ must be equal;
times are left out. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_tasks.config import flatten
from rlhf_tasks.project import hashing

ABSENT = "absent"


def contents(root: Path) -> dict[str, str]:
    """`{"models/sft/model.safetensors": md5, "metrics/sft.json loss": number, …}` of a finished run.

    Raises:
        SystemExit: for a folder without weights or metrics.
    """
    weights = {file: hashing.dvc_md5(root / file) for file in _files(root, "models/**/model.safetensors")}
    numbers = {
        f"{file} {key}": repr(value)
        for file in _files(root, "metrics/**/*.json")
        for key, value in flatten(json.loads((root / file).read_text(encoding="utf-8"))).items()
        if not is_time(key)
    }
    return weights | numbers


def _files(root: Path, pattern: str) -> list[str]:
    files = sorted(file.relative_to(root).as_posix() for file in root.glob(pattern))
    if not files:
        raise SystemExit(f"{root} has no {pattern}: give a folder with a finished run")
    return files


def is_time(key: str) -> bool:
    """True for durations and speeds; `eps` is PPO's episodes per second."""
    return key == "eps" or "time" in key.split("/")


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What differs, as `NAME: old → new`."""
    names = [name for name in sorted({**before, **after}) if before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, ABSENT)} → {after.get(name, ABSENT)}" for name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.identity", description="Compare the results of two finished runs."
    )
    parser.add_argument("before", type=Path, help="the folder of the first run")
    parser.add_argument("after", type=Path, help="the folder of the second run")
    options = parser.parse_args(arguments)
    before, after = contents(options.before), contents(options.after)
    found = differences(before, after)
    print(*found, sep="\n", end="\n" * bool(found))
    num_weights = sum(" " not in name for name in before)
    result = f"{len(found)} differ" if found else "equal"
    print(f"{num_weights} weight files and {len(before) - num_weights} numbers compared: {result}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
