"""What parts of PPO are worth on the default task: `python -m benchmarks.ablations parts 1 2 3`.

    parts        docs/results/ablations.md: one setting changed, half the episodes, and the validation posts,
                 since test posts are for verdicts and not for choices; guards only warn
    critic       with and without stage value, all episodes, and the validation posts
    estimators   docs/results/estimators.md: GAE, RLOO and GRPO by their presets, and the test posts

It goes on in the runs of `benchmarks.seeds`, whose data, SFT and reward models it uses, or makes them: only
PPO runs again, once per variant, after stage value where its critic is of it. The gold judge compares its
policy with the references. Prints a row per variant; a cell is the mean over the seeds and the range. With
`--jobs 1` the seconds of the variants can be compared. See `benchmarks.cells`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import cells
from rlhf_tasks import config
from rlhf_tasks.config import Split
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.synthetic import gold, gold_scores
from rlhf_tasks.data.tokenizer import encode, load_tokenizer, response_texts
from rlhf_tasks.judging import statistics
from rlhf_tasks.models.load import load_causal, load_reward
from rlhf_tasks.models.sampling import sample_responses
from rlhf_tasks.project import durations
from rlhf_tasks.project.paths import Paths

Variants = Mapping[str, Mapping[str, str]]

WARM = {"ppo.advantages.critic.warmup": "{max_updates: 8, settled: 0.02}"}
LORA = {"ppo.lora": "{r: 16, alpha: 32.0}"}
PARTS: Variants = {
    "default": {},
    "truncation: none": {"ppo.truncation.kind": "none"},
    "truncation: eos_trick_subtract": {"ppo.truncation.kind": "eos_trick_subtract"},
    "truncation: bootstrap, critic warmed up": {"ppo.truncation.kind": "bootstrap", **WARM},
    "truncation: bootstrap_add, critic warmed up": {"ppo.truncation.kind": "bootstrap_add", **WARM},
    "truncation: bootstrap, gamma: 0.99, critic warmed up": {
        "ppo.truncation.kind": "bootstrap",
        "ppo.advantages.gamma": "0.99",
        **WARM,
    },
    "kl_estimator: k2": {"ppo.kl.estimator": "k2"},
    "kl_estimator: k3": {"ppo.kl.estimator": "k3"},
    "kl_in: loss, k2": {"ppo.kl.kind": "in_loss", "ppo.kl.estimator": "k2"},
    "kl_in: loss, k3": {"ppo.kl.kind": "in_loss", "ppo.kl.estimator": "k3"},
    "kl_coef: 0": {"ppo.kl_coef": "0.0"},
    "reference_sync every 8, alpha 0.6": {"ppo.reference_sync": "{every: 8, alpha: 0.6}"},
    "ratio_from: reference": {"ppo.ratio_from": "reference"},
    "critic_init: sft": {"ppo.advantages.critic.init": "sft"},
    "critic_init: base": {"ppo.advantages.critic.init": "base"},
    "critic_warmup": WARM,
    "value_model: shared": {"ppo.advantages.critic.kind": "shared"},
    "lora r 16": LORA,
    "lora r 16, at ten times the rate": {
        **LORA,
        "ppo.learning_rate": "0.004",
        "ppo.advantages.critic.learning_rate": "0.0004",
    },
    "score_scaling, mean subtracted, clip 0.8": {"ppo.score_scaling": "{subtract_mean: true, clip: 0.8}"},
    "whiten_rewards": {"ppo.advantages.whiten_rewards": "true"},
    "whiten_advantages: false": {"ppo.whiten_advantages": "false"},
    "advantage_clip: 0.5": {"ppo.advantage_clip": "0.5"},
    "cliprange_value: null": {"ppo.advantages.critic.cliprange_value": "null"},
    "entropy_coef: 0.01": {"ppo.entropy_coef": "0.01"},
    "ptx, coef 0.1": {"ppo.ptx": "{coef: 0.1, text: null}"},
}
STAGE_VALUE = {"ppo.advantages.critic.init": "value"}
CRITIC: Variants = {
    "default: critic from the reward model": {},
    "critic of stage value": STAGE_VALUE,
    "critic of stage value, its own λ 1": {**STAGE_VALUE, "ppo.advantages.lam_value": "1.0"},
}
ESTIMATORS: Variants = {"gae": {}, "rloo": cells.values_of("rloo"), "group": cells.values_of("grpo")}
COMMON = {"ppo.num_sample_generations": "0", "promotion": "null", "tracking.enabled": "false"}
WARN = {"ppo.guards.action": "warn"}
TABLES: Mapping[str, tuple[Variants, Split, Mapping[str, str]]] = {
    "parts": (PARTS, "validation", WARN | {"ppo.total_episodes": "4096"}),
    "critic": (CRITIC, "validation", WARN),
    "estimators": (ESTIMATORS, "test", {}),
}
"""Variants, the split of the posts, and the values of all variants."""
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


def measure(folder: Path, split: Split) -> cells.Cell:
    """The results of the policy of a run on the posts of a split."""
    paths = Paths(folder)
    settings, metrics = config.load(paths.params), cells.metrics(folder, "ppo")
    rows, tokenizer = read_table(paths, "prompts", split), load_tokenizer(paths.policy)
    prompts = [row["prompt"] for row in rows]
    models: list[Any] = [load_causal(paths.policy).eval()]
    responses = sample_responses(
        models[0],
        tokenizer,
        prompts,
        seed=settings.seed,
        max_new_tokens=settings.data.max_completion_tokens,
        temperature=settings.judge.temperature,
    )
    models += [load_reward(paths.reward)] if settings.ppo.critic is not None else []
    texts = response_texts(tokenizer, encode(tokenizer, prompts), responses)
    references = gold_scores(prompts, [row["reference"] for row in rows])
    rate = statistics.rate(statistics.outcomes(gold_scores(prompts, texts), references))
    facets = [gold(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    stages = ["value", "ppo"] if settings.ppo.critic_init == "value" else ["ppo"]
    seconds = durations.read(paths.home)
    return {
        "win_rate": rate.value,
        "low": rate.low,
        "high": rate.high,
        "coverage": sum(f.coverage for f in facets) / len(facets),
        "faithfulness": sum(f.faithfulness for f in facets) / len(facets),
        "kl": metrics["objective/kl_k1"],  # the same estimator for all
        "selected_kl": metrics["selected_kl"],
        "length": sum(map(len, responses)) / len(responses),
        "trips": metrics["guards/trips"],
        "seconds": sum(seconds[stage] for stage in stages),
        "weights": sum(weights.numel() for model in models for weights in model.parameters()),
    }


def row(name: str, results: Sequence[Mapping[str, float]]) -> list[str]:
    """A row of the table: means, and ranges where the seeds differ."""
    texts = [name]
    for key, form in CELLS.values():
        values = [result[key] for result in results]
        low, high = form.format(min(values)), form.format(max(values))
        texts.append(form.format(sum(values) / len(values)) + (f" ({low}–{high})" if low != high else ""))
    return texts


def main() -> None:
    parser = cells.arguments(__doc__, [*PARTS, *CRITIC, *ESTIMATORS], jobs=2, tables=TABLES)
    args = parser.parse_args()
    variants, split, common = TABLES[args.table]
    args.only = [name for name in args.only if name in variants]
    torch.set_num_threads(1)  # as the stages have
    found = cells.run(
        "seeds",
        {name: {**COMMON, **common, **own} for name, own in variants.items()},
        lambda folder: measure(folder, split),
        args,
        program=("dvc", "repro", "ppo"),
        environment=cells.ONE_THREAD,
    )
    found = [one for one in found if one["seed"] in args.seeds]
    rows = (row(name, [one for one in found if one["variant"] == name]) for name in args.only)
    print(cells.table(["variant", *CELLS], rows))


if __name__ == "__main__":
    main()
