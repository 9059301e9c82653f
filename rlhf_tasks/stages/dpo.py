"""Stage dpo: models/dpo, a policy trained on preference pairs, where `dpo.train` is true.

PPO starts from it, or with `ppo.train: false` it is the policy. It learns from the pairs of models/reward.
models/reward_heldout, which has learned from the others, chooses its weights by responses to validation
prompts; without reward models the validation loss does.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import DpoView, Split
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table, sets_of, token_ids
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.splits import pairs_of
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import supports_shared_prefix
from rlhf_tasks.models.load import load_causal, load_reward
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.stop_tokens import ends_of, has_ended
from rlhf_tasks.ppo import preconditions
from rlhf_tasks.ppo.measure import ResponseMeasures
from rlhf_tasks.ppo.metrics import Metrics, standard_error
from rlhf_tasks.ppo.rollout import Prompts, Reference, interleave
from rlhf_tasks.ppo.sampler import LocalSampler
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.reward_model import RewardModel
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training import checkpoint
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.dpo import (
    LabeledResponses,
    PolicyPairs,
    pair_loss_of,
    read_logprobs,
    responses_to_others,
)
from rlhf_tasks.training.supervised import evaluate, save, save_nothing, train
from rlhf_tasks.training.tasks import Task
from rlhf_tasks.training.throughput import pass_flops

WHY_NONE = "`dpo.train` of params.yaml is false: PPO starts from models/sft."


def run(config: DpoView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write models/dpo, the weights that models/reward_heldout likes best, or of the lowest validation loss.

    Reads data/comparisons, data/prompts, models/sft, and models/reward_heldout where there is one. Metrics:
    those of the loss on validation pairs, and `selected_…`: the step, held-out score and KL from the SFT
    model, in nats per response, of the weights that are kept. Where no policy is trained there are none, and
    the folder holds only a README.

    Raises:
        UserError: if there is no pair to train on, or no evaluation has a KL of at most `max_kl`.
    """
    dist, settings = Distributed(config.launch, config.seed), config.dpo
    if not settings.train:
        save_nothing(dist, paths.dpo, "No policy", WHY_NONE)
        return {}

    # 1. The policy, and the SFT model as its reference; of that all log-probs of the pairs are needed once.
    preconditions.check_stop_token(config.stop_token, paths)
    if config.has_reward_model:
        contracts.check_same_tokenizer(paths.sft, paths.reward_heldout)
        contracts.check_parent(paths.reward_heldout, "sft", paths.sft)
    tokenizer, policy = load_tokenizer(paths.sft), load_causal(paths.sft)
    frozen = load_causal(paths.sft)
    dist.freeze(frozen)
    tasks = {
        split: _read_pairs(dist, config, paths, tokenizer, frozen, split) for split in ("train", "validation")
    }
    reference = Reference(frozen)
    if settings.lora is not None:  # then no second copy of the weights stays in memory
        policy = add_lora(policy, settings.lora, seed=config.seed)
        reference = Reference(policy)
    del frozen

    # 2. The training. An evaluation samples responses, which decide what weights are kept.
    has_loss = bool(tasks["validation"].sizes)
    prober = _Prober(dist, config, paths, tokenizer, policy, reference, has_loss)
    with checkpoint.open_snapshots(dist, paths, config, "dpo") as snapshots:
        state = train(
            dist,
            policy,
            tasks["train"],
            settings,
            seed=config.seed,
            name="dpo",
            tracker=tracker,
            snapshots=snapshots,
            validation=tasks["validation"],
            num_evaluations=settings.num_epochs * settings.evals_per_epoch,
            patience=settings.patience,
            measure=prober.measure,
        )

    # 3. The metrics of the weights that are kept, and the checkpoint.
    metrics: Metrics = {}
    if has_loss:
        metrics = evaluate(dist, policy, tasks["validation"], TokenBudget(settings.micro_batch_tokens))
    was_chosen = math.isfinite(state.best_loss)  # else they are the last
    step = state.best_step if was_chosen else state.step
    probed, kls = prober.probe(step)
    kl, error = probed["kl"], standard_error(probed["kl"], float((kls**2).sum()), len(kls))
    if settings.max_kl is not None and not was_chosen and kl > settings.max_kl:
        raise UserError(
            f"dpo.max_kl={settings.max_kl:g}: the KL from the SFT model was higher at every evaluation; "
            "lower dpo.learning_rate, or raise dpo.beta, dpo.max_kl or dpo.evals_per_epoch"
        )
    everything = ((task, range(len(task.sizes))) for task in tasks.values())
    read = (task.num_tokens(rows) + task.num_prepared(rows) for task, rows in everything)
    metrics["compute/forward_tflop"] = 1e-12 * pass_flops(policy) * sum(read)  # of the SFT model's log-probs
    metrics |= {"selected_step": step, "steps_trained": state.step}
    metrics |= {"selected_kl": kl, "selected_kl_standard_error": error}
    if config.has_reward_model:
        metrics["selected_heldout_score"] = probed["heldout_scores"]
    parents = {"sft": contracts.fingerprint(paths.sft)}
    inputs = {"models/sft": parents["sft"], "data/comparisons": hashing.file_hash(paths.rows("comparisons"))}
    identity: dict[str, Any] = contracts.identity("policy", parents)
    identity |= {"method": f"dpo, loss {settings.loss}", "kl": [kl, error]}
    if config.labeler and config.num_labeled:
        identity["labeled_by"] = config.labeler  # which has been optimized, so that it is no judge
    chosen = "of the lowest validation loss" if was_chosen and has_loss else "the last"
    if config.has_reward_model:
        identity["chosen_by"] = contracts.fingerprint(paths.reward_heldout)
        chosen = "the best by models/reward_heldout on validation prompts"
    card = contracts.model_card(
        "DPO policy",
        task="dpo",
        parameters=config.declared,
        inputs=inputs,
        how=f"Trained on preference pairs from the SFT policy by the loss {settings.loss}; the weights are "
        f"those of step {step}, {chosen}.",
    )
    save(dist, policy, tokenizer, paths.dpo, identity, card, others=prober.ends)
    return metrics


