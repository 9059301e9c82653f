"""Evaluation of the policy on fixed validation prompts: which weights to keep, and which samples to show.

Weights are chosen by the judge of `ppo.select_by`, else by models/reward_heldout: never by the reward that is
optimized, by the gold judge or on test data.

B prompts · R response length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config import Ppo
from rlhf_tasks.config.judge import Selection
from rlhf_tasks.data import columns
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.data.tokenizer import Ids, response_texts
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.build import build_judge
from rlhf_tasks.judging.judges.comparisons import check_failures
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.stop_tokens import StopTokens, close_responses, has_ended
from rlhf_tasks.ppo.measure import measure_kl, score_ends, score_heldout, shard_responses
from rlhf_tasks.ppo.metrics import Metrics, moments, standard_error, standardized_gaps
from rlhf_tasks.ppo.rollout import Prompts, Reference, interleave, raise_on_all_ranks
from rlhf_tasks.ppo.sampler import Sampler
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import WeightedSum
from rlhf_tasks.scoring.protocol import Scorer
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed

NUM_SAMPLE_PROMPTS = 4
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

    ids: list[Ids]
    scores: Tensor  # (B,)
    heldout: Tensor | None  # (B,)
    parts: dict[str, Tensor]  # (B,) by scorer, unweighted


WinRate = Callable[[Sequence[str], Sequence[str], Sequence[str], Columns], float]
"""(prompts, responses, references, columns) → the share of responses that win; a tie counts half."""


def selection_judge(
    dist: Distributed, settings: Selection, paths: Paths, columns: Collection[str] = ()
) -> WinRate:
    """The judge of `ppo.select_by`, by its win rate.

    The first rank judges and sends the result to the others, so that no comparison is paid for twice.

    Raises:
        UserError: if the judge cannot be made; when it judges, if it stops or fails at too many prompts.
    """
    chosen, most, judge = settings.judge, settings.max_failure_share, None
    if dist.is_main:
        key = "ppo.select_by.judge"
        judge = build_judge(chosen, dist.device, most, paths, columns=columns, key=key)

    def win_rate(
        prompts: Sequence[str], responses: Sequence[str], references: Sequence[str], columns: Columns
    ) -> float:
        rate = None
        if judge is not None:
            comparisons = judge.compare(prompts, responses, references, columns)
            check_failures(chosen.name, comparisons, most)
            rate = statistics.rate(comparisons.outcomes).value
        return float(dist.broadcast_object(rate))

    return win_rate


class Evaluator:
    """Evaluates the policy; its KL is to the reference in use, which `reference_sync` may have moved."""

    def __init__(
        self,
        dist: Distributed,
        config: Ppo,
        policy: PreTrainedModel,
        reference: Reference,
        tokenizer: PreTrainedTokenizerBase,
        ends: StopTokens,
        prompts: Prompts,
        references: Sequence[str],
        *,
        scorers: WeightedSum,
        heldout: Scorer | None,
        win_rate: WinRate | None,
        seed: int,
        sft: Reference | None = None,
    ) -> None:
        """The first `num_selection_prompts` of the prompts and their reference responses are used.

        `sft`, where the reference is not the SFT model: `selected_kl` is the KL from that.
        """
        self._sft = sft
        self._dist, self._config, self._policy, self._reference = dist, config, policy, reference
        self._tokenizer, self._scorers, self._heldout, self._win_rate = tokenizer, scorers, heldout, win_rate
        self._ends, self._seed = ends, seed
        self._prompts = prompts.take(range(min(len(prompts), config.num_selection_prompts)))
        self._references = references[: len(self._prompts)]

    @property
    def selection_metric(self) -> str | None:
        """The metric by which weights are kept; None keeps those of the last evaluation."""
        if self._win_rate is not None:
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
        prompts = self._prompts
        result = self._respond(prompts, sampler, update)
        kl = self._kl(self._reference, result.ids, budget)  # (B,)
        texts = self.texts(prompts.queries, result.ids)
        state.responses += [
            {"episode": episode, "prompt": prompt, "reference": reference, "response": text}
            | columns.encoded(columns.of_row(prompts.columns, i))
            for i, (prompt, reference, text) in enumerate(
                zip(prompts.texts, self._references, texts, strict=True)
            )
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
        if self._win_rate is not None:
            metrics["eval/win_rate"] = self._win_rate(prompts.texts, texts, self._references, prompts.columns)
        name = self.selection_metric
        if name is None or metrics[name] > state.best:
            frozen = {name for name, p in self._policy.named_parameters() if not p.requires_grad}
            state.weights = sharding.weights_of(self._policy, but=frozen)
            kl = kl if self._sft is None else self._kl(self._sft, result.ids, budget)
            mean = float(kl.mean())
            state.metrics = {
                "selected_episode": float(episode),
                "selected_kl": mean,
                "selected_kl_standard_error": standard_error(mean, float((kl**2).sum()), len(kl)),
            }
            if name is not None:
                state.best = state.metrics[SELECTED_NAMES[name]] = metrics[name]
        return metrics

    @console.part("samples to show")
    def show(
        self, state: EvaluationState, sampler: Sampler, *, episode: int, update: int
    ) -> list[dict[str, Any]]:
        """Responses to the first few prompts with their scores, rows of samples.parquet."""
        prompts = self._prompts.take(range(min(len(self._prompts), NUM_SAMPLE_PROMPTS)))
        result = self._respond(prompts, sampler, update)
        scores = {"score": result.scores, **(result.parts if len(result.parts) > 1 else {})}
        if result.heldout is not None:
            scores["reward_heldout"] = result.heldout
        texts = self.texts(prompts.queries, result.ids)
        rows = [
            {"episode": episode, "prompt": prompt, "response": text}
            | columns.shown(columns.of_row(prompts.columns, i))
            | {name: float(values[i]) for name, values in scores.items()}
            for i, (prompt, text) in enumerate(zip(prompts.texts, texts, strict=True))
        ]
        state.samples += rows
        return rows

    def texts(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> list[str]:
        """The responses to these queries as texts, without their ends."""
        return response_texts(self._tokenizer, queries, self._close(responses))

    # ----------------------------------------------------------------------- sampling and scoring

    @torch.no_grad()
    def _respond(self, prompts: Prompts, sampler: Sampler, update: int) -> Scored:
        """Responses to the prompts: each rank has and scores a share, and all receive the whole.

        Raises:
            NonFiniteError: on all ranks, if a number is NaN or infinite; the responses are its `batch`.
        """
        ids = sampler.respond(prompts.queries, self._seed, update)
        scores, parts = self._score(prompts, ids)
        return Scored(ids, scores, self.heldout_scores(prompts, ids), parts)

    def score(self, responses: Sequence[Ids]) -> Tensor:
        """(B,) what PPO's reward gives responses to the first B prompts; errors as in an evaluation."""
        return self._score(self._prompts.take(range(len(responses))), responses)[0]

    @torch.no_grad()
    def _score(self, prompts: Prompts, responses: Sequence[Ids]) -> tuple[Tensor, dict[str, Tensor]]:
        """(B,) the sum, `under_eos_rule`, and (B,) by scorer."""
        dist, rows = self._dist, prompts.responses(self._close(responses), self._tokenizer)
        local, batch = shard_responses(dist, prompts, responses, self._tokenizer, self._ends)
        if any(scorer.kind in ("http", "llm") for scorer in self._config.scorers) and not dist.shards:
            # the first rank alone sends requests, but passes of a sharded reward model need all ranks
            parts = dist.broadcast_object(
                raise_on_all_ranks(dist, lambda: self._scorers.parts(rows) if dist.is_main else {}, batch)
            )
        else:
            local_parts = raise_on_all_ranks(dist, lambda: self._scorers.parts(local), batch)
            parts = interleave(dist.all_gather_object(local_parts))
        return self.under_eos_rule(self._scorers.total(parts), responses), parts

    def _close(self, responses: Sequence[Ids]) -> list[Ids]:
        return close_responses(self._tokenizer, responses, self._ends)

    def under_eos_rule(self, scores: Tensor, responses: Sequence[Ids]) -> Tensor:
        """(B,) the scores under the rule for responses that did not end, if they are not scaled."""
        is_raw = self._config.score_scaling is not None
        return score_ends(scores, responses, self._ends, self._config.truncation, is_raw=is_raw)

    def _kl(self, reference: Reference, responses: Sequence[Ids], budget: TokenBudget) -> Tensor:
        """(B,) of responses to the selection prompts, as `measure_kl`."""
        return measure_kl(
            self._dist,
            self._policy,
            reference,
            self._prompts,
            responses,
            temperature=self._config.temperature,
            pad=self._tokenizer.pad_token_id,
            budget=budget,
        )

    def heldout_scores(self, prompts: Prompts, responses: Sequence[Ids]) -> Tensor | None:
        """`score_heldout`, `under_eos_rule`, (B,); None without a held-out model."""
        if self._heldout is None:
            return None
        scores = score_heldout(self._dist, self._heldout, prompts, responses, self._tokenizer, self._ends)
        return self.under_eos_rule(scores, responses)
