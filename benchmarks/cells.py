"""Runs over seeds and variants, for a table of a results page. Each finished one is a line.

Each seed has a clone of the committed state under `.rlhf/NAME/SEED`, in which only what a variant changes
runs again. `.rlhf/NAME/cells.jsonl` has a line for every finished cell, so that an interrupted benchmark
continues. `--jobs` seeds run at a time. Cells with more values (`--set`) are a trial, under
`.rlhf/NAME-trial`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from rlhf_tasks import config, presets

Cell = dict[str, Any]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""An environment in which the bits of a run do not depend on the number of cores."""


def arguments(
    description: str | None, variants: Iterable[str], jobs: int = 1, tables: Iterable[str] = ()
) -> argparse.ArgumentParser:
    """The command line of such a benchmark; one of several `tables` is the first word."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if tables:
        parser.add_argument("table", choices=list(tables))
    parser.add_argument("seeds", type=int, nargs="+")
    names = list(variants)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="VARIANT")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="more values, for a trial; the page stays"
    )
    parser.add_argument("--jobs", type=int, default=jobs, help="run so many seeds at a time")
    return parser


def values_of(preset: str) -> dict[str, str]:
    """The values of a preset by dotted key, as a variant has them."""
    return {key: json.dumps(value) for key, value in config.flatten(presets.read(preset)).items()}


def run(
    name: str,
    variants: Mapping[str, Mapping[str, str]],
    measure: Callable[[Path], Cell],
    args: argparse.Namespace,
    *,
    preset: str | None = None,
    program: Sequence[str] = ("rlhf", "run"),
    environment: Mapping[str, str] | None = None,
) -> list[Cell]:
    """All cells of `variants` that are finished, those of `args` among them; by seed and variant.

    `measure` reads the results from a run's folder. A cell has its `seed` and its `variant` too.
    """
    pass_on_sigterm()
    work = Path(".rlhf") / (f"{name}-trial" if args.set else name)
    work.mkdir(parents=True, exist_ok=True)
    file, lock = work / "cells.jsonl", threading.Lock()
    cells = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    finished = {(cell["seed"], cell["variant"]) for cell in cells}
    failed = threading.Event()  # then no further cell begins

    def run_variants(seed: int) -> None:
        folder = work / str(seed)
        for variant in args.only:
            if (seed, variant) in finished or failed.is_set():
                continue
            if not folder.exists():
                subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
            values = [f"seed={seed}", *(f"{key}={value}" for key, value in variants[variant].items())]
            own = {"PYTHONPATH": f"{folder.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
            whole = {**os.environ, **own, **(environment or {})}
            with (folder / "run.log").open("a", encoding="utf-8") as log:
                for words in (
                    ["git", "checkout", "--quiet", "--", "params.yaml"],
                    ["rlhf", "preset", *filter(None, [preset]), "--set", *values, *args.set],
                    program,
                ):
                    done = subprocess.run(words, cwd=folder, env=whole, stdout=log, stderr=log, check=False)
                    if done.returncode:
                        raise SystemExit(f"{' '.join(words)} failed: see {folder / 'run.log'}")
            with lock:
                cells.append({"seed": seed, "variant": variant, **measure(folder)})
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(cells[-1]) + "\n")
                print(cells[-1], flush=True)

    def run_seed(seed: int) -> None:
        try:
            run_variants(seed)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run_seed, args.seeds))
    order = list(variants)
    known = [cell for cell in cells if cell["variant"] in order]
    return sorted(known, key=lambda cell: (cell["seed"], order.index(cell["variant"])))


def pass_on_sigterm() -> None:
    """Let the programs that run save their state, where this one is ended."""

    def stop(*_: object) -> None:
        for program in psutil.Process().children():
            program.terminate()
        os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, ["---"] * len(header), *rows])


def publish(page: Path, name: str, text: str, args: argparse.Namespace) -> None:
    """Print a table, and write it between the page's marks `<!-- NAME: … -->`; not that of a trial."""
    print(text)
    if not args.set:
        whole = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
        old = page.read_text(encoding="utf-8")
        if not whole.search(old):
            raise SystemExit(f"{page} has no marks of {name}, between which the table is to stand")
        page.write_text(whole.sub(lambda marks: marks[1] + text + marks[2], old), encoding="utf-8")


def curve(folder: Path) -> list[dict[str, str]]:
    """The rows of plots/ppo.csv, one per update."""
    with (folder / "plots/ppo.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def metrics(folder: Path, stage: str) -> dict[str, float]:
    """What metrics/STAGE.json holds."""
    known: dict[str, float] = json.loads((folder / f"metrics/{stage}.json").read_text("utf-8"))
    return known
