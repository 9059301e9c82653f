"""Evaluation of the policy on fixed validation prompts: which weights to keep, and which samples to show.

Weights are chosen by the judge of `ppo.select_by`, else by models/reward_heldout: never by the reward that is
optimized, by the gold judge or on test data.

B prompts · R response length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo
from rlhf_tasks.config.judge import Selection
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import TokenBudget, collate_groups, sizes
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.tokenizer import Ids, encode, response_texts
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.build import build_judge
from rlhf_tasks.judging.judges.comparisons import check_failures
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.models.stop_tokens import close_responses, has_ended
from rlhf_tasks.models.tensors import NonFiniteError
from rlhf_tasks.ppo.advantages import ROUNDING, group_deviations
from rlhf_tasks.ppo.kl import k1
from rlhf_tasks.ppo.metrics import Metrics, moments, standard_error, standardized_gaps
from rlhf_tasks.ppo.rewards import truncated_scores
from rlhf_tasks.ppo.rollout import Reference, Rollout, Scorers, interleave, raise_on_all_ranks
from rlhf_tasks.ppo.sampler import Sampler, response_ends
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import Responses, Scorer
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed

NUM_SAMPLE_PROMPTS = 4
NUM_ROLLOUTS = 32  # of an update, that are kept to be read
UNFINISHED = {
    "eos_trick_replace": "missing_eos_score replaces its score",
    "eos_trick_subtract": "missing_eos_score is added to its score",
    "bootstrap": "the critic's value of its last state replaces its score",
    "bootstrap_add": "the critic's value of its last state is added to its score",
    "none": "it keeps its score",
}
"""By `ppo.truncation`, what becomes of the score of a response without an end."""
SELECTED_NAMES = {"eval/win_rate": "selected_win_rate", "eval/heldout_scores": "selected_heldout_score"}


@dataclass
class EvaluationState:
    """The weights that scored best so far, and the responses of all evaluations."""

    best: float = -float("inf")
    metrics: Metrics = field(default_factory=lambda: {"selected_episode": 0.0})
    """`selected_…`: episode, KL to the reference and score of the weights that are kept."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """What training changes, on the CPU; of a sharded model only on the first rank."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The samples shown so far, rows of samples.parquet."""
    responses: list[dict[str, Any]] = field(default_factory=list)
    """The responses of each evaluation, rows of answers.parquet, from which the judge's curve is made."""
    start: list[list[float]] = field(default_factory=list)
    """Mean and standard deviation of the scores before training, optimized and held-out: the gap's units."""


class Scored(NamedTuple):
    """Responses to some prompts, of all ranks; scores are under the EOS rule."""

    queries: list[Ids]
    ids: list[Ids]
    scores: Tensor  # (B,)
    heldout: Tensor | None  # (B,)
    parts: dict[str, Tensor]  # (B,) by scorer, unweighted


class SelectionJudge:
    """The judge of `ppo.select_by`.

    The first rank judges and sends the result to the others, so that no comparison is paid for twice.

    Raises:
        UserError: if the judge cannot be made.
    """

    def __init__(
        self, dist: Distributed, settings: Selection, paths: Paths, columns: Collection[str] = ()
    ) -> None:
        self._dist, self._max_failure_share = dist, settings.max_failure_share
        self.name = settings.judge.name
        self._judge = None
        if dist.is_main:
            self._judge = build_judge(
                settings.judge,
                dist.device,
                settings.max_failure_share,
                paths,
                columns=columns,
                key="ppo.select_by.judge",
            )

    def win_rate(
        self, prompts: Sequence[str], responses: Sequence[str], references: Sequence[str], columns: Columns
    ) -> float:
        """The share of prompts at which the response wins over the reference; a tie counts half.

        Raises:
            UserError: if the judge stops, or fails at too many prompts.
        """
        rate = None
        if self._judge is not None:
            comparisons = self._judge.compare(prompts, responses, references, columns)
            check_failures(self.name, comparisons, self._max_failure_share)
            rate = statistics.rate(comparisons.outcomes).value
        result: float = self._dist.broadcast_object(rate)
        return result


