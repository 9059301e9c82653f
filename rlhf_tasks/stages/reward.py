"""Stage reward: two reward models, one that PPO optimizes and one held out.

The score is read at the last real token. The mean score of the demonstrations, or without any that of the
train pairs' responses, is stored with the model and subtracted from every score: they score zero on average.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import Reward, RewardView, Split
from rlhf_tasks.data.batches import read_table, sets_of, token_ids
from rlhf_tasks.data.rows import Rows
from rlhf_tasks.data.splits import pairs_of
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import TokenScores, supports_shared_prefix
from rlhf_tasks.models.load import add_score_head, fetch_tokenizer, load_causal, load_reward
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.scoring.reward_model import RewardModel
from rlhf_tasks.tracking import Tracker, context
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training.distributed import PATIENCE, Distributed, alone
from rlhf_tasks.training.supervised import save, save_nothing, train
from rlhf_tasks.training.tasks import PreferencePairs, RewardLearner

LOCKED = "locked"
WHY_NONE = "`reward.train` is false: no scorer, critic or judge of params.yaml uses a reward model."


def run(config: RewardView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/reward and models/reward_heldout: one after the other, or at once in a process each.

    Metrics on the test pairs, for the optimized model (and for the other under `heldout/`): accuracy
    with its interval and by origin, margin, calibration error, length_correlation. With `train: false`
    the folders hold only a README, and there are no metrics.
    """
    if context.is_worker() and (config.launch.num_processes, os.environ.get("WORLD_SIZE")) == (1, "2"):
        return _side_by_side(config, paths, tracker)
    dist, metrics = Distributed(config.launch, config.seed), dict[str, float]()
    for out in (paths.reward, paths.reward_heldout):
        if config.reward.train:
            metrics |= _make_reward_model(dist, config, paths, tracker, out)
        else:
            save_nothing(dist, out, "No reward model", WHY_NONE)
    return metrics


