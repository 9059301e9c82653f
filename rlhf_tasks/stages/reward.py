"""Stage reward: two reward models, one that PPO optimises and one held out.

    loss = −log σ(r_chosen − r_rejected − margin)                      Bradley-Terry
         + centering_coef · (r_chosen + r_rejected)²                    arXiv 2312.09244
         + lm_coef · LM loss on the chosen answer                      arXiv 2307.04964, eq. 4

The score is read at the last real token. The mean score of the demonstrations is stored with the model and
subtracted from every score, so that demonstrations score zero on average.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Reward, RewardView
from rlhf_tasks.data.batches import (
    Batch,
    Ids,
    collate,
    encode,
    encode_answers,
    fork,
    load_tokenizer,
    read_table,
    sizes,
)
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.modeling import contracts, models
from rlhf_tasks.modeling.classifiers import replace_trunk
from rlhf_tasks.modeling.head import head_loss, reads_trunk, token_stats
from rlhf_tasks.modeling.models import TokenScores
from rlhf_tasks.modeling.reward_scorer import RewardScorer
from rlhf_tasks.project import hashing
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.beside import beside
from rlhf_tasks.training.runtime import Runtime
from rlhf_tasks.training.supervised import Fit, Sums, evaluate, resumed

NONE_MADE = """\
# No reward model

