"""Stage preferences: the pairs for the reward model, given ones and samples of the SFT policy.

A reward model misjudges responses of a kind that it has not seen, so it trains on the policy's samples too.
On the synthetic task the gold judge compares two samples for one prompt. Other tasks have no labels, so a
sample is the rejected response and the prompt's reference the chosen one. Training labels of the gold judge
are flipped with probability `label_noise`, because people err too; held-out labels are correct.

With `reward.train: false` nothing reads the pairs: the tables are empty, and nothing is sampled.
"""

from __future__ import annotations

import random

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import PreferencesView, Split
from rlhf_tasks.data.batches import load_tokenizer, read_table, text_of
from rlhf_tasks.data.synthetic import gold_scores
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling.load import load_causal, place
from rlhf_tasks.modeling.sampling import sample_responses
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.runtime import Runtime

COLUMNS = ("prompt", "chosen", "rejected", "source", "origin")
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
Row = dict[str, str]


def run(config: PreferencesView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write data/comparisons. Metrics: pairs by split and origin, and the number of flipped labels."""
    rt = Runtime(config.launch, config.seed)
    is_used = config.train_reward_model
    policy = place(load_causal(paths.sft), rt.device).eval() if is_used else None
    tokenizer = load_tokenizer(paths.sft)
    metrics: dict[str, float] = {}
    with (
        whole(paths.rows("comparisons")) as folder,
        console.progress("preferences", len(SPLITS), unit="splits") as bar,
    ):
        for number, split in enumerate(SPLITS):
            rows: list[Row] = []
            if policy is not None:
                rows += [row | {"origin": "given"} for row in read_table(paths, "preferences", split)]
                rows += _sampled(
                    paths, config, policy, tokenizer, split, seed=config.seed * len(SPLITS) + number
                )
            if split == "train" and config.data_source == "synthetic":
                metrics["flipped"] = _flip(rows, config.preferences.label_noise, config.seed)
            if is_used and not rows and split == "train":
                raise UserError(
                    "there is no pair to train a reward model on: data/preferences is empty and "
                    "preferences.num_prompts is 0; give pairs, or raise preferences.num_prompts"
                )
            for origin in ("given", "sft_samples"):
                metrics[f"pairs/{split}/{origin}"] = sum(row["origin"] == origin for row in rows)
            table = pa.table({c: pa.array([row[c] for row in rows], pa.string()) for c in COLUMNS})
            pq.write_table(table, folder / f"{split}.parquet")
            bar.advance()
    return metrics


def _sampled(
    paths: Paths,
    config: PreferencesView,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    split: Split,
    seed: int,
) -> list[Row]:
    """Pairs with samples of the SFT policy; each held-out split has a quarter as many prompts."""
    settings = config.preferences
    count = settings.num_prompts if split == "train" else -(-settings.num_prompts // 4)
    prompts = read_table(paths, "prompts", split)
    prompts = random.Random(f"preferences-{seed}").sample(prompts, min(count, len(prompts)))
    repeated = [row for row in prompts for _ in range(settings.pairs_per_prompt)]

    def samples(seed: int) -> list[str]:
        answers = sample_responses(
            model, tokenizer, [row["prompt"] for row in repeated],
            max_new_tokens=config.max_completion_tokens, temperature=settings.temperature, seed=seed,
        )  # fmt: skip
        return [text_of(tokenizer, response) for response in answers]

    first = samples(2 * seed)
    if config.data_source == "synthetic":
        pairs = compare_by_gold([row["prompt"] for row in repeated], first, samples(2 * seed + 1))
    else:
        pairs = [(row["reference"], text) for row, text in zip(repeated, first, strict=True)]
    return [
        {"prompt": row["prompt"], "chosen": pair[0], "rejected": pair[1], "source": row["source"],
         "origin": "sft_samples"}
        for row, pair in zip(repeated, pairs, strict=True)
        if pair is not None and pair[0].strip() != pair[1].strip()
    ]  # fmt: skip


def compare_by_gold(prompts: list[str], first: list[str], second: list[str]) -> list[tuple[str, str] | None]:
    """(better, worse) of each two summaries; None where their gold scores are equal."""
    scores = zip(gold_scores(prompts, first), gold_scores(prompts, second), strict=True)
    return [
        None if a == b else (x, y) if a > b else (y, x)
        for (a, b), x, y in zip(scores, first, second, strict=True)
    ]  # fmt: skip


def _flip(rows: list[Row], share: float, seed: int) -> int:
    """Exchange chosen and rejected in a random share of the rows, in place; returns their number."""
    rng = random.Random(f"label-noise-{seed}")
    flipped = [row for row in rows if rng.random() < share]
    for row in flipped:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return len(flipped)
