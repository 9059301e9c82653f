"""The three advantage estimators on the default task: `python -m benchmarks.estimators 1 2 3`.

Each seed has one base, SFT and reward model, made by `dvc repro reward` in a clone of the committed state,
or by an earlier benchmark. Then stage ppo runs once for each estimator, with equally many episodes. The gold
judge compares the kept policy with the references on the test posts; `--split validation` is for choosing
parameters. The stages run one after another, so that their seconds can be compared. An interrupted command
can be repeated: it skips what has a result. Writes docs/results/estimators.md when each seed has all
of them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.seeds import linked, run_seed
from rlhf_tasks import presets

OUT = Path(__file__).parents[1] / "docs/results/estimators.md"
Result = dict[str, float]
NAMES: Mapping[str, str | None] = {"gae": None, "rloo": "rloo", "group": "grpo"}
"""The preset of each estimator."""
INTRODUCTION = """\
# Advantage estimators compared

```sh
python -m benchmarks.estimators {seeds}
```

For each seed the three estimators train from the same SFT and reward models, with {episodes} episodes.
GAE has the shipped values, the others those of their presets, `rloo` and `grpo`. The win rate is the gold
judge's over the references, on the {posts} test posts, with its 95% interval. The KL is that of the kept
policy, `selected_kl`, in nats per response. The seconds are those of the whole stage `ppo`, one thread on one
machine. The weights are those that the stage trains; a snapshot holds them with two moments each.

"""


def trained(
    folder: Path, seed: int, runs: Path, preset: str | None, settings: Sequence[str], split: str = "test"
) -> Result:
    """The result of stage ppo with a preset and settings; it runs if the folder has no result.

    The stages before it are those of `seeds.run_seed` in `runs`.
    """
    if not (folder / "result.json").exists():
        prepare(folder, run_seed(seed, runs, "reward"), preset, settings)
        start = time.monotonic()
        _call(folder, "rlhf", "ppo")
        seconds = time.monotonic() - start
        again = (sys.executable, "-m", "benchmarks.estimators")
        _call(folder, *again, "--judge", str(seconds), "--split", split)
        shutil.rmtree(folder / "models/policy")
    found: Result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def _call(folder: Path, *command: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with (folder / "log").open("a", encoding="utf-8") as log:
        subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=True)


def prepare(folder: Path, finished: Path, preset: str | None, settings: Sequence[str]) -> None:
    """Make a workspace with the data and models of a finished run, and parameters of its own."""
    params = linked(folder, finished)
    params["promotion"] = None
    YAML().dump(params, folder / "params.yaml")
    presets.apply([preset] if preset else [], folder / "params.yaml", settings)


def judge(seconds: float, split: str) -> None:
    """Write the results of models/policy of this folder to result.json."""
    from rlhf_tasks import config
    from rlhf_tasks.data.batches import load_tokenizer, read_table
    from rlhf_tasks.data.synthetic import gold_scores
    from rlhf_tasks.data.tokenizer import encode, response_texts
    from rlhf_tasks.judging import statistics
    from rlhf_tasks.models.load import load_causal, load_reward
    from rlhf_tasks.models.sampling import sample_responses
    from rlhf_tasks.project.paths import Paths

    settings, policy = config.load(), Path("models/policy")
    rows = read_table(Paths(), "prompts", "validation" if split == "validation" else "test")
    prompts, tokenizer = [row["prompt"] for row in rows], load_tokenizer(policy)
    model = load_causal(policy).eval()
    responses = sample_responses(
        model, tokenizer, prompts, seed=settings.seed, temperature=settings.judge.temperature,
        max_new_tokens=settings.data.max_completion_tokens,
    )  # fmt: skip
    scores = gold_scores(prompts, response_texts(tokenizer, encode(tokenizer, prompts), responses))
    references = gold_scores(prompts, [row["reference"] for row in rows])
    rate = statistics.rate(statistics.outcomes(scores, references))
    metrics = json.loads(Path("metrics/ppo.json").read_text(encoding="utf-8"))
    critic = 0 if settings.ppo.critic is None else load_reward(Path("models/reward"))
    result: dict[str, Any] = {
        "win_rate": rate.value, "low": rate.low, "high": rate.high, "posts": len(rows),
        "kl": metrics["selected_kl"], "episode": metrics["selected_episode"], "seconds": seconds,
        "length": sum(map(len, responses)) / len(responses), "trips": metrics["guards/trips"],
        "episodes": settings.ppo.total_episodes,
        "weights": num_weights(model) + (num_weights(critic) if critic else 0),
    }  # fmt: skip
    Path("result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def num_weights(model: Any) -> int:
    return sum(weights.numel() for weights in model.parameters())


def table(results: Mapping[str, Sequence[Result]], seeds: Sequence[int]) -> str:
    """A row per estimator: the win rate of each seed, then means over the seeds."""
    head = ["estimator", *(f"win rate, seed {seed}" for seed in seeds), "mean", "KL", "seconds", "weights"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, found in results.items():
        rates = [f"{one['win_rate']:.1%} ({one['low']:.1%}–{one['high']:.1%})" for one in found]
        cells = [
            name, *rates, f"{_mean(found, 'win_rate'):.1%}", f"{_mean(found, 'kl'):.2f}",
            f"{_mean(found, 'seconds'):.0f}", f"{_mean(found, 'weights'):,.0f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _mean(found: Sequence[Result], key: str) -> float:
    return sum(one[key] for one in found) / len(found)


def page(results: Mapping[str, Sequence[Result]], seeds: Sequence[int]) -> str:
    first = results["gae"][0]
    introduction = INTRODUCTION.format(
        seeds=" ".join(map(str, seeds)), episodes=f"{first['episodes']:,.0f}", posts=f"{first['posts']:,.0f}"
    )
    return introduction + table(results, seeds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="run these estimators")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="change parameters of all")
    parser.add_argument("--split", choices=["test", "validation"], default="test", help="posts of the judge")
    parser.add_argument("--runs", type=Path, default=Path(".rlhf/seeds"), help="where the first stages are")
    parser.add_argument("--work", type=Path, default=Path(".rlhf/estimators"), help="where the results are")
    parser.add_argument("--judge", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge is not None:
        judge(args.judge, args.split)
        return
    results: dict[str, list[Result]] = {name: [] for name in args.only}
    for seed in args.seeds:
        for name in args.only:
            folder = (args.work / str(seed) / name).absolute()
            results[name].append(trained(folder, seed, args.runs, NAMES[name], args.set, args.split))
            print(f"seed {seed}, {name}: {json.dumps(results[name][-1])}", flush=True)
    print(table(results, args.seeds))
    if not args.set and args.split == "test" and list(results) == list(NAMES):
        OUT.write_text(page(results, args.seeds), encoding="utf-8")


if __name__ == "__main__":
    main()