def _read_pairs(
    dist: Distributed,
    config: DpoView,
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase,
    reference: PreTrainedModel,
    split: Split,
) -> Task:
    """The pairs of a split with the log-probs of the reference; of training those of models/reward.

    Raises:
        UserError: if there is nothing to train on; if `dpo.loss` cannot be imported, or needs pairs where
            rows have one response.
    """
    settings, rows, pad = config.dpo, read_table(paths, "comparisons", split), tokenizer.pad_token_id
    if split == "train":
        if config.has_reward_model:  # else no model learns from the other half
            rows = pairs_of(rows, "reward")
        if not rows:
            raise UserError("no comparison is left to train models/dpo; give pairs with more prompts")
    good, bad = rows.that_have("chosen"), rows.that_have("rejected")
    if settings.loss == "kto":  # single responses, and beside each one to another prompt
        of_good, of_bad = token_ids(tokenizer, good, "chosen"), token_ids(tokenizer, bad, "rejected")
        queries, chosen = (Ragged(chain(*both)) for both in zip(of_good, of_bad, strict=True))
        rejected = responses_to_others(queries, chosen)
        loss, shares, is_good = None, False, torch.arange(len(queries)) < len(good)
    else:
        if len(good) < len(rows) or len(bad) < len(rows):
            num_unpaired = 2 * len(rows) - len(good) - len(bad)
            raise UserError(
                f"dpo.loss={settings.loss} needs pairs, and {num_unpaired:,} of {len(rows):,} {split} rows "
                "are a good or a bad response alone; set dpo.loss to kto"
            )
        queries, chosen, rejected = token_ids(tokenizer, rows, "chosen", "rejected")
        loss, shares = pair_loss_of(settings.loss, paths.root), supports_shared_prefix(reference)
    with console.part("log-probs of the SFT model"):
        local = dist.shard_rows(range(len(queries)))  # of all rows, which need not fit in memory
        asked = Ragged(queries[i] for i in chain(local, local))
        both = Ragged(responses[i] for responses in (chosen, rejected) for i in local)
        pairs = [[i, len(local) + i] for i in range(len(local))]
        budget = TokenBudget(settings.micro_batch_tokens)
        found = read_logprobs(dist, reference, asked, both, pad, budget, pairs if shares else None)
    known: Tensor = interleave(dist.all_gather_object(found.view(2, -1).T))  # (N, 2)
    if loss is None:
        sets = sets_of(good, bad)
        return LabeledResponses(queries, chosen, rejected, is_good, known, pad, settings, sets)
    return PolicyPairs(queries, chosen, rejected, known, pad, settings, loss, shares, sets_of(rows))


