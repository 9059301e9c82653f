"""One reward model against three of them, over-optimised: `python -m tests.benchmarks.ensembles 1 2 3`.

Every seed runs the preset `over_optimised` up to stage reward. Stage reward then runs again with two other
seeds, on the same pairs. PPO runs once per variant, with the same prompts and the same number of episodes.
The gold judge compares the responses of PPO's evaluations with the references, on the validation posts. An
interrupted command can be repeated: it skips what is done. The table goes to docs/results/ensembles.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ruamel.yaml import YAML

from rlhf_tasks import presets
from rlhf_tasks.data.synthetic import gold_scores
from rlhf_tasks.evaluation import statistics

OUT = Path("docs/results/ensembles.md")
NUM_OTHERS = 2
NAMES = [f"seed_{number}" for number in range(2, NUM_OTHERS + 2)]
SHARE = round(1 / (NUM_OTHERS + 1), 4)


def ensemble(weight: float, combine: Any) -> dict[str, Any]:
    """Changes of the section `ppo`: models/reward and the others."""
    own = {"kind": "reward_model", "weight": weight}
    others = [own | {"path": f"rewards/{name}", "name": name} for name in NAMES]
    return {"scorers": [own, *others], "combine_reward_models": combine}


VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "one reward model": {},
    "mean of three": ensemble(SHARE, "sum"),
    "minimum of three": ensemble(1.0, "min"),
    "mean of three − 1 standard deviation": ensemble(1.0, {"mean_minus_deviations": 1.0}),
}


@dataclass(frozen=True)
class Outcome:
    """Gold win rates over the references, and the KL of the last rollout in nats per response."""

    best: statistics.Estimate
    """The evaluation with the highest gold win rate, which no run can know."""
    kept: statistics.Estimate
    """The checkpoint that PPO kept."""
    end: statistics.Estimate
    kl: float


def workspace(folder: Path, seed: int, settings: Sequence[str], changes: Mapping[str, Any]) -> None:
    """A folder with parameters of its own, in which stages run without DVC. One that is there is kept."""
    if (folder / "params.yaml").exists():
        return
    (folder / "models").mkdir(parents=True)
    (folder / "rlhf_tasks").symlink_to(Path("rlhf_tasks").absolute())
    shutil.copy("dvc.yaml", folder)
    params = folder / "new.yaml"
    shutil.copy("params.yaml", params)
    presets.apply(["over_optimised"], params, [f"seed={seed}", "tracking.enabled=false", *settings])
    yaml = YAML()
    tree = yaml.load(params.read_text(encoding="utf-8"))
    tree["ppo"].update(changes)
    yaml.dump(tree, params)
    params.rename(folder / "params.yaml")


def link(folder: Path, finished: Path, *paths: str) -> None:
    """Make data and models of a finished workspace those of this one."""
    for path in paths:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            target.symlink_to((finished / path).absolute())


def run(folder: Path, *stages: str) -> None:
    """Run stages on one thread; those that have ended are skipped."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    for stage in stages:
        done = folder / f"{stage}.done"
        if done.exists():
            continue
        with (folder / "log").open("a", encoding="utf-8") as log:
            subprocess.run(["rlhf", stage], cwd=folder, env=environment, stdout=log, stderr=log, check=True)
        done.touch()


def prepared(seed: int, work: Path, settings: Sequence[str]) -> Path:
    """The finished stages of a seed up to reward, with the other reward models in `rewards`."""
    folder = work / str(seed) / "pipeline"
    workspace(folder, seed, settings, {})
    run(folder, "prepare", "base", "sft", "preferences", "reward")
    for number, name in enumerate(NAMES, start=1):
        other = work / str(seed) / name
        workspace(other, seed + 100 * number, settings, {})
        link(other, folder, "data", "models/base", "models/sft")
        run(other, "reward")
        (folder / "rewards").mkdir(exist_ok=True)
        if not (folder / "rewards" / name).exists():
            (folder / "rewards" / name).symlink_to((other / "models/reward").absolute())
    return folder