def _side_by_side(config: RewardView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Make the model of this worker alone; the first one gets metrics and curves of the other."""
    is_main = context.is_main_rank()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=False, timeout=PATIENCE
    )
    if is_main:  # it has locked the snapshots of both; the same stage may have been at work elsewhere
        store.set(LOCKED, "")
    else:
        store.wait([LOCKED])
    dist, out = alone(config.launch, config.seed), paths.reward if is_main else paths.reward_heldout
    metrics = _make_reward_model(dist, config, paths, tracker, out)
    if not is_main:
        store.set(out.name, json.dumps([metrics, tracker.history()]))
        return metrics
    of_heldout: dict[str, float]
    of_heldout, curves = json.loads(store.get(paths.reward_heldout.name))
    for row in curves:
        step = int(row.pop("step"))
        tracker.metrics(row, step=step)
    return metrics | of_heldout


def _make_reward_model(
    dist: Distributed, config: RewardView, paths: Paths, tracker: Tracker, out: Path
) -> dict[str, float]:
    """Train one of the two models on its half of the prompts, or fetch it; write it, and measure it."""
    tokenizer, prefix = load_tokenizer(paths.sft), "" if out == paths.reward else "heldout/"
    if config.reward.source is not None and out == paths.reward:
        scores, parents = _fetch(paths, config.reward, tokenizer)
    else:
        scores = _train(dist, paths, config, tokenizer, tracker, out.name, prefix)
        parents = {"sft": contracts.fingerprint(paths.sft)}
    metrics = _measure(dist, paths, scores, tokenizer)
    card = contracts.model_card(
        f"Reward model ({out.name})",
        task="reward-model",
        parameters=config.declared,
        inputs={
            "data/comparisons": hashing.file_hash(paths.rows("comparisons")),
            "data/sft": hashing.file_hash(paths.rows("sft")),  # whose mean score is subtracted
            "models/sft": parents.get("sft", "lineage unknown"),
        },
        how="One score, read at the last token of query + response + EOS, minus `score_mean` of the "
        "config. `reward_heldout` is trained on other prompts and never optimized.",
    )
    source = config.reference if out == paths.reward else None
    save(dist, scores.model, tokenizer, out, contracts.identity("reward", parents), card, source)
    return {prefix + key: value for key, value in metrics.items()}


# ----------------------------------------------------------------------------------- training


def _train(
    dist: Distributed,
    paths: Paths,
    config: RewardView,
    tokenizer: PreTrainedTokenizerBase,
    tracker: Tracker,
    name: str,
    prefix: str,
) -> TokenScores:
    settings, seed = config.reward, config.seed + 1000 * (name == "reward_heldout")
    # 1. The SFT model with a new head.
    scores = add_score_head(paths.sft, torch.Generator().manual_seed(seed))
    if settings.lora is not None:
        add_lora(scores.model, settings.lora, seed=seed)
    learner = RewardLearner(scores, load_causal(paths.sft) if settings.lm_coef else None)
    # 2. Its pairs, trained on.
    rows = pairs_of(_read_pairs(paths, "train"), name)
    if not rows:
        raise UserError(f"no comparison is left to train models/{name}; give pairs with more prompts")
    shares_prefix = not settings.lm_coef and supports_shared_prefix(scores.model)
    coefs = {key: getattr(settings, key) for key in ("margin", "centering_coef", "lm_coef")}
    with checkpoint.open_snapshots(dist, paths, config, name) as snapshots:
        train(
            dist,
            learner,
            _pairs(tokenizer, rows, shares_prefix=shares_prefix, **coefs),
            settings,
            seed=seed,
            name=name,
            tracker=tracker,
            snapshots=snapshots,
            validation=_pairs(
                tokenizer, _read_pairs(paths, "validation"), shares_prefix=shares_prefix, **coefs
            ),
            num_evaluations=2,
            prefix=prefix,
        )
    # 3. Demonstrations score zero on average, or where there are none the responses of the pairs.
    demonstrations = read_table(paths, "sft", "train")
    if sets_of(demonstrations):  # one set after the other
        demonstrations = demonstrations.take(np.linspace(0, len(demonstrations) - 1, 1000).astype(int))
    shown = [(row["prompt"], row["completion"]) for row in demonstrations[:1000]]
    shown = shown or [(row["prompt"], row[side]) for row in rows[:500] for side in ("chosen", "rejected")]
    given = Responses.of_texts([prompt for prompt, _ in shown], [response for _, response in shown])
    found = RewardModel(scores, tokenizer, settings.micro_batch_tokens, dist)(given)
    scores.set_mean(scores.mean + float(found.mean()))
    return scores


def _read_pairs(paths: Paths, split: Split) -> Rows:
    """The comparisons of a split with both responses."""
    return read_table(paths, "comparisons", split).that_have("chosen", "rejected")


def _pairs(tokenizer: PreTrainedTokenizerBase, rows: Rows, **settings: Any) -> PreferencePairs:
    queries, chosen, rejected = token_ids(tokenizer, rows, "chosen", "rejected")
    return PreferencePairs(queries, chosen, rejected, tokenizer.pad_token_id, sets=sets_of(rows), **settings)


# ---------------------------------------------------------------------------- fetching and measuring


def _fetch(
    paths: Paths, settings: Reward, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenScores, dict[str, str]]:
    """An existing reward model and its known parents, checked against the SFT model before it is loaded."""
    assert settings.source is not None
    where = fetch_tokenizer(settings.source, settings.revision)
    try:
        contracts.check_same_tokenizer(paths.sft, where)
    except contracts.ContractError as error:
        raise contracts.ContractError(
            f"reward.from: {error}; or leave reward.from out and give it as a scorer, which reads texts: "
            f"`ppo.scorers: [{{kind: reward_model, path: {settings.source}}}]`"
        ) from None
    contracts.check_parent(where, "sft", paths.sft)
    scores = load_reward(settings.source, settings.revision)
    contracts.check_fits(scores.model, tokenizer, f"reward.from={settings.source}")
    return scores, contracts.read_parents(where)


@torch.no_grad()
def _measure(
    dist: Distributed, paths: Paths, scores: TokenScores, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """Accuracy, margin, calibration and length correlation on the test pairs."""
    rows = _read_pairs(paths, "test") or _read_pairs(paths, "validation")
    if not rows:
        return {}
    dist.put(scores)
    pairs, prompts = _pairs(tokenizer, rows), rows.texts("prompt")
    scorer = RewardModel(scores, tokenizer, placement=dist)
    chosen, rejected = (
        scorer(Responses.of_ids(prompts, pairs.queries, responses, tokenizer)).numpy()
        for responses in (pairs.chosen, pairs.rejected)
    )
    lead = chosen - rejected
    metrics: dict[str, float] = {"margin": float(lead.mean())}
    groups = {"": np.ones(len(rows), bool)}
    for start, names in {"/": [*rows.texts("origin")], "/in/": pairs.sets}.items():
        groups |= {f"{start}{name}": np.array(names) == name for name in sorted({*names})}
    for name, mask in groups.items():
        found = statistics.rate(statistics.outcomes(chosen[mask], rejected[mask]))
        bounds = {"": found.value, "/low": found.low, "/high": found.high}
        metrics |= {f"accuracy{name}{bound}": value for bound, value in bounds.items()}
    metrics["calibration"] = statistics.calibration_error(lead)
    lengths = [len(response) for responses in (pairs.chosen, pairs.rejected) for response in responses]
    metrics["length_correlation"] = statistics.pearson(np.concatenate([chosen, rejected]), lengths)
    metrics["score_mean"] = scores.mean
    return metrics
