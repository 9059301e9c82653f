"""Stage preferences: the pairs for the reward model, given ones and samples of the SFT policy.

A reward model misjudges responses of a kind that it has not seen, so it trains on the policy's samples too.
`preferences.function`, or the gold judge on the synthetic task, scores samples for one prompt, of which the
best and the worst are a pair. Without either a sample is the rejected response and the prompt's reference the
chosen one. Their train labels are flipped with probability `label_noise`, because people err too; held-out
labels are correct.

A sample ends as PPO's responses do, also at `ppo.stop_token`; a special token that ended it is no text of it.
One that was cut at `data.max_completion_tokens` is a response too: like all rows of the reward model it is
read with EOS, so that the model learns what a response is worth that stops there.

Where `reward.train` and `dpo.train` are false nothing reads the pairs: the tables are empty, and nothing is
sampled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlhf_tasks import console
from rlhf_tasks.config import PreferencesView, Split
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import SET, SPLITS, Rows, write
from rlhf_tasks.data.tokenizer import encode, load_tokenizer, response_texts
from rlhf_tasks.errors import PROMPTS_ALONE, UserError
from rlhf_tasks.models.load import load_causal, place
from rlhf_tasks.models.sampling import sample_responses
from rlhf_tasks.models.stop_tokens import close_responses, ends_of
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import score_gold
from rlhf_tasks.scoring.function import ImportedScorer
from rlhf_tasks.scoring.protocol import Responses, Scorer
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.throughput import pass_flops

COLUMNS = ("prompt", "chosen", "rejected", "source", "origin")
Row = dict[str, Any]


def run(config: PreferencesView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write data/comparisons. Metrics: pairs by split and origin, and the number of flipped labels."""
    dist, settings = Distributed(config.launch, config.seed), config.preferences
    # 1. The prompts to sample for. Without any, no model is loaded.
    prompts = {split: _choose_prompts(paths, config, split) for split in SPLITS}
    scorer = _scorer(paths, config, prompts["train"])
    # Two rounds, each of half of a pair's samples: side by side they share their prompt's tokens.
    num_rounds, per_round = (2, settings.samples_per_pair // 2) if scorer else (1, 1)
    total = num_rounds * per_round * sum(map(len, prompts.values()))
    if total:
        model, tokenizer = place(load_causal(paths.sft), dist.device), load_tokenizer(paths.sft)
        ends = ends_of(model, tokenizer, [config.stop_token])
    metrics = {"compute/forward_tflop": 0.0}
    with (
        whole(paths.rows("comparisons")) as folder,
        console.progress("preferences", total, unit="responses") as meter,
    ):
        for number, split in enumerate(SPLITS):
            # 2. Given pairs, and pairs with samples.
            tables = [pa.schema([(name, pa.string()) for name in COLUMNS]).empty_table()]
            if config.uses_pairs:
                given = read_table(paths, "preferences", split).table
                tables.append(given.append_column("origin", pa.repeat("given", len(given))))
            if total:
                repeated = [row["prompt"] for row in prompts[split] for _ in range(per_round)]
                samples = [
                    sample_responses(
                        model,
                        tokenizer,
                        repeated,
                        max_new_tokens=config.max_completion_tokens,
                        temperature=settings.temperature,
                        seed=2 * (config.seed * len(SPLITS) + number) + i,
                        precision=config.launch.precision,
                        ends=ends,
                        meter=meter,
                    )
                    for i in range(num_rounds)
                ]
                queries = encode(tokenizer, repeated)
                sampled = (
                    response_texts(tokenizer, queries, close_responses(tokenizer, ids, ends))
                    for ids in samples
                )
                texts = [found[i::per_round] for found in sampled for i in range(per_round)]
                num_tokens = num_rounds * sum(map(len, queries)) + sum(map(len, chain(*samples)))
                metrics["compute/forward_tflop"] += 1e-12 * pass_flops(model) * num_tokens
                made = _pair(prompts[split], texts, scorer)
                if left_out := len(prompts[split]) - len(made):
                    console.say(
                        f"{split}: {left_out:,} of {len(prompts[split]):,} pairs are left out: "
                        "equal texts, equal scores or NaN"
                    )
                names = (*COLUMNS, SET) if any(SET in row for row in made) else COLUMNS
                tables.append(pa.Table.from_pylist(made, pa.schema([(name, pa.string()) for name in names])))
            table = pa.concat_tables(tables, promote_options="default")
            # 3. Labels err in training only; those of given pairs are the user's, or of the synthetic task.
            if split == "train" and scorer:
                rng = random.Random(f"label-noise-{config.seed}")
                drawn = pa.array([rng.random() < settings.label_noise for _ in range(len(table))], pa.bool_())
                of_gold = pa.scalar(config.data_source == "synthetic")
                flipped = pc.and_(drawn, pc.or_(of_gold, pc.equal(table["origin"], "sft_samples")))
                chosen, rejected = table["chosen"], table["rejected"]
                for name, kept, other in (("chosen", chosen, rejected), ("rejected", rejected, chosen)):
                    position = table.column_names.index(name)
                    table = table.set_column(position, name, pc.if_else(flipped, other, kept))
                metrics["flipped"] = pc.sum(flipped).as_py() or 0
            rows = Rows("preferences", split, table, np.arange(len(table)))
            num_pairs = len(rows.that_have("chosen", "rejected"))
            if config.train_reward_model and split == "train" and (unpaired := len(rows) - num_pairs):
                if not num_pairs:
                    raise UserError(
                        f"reward.train: true needs pairs, and the data has {unpaired:,} unpaired labels; "
                        "set reward.train to false, with scorers and judges that need no reward model of the "
                        "pipeline (a verifier, a function, a ready model), or data.format to label_pairs, or "
                        "preferences.num_prompts above 0 for pairs of samples"
                    )
                console.say(f"The reward models train on {num_pairs:,} pairs, and no unpaired label")
            if config.uses_pairs and not len(table) and split == "train":
                raise UserError(
                    "there is no pair to train on: data/preferences is empty, and of "
                    f"{len(prompts[split])} pairs of samples (preferences.num_prompts="
                    f"{settings.num_prompts}) none is left; give pairs, raise preferences.num_prompts, or "
                    "set reward.train to false with a reward that is ready, and dpo.train to false"
                )
            for origin in ("given", "sft_samples"):
                metrics[f"pairs/{split}/{origin}"] = pc.sum(pc.equal(table["origin"], origin)).as_py() or 0
            write(rows, folder / f"{split}.parquet", table.column_names)
    return metrics


def _choose_prompts(paths: Paths, config: PreferencesView, split: Split) -> list[Row]:
    """Random prompts; a held-out split has a quarter as many as training."""
    settings = config.preferences
    count = settings.num_prompts if split == "train" else -(-settings.num_prompts // 4)
    if not config.uses_pairs or not count:
        return []
    rows = read_table(paths, "prompts", split)
    if rows.table["reference"].null_count and not settings.function:
        raise UserError(
            "data/prompts has no references, with which stage preferences compares samples: set "
            "preferences.function to what scores them, or preferences.num_prompts to 0 where the "
            f"data has pairs. {PROMPTS_ALONE}"
        )
    seed = config.seed * len(SPLITS) + SPLITS.index(split)
    return random.Random(f"preferences-{seed}").sample(rows, min(count, len(rows)))


def _scorer(paths: Paths, config: PreferencesView, rows: Sequence[Row]) -> Scorer | None:
    """What compares samples for one prompt; None: samples are compared with references."""
    if config.preferences.function and rows:
        kept = columns.of_rows(rows)
        return ImportedScorer(config.preferences.function, "preferences.function", paths.root, kept)
    return score_gold if config.data_source == "synthetic" else None


def _pair(rows: Sequence[Row], texts: Sequence[list[str]], scorer: Scorer | None) -> list[Row]:
    """Pairs of samples that a scorer compares, or of a sample and the reference; no equal texts.

    `texts`: the first sample of each row, the second ones, and so on.
    """
    if scorer is not None:
        pairs = compare(scorer, rows, *texts)
    else:
        pairs = [(row["reference"], text) for row, text in zip(rows, texts[0], strict=True)]
    return [
        {key: row[key] for key in ("prompt", "source", SET) if key in row}
        | {"chosen": pair[0], "rejected": pair[1], "origin": "sft_samples"}
        for row, pair in zip(rows, pairs, strict=True)
        if pair is not None and pair[0].strip() != pair[1].strip()
    ]


def compare(scorer: Scorer, rows: Sequence[Row], *texts: list[str]) -> list[tuple[str, str] | None]:
    """(best, worst) of the responses to each row; None without two different scores. NaN is none."""
    prompts, kept = [row["prompt"] for row in rows], columns.of_rows(rows)
    scores = [scorer(Responses.of_texts(prompts, column, kept)).tolist() for column in texts]
    pairs: list[tuple[str, str] | None] = []
    for of_row, candidates in zip(zip(*scores, strict=True), zip(*texts, strict=True), strict=True):
        scored = zip(of_row, candidates, strict=True)
        known = sorted(((score, text) for score, text in scored if not math.isnan(score)), key=itemgetter(0))
        decides = bool(known) and known[0][0] < known[-1][0]
        pairs.append((known[-1][1], known[0][1]) if decides else None)
    return pairs