class Evaluator:
    """Evaluates the policy; its KL is to the reference in use, which `reference_sync` may have moved."""

    def __init__(
        self,
        dist: Distributed,
        config: Ppo,
        policy: PreTrainedModel,
        reference: Reference,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Mapping[str, Any]],
        *,
        scorers: Scorers,
        heldout: Scorer | None,
        judge: SelectionJudge | None,
        seed: int,
    ) -> None:
        """`rows` are of data/prompts; the first `num_selection_prompts` of them are used."""
        self._dist, self._config, self._policy, self._reference = dist, config, policy, reference
        self._tokenizer, self._scorers, self._heldout, self._judge = tokenizer, scorers, heldout, judge
        self._ends, self._seed = response_ends(config, policy, tokenizer), seed
        rows = rows[: config.num_selection_prompts]
        self._prompts = [row["prompt"] for row in rows]
        self._references = [row["reference"] for row in rows]
        self._columns = columns.of_rows(rows)

    @property
    def selection_metric(self) -> str | None:
        """The metric by which weights are kept; None keeps those of the last evaluation."""
        if self._judge is not None:
            return "eval/win_rate"
        return None if self._heldout is None else "eval/heldout_scores"

    @console.part("validation")
    def evaluate(
        self, state: EvaluationState, sampler: Sampler, budget: TokenBudget, *, episode: int, update: int
    ) -> Metrics:
        """Sample a response to each selection prompt, score them, and keep the weights if they are best.

        Out-of-memory in the passes that measure the KL lowers the `budget`, for later evaluations too.

        Raises:
            NonFiniteError: on all ranks, if a number is NaN or infinite.
        """
        result = self._respond(len(self._prompts), sampler, update)
        kl = self._kl(result.queries, result.ids, budget)  # (B,)
        texts = response_texts(self._tokenizer, result.queries, self._close(result.ids))
        rows = zip(self._prompts, self._references, texts, strict=True)
        state.responses += [
            {"episode": episode, "prompt": prompt, "reference": reference, "response": text}
            | columns.encoded(columns.of_row(self._columns, i))
            for i, (prompt, reference, text) in enumerate(rows)
        ]
        metrics = {
            "eval/scores": float(result.scores.mean()),
            "eval/response_length": sum(map(len, result.ids)) / len(result.ids),
            "eval/ended": sum(has_ended(response, self._ends) for response in result.ids) / len(result.ids),
            "eval/kl": float(kl.mean()),
        }
        if result.heldout is not None:
            metrics["eval/heldout_scores"] = float(result.heldout.mean())
            metrics["eval/reward_gap"] = metrics["eval/scores"] - metrics["eval/heldout_scores"]
            state.start = state.start or [moments(result.scores), moments(result.heldout)]
            gaps = standardized_gaps(result.scores, result.heldout, *state.start)
            if gaps is not None:
                metrics["eval/standardized_gap"] = float(gaps.mean())
            elif self._config.guards is not None and self._config.guards.gap_max is not None:
                raise UserError(
                    f"ppo.guards.gap_max={self._config.guards.gap_max:g} is in standard deviations of the "
                    "optimized and the held-out score before training, and one of them is the same for all "
                    "selection prompts; set it to null, or change ppo.scorers"
                )
        if self._judge is not None:
            metrics["eval/win_rate"] = self._judge.win_rate(
                self._prompts, texts, self._references, self._columns
            )
        name = self.selection_metric
        if name is None or metrics[name] > state.best:
            frozen = {name for name, p in self._policy.named_parameters() if not p.requires_grad}
            state.weights = sharding.weights_of(self._policy, but=frozen)
            error = standard_error(metrics["eval/kl"], float((kl**2).sum()), len(kl))
            state.metrics = {
                "selected_episode": float(episode),
                "selected_kl": metrics["eval/kl"],
                "selected_kl_standard_error": error,
            }
            if name is not None:
                state.best = state.metrics[SELECTED_NAMES[name]] = metrics[name]
        return metrics

    @console.part("samples to show")
    def show(
        self, state: EvaluationState, sampler: Sampler, *, episode: int, update: int
    ) -> list[dict[str, Any]]:
        """Responses to the first few prompts with their scores, rows of samples.parquet."""
        prompts = self._prompts[:NUM_SAMPLE_PROMPTS]
        result = self._respond(len(prompts), sampler, update)
        scores = {"score": result.scores, **(result.parts if len(result.parts) > 1 else {})}
        if result.heldout is not None:
            scores["reward_heldout"] = result.heldout
        texts = response_texts(self._tokenizer, result.queries, self._close(result.ids))
        rows = [
            {"episode": episode, "prompt": prompt, "response": text}
            | columns.shown(columns.of_row(self._columns, i))
            | {name: float(values[i]) for name, values in scores.items()}
            for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
        ]
        state.samples += rows
        return rows

    @torch.no_grad()
    def rollout_rows(
        self,
        state: EvaluationState,
        rollout: Rollout,
        prompts: Sequence[str],
        kl: Tensor,
        *,
        episode: int,
        update: int,
    ) -> list[dict[str, Any]]:
        """Rows of rollouts.parquet: all responses to the first prompts, at most NUM_ROLLOUTS, by prompt.

        `rollout` is that of all ranks with its advantages; its B `prompts` and its `kl` (B, R) belong to it.
        Scores are under the EOS rule, before scaling; those of each scorer are as it gave them.

        Raises:
            NonFiniteError: on all ranks, if a held-out score is NaN or infinite.
        """
        config, num_samples = self._config, self._config.samples_per_prompt
        num_prompts, mask = len(prompts) // num_samples, rollout.mask
        rows = [i + num_prompts * j for i in range(num_prompts) for j in range(num_samples)][:NUM_ROLLOUTS]
        texts = [prompts[i] for i in rows]
        queries, ids = ([values[i] for i in rows] for values in (rollout.queries, rollout.responses))
        scores = self._under_eos_rule(rollout.scores[rows], ids)
        heldout = self._heldout_scores(texts, queries, ids)
        gaps = None if heldout is None else standardized_gaps(scores, heldout, *state.start)
        numbers = {
            "score": scores,
            **{f"scorer/{name}": part[rows] for name, part in rollout.parts.items()},
            **({} if heldout is None else {"heldout": heldout}),
            **({} if gaps is None else {"gap": gaps}),
            "kl": torch.where(mask, kl, 0).sum(1)[rows],
            "advantage": ((rollout.advantages * mask).sum(1) / mask.sum(1))[rows],
        }
        cap = config.sampler.importance_cap if config.sampler.kind == "vllm" else None
        equal = torch.zeros(len(prompts), dtype=torch.bool)
        if config.critic is None and num_samples > 1:  # the returns of a response's tokens are all its own
            returns = rollout.returns[:, 0].double()
            largest = returns.view(num_samples, -1).abs().amax(0)
            equal = (group_deviations(returns, num_samples) <= ROUNDING * largest).repeat(num_samples)
        responses = response_texts(self._tokenizer, queries, self._close(ids))
        found = []
        for at, (i, response) in enumerate(zip(rows, responses, strict=True)):
            notes, length = list[str](), len(ids[at])
            if not rollout.ended[i]:
                notes.append(f"no end within {length} tokens: {UNFINISHED[config.truncation.kind]}")
            if cap is not None and (capped := int((rollout.importance[i] >= cap).sum())):
                notes.append(f"{capped} of {length} tokens have the largest importance weight, {cap:g}")
            if equal[i]:
                notes.append(
                    "all responses to the prompt have the same return, so that none has an advantage"
                )
            found.append(
                {"episode": episode, "update": update, "rollouts": len(prompts), "prompt": texts[at]}
                | {"response": response, "length": length, "notes": "; ".join(notes)}
                | {name: float(values[at]) for name, values in numbers.items()}
            )
        return found

    # ----------------------------------------------------------------------- sampling and scoring

    @torch.no_grad()
    def _respond(self, count: int, sampler: Sampler, update: int) -> Scored:
        """Responses to the first prompts: each rank has and scores a share, and all receive the whole.

        Raises:
            NonFiniteError: on all ranks, if a number is NaN or infinite; the responses are its `batch`.
        """
        prompts = self._prompts[:count]
        queries, ids = encode(self._tokenizer, prompts), sampler.respond(prompts, self._seed, update)
        scores, parts = self.score(queries, ids)
        return Scored(queries, ids, scores, self._heldout_scores(prompts, queries, ids), parts)

    @torch.no_grad()
    def score(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> tuple[Tensor, dict[str, Tensor]]:
        """What PPO's reward gives responses to the first B prompts: (B,) the sum, and (B,) by scorer.

        Raises:
            NonFiniteError: on all ranks, if a number is NaN or infinite; the responses are its `batch`.
        """
        dist, prompts = self._dist, self._prompts[: len(queries)]
        kept = columns.take(self._columns, range(len(queries)))
        own, batch = self._own(prompts, queries, responses, kept)
        if any(scorer.kind == "http" for scorer in self._config.scorers) and not dist.shards:
            # the first rank alone sends requests, but passes of a sharded reward model need all ranks
            rows = Responses.of_ids(prompts, queries, self._close(responses), self._tokenizer, kept)
            parts = dist.broadcast_object(
                raise_on_all_ranks(dist, lambda: self._scorers.parts(rows) if dist.is_main else {}, batch)
            )
        else:
            found = raise_on_all_ranks(dist, lambda: self._scorers.parts(own), batch)
            parts = interleave(dist.all_gather_object(found))
        return self._under_eos_rule(self._scorers.total(parts), responses), parts

    def _own(
        self, prompts: Sequence[str], queries: Sequence[Ids], responses: Sequence[Ids], kept: Columns = NONE
    ) -> tuple[Responses, dict[str, Any]]:
        """This rank's share of the rows, and what a failure writes down of them."""
        kept = columns.take(kept, self._dist.shard_rows(range(len(queries))))
        prompts, queries, responses = map(self._dist.shard_rows, (prompts, queries, responses))
        own = Responses.of_ids(prompts, queries, self._close(responses), self._tokenizer, kept)
        return own, {"prompts": prompts, "responses": responses}

    def _close(self, responses: Sequence[Ids]) -> list[Ids]:
        return close_responses(self._tokenizer, responses, self._ends)

    def _under_eos_rule(self, scores: Tensor, responses: Sequence[Ids]) -> Tensor:
        """(B,) the scores under the rule for responses that did not end."""
        ended = torch.tensor([has_ended(response, self._ends) for response in responses])
        rule = self._config.truncation.kind
        if rule.startswith("bootstrap"):  # there is no critic here to value an unfinished response
            rule = "none"
        return truncated_scores(scores, ended, rule, missing_eos_score=self._config.missing_eos_score)

    @torch.no_grad()
    def _kl(self, queries: Sequence[Ids], responses: Sequence[Ids], budget: TokenBudget) -> Tensor:
        """(B,) float64: Σ_t log π − log π_ref of each response, in nats; each rank measures its share.

        Raises:
            NonFiniteError: on all ranks, if a KL is NaN or infinite.
        """
        dist = self._dist
        own, own_responses = dist.shard_rows(queries), dist.shard_rows(responses)
        result = torch.zeros(len(own), dtype=torch.float64)

        def measure(rows: list[int]) -> None:
            groups, pad = [[i] for i in rows], self._tokenizer.pad_token_id
            batch = collate_groups(own, own_responses, groups, pad).to(dist.device)
            with dist.autocast():
                logprobs = response_logprobs(self._policy, batch, self._config.temperature).float()
                ref_logprobs = self._reference.logprobs(batch, self._config.temperature).float()
            kl = k1(logprobs, ref_logprobs).double().sum(1)  # both are zero on padding
            result[rows] = kl.cpu()[: len(rows)]

        dist.run_batches(budget, sizes(own, own_responses), measure)
        if dist.max(int(not bool(result.isfinite().all()))):
            raise NonFiniteError(
                "the KL to the reference is NaN or infinite at the selection prompts",
                {"prompts": dist.shard_rows(self._prompts), "responses": own_responses},
            )
        whole: Tensor = interleave(dist.all_gather_object(result))
        return whole

    def _heldout_scores(
        self, prompts: Sequence[str], queries: Sequence[Ids], responses: Sequence[Ids]
    ) -> Tensor | None:
        """(B,) by models/reward_heldout, under the EOS rule; each rank scores a share. None without it.

        Raises:
            NonFiniteError: on all ranks, if a score is NaN or infinite; the responses are its `batch`.
        """
        if (heldout := self._heldout) is None:
            return None
        rows, batch = self._own(prompts, queries, responses)

        def score() -> Tensor:
            scores = heldout(rows)
            if not bool(scores.isfinite().all()):
                raise NonFiniteError("models/reward_heldout gave NaN or infinity")
            return scores

        found = raise_on_all_ranks(self._dist, score, batch)
        return self._under_eos_rule(interleave(self._dist.all_gather_object(found)), responses)
