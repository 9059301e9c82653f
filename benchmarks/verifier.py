"""The preset `arithmetic` over several seeds, as a table: `python -m benchmarks.verifier 1 2 3`.

Each seed runs in a clone of the committed state under `.rlhf/verifier/SEED` and is kept, so that a stopped
benchmark continues. One runs at a time, on one thread. Writes benchmarks/verifier.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

OUT = Path(__file__).with_name("verifier.md")
MINUTES = "minutes.txt"


def run_seed(seed: int, work: Path) -> Path:
    """The folder of a seed's finished run; made where there is none."""
    folder = work / str(seed)
    if (folder / MINUTES).exists():
        return folder
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder.resolve())}
    start = time.monotonic()
    with (folder / "run.log").open("a", encoding="utf-8") as log:
        for words in (["rlhf", "preset", "arithmetic", "--set", f"seed={seed}"], ["dvc", "repro"]):
            subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
    minutes = (time.monotonic() - start) / 60
    (folder / MINUTES).write_text(f"{minutes:.1f}\n", encoding="utf-8")
    return folder


def row(seed: int, metrics: Mapping[str, float], minutes: float) -> str:
    """One seed's accuracies, and the interval of their difference in percentage points."""
    sft, policy = (metrics[f"verifier/accuracy/{who}"] for who in ("sft", "policy"))
    gain, low, high = (100 * metrics[f"verifier/accuracy_gain{end}"] for end in ("", "/low", "/high"))
    return f"| {seed} | {sft:.1%} | {policy:.1%} | {gain:+.1f} ({low:+.1f} to {high:+.1f}) | {minutes:.1f} |"


def table(seeds: Sequence[int], folders: Sequence[Path]) -> str:
    lines = ["| Seed | Accuracy SFT | Accuracy PPO | Difference in points (95% interval) | Minutes |"]
    lines += ["|---|---|---|---|---|"]
    for seed, folder in zip(seeds, folders, strict=True):
        metrics = json.loads((folder / "metrics/judge.json").read_text(encoding="utf-8"))
        minutes = float((folder / MINUTES).read_text(encoding="utf-8"))
        lines.append(row(seed, metrics, minutes))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--work", type=Path, default=Path(".rlhf/verifier"), help="where the runs are kept")
    args = parser.parse_args()
    OUT.write_text(table(args.seeds, [run_seed(seed, args.work) for seed in args.seeds]), encoding="utf-8")
    print(OUT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
