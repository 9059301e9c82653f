"""What `ppo.guards.gap_max` does to over-optimisation: `python -m benchmarks.gap_guard 1 2 3`.

The preset `over_optimised` with a KL penalty of a tenth of the default, which a guard can raise, without and
with the guard. Each seed has a clone of the committed state under `.rlhf/gap_guard/SEED`, in which only PPO,
the judge and the report run again for another variant. Every finished cell is a line of
`.rlhf/gap_guard/cells.jsonl`, so that an interrupted benchmark continues. One runs at a time, on one thread.
Writes the table of docs/results/over-optimisation.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path("docs/results/over-optimisation.md")
BEGIN, END = "<!-- gap_guard: written by benchmarks/gap_guard.py -->\n", "<!-- gap_guard: end -->\n"
SHARED = {"ppo.kl_coef": "0.003", "ppo.guards.kl_max": "1000.0"}  # the guard on the KL is to do nothing
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "none": {"ppo.guards.action": "warn", "ppo.guards.gap_max": "null"},
    "raise_kl": {"ppo.guards.action": "raise_kl", "ppo.guards.gap_max": "1.0"},
    "roll_back": {"ppo.guards.action": "roll_back", "ppo.guards.gap_max": "1.0"},
}


def run_cell(seed: int, variant: str, work: Path, others: Sequence[str]) -> dict[str, Any]:
    """The result of one seed and variant; `others` are further values as `KEY=VALUE`."""
    folder = work / str(seed)
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
    values = {"seed": str(seed), **SHARED, **VARIANTS[variant]}
    changes = [*(f"{key}={value}" for key, value in values.items()), *others]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder.resolve())}
    cell: dict[str, Any] = {"seed": seed, "guard": variant}
    with (folder / "run.log").open("a", encoding="utf-8") as log:
        for words in (["rlhf", "preset", "over_optimised", "--set", *changes], ["dvc", "repro", "report"]):
            done = subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=log)
            if done.returncode:
                raise SystemExit(f"{' '.join(words)} failed: see {folder / 'run.log'}")
    ppo, judge = (json.loads((folder / f"metrics/{stage}.json").read_text()) for stage in ("ppo", "judge"))
    for name, key in {"win_rate": "win_rate", "low": "low", "high": "high"}.items():
        cell[f"kept_{name}"] = judge[f"gold/policy_vs_reference/{key}"]
        cell[f"last_{name}"] = _last(folder / "plots/judge.csv", f"gold/{key}")
    cell |= {"kept_kl": ppo["selected_kl"], "last_kl": _last(folder / "plots/ppo.csv", "eval/kl")}
    gap = _last(folder / "plots/ppo.csv", "eval/standardized_gap")
    return cell | {"last_gap": gap, "trips": int(ppo["guards/trips"])}


def _last(path: Path, column: str) -> float:
    with path.open(encoding="utf-8") as file:
        return float([row[column] for row in csv.DictReader(file) if row[column]][-1])


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """A row per cell, by seed and then by variant."""
    order = list(VARIANTS)
    lines = [
        "| Seed | Guard on the gap | Trips | Gold win rate, kept checkpoint | KL "
        "| Gold win rate, last weights | KL | Gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells, key=lambda one: (one["seed"], order.index(one["guard"]))):
        parts = [str(cell["seed"]), cell["guard"], str(cell["trips"])]
        for which in ("kept", "last"):
            rate, low, high = (cell[f"{which}_{name}"] for name in ("win_rate", "low", "high"))
            parts += [f"{rate:.1%} ({low:.1%}–{high:.1%})", f"{cell[f'{which}_kl']:.1f}"]
        lines.append(f"| {' | '.join([*parts, format(cell['last_gap'], '.2f')])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--work", type=Path, default=Path(".rlhf/gap_guard"), help="where the runs are kept")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="more values, for a trial; the page stays"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "cells.jsonl"
    cells = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    for seed in args.seeds:
        for variant in args.only:
            if not any((one["seed"], one["guard"]) == (seed, variant) for one in cells):
                cells.append(run_cell(seed, variant, args.work, args.set))
                with file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(cells[-1]) + "\n")
                print(table(cells[-1:]).splitlines()[-1], flush=True)
    print(table(cells))
    if not args.set:
        text = PAGE.read_text(encoding="utf-8")
        whole = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
        PAGE.write_text(whole.sub(lambda _: BEGIN + table(cells) + END, text), encoding="utf-8")


if __name__ == "__main__":
    main()
