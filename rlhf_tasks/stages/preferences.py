"""Stage preferences: the pairs for the reward model, given ones and samples of the SFT policy.

A reward model misjudges responses of a kind that it has not seen, so it trains on the policy's samples too.
On the synthetic task the gold judge compares two samples for one prompt. Other tasks have no labels, so a
sample is the rejected response and the prompt's reference the chosen one. Training labels of the gold judge
are flipped with probability `label_noise`, because people err too; held-out labels are correct.

With `reward.train: false` nothing reads the pairs: the tables are empty, and nothing is sampled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import torch

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
    # 1. The prompts to sample for. Without any, no model is loaded.
    prompts = {split: _choose_prompts(paths, config, split) for split in SPLITS}
    num_rounds = 2 if config.data_source == "synthetic" else 1
    total = num_rounds * sum(map(len, prompts.values()))
    sampler = _Sampler(config, paths, rt.device) if total else None
    metrics: dict[str, float] = {}
    with (
        whole(paths.rows("comparisons")) as folder,
        console.progress("preferences", total, unit="responses") as meter,
    ):
        for number, split in enumerate(SPLITS):
            # 2. Given pairs, and pairs with samples.
            rows: list[Row] = []
            if config.train_reward_model:
                rows += [row | {"origin": "given"} for row in read_table(paths, "preferences", split)]
            if sampler is not None:
                seeds = [2 * (config.seed * len(SPLITS) + number) + i for i in range(num_rounds)]
                texts = [sampler.sample(prompts[split], seed, meter) for seed in seeds]
                rows += _pair(prompts[split], texts)
            # 3. Labels err in training only.
            if split == "train" and config.data_source == "synthetic":
                metrics["flipped"] = _flip(rows, config.preferences.label_noise, config.seed)
            if config.train_reward_model and not rows and split == "train":
                raise UserError(
                    "there is no pair to train a reward model on: data/preferences is empty and "
                    "preferences.num_prompts is 0; give pairs, or raise preferences.num_prompts"
                )
            for origin in ("given", "sft_samples"):
                metrics[f"pairs/{split}/{origin}"] = sum(row["origin"] == origin for row in rows)
            table = pa.table({c: pa.array([row[c] for row in rows], pa.string()) for c in COLUMNS})
            pq.write_table(table, folder / f"{split}.parquet")
    return metrics


def _choose_prompts(paths: Paths, config: PreferencesView, split: Split) -> list[Row]:
    """Random prompts, `pairs_per_prompt` times each; a held-out split has a quarter as many as training."""
    settings = config.preferences
    count = settings.num_prompts if split == "train" else -(-settings.num_prompts // 4)
    if not config.train_reward_model or not count:
        return []
    rows = read_table(paths, "prompts", split)
    seed = config.seed * len(SPLITS) + SPLITS.index(split)
    chosen = random.Random(f"preferences-{seed}").sample(rows, min(count, len(rows)))
    return [row for row in chosen for _ in range(settings.pairs_per_prompt)]


class _Sampler:
    """The SFT policy."""

    def __init__(self, config: PreferencesView, paths: Paths, device: torch.device) -> None:
        self._model, self._tokenizer = place(load_causal(paths.sft), device), load_tokenizer(paths.sft)
        self._max_new_tokens, self._temperature = config.max_completion_tokens, config.preferences.temperature

    def sample(self, rows: Sequence[Row], seed: int, meter: console.Meter) -> list[str]:
        """A response to the prompt of each row."""
        responses = sample_responses(
            self._model,
            self._tokenizer,
            [row["prompt"] for row in rows],
            max_new_tokens=self._max_new_tokens,
            temperature=self._temperature,
            seed=seed,
            meter=meter,
        )
        return [text_of(self._tokenizer, response) for response in responses]


def _pair(rows: Sequence[Row], texts: Sequence[list[str]]) -> list[Row]:
    """Pairs of two samples that gold compares, or of a sample and the prompt's reference; no equal texts."""
    if len(texts) == 2:
        pairs = compare_by_gold([row["prompt"] for row in rows], *texts)
    else:
        pairs = [(row["reference"], text) for row, text in zip(rows, texts[0], strict=True)]
    return [
        {
            "prompt": row["prompt"],
            "chosen": pair[0],
            "rejected": pair[1],
            "source": row["source"],
            "origin": "sft_samples",
        }
        for row, pair in zip(rows, pairs, strict=True)
        if pair is not None and pair[0].strip() != pair[1].strip()
    ]


def compare_by_gold(prompts: list[str], first: list[str], second: list[str]) -> list[tuple[str, str] | None]:
    """(better, worse) of each two summaries; None where their gold scores are equal."""
    scores = zip(gold_scores(prompts, first), gold_scores(prompts, second), strict=True)
    return [
        None if a == b else (x, y) if a > b else (y, x)
        for (a, b), x, y in zip(scores, first, second, strict=True)
    ]


def _flip(rows: list[Row], share: float, seed: int) -> int:
    """Exchange chosen and rejected in a random share of the rows, in place; returns their number."""
    rng = random.Random(f"label-noise-{seed}")
    flipped = [row for row in rows if rng.random() < share]
    for row in flipped:
        row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    return len(flipped)
