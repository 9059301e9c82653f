"""One row of results per commit, in docs/results/ledger.csv: `python -m tests.benchmarks.ledger`.

    python -m tests.benchmarks.ledger --seeds 1 2 3 --time --speed --peer PYTHON

measures everything for the present commit. A part that is not asked for leaves its columns as they are:
empty, or as an earlier call for the same commit has filled them. Instead of `--seeds`, folders of finished
runs can be given. `--time` runs the default parameters in a fresh clone, without the installation. Then all
rows are drawn as docs/pictures/ledger.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import matplotlib
from ruamel.yaml import YAML

from tests.benchmarks import seeds, speed

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
LEDGER, FIGURE = ROOT / "docs/results/ledger.csv", ROOT / "docs/pictures/ledger.png"
SEEDS = (1, 2, 3)
RATES = {"vs_reference": "gold/policy_vs_reference", "vs_sft": "gold/policy_vs_sft"}
COLUMNS = (
    *("commit", "date", "machine", "run_seconds", "run_peak_gb"),
    *(
        f"seed{seed}_{name}"
        for seed in SEEDS
        for name in (*(f"{rate}{end}" for rate in RATES for end in ("", "_low", "_high")), "kl")
    ),
    *(f"{kind}_{shape}" for kind in ("episodes", "ratio", "memory_ratio") for shape in speed.CPU_SHAPES),
)
Row = dict[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--seeds", type=int, nargs="+", choices=SEEDS, default=[], help="run these seeds")
    parser.add_argument("--work", type=Path, default=Path(".rlhf/seeds"), help="where runs of seeds are kept")
    parser.add_argument("--time", action="store_true", help="time a default run in a fresh clone")
    parser.add_argument("--speed", action="store_true", help="measure PPO's shapes A, B and C")
    parser.add_argument(
        "--peer", type=Path, metavar="PYTHON", help="the interpreter with TRL, for the ratios"
    )
    parser.add_argument("--turns", type=int, default=3, help="of --speed: ours and the peer's in turn")
    args = parser.parse_args(arguments)
    row = {"commit": _git("rev-parse", "--short", "HEAD"), "date": time.strftime("%Y-%m-%d")}
    row["machine"] = f"{os.cpu_count()} cores, {processor()}"
    for folder in [*args.runs, *(args.work / str(seed) for seed in args.seeds)]:
        if folder in args.runs or folder.exists():
            check_commit(folder, row["commit"])
    for part in parts(args):  # each is written at once, so that none is lost if a later one fails
        draw(add(row | part, LEDGER), FIGURE)


def parts(args: argparse.Namespace) -> Iterator[Row]:
    """The columns of what is asked for, one part after the other."""
    for folder in args.runs:
        yield of_run(folder)
    for seed in args.seeds:
        yield of_run(seeds.run_seed(seed, args.work))
    if args.time:
        yield timed_run()
    if args.speed:
        found = {shape: speed.measure("ppo", shape, args.peer, 4, args.turns) for shape in speed.CPU_SHAPES}
        yield of_speed(found)


def check_commit(folder: Path, commit: str) -> None:
    """Refuse a run of another commit: its results are not those of the row."""
    found = _git("rev-parse", "--short", "HEAD", at=folder)
    if found != commit:
        raise SystemExit(
            f"{folder} is a run of commit {found}, and not of {commit}; remove it to run it anew"
        )


def of_run(folder: Path) -> Row:
    """The columns of a finished run, by the seed in its params.yaml; no other seeds have columns."""
    seed = YAML(typ="safe", pure=True).load((folder / "params.yaml").read_text(encoding="utf-8"))["seed"]
    if seed not in SEEDS:
        raise SystemExit(f"{folder}: its seed is {seed}; the ledger has columns for {SEEDS}")
    judge, ppo = (json.loads((folder / f"metrics/{stage}.json").read_text()) for stage in ("judge", "ppo"))
    row = {f"seed{seed}_kl": f"{ppo['selected_kl']:.2f}"}
    for name, key in RATES.items():
        for end, metric in {"": "win_rate", "_low": "low", "_high": "high"}.items():
            row[f"seed{seed}_{name}{end}"] = f"{judge[f'{key}/{metric}']:.3f}"
    return row


def of_speed(found: Mapping[str, Mapping[str, speed.Figures]]) -> Row:
    """Our episodes per second by shape; with a peer, how many times as fast, and how much of its memory."""
    row: Row = {}
    for shape, sides in found.items():
        ours = sides["ours"]
        row[f"episodes_{shape}"] = f"{ours.speed:.2f}"
        if "peer" in sides:
            row[f"ratio_{shape}"] = f"{ours.speed / sides['peer'].speed:.2f}"
            row[f"memory_ratio_{shape}"] = f"{ours.memory_gb / sides['peer'].memory_gb:.2f}"
    return row


def timed_run() -> Row:
    """The default run in a fresh clone: its seconds, and the memory of its largest process."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # the uploader may still write
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        start = time.monotonic()
        environment = os.environ | {"PYTHONPATH": folder}
        run = subprocess.Popen(["dvc", "repro"], cwd=folder, env=environment)
        _, status, used = os.wait4(run.pid, 0)  # of this run alone, with all that it started
        seconds = time.monotonic() - start
        run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode != 0:
        raise SystemExit("the default run failed; its output says why")
    return {"run_seconds": f"{seconds:.0f}", "run_peak_gb": f"{used.ru_maxrss * 1024 / 1e9:.2f}"}


