"""What parts of PPO are worth on the default task: `python -m benchmarks.ablations parts 1 2 3`.

    parts        docs/results/ablations.md: one setting changed, half the episodes, and the validation posts,
                 since test posts are for verdicts and not for choices; guards only warn
    critic       with and without stage value, all episodes, and the validation posts
    estimators   docs/results/estimators.md: GAE, RLOO and GRPO by their presets, and the test posts

For every seed, a run of `benchmarks.seeds` provides data, SFT and reward models; it is made where there is
none. Only PPO runs again, once per variant, after stage value where its critic is of it. The gold judge
compares its policy with the references. An interrupted command can be repeated: it skips what has a
result.json. Prints a line per variant; a cell is the mean over the seeds and the range. With `--jobs 1` the
seconds of the variants can be compared.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from benchmarks.seeds import linked, run_seed
from rlhf_tasks import config, presets

WARM = "ppo.advantages.critic.warmup={max_updates: 8, settled: 0.02}"
LORA = "ppo.lora={r: 16, alpha: 32.0}"
PARTS: Mapping[str, Sequence[str]] = {
    "default": [],
    "truncation: none": ["ppo.truncation.kind=none"],
    "truncation: eos_trick_subtract": ["ppo.truncation.kind=eos_trick_subtract"],
    "truncation: bootstrap, critic warmed up": ["ppo.truncation.kind=bootstrap", WARM],
    "truncation: bootstrap_add, critic warmed up": ["ppo.truncation.kind=bootstrap_add", WARM],
    "truncation: bootstrap, gamma: 0.99, critic warmed up": [
        "ppo.truncation.kind=bootstrap",
        "ppo.advantages.gamma=0.99",
        WARM,
    ],
    "kl_estimator: k2": ["ppo.kl.estimator=k2"],
    "kl_estimator: k3": ["ppo.kl.estimator=k3"],
    "kl_in: loss, k2": ["ppo.kl.kind=in_loss", "ppo.kl.estimator=k2"],
    "kl_in: loss, k3": ["ppo.kl.kind=in_loss", "ppo.kl.estimator=k3"],
    "kl_coef: 0": ["ppo.kl_coef=0.0"],
    "reference_sync every 8, alpha 0.6": ["ppo.reference_sync={every: 8, alpha: 0.6}"],
    "ratio_from: reference": ["ppo.ratio_from=reference"],
    "critic_init: sft": ["ppo.advantages.critic.init=sft"],
    "critic_init: base": ["ppo.advantages.critic.init=base"],
    "critic_warmup": [WARM],
    "value_model: shared": ["ppo.advantages.critic.kind=shared"],
    "lora r 16": [LORA],
    "lora r 16, at ten times the rate": [
        LORA,
        "ppo.learning_rate=0.004",
        "ppo.advantages.critic.learning_rate=0.0004",
    ],
    "score_scaling, mean subtracted, clip 0.8": ["ppo.score_scaling={subtract_mean: true, clip: 0.8}"],
    "whiten_rewards": ["ppo.advantages.whiten_rewards=true"],
    "whiten_advantages: false": ["ppo.whiten_advantages=false"],
    "advantage_clip: 0.5": ["ppo.advantage_clip=0.5"],
    "cliprange_value: null": ["ppo.advantages.critic.cliprange_value=null"],
    "entropy_coef: 0.01": ["ppo.entropy_coef=0.01"],
    "ptx, coef 0.1": ["ppo.ptx={coef: 0.1, text: null}"],
}
STAGE_VALUE = "ppo.advantages.critic.init=value"
CRITIC: Mapping[str, Sequence[str]] = {
    "default: critic from the reward model": [],
    "critic of stage value": [STAGE_VALUE],
    "critic of stage value, its own λ 1": [STAGE_VALUE, "ppo.advantages.lam_value=1.0"],
}
ESTIMATORS: Mapping[str, Sequence[str]] = {"gae": [], "rloo": ["rloo"], "group": ["grpo"]}
"""The preset of each estimator."""
CELLS = {
    "PPO vs reference": ("win_rate", "{:.1%}"),
    "coverage": ("coverage", "{:.3f}"),
    "faithfulness": ("faithfulness", "{:.3f}"),
    "KL": ("kl", "{:.2f}"),
    "KL of the kept policy": ("selected_kl", "{:.2f}"),
    "length": ("length", "{:.1f}"),
    "guards that warned": ("trips", "{:.0f}"),
    "seconds": ("seconds", "{:.0f}"),
    "weights": ("weights", "{:,.0f}"),
}


def run_variant(folder: Path, changes: Sequence[str], finished: Path, split: str) -> dict[str, float]:
    """The result of PPO with these presets and settings on a finished run; it is trained if there is none."""
    result = folder / "result.json"
    if not result.exists():
        params = linked(folder, finished)
        params["promotion"] = None
        YAML().dump(params, folder / "params.yaml")
        chosen = [change for change in changes if "=" not in change]
        presets.apply(chosen, folder / "params.yaml", [change for change in changes if "=" in change])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
        with (folder / "log").open("w", encoding="utf-8") as log:
            start = time.monotonic()
            stages = ["value", "ppo"] if STAGE_VALUE in changes else ["ppo"]
            if "value" in stages:
                (folder / "models/value").unlink()  # the finished run's, which trained none
            for stage in stages:
                words = ["rlhf", stage]
                subprocess.run(words, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
            seconds = str(time.monotonic() - start)
            again = [sys.executable, "-m", "benchmarks.ablations", "--judge", split, seconds]
            subprocess.run(again, cwd=folder, env=environment, stdout=log, stderr=log, check=True)
        for made in ("policy", "value"):
            if not (folder / "models" / made).is_symlink():
                shutil.rmtree(folder / "models" / made)
    numbers: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    return numbers


def judge(split: str, seconds: float) -> None:
    """Write the results of models/policy of this folder on the posts of a split to result.json."""
    from rlhf_tasks.data.batches import read_table
    from rlhf_tasks.data.synthetic import gold, gold_scores
    from rlhf_tasks.data.tokenizer import encode, load_tokenizer, response_texts
    from rlhf_tasks.judging import statistics
    from rlhf_tasks.models.load import load_causal, load_reward
    from rlhf_tasks.models.sampling import sample_responses
    from rlhf_tasks.project.paths import Paths

    settings, policy = config.load(), Path("models/policy")
    rows = read_table(Paths(), "prompts", "test" if split == "test" else "validation")
    prompts, tokenizer = [row["prompt"] for row in rows], load_tokenizer(policy)
    models: list[Any] = [load_causal(policy).eval()]
    responses = sample_responses(
        models[0],
        tokenizer,
        prompts,
        seed=settings.seed,
        max_new_tokens=settings.data.max_completion_tokens,
        temperature=settings.judge.temperature,
    )
    models += [load_reward(Path("models/reward"))] if settings.ppo.critic is not None else []
    texts = response_texts(tokenizer, encode(tokenizer, prompts), responses)
    references = gold_scores(prompts, [row["reference"] for row in rows])
    rate = statistics.rate(statistics.outcomes(gold_scores(prompts, texts), references))
    facets = [gold(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    metrics = json.loads(Path("metrics/ppo.json").read_text(encoding="utf-8"))
    result = {
        "win_rate": rate.value,
        "low": rate.low,
        "high": rate.high,
        "coverage": sum(f.coverage for f in facets) / len(facets),
        "faithfulness": sum(f.faithfulness for f in facets) / len(facets),
        "kl": metrics["objective/kl_k1"],  # the same estimator for all
        "selected_kl": metrics["selected_kl"],
        "length": sum(map(len, responses)) / len(responses),
        "trips": metrics["guards/trips"],
        "seconds": seconds,
        "weights": sum(weights.numel() for model in models for weights in model.parameters()),
    }
    Path("result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def line(name: str, results: Sequence[Mapping[str, float]]) -> str:
    """A row of the table: means, and ranges where the seeds differ."""
    cells = []
    for key, form in CELLS.values():
        values = [result[key] for result in results]
        low, high = form.format(min(values)), form.format(max(values))
        cells.append(form.format(sum(values) / len(values)) + (f" ({low}–{high})" if low != high else ""))
    return f"| {name} | " + " | ".join(cells) + " |"


def main() -> None:
    if sys.argv[1:2] == ["--judge"]:  # of `run_variant`
        judge(sys.argv[2], float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("parts", "critic", "estimators"))
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--jobs", type=int, default=2, help="run so many at a time, on one thread each")
    args = parser.parse_args()
    variants, split, common = PARTS, "validation", ["ppo.total_episodes=4096", "ppo.guards.action=warn"]
    if args.table == "critic":
        variants, common = CRITIC, ["ppo.guards.action=warn"]
    elif args.table == "estimators":
        variants, split, common = ESTIMATORS, "test", []
    common.append("ppo.num_sample_generations=0")
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = pool.map(lambda seed: run_seed(seed, Path(".rlhf/seeds"), "value"), args.seeds)
        finished = dict(zip(args.seeds, folders, strict=True))
    print("| variant | " + " | ".join(CELLS) + " |", "|---" * (len(CELLS) + 1) + "|", sep="\n")
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {}
        for name, changes in variants.items():
            own = "".join(c if c.isalnum() else "-" for c in name)
            waiting[name] = [
                pool.submit(
                    run_variant,
                    Path(".rlhf/ablations", args.table, str(seed), own).absolute(),
                    [*common, *changes],
                    finished[seed],
                    split,
                )
                for seed in args.seeds
            ]
        for name, runs in waiting.items():
            print(line(name, [run.result() for run in runs]), flush=True)


if __name__ == "__main__":
    main()