class _Prober:
    """Samples responses to validation prompts, and measures their KL and held-out score."""

    def __init__(
        self,
        dist: Distributed,
        config: DpoView,
        paths: Paths,
        tokenizer: PreTrainedTokenizerBase,
        policy: PreTrainedModel,
        reference: Reference,
        has_loss: bool,
    ) -> None:
        """`has_loss`: an evaluation has a validation loss, which decides where no held-out score does."""
        self._config, self._reference, self._has_loss = config, reference, has_loss
        self._budget = TokenBudget(config.dpo.micro_batch_tokens)
        self.ends = ends_of(policy, tokenizer, [config.stop_token])
        rows = read_table(paths, "prompts", "validation")[: config.dpo.num_selection_prompts]
        heldout: RewardModel | None = None
        if config.has_reward_model:
            scores = load_reward(paths.reward_heldout).requires_grad_(False)
            dist.put(scores)
            heldout = RewardModel(scores, tokenizer, config.dpo.micro_batch_tokens, dist)
        self._measures = ResponseMeasures(
            dist=dist,
            config=config,
            policy=policy,
            tokenizer=tokenizer,
            ends=self.ends,
            prompts=Prompts(rows.texts("prompt"), token_ids(tokenizer, rows)[0], columns.of_rows(rows)),
            heldout=heldout,
        )
        self._sampler = LocalSampler(
            dist,
            policy,
            torch.Generator(dist.device),
            num_samples=1,
            batch_size=None,
            temperature=config.temperature,
            max_new_tokens=config.response_length,
            pad=tokenizer.pad_token_id,
            ends=self.ends,
        )

    def measure(self, step: int) -> tuple[Metrics, float | None]:
        """Metrics of the policy after so many steps, and what decides which weights are kept."""
        metrics, _ = self.probe(step)
        limit = self._config.dpo.max_kl
        criterion: float | None = None  # the validation loss decides
        if limit is not None and metrics["kl"] > limit:
            criterion = math.inf
        elif self._measures.heldout is not None:
            criterion = -metrics["heldout_scores"]
        elif limit is not None and not self._has_loss:
            criterion = -float(step)  # the last weights within the bound
        return metrics, criterion

    @torch.no_grad()
    def probe(self, step: int) -> tuple[Metrics, Tensor]:
        """Metrics of a response to each prompt, and the (B,) KLs from the SFT model, in nats.

        The random numbers are the same at every step.
        """
        prompts = self._measures.prompts
        responses = self._sampler.respond(prompts.queries, self._config.seed, step)
        kl = self._measures.kl(self._reference, responses, self._budget)
        metrics = {
            "kl": float(kl.mean()),
            "response_length": sum(map(len, responses)) / len(responses),
            "ended": sum(has_ended(response, self.ends) for response in responses) / len(responses),
        }
        if (scores := self._measures.heldout_scores(prompts, responses)) is not None:
            metrics["heldout_scores"] = float(scores.mean())
        return metrics, kl