def add(row: Row, ledger: Path) -> list[Row]:
    """Write a row, or the new values of its commit's row; returns all rows."""
    rows: list[Row] = []
    if ledger.exists():
        with ledger.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    same = [one for one in rows if one["commit"] == row["commit"]]
    if same:
        same[0].update(row)
    else:
        rows.append(row)
    with ledger.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return rows


def draw(rows: Sequence[Row], out: Path) -> None:
    """The default run's minutes, the win rates with intervals, the KL and the ratios, commit by commit."""
    figure, (times, rates, kls, ratios) = plt.subplots(1, 4, figsize=(14, 3.4))
    commits = [row["commit"] for row in rows]
    _line(times, rows, "run_seconds", "minutes of a default run", scale=1 / 60)
    for seed in SEEDS:
        _rates(rates, rows, seed)
        _line(kls, rows, f"seed{seed}_kl", f"seed {seed}")
    for shape in speed.CPU_SHAPES:
        _line(ratios, rows, f"ratio_{shape}", f"shape {shape}")
    titles = ("Default run", "PPO's win rate over references", "KL, nats per response", "Speed beside TRL")
    for panel, title in zip((times, rates, kls, ratios), titles, strict=True):
        panel.set_title(title, fontsize=9)
        panel.set_xticks(range(len(commits)), commits, rotation=45, fontsize=7)
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(fontsize=7)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def _points(rows: Sequence[Row], column: str) -> tuple[list[int], list[float]]:
    found = [(x, float(row[column])) for x, row in enumerate(rows) if row.get(column)]
    return [x for x, _ in found], [y for _, y in found]


def _line(panel: Axes, rows: Sequence[Row], column: str, label: str, scale: float = 1.0) -> None:
    x, y = _points(rows, column)
    if x:
        panel.plot(x, [value * scale for value in y], marker="o", label=label)


def _rates(panel: Axes, rows: Sequence[Row], seed: int) -> None:
    (x, y), (_, low), (_, high) = (
        _points(rows, f"seed{seed}_vs_reference{end}") for end in ("", "_low", "_high")
    )
    if x:
        reach = [
            [a - b for a, b in zip(y, low, strict=True)],
            [b - a for a, b in zip(y, high, strict=True)],
        ]
        shifted = [one + 0.1 * (seed - 2) for one in x]
        panel.errorbar(shifted, y, yerr=reach, fmt="o", capsize=2, label=f"seed {seed}")


def _git(*words: str, at: Path = ROOT) -> str:
    done = subprocess.run(["git", *words], cwd=at, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def processor() -> str:
    """The processor's name, from Linux where it is to be had."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
