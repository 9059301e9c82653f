"""The default run, or a preset, over several seeds, as a table: `python -m benchmarks.seeds 1 2 3`.

Each seed runs in a clone of the committed state under `.rlhf/seeds/SEED`, with a preset `.rlhf/PRESET/SEED`,
and is kept, so that a broken-off benchmark goes on where it was. Two run at a time, a thread each: the bits
depend on the number of threads. `--preset arithmetic` is that of docs/results/verifier.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROWS: Mapping[str | None, Mapping[str, tuple[str, str]]] = {
    None: {
        "SFT vs reference (gold)": ("judge", "gold/sft_vs_reference/win_rate"),
        "PPO vs reference (gold)": ("judge", "gold/policy_vs_reference/win_rate"),
        "PPO vs SFT (gold)": ("judge", "gold/policy_vs_sft/win_rate"),
        "coverage SFT": ("judge", "gold/sft/coverage"),
        "coverage PPO": ("judge", "gold/policy/coverage"),
        "faithfulness SFT": ("judge", "gold/sft/faithfulness"),
        "faithfulness PPO": ("judge", "gold/policy/faithfulness"),
        "objective/kl at the end": ("ppo", "objective/kl"),
        "reward model's accuracy, held-out pairs": ("reward", "accuracy"),
        "reward model's agreement, pairs of SFT samples": ("judge", "agreement/reward/sft_samples"),
        "reward model's agreement, pairs of PPO samples": ("judge", "agreement/reward/policy_samples"),
    },
    "arithmetic": {
        "accuracy SFT": ("judge", "verifier/accuracy/sft"),
        "accuracy PPO": ("judge", "verifier/accuracy/policy"),
        "difference": ("judge", "verifier/accuracy_gain"),
    },
}
"""The metrics of a row, by preset."""


def run_seed(seed: int, work: Path, *targets: str, preset: str | None = None) -> Path:
    """The folder of a seed's finished run, or of its stages up to `targets`; made where there is none."""
    folder = work / str(seed)
    if not folder.exists():
        subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder.resolve())}
    with (folder / "run.log").open("a", encoding="utf-8") as log:
        presets = ["rlhf", "preset", *filter(None, [preset]), f"seed={seed}"]
        for command in (presets, ["dvc", "repro", *targets]):
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
    return folder


def linked(folder: Path, finished: Path) -> Any:
    """Make a workspace with the data and models of a finished run; its parameters, without tracking."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "models").mkdir(parents=True)
    (folder / "data").symlink_to((finished / "data").absolute())
    (folder / "rlhf_tasks").symlink_to(Path("rlhf_tasks").absolute())
    shutil.copy("dvc.yaml", folder)
    for role in ("base", "sft", "reward", "reward_heldout", "dpo", "value"):
        (folder / "models" / role).symlink_to((finished / "models" / role).absolute())
    yaml = YAML()
    params = yaml.load(Path("params.yaml").read_text(encoding="utf-8"))
    params["seed"] = yaml.load((finished / "params.yaml").read_text(encoding="utf-8"))["seed"]
    params["tracking"]["enabled"] = False
    return params


def cell(folder: Path, stage: str, key: str) -> str:
    """A metric, with its 95% interval where it has one."""
    metrics = json.loads((folder / f"metrics/{stage}.json").read_text())
    stem = key.removesuffix("/win_rate")
    low, high = metrics.get(f"{stem}/low"), metrics.get(f"{stem}/high")
    if "kl" in key:
        return f"{metrics[key]:.2f}"
    return f"{metrics[key]:.1%}" + ("" if low is None else f" ({low:.1%}–{high:.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--preset", choices=[name for name in ROWS if name], help="run this preset")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    args = parser.parse_args()
    work = Path(".rlhf") / (args.preset or "seeds")
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = list(pool.map(lambda seed: run_seed(seed, work, preset=args.preset), args.seeds))
    print("| | " + " | ".join(f"seed {seed}" for seed in args.seeds) + " |")
    print("|---" * (len(folders) + 1) + "|")
    for name, where in ROWS[args.preset].items():
        print(f"| {name} | " + " | ".join(cell(folder, *where) for folder in folders) + " |")


if __name__ == "__main__":
    main()
