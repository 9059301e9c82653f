"""Compares two finished runs: `python -m benchmarks.identity BEFORE AFTER [--added KEY …]`.

BEFORE and AFTER are projects in which the pipeline has run with the same parameters, seed and number of
threads. The md5 of every model.safetensors under models/ and every number under metrics/ must be equal;
times are left out. The exit status is 1 if anything differs but the keys allowed by --added.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from rlhf_tasks.config import flatten
from rlhf_tasks.project import hashing

ABSENT = "absent"


def contents(root: Path) -> dict[str, str]:
    """`{"models/sft/model.safetensors": md5, "metrics/sft.json loss": number, …}` of a finished run.

    Raises:
        SystemExit: for a folder without weights or metrics.
    """
    weights = {
        _name(root, file): hashing.dvc_md5(file) for file in _files(root, "models/**/model.safetensors")
    }
    numbers = {
        f"{_name(root, file)} {key}": repr(value)
        for file in _files(root, "metrics/**/*.json")
        for key, value in flatten(json.loads(file.read_text(encoding="utf-8"))).items()
        if not is_time(key)
    }
    return weights | numbers


def _files(root: Path, pattern: str) -> list[Path]:
    files = sorted(root.glob(pattern))
    if not files:
        raise SystemExit(f"{root} has no {pattern}: give a folder with a finished run")
    return files


def _name(root: Path, file: Path) -> str:
    return file.relative_to(root).as_posix()


def is_time(key: str) -> bool:
    """True for durations and speeds; `eps` is PPO's episodes per second."""
    return key == "eps" or "time" in key.split("/")


def differences(
    before: Mapping[str, str], after: Mapping[str, str], allowed: Collection[str]
) -> Iterator[tuple[str, str]]:
    """(kind, line) of what differs; the kind is `allowed`, `added`, `removed` or `changed`."""
    for name in sorted({**before, **after}):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if old == new:
            continue
        kind = "added" if old == ABSENT else "removed" if new == ABSENT else "changed"
        key = name.partition(" ")[2]
        yield ("allowed" if key and key in allowed else kind), f"{name}: {old} → {new}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.identity", description="Compare the results of two finished runs."
    )
    parser.add_argument("before", type=Path, help="the folder of the first run")
    parser.add_argument("after", type=Path, help="the folder of the second run")
    parser.add_argument(
        "--added", nargs="+", default=[], metavar="KEY", help="allow these metrics to be new or to differ"
    )
    options = parser.parse_args(arguments)
    before, after = contents(options.before), contents(options.after)
    found = list(differences(before, after, options.added))
    for kind, line in found:
        print(f"{kind:8} {line}")
    num_weights = sum(" " not in name for name in before)
    num_wrong = sum(kind != "allowed" for kind, _ in found)
    print(
        f"{num_weights} weight files and {len(before) - num_weights} numbers compared: "
        + (f"{num_wrong} differ" if num_wrong else "equal")
        + (f", {len(found) - num_wrong} allowed to differ" if len(found) > num_wrong else "")
    )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
