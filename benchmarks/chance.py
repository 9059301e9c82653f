"""Whether policies that learnt nothing pass the gate by luck: `python -m benchmarks.chance smoke 1 2 3`.

    smoke      the preset, whose scorer is a dummy
    shuffled   the preset's sizes, with a reward model that was trained on pairs in random order

The trial mark and the rule against dummy rewards are switched off, so that only what was measured decides.
Each seed runs in a clone of the committed state under `.rlhf/chance/KIND-SEED`, a thread each, and is kept: a
benchmark that was broken off goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

RULES = ("trial", "no_reward")
SHUFFLED: dict[str, Any] = {
    "preferences": {"label_noise": 0.5, "num_prompts": 200},
    "reward": {"train": True, "num_epochs": 1},
    "ppo": {"scorers": [{"kind": "reward_model", "weight": 1.0}]},
}


def run(kind: str, seed: int, work: Path) -> dict[str, Any]:
    """The verdict of one seed; the run is made where there is none."""
    folder = (work / f"{kind}-{seed}").absolute()
    verdict = folder / "evaluation/verdict.json"
    if not verdict.exists():
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", ".", str(folder)], check=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
        subprocess.run(
            ["rlhf", "preset", "smoke"], cwd=folder, env=environment, check=True, capture_output=True
        )
        params = YAML().load(folder / "params.yaml")
        params["seed"], params["tracking"]["enabled"] = seed, False
        params["data"]["num_test"] = params["judge"]["num_examples"] = 200
        params["promotion"].update({"min_examples": 194, "trial": False})
        for section, changes in SHUFFLED.items() if kind == "shuffled" else ():
            params.setdefault(section, {}).update(changes)
        YAML().dump(params, folder / "params.yaml")
        dvc = ["dvc", "repro", "--quiet", "verdict"]
        subprocess.run(dvc, cwd=folder, env=environment, check=True, capture_output=True)
    found: dict[str, Any] = json.loads(verdict.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("smoke", "shuffled"))
    parser.add_argument("seeds", type=int, nargs="+")
    given, work, passed = parser.parse_args(), Path(".rlhf/chance"), 0
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        for seed, verdict in zip(
            given.seeds, pool.map(lambda seed: run(given.kind, seed, work), given.seeds), strict=True
        ):
            failed = [c["key"] for c in verdict["criteria"] if not c["passed"] and c["key"] not in RULES]
            passed += not failed
            print(f"{given.kind} seed {seed}: {', '.join(failed) or 'PASSED'}", flush=True)
    print(f"{passed} of {len(given.seeds)} pass")


if __name__ == "__main__":
    main()
