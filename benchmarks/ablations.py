"""The effect of each part of PPO on the default task: `python -m benchmarks.ablations 1 2 3`.

For every seed, the finished run of `benchmarks.seeds` provides data, SFT and reward models. Only PPO
runs again, once per variant and with half the episodes. The gold judge compares the policy on the validation
posts, since test posts are for verdicts and not for choices. Guards only warn. An interrupted command can be
repeated: it skips the variants that have a result. Results are in benchmarks/ablations.md, one line per
variant; a cell is the mean over seeds and the range.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.seeds import linked, run_seed
from rlhf_tasks import config
from tests import small

OUT = Path(__file__).with_suffix(".md")
EPISODES = 4096
WARM = {"max_updates": 8, "settled": 0.02}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "truncation: none": {"truncation.kind": "none"},
    "truncation: eos_trick_subtract": {"truncation.kind": "eos_trick_subtract"},
    "truncation: bootstrap, critic warmed up": {
        "truncation.kind": "bootstrap",
        "advantages.critic.warmup": WARM,
    },
    "truncation: bootstrap_add, critic warmed up": {
        "truncation.kind": "bootstrap_add",
        "advantages.critic.warmup": WARM,
    },
    "truncation: bootstrap, gamma: 0.99, critic warmed up": {
        "truncation.kind": "bootstrap",
        "advantages.gamma": 0.99,
        "advantages.critic.warmup": WARM,
    },
    "kl_estimator: k2": {"kl.estimator": "k2"},
    "kl_estimator: k3": {"kl.estimator": "k3"},
    "kl_in: loss, k2": {"kl.kind": "in_loss", "kl.estimator": "k2"},
    "kl_in: loss, k3": {"kl.kind": "in_loss", "kl.estimator": "k3"},
    "kl_coef: 0": {"kl_coef": 0.0},
    "reference_sync every 8, alpha 0.6": {"reference_sync": {"every": 8, "alpha": 0.6}},
    "ratio_from: reference": {"ratio_from": "reference"},
    "critic_init: sft": {"advantages.critic.init": "sft"},
    "critic_init: base": {"advantages.critic.init": "base"},
    "critic_warmup": {"advantages.critic.warmup": WARM},
    "value_model: shared": {"advantages.critic.kind": "shared"},
    "lora r 16": {"lora": {"r": 16, "alpha": 32.0}},
    "lora r 16, at ten times the rate": {
        "lora": {"r": 16, "alpha": 32.0},
        "learning_rate": 4e-3,
        "advantages.critic.learning_rate": 4e-4,
    },
    "score_scaling, mean subtracted, clip 0.8": {"score_scaling": {"subtract_mean": True, "clip": 0.8}},
    "whiten_rewards": {"advantages.whiten_rewards": True},
    "whiten_advantages: false": {"whiten_advantages": False},
    "advantage_clip: 0.5": {"advantage_clip": 0.5},
    "cliprange_value: null": {"advantages.critic.cliprange_value": None},
    "entropy_coef: 0.01": {"entropy_coef": 0.01},
    "ptx, coef 0.1": {"ptx": {"coef": 0.1, "text": None}},
}
CELLS = {
    "PPO vs reference": ("win_rate", "{:.1%}"),
    "coverage": ("coverage", "{:.3f}"),
    "faithfulness": ("faithfulness", "{:.3f}"),
    "KL": ("kl", "{:.2f}"),
    "length": ("length", "{:.1f}"),
    "guards that warned": ("trips", "{:.0f}"),
}


def run_variant(seed: int, name: str, finished: Path, work: Path) -> dict[str, float]:
    """The result of one variant and seed; PPO runs if there is none."""
    folder = work / str(seed) / "".join(c if c.isalnum() else "-" for c in name)
    result = folder / "result.json"
    if not result.exists():
        _prepare(folder, finished, VARIANTS[name])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
        with (folder / "log").open("w", encoding="utf-8") as log:
            for command in (
                ["rlhf", "ppo"],
                [sys.executable, "-m", "benchmarks.ablations", "--judge", "result.json"],
            ):
                subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
        shutil.rmtree(folder / "models" / "policy")
    numbers: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    return numbers


def _prepare(folder: Path, finished: Path, changes: Mapping[str, Any]) -> None:
    """Make a workspace with the data and models of a finished run, and parameters of its own."""
    params = linked(folder, finished)
    own = {"total_episodes": EPISODES, "guards.action": "warn", "num_sample_generations": 0, **changes}
    config.merge(params, small.together({f"ppo.{key}": value for key, value in own.items()}))
    params["promotion"] = None
    YAML().dump(params, folder / "params.yaml")


def judge(out: Path) -> None:
    """Write the results of models/policy of this folder on the validation posts."""
    from rlhf_tasks.data.batches import load_tokenizer, read_table
    from rlhf_tasks.data.synthetic import gold, gold_scores
    from rlhf_tasks.data.tokenizer import encode, response_texts
    from rlhf_tasks.judging import statistics
    from rlhf_tasks.models.load import load_causal
    from rlhf_tasks.models.sampling import sample_responses
    from rlhf_tasks.project.paths import Paths

    settings, policy = config.load(), Path("models/policy")
    rows = read_table(Paths(), "prompts", "validation")
    prompts, tokenizer = [row["prompt"] for row in rows], load_tokenizer(policy)
    responses = sample_responses(
        load_causal(policy).eval(), tokenizer, prompts, seed=settings.seed,
        max_new_tokens=settings.data.max_completion_tokens, temperature=settings.judge.temperature,
    )  # fmt: skip
    texts = response_texts(tokenizer, encode(tokenizer, prompts), responses)
    references = gold_scores(prompts, [row["reference"] for row in rows])
    facets = [gold(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    metrics = json.loads(Path("metrics/ppo.json").read_text(encoding="utf-8"))
    result = {
        "win_rate": statistics.rate(statistics.outcomes(gold_scores(prompts, texts), references)).value,
        "coverage": sum(f.coverage for f in facets) / len(facets),
        "faithfulness": sum(f.faithfulness for f in facets) / len(facets),
        "kl": metrics["objective/kl_k1"],  # the same estimator for all
        "length": sum(map(len, responses)) / len(responses),
        "trips": metrics["guards/trips"],
    }
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def table(results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    lines = ["| variant | " + " | ".join(CELLS) + " |", "|---" * (len(CELLS) + 1) + "|"]
    for name, numbers in results.items():
        cells = []
        for key, form in CELLS.values():
            values = [result[key] for result in numbers]
            low, high = form.format(min(values)), form.format(max(values))
            cells.append(form.format(sum(values) / len(values)) + (f" ({low}–{high})" if low != high else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="run these variants")
    parser.add_argument(
        "--runs", type=Path, default=Path(".rlhf/seeds"), help="the folder of the finished runs"
    )
    parser.add_argument(
        "--work", type=Path, default=Path(".rlhf/ablations"), help="the folder of the results"
    )
    parser.add_argument("--jobs", type=int, default=2, help="run so many at a time, on one thread each")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.judge:
        judge(args.judge)
        return
    finished = {seed: run_seed(seed, args.runs) for seed in args.seeds}
    results: dict[str, list[dict[str, float]]] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {
            name: [pool.submit(run_variant, seed, name, finished[seed], args.work) for seed in args.seeds]
            for name in args.only
        }
        for name, runs in waiting.items():
            results[name] = [run.result() for run in runs]
            print(table({name: results[name]}).splitlines()[-1], flush=True)
    if set(results) == set(VARIANTS):  # the table is written only when it is whole
        OUT.write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
