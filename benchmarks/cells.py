"""Runs of a preset over seeds and variants, for a table of a results page. Each finished one is a line.

Each seed has a clone of the committed state under `.rlhf/NAME/SEED`, in which only what a variant changes
runs again. `.rlhf/NAME/cells.jsonl` has a line for every finished cell, so that an interrupted benchmark
continues. One runs at a time. Cells with more values (`--set`) are a trial, under `.rlhf/NAME-trial`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

Cell = dict[str, Any]


def arguments(description: str | None, variants: Sequence[str]) -> argparse.ArgumentParser:
    """The command line of such a benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", choices=variants, default=variants, metavar="VARIANT")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="more values, for a trial; the page stays"
    )
    return parser


def run(
    name: str,
    preset: str,
    variants: Mapping[str, Mapping[str, str]],
    measure: Callable[[Path], Cell],
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
) -> list[Cell]:
    """All cells that are finished, those of `args.seeds` and `args.only` among them; by seed and variant.

    `measure` reads the results from a run's folder. A cell has its `seed` and its `variant` too.
    """
    work = Path(".rlhf") / (f"{name}-trial" if args.set else name)
    work.mkdir(parents=True, exist_ok=True)
    file = work / "cells.jsonl"
    cells = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    for seed in args.seeds:
        for variant in args.only:
            if any((one["seed"], one["variant"]) == (seed, variant) for one in cells):
                continue
            folder = work / str(seed)
            if not folder.exists():
                subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
            values = [f"seed={seed}", *(f"{key}={value}" for key, value in variants[variant].items())]
            own = os.environ | {"PYTHONPATH": f"{folder.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
            subprocess.run(["git", "checkout", "--quiet", "--", "params.yaml"], cwd=folder, check=True)
            with (folder / "run.log").open("a", encoding="utf-8") as log:
                for words in (
                    ["rlhf", "preset", preset, "--set", *values, *args.set],
                    ["rlhf", "run"],
                ):
                    if call(words, folder, {**own, **(environment or {})}, log):
                        raise SystemExit(f"{' '.join(words)} failed: see {folder / 'run.log'}")
            cells.append({"seed": seed, "variant": variant, **measure(folder)})
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(cells[-1]) + "\n")
            print(cells[-1], flush=True)
    order = list(variants)
    return sorted(cells, key=lambda cell: (cell["seed"], order.index(cell["variant"])))


def call(words: Sequence[str], folder: Path, environment: Mapping[str, str], log: IO[str]) -> int:
    """The exit status of a program. It gets our SIGTERM, so that a stage saves its state."""
    with subprocess.Popen(words, cwd=folder, env=environment, stdout=log, stderr=log) as program:
        before = signal.signal(signal.SIGTERM, lambda *_: program.terminate())
        try:
            return program.wait()
        finally:
            signal.signal(signal.SIGTERM, before)


def publish(page: Path, name: str, text: str, args: argparse.Namespace) -> None:
    """Print a table, and write it between the page's marks `<!-- NAME: … -->`; not that of a trial."""
    print(text)
    if not args.set:
        whole = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        old = page.read_text(encoding="utf-8")
        if not whole.search(old):
            raise SystemExit(f"{page} has no marks of {name}, between which the table is to stand")
        page.write_text(whole.sub(lambda marks: marks[1] + text + marks[2], old), encoding="utf-8")


def last(path: Path, column: str) -> float:
    """The last number in a column of a CSV file."""
    with path.open(encoding="utf-8") as file:
        return float([row[column] for row in csv.DictReader(file) if row[column]][-1])


def metrics(folder: Path, stage: str) -> dict[str, float]:
    """What metrics/STAGE.json holds."""
    known: dict[str, float] = json.loads((folder / f"metrics/{stage}.json").read_text("utf-8"))
    return known