def variant(name: str, seed: int, finished: Path, work: Path, settings: Sequence[str]) -> Outcome:
    """The outcome of PPO's run of one variant; it runs if it has not."""
    folder = work / str(seed) / "".join(c if c.isalnum() else "-" for c in name)
    workspace(folder, seed, settings, VARIANTS[name])
    models = [f"models/{role}" for role in ("base", "sft", "reward", "reward_heldout")]
    link(folder, finished, "data", "rewards", *models)
    run(folder, "ppo")
    return outcome(folder)


def outcome(folder: Path) -> Outcome:
    """The gold win rates of the responses that PPO's evaluations kept."""
    rows = pq.read_table(folder / "evaluation/ppo/answers.parquet").to_pylist()
    metrics = json.loads((folder / "metrics/ppo.json").read_text(encoding="utf-8"))
    rates = {
        episode: _rate(list(group)) for episode, group in itertools.groupby(rows, lambda row: row["episode"])
    }
    return Outcome(
        best=max(rates.values(), key=lambda rate: rate.value),
        kept=rates[int(metrics["selected_episode"])],
        end=rates[max(rates)],
        kl=metrics["objective/kl"],
    )


def _rate(rows: Sequence[Mapping[str, Any]]) -> statistics.Estimate:
    prompts = [row["prompt"] for row in rows]
    scores = [gold_scores(prompts, [row[column] for row in rows]) for column in ("response", "reference")]
    return statistics.rate(statistics.outcomes(*scores))


def table(results: Mapping[str, Sequence[Outcome]], seeds: Sequence[int]) -> str:
    """Mean and range over the seeds, then the last policy of each seed with its interval."""
    heads = ["best checkpoint", "kept checkpoint", "last policy", "last KL"]
    lines = [f"| | {' | '.join(heads)} | {' | '.join(f'last policy, seed {seed}' for seed in seeds)} |"]
    lines.append("|---" * (len(heads) + len(seeds) + 1) + "|")
    for name, found in results.items():
        cells = [_spread([getattr(one, key).value for one in found]) for key in ("best", "kept", "end")]
        cells.append(_spread([one.kl for one in found], "{:.1f}"))
        cells += [f"{one.end.value:.1%} ({one.end.low:.1%}–{one.end.high:.1%})" for one in found]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float], form: str = "{:.1%}") -> str:
    low, mean, high = (form.format(x) for x in (min(values), sum(values) / len(values), max(values)))
    return f"{mean} ({low}–{high})" if low != high else mean


def page(results: Mapping[str, Sequence[Outcome]], seeds: Sequence[int]) -> str:
    return f"""# Pessimistic ensembles

```sh
python -m tests.benchmarks.ensembles {" ".join(map(str, seeds))}
```

The preset `over_optimised` has no KL penalty, few pairs and a high learning rate, so that PPO exploits its
reward model ([over-optimisation](over-optimisation.md)). Here it optimises one reward model, or three that
were trained on the same pairs with other seeds. Each variant has the same prompts and the same number of
episodes. Cells are the gold judge's win rates over the references on the validation posts, as the mean and
the range over the seeds. The columns of single seeds have 95% intervals. The best checkpoint is by the gold
judge, which no run can know; the kept one is chosen by `models/reward_heldout`.

{table(results, seeds)}"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--work", type=Path, default=Path(".rlhf/ensembles"), help="where runs are kept")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the page (default: {OUT})")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of params.yaml, for a small trial"
    )
    args = parser.parse_args()
    settings = ["ppo.num_selection_prompts=500", *args.set]
    with ThreadPoolExecutor(args.jobs) as pool:
        finished = list(pool.map(lambda seed: prepared(seed, args.work, settings), args.seeds))
        waiting = {
            name: [
                pool.submit(variant, name, seed, folder, args.work, settings)
                for seed, folder in zip(args.seeds, finished, strict=True)
            ]
            for name in VARIANTS
        }
        results = {name: [one.result() for one in runs] for name, runs in waiting.items()}
    args.out.write_text(page(results, args.seeds), encoding="utf-8")
    print(args.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