`reward.train` is false: no scorer, critic or judge of params.yaml uses a reward model.
"""
Row = dict[str, Any]
PAIRS_WORTH_A_PROCESS = 2000  # the other process takes some five seconds to start


def run(config: RewardView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/reward and models/reward_heldout.

    Metrics on the test pairs, for the optimised model (and for the other under `heldout/`): accuracy
    with its interval and by origin, margin, calibration error, length_correlation. With `train: false`
    the folders hold only a README, and there are no metrics.
    """
    rt = Runtime(config.launch, config.seed)
    if not config.reward.train:
        return _none_made(rt, paths)
    threads = torch.get_num_threads()
    if rt.world_size > 1 or rt.device.type != "cpu" or threads == 1:
        return _made_one_after_the_other(rt, config, paths, tracker)
    torch.set_num_threads(threads // 2)  # in one process too: the cores do not decide the result
    try:
        if pq.read_metadata(paths.table("comparisons", "train")).num_rows < PAIRS_WORTH_A_PROCESS:
            return _made_one_after_the_other(rt, config, paths, tracker)
        return _made_in_two_processes(rt, config, paths, tracker)
    finally:
        torch.set_num_threads(threads)


def _made_one_after_the_other(
    rt: Runtime, config: RewardView, paths: Paths, tracker: Tracker
) -> dict[str, float]:
    metrics = _made(rt, config, paths, tracker, "reward")
    return metrics | _made(rt, config, paths, tracker, "reward_heldout")


def _made_in_two_processes(
    rt: Runtime, config: RewardView, paths: Paths, tracker: Tracker
) -> dict[str, float]:
    """Both models at once on a CPU, each with half of its threads: one small model gains less by them."""
    with beside(_made_beside, config, paths, torch.get_num_threads()) as heldout:
        metrics = _made(rt, config, paths, tracker, "reward")
        found, history = heldout()
    for row in history:
        tracker.metrics({key: x for key, x in row.items() if key != "step"}, step=int(row["step"]))
    return metrics | found


def _made_beside(
    config: RewardView, paths: Paths, threads: int
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The held-out model's metrics and curves."""
    torch.set_num_threads(threads)
    tracker = Tracker("reward")
    metrics = _made(Runtime(config.launch, config.seed), config, paths, tracker, "reward_heldout")
    return metrics, tracker.history()


def _made(
    rt: Runtime, config: RewardView, paths: Paths, tracker: Tracker, name: Literal["reward", "reward_heldout"]
) -> dict[str, float]:
    """Write one of the two models; returns its metrics."""
    tokenizer = load_tokenizer(paths.sft)
    if config.reward.source is not None and name == "reward":
        scores, parents = _fetched(paths, config.reward, tokenizer)
    else:
        seed = config.seed + 1000 * (name == "reward_heldout")
        scores = _trained(rt, paths, config, tokenizer, tracker, name, seed)
        parents = {"sft": contracts.fingerprint(paths.sft)}
    metrics = _measured(rt, paths, scores, tokenizer, "" if name == "reward" else "heldout/")
    with sharding.to_save(scores.model) as plain:
        if rt.is_main:
            _save(paths, config, plain, tokenizer, _outs(paths)[name], parents)
    rt.barrier()
    return metrics


def _outs(paths: Paths) -> dict[str, Path]:
    return {"reward": paths.reward, "reward_heldout": paths.reward_heldout}


# ----------------------------------------------------------------------------------- training


@dataclass
class Pairs:
    """Chosen and rejected responses of each query, as token ids: the task of `supervised.Fit`."""

    queries: list[Ids]
    chosen: list[Ids]
    rejected: list[Ids]
    pad: int
    margin: float = 0.0
    centering_coef: float = 0.0
    lm_coef: float = 0.0
    forked: bool = False
    """Whether the two responses share a row, and the model reads the query once."""

    def __post_init__(self) -> None:
        with_chosen, with_rejected = sizes(self.queries, self.chosen), sizes(self.queries, self.rejected)
        if self.forked:
            self.sizes = [a + len(r) for a, r in zip(with_chosen, self.rejected, strict=True)]
        else:
            self.sizes = [2 * max(pair) for pair in zip(with_chosen, with_rejected, strict=True)]

    def weight(self, rows: Sequence[int]) -> float:
        return len(rows)

    def sums(self, model: nn.Module, rows: Sequence[int], device: torch.device) -> Sums:
        queries, chosen, rejected = (
            [texts[i] for i in rows] for texts in (self.queries, self.chosen, self.rejected)
        )
        if self.forked:
            found, _ = model(fork(queries, chosen, rejected, self.pad).to(device))
            return pair_sums(found[:, 0], found[:, 1], self.margin, self.centering_coef)
        batch = collate(queries * 2, chosen + rejected, self.pad).to(device)
        found, of_lm = model(batch, len(rows) if self.lm_coef else 0)
        of_chosen, of_rejected = found[:, 0].chunk(2)
        sums = pair_sums(of_chosen, of_rejected, self.margin, self.centering_coef)
        if of_lm is not None:
            sums["loss"] = sums["loss"] + self.lm_coef * of_lm
        return sums


def pair_sums(chosen: Tensor, rejected: Tensor, margin: float, centering_coef: float) -> Sums:
    """Σ over pairs of loss, correct orders (equal scores count half) and score differences; scores (B,)."""
    lead = chosen - rejected
    loss = -F.logsigmoid(lead - margin) + centering_coef * (chosen + rejected) ** 2
    right = (lead > 0).float() + 0.5 * (lead == 0).float()
    return {"loss": loss.sum(), "accuracy": right.sum(), "margin": lead.sum()}


class Learner(nn.Module):
    """The reward model in training; with `lm_coef`, the policy's head on the same trunk beside it.

    If the policy changes states before its head or logits after it (Gemma 2, Cohere, Granite), its own
    forward pass gives the LM loss. That reads the chosen answers a second time.
    """

    def __init__(self, scores: TokenScores, policy: PreTrainedModel | None = None) -> None:
        super().__init__()
        self.scores = scores
        self.lm: nn.Module | None = None
        if policy is not None:
            plain = reads_trunk(policy)
            replace_trunk(policy, scores.model.base_model)
            self.lm = policy.get_output_embeddings() if plain else policy

    def forward(self, batch: Batch, lm_rows: int = 0) -> tuple[Tensor, Tensor | None]:
        """((B, N) scores of N responses a row, the LM loss of the first rows or None).

        That loss is Σ over rows of the mean −log p.
        """
        if self.lm is None or not lm_rows:
            return self.scores(batch, ends_only=True), None
        hidden = self.scores.hidden_states(batch)
        answers = batch.first(lm_rows)
        lengths = answers.response_mask.sum(1, keepdim=True)
        shares = (answers.response_mask / lengths)[answers.response_mask]

        def loss(logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
            return -(logprobs * shares[tokens]).sum()

        if isinstance(self.lm, PreTrainedModel):
            of_lm = token_stats(self.lm, answers, loss=loss).loss
        else:
            of_lm = head_loss(cast(nn.Linear, self.lm), hidden[:lm_rows], answers, loss)
        return self.scores.scored(hidden[:, -1:]), of_lm


def _trained(
    rt: Runtime,
    paths: Paths,
    config: RewardView,
    tokenizer: PreTrainedTokenizerBase,
    tracker: Tracker,
    name: str,
    seed: int,
) -> TokenScores:
    settings = config.reward
    generator = torch.Generator().manual_seed(seed)
    scores = TokenScores.from_policy(paths.sft, generator)
    if settings.lora is not None:
        models.with_lora(scores.model, settings.lora, seed=seed)
    policy = models.load_causal(paths.sft) if settings.lm_coef else None
    learner = rt.place(Learner(scores, policy))
    rows = [row for row in read_table(paths, "comparisons", "train") if model_of(row["prompt"]) == name]
    if not rows:
        raise UserError(f"no comparison is left to train models/{name}; give pairs with more prompts")
    forked = not settings.lm_coef and models.takes_forks(scores.model)
    train = _pairs(
        tokenizer, rows, forked=forked, margin=settings.margin, centering_coef=settings.centering_coef,
        lm_coef=settings.lm_coef,
    )  # fmt: skip
    validation = _pairs(tokenizer, read_table(paths, "comparisons", "validation"), forked=forked)
    prefix = "" if name == "reward" else "heldout/"
    fit = Fit(rt, learner, train, settings, seed)
    for step in resumed(paths, config, name, fit, tracker):
        tracker.metrics({prefix + key: value for key, value in step.metrics.items()}, step=step.number)
        if validation.sizes and step.number in (step.num_steps // 2, step.num_steps):
            result = evaluate(rt, learner, validation, fit.budget)
            tracker.metrics({f"{prefix}eval/{key}": value for key, value in result.items()}, step=step.number)
    _normalise(rt, paths, scores, tokenizer, settings.micro_batch_tokens)
    return scores


def model_of(prompt: str) -> str:
    """The model that a prompt's pairs train, by its hash.

    Each gets half of the prompts: the two are trained at once, and neither waits for the other.
    """
    return "reward" if hashlib.sha256(prompt.encode()).digest()[0] % 2 else "reward_heldout"


def _pairs(tokenizer: PreTrainedTokenizerBase, rows: list[Row], **settings: Any) -> Pairs:
    return Pairs(
        encode(tokenizer, [row["prompt"] for row in rows]),
        encode_answers(tokenizer, [row["chosen"] for row in rows]),
        encode_answers(tokenizer, [row["rejected"] for row in rows]),
        tokenizer.pad_token_id,
        **settings,
    )


def _normalise(
    rt: Runtime, paths: Paths, scores: TokenScores, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> None:
    """Make the mean score of the demonstrations zero; the model's config stores the constant."""
    rows = read_table(paths, "sft", "train")[:1000]
    found = RewardScorer(scores, tokenizer, max_tokens, rt)(
        encode(tokenizer, [row["prompt"] for row in rows]),
        encode_answers(tokenizer, [row["completion"] for row in rows]),
    )
    scores.set_mean(scores.mean + float(found.mean()))


# ------------------------------------------------------------------------- fetching, measuring, saving


def _none_made(rt: Runtime, paths: Paths) -> dict[str, float]:
    """Write both outs with a README in place of a model; `contracts.is_made` is False for them."""
    for out in _outs(paths).values():
        if rt.is_main:
            with whole(out) as folder:
                (folder / "README.md").write_text(NONE_MADE, encoding="utf-8")
    rt.barrier()
    return {}


def _fetched(
    paths: Paths, settings: Reward, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenScores, dict[str, str]]:
    """An existing reward model and its known parents, checked against the SFT model before it is loaded."""
    assert settings.source is not None
    where = models.local_tokenizer(settings.source, settings.revision)
    contracts.check_same_tokenizer(paths.sft, where)
    contracts.check_parent(where, "sft", paths.sft)
    scores = models.load_reward(settings.source, settings.revision)
    contracts.check_fits(scores.model, tokenizer, f"reward.from={settings.source}")
    return scores, contracts.parents_of(where)


@torch.no_grad()
def _measured(
    rt: Runtime, paths: Paths, scores: TokenScores, tokenizer: PreTrainedTokenizerBase, prefix: str
) -> dict[str, float]:
    """Accuracy, margin, calibration and length correlation on the test pairs."""
    rows = read_table(paths, "comparisons", "test") or read_table(paths, "comparisons", "validation")
    if not rows:
        return {}
    rt.put(scores)
    pairs = _pairs(tokenizer, rows)
    scorer = RewardScorer(scores, tokenizer, placement=rt)
    chosen, rejected = (
        scorer(pairs.queries, pairs.chosen).numpy(),
        scorer(pairs.queries, pairs.rejected).numpy(),
    )
    lead = chosen - rejected
    metrics: dict[str, float] = {"margin": float(lead.mean())}
    origins = np.array([row["origin"] for row in rows])
    for name, mask in {"": origins != "", **{f"/{o}": origins == o for o in sorted(set(origins))}}.items():
        found = statistics.rate(statistics.outcomes(chosen[mask], rejected[mask]))
        metrics |= {
            f"accuracy{name}": found.value,
            f"accuracy{name}/low": found.low,
            f"accuracy{name}/high": found.high,
        }
    metrics["calibration"] = statistics.calibration_error(lead, np.ones(len(lead)))
    lengths = [len(a) for a in pairs.chosen + pairs.rejected]
    metrics["length_correlation"] = statistics.pearson(np.concatenate([chosen, rejected]), lengths)
    metrics["score_mean"] = scores.mean
    return {prefix + key: value for key, value in metrics.items()}


def _save(
    paths: Paths,
    config: RewardView,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    parents: dict[str, str],
) -> None:
    with whole(out) as folder:
        models.save(
            models.merged(model), tokenizer, folder,
            identity=contracts.identity("reward", parents),
            card=contracts.model_card(
                f"Reward model ({out.name})", task="reward-model", parameters=config.declared,
                inputs={
                    "data/comparisons": hashing.file_hash(paths.rows("comparisons")),
                    "models/sft": parents.get("sft", "lineage unknown"),
                },
                how="One score, read at the last token of query + response + EOS, minus `score_mean` of the "
                "config. `reward_heldout` is trained on other prompts and never optimised.",
            ),
        )  # fmt: skip
