"""Rows a second and memory of stage prepare: `python -m benchmarks.prepare --rows 200000`.

It writes a file of preference pairs whose texts have 50 words each, runs `rlhf prepare` on it, and prints the
rows a second and the most anonymous memory (RssAnon: without the mapped files, which the kernel can drop).
With `--code FOLDER`, a checkout of another commit is measured too, on the same file. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
WORDS = 50  # of a text
VOCABULARY = 20_000
EVERY_SECONDS = 0.05


class Figures(NamedTuple):
    rows: int
    seconds: float
    cpu_seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.rows:,} pairs in {self.seconds:.1f} s ({self.cpu_seconds:.1f} s of CPU), "
            f"{self.rows / self.seconds:,.0f} rows/s, "
            f"at most {self.peak_bytes / 1e9:.2f} GB of anonymous memory"
        )


def write_pairs(file: Path, rows: int, seed: int = 1) -> None:
    """Pairs of different texts; a word is the more frequent the lower its number."""
    draws = np.random.default_rng(seed)
    vocabulary = np.array([f"{'aeiou'[i % 5]}{i:x}" for i in range(VOCABULARY)])
    weights = 1 / np.arange(10, VOCABULARY + 10)
    with file.open("w", encoding="utf-8") as out:
        for number in range(rows):
            if number % 1000 == 0:
                some = draws.choice(vocabulary, (1000, 3 * WORDS), p=weights / weights.sum()).tolist()
            words = some[number % 1000]
            prompt, *answers = (
                " ".join(words[start : start + WORDS]) for start in range(0, 3 * WORDS, WORDS)
            )
            pair = {"prompt": prompt, "chosen": f" {answers[0]}", "rejected": f" {answers[1]}"}
            out.write(json.dumps(pair) + "\n")


def measure(code: Path, file: Path, rows: int) -> Figures:
    """Run `rlhf prepare` of a checkout on the file, in a folder of its own.

    Raises:
        RuntimeError: if it fails, with the end of what it printed.
    """
    yaml = YAML(typ="safe", pure=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as name:
        folder = Path(name)
        settings = yaml.load((code / "params.yaml").read_text(encoding="utf-8"))
        settings["data"] |= {"source": "files", "path": str(file), "max_completion_tokens": 80}
        judge = {"kind": "reward_model", "name": "reward_model", "path": "models/reward_heldout"}
        settings["judge"]["judges"], settings["promotion"] = [judge], None
        settings["tracking"]["enabled"] = False
        with (folder / "params.yaml").open("w", encoding="utf-8") as out:
            yaml.dump(settings, out)
        shutil.copy(code / "dvc.yaml", folder / "dvc.yaml")
        start, peak, before = time.monotonic(), 0, os.times()
        with (folder / "log.txt").open("w+", encoding="utf-8") as log:
            process = subprocess.Popen(
                ["rlhf", "prepare"],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(code.resolve())},
                stdout=log,
                stderr=log,
            )
            while process.poll() is None:
                peak = max(peak, anonymous_bytes(process.pid))
                time.sleep(EVERY_SECONDS)
            seconds, after = time.monotonic() - start, os.times()
            log.seek(0)
            printed = log.read()
        if process.returncode:
            raise RuntimeError(f"rlhf prepare of {code} failed:\n{printed[-3000:]}")
    cpu = sum(after[2:4]) - sum(before[2:4])  # of the processes that have ended
    return Figures(rows, seconds, cpu, peak)


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000, help="number of pairs")
    parser.add_argument("--code", type=Path, action="append", default=[], help="another checkout to measure")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "pairs.jsonl"
        write_pairs(file, given.rows)
        for code in (ROOT, *given.code):
            print(f"{code}: {measure(code, file, given.rows)}", flush=True)


if __name__ == "__main__":
    main()
