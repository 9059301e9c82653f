"""Stage base: the model that SFT starts from, trained from scratch on the prompts or fetched."""

from __future__ import annotations

import itertools
import math

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import BaseView, Split
from rlhf_tasks.data import positions
from rlhf_tasks.data.batches import read_table, sets_of, token_ids
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.rows import Rows, digest
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import from_scratch, load_causal
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint, sharding
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.supervised import evaluate, save, train
from rlhf_tasks.training.tasks import LanguageModeling, plain_text


def run(config: BaseView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/base. Metrics: loss and perplexity on validation prompts, number of parameters.

    Prompts are those of demonstrations and pairs; where the data has neither, there is no loss.
    """
    dist = Distributed(config.launch, config.seed)
    tokenizer = load_tokenizer(paths.tokenizer)
    validation = _prompts(paths, tokenizer, "validation")
    # 1. A model trained on the prompts, or a ready one.
    if config.model.scratch is not None:
        texts = _prompts(paths, tokenizer, "train")
        longest = max([*texts.sizes, *validation.sizes], default=1)
        model = from_scratch(config.model.scratch, tokenizer, positions.of_scratch(longest))
        with checkpoint.open_snapshots(dist, paths, config, "base") as snapshots:
            train(
                dist,
                model,
                texts,
                config.base,
                seed=config.seed,
                name="base",
                tracker=tracker,
                snapshots=snapshots,
            )
    else:
        model = load_causal(config.model.base, config.model.revision)
        dist.put(model)
    contracts.check_fits(model, tokenizer, "model.base")
    metrics: dict[str, float] = {"parameters": sharding.num_parameters(model)}
    if validation.sizes:
        result = evaluate(dist, model, validation, TokenBudget(config.base.micro_batch_tokens))
        metrics |= {key: value for key, value in result.items() if key.startswith("loss")}
        metrics["perplexity"] = math.exp(result["loss"])
    # 2. The checkpoint.
    card = contracts.model_card(
        "Base model",
        task="base",
        parameters=config.declared,
        inputs={
            "data/tokenizer": hashing.file_hash(paths.tokenizer),
            "data/sft": hashing.file_hash(paths.rows("sft")),
            "data/preferences": hashing.file_hash(paths.rows("preferences")),
        },
        how="A causal language model of the task's prompts, before any instruction.",
    )
    save(dist, model, tokenizer, paths.base, {"kind": "base", "parents": {}}, card, config.reference)
    return metrics


def _prompts(paths: Paths, tokenizer: PreTrainedTokenizerBase, split: Split) -> LanguageModeling:
    """All prompts of a split, without responses."""
    tables, seen = list[Rows](), set[bytes]()
    for role in ("sft", "preferences"):
        rows, is_new = read_table(paths, role, split), list[bool]()
        for key in map(digest, rows.texts("prompt")):
            is_new.append(key not in seen)
            seen.add(key)
        tables.append(rows.take(np.array(is_new, bool)))
    ids = Ragged(itertools.chain.from_iterable(token_ids(tokenizer, rows)[0] for rows in tables))
    return plain_text(ids, tokenizer.pad_token_id, sets_of(*tables))
