"""Evaluation of the policy on fixed validation prompts: which weights to keep, and which samples to show.

Weights are chosen by the judge of `ppo.select_by`, else by models/reward_heldout: never by the reward that is
optimized, by the gold judge or on test data.

B prompts · R response length.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

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
from rlhf_tasks.models.stop_tokens import close_responses, has_ended
from rlhf_tasks.ppo.measure import ResponseMeasures, score_on_all_ranks
from rlhf_tasks.ppo.metrics import Metrics, moments, standard_error, standardized_gaps
from rlhf_tasks.ppo.rollout import Prompts, Reference
from rlhf_tasks.ppo.sampler import Sampler
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.build import WeightedSum
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


@dataclass(kw_only=True)
class Evaluator(ResponseMeasures):
    """Evaluates the policy on the selection prompts."""

    config: Ppo
    reference: Reference
    """The one in use, which `reference_sync` may have moved."""
    sft: Reference | None = None
    """Where that is not the SFT model: `selected_kl` is the KL from this one."""
    references: Sequence[str]
    """The responses of the data to the prompts."""
    scorers: WeightedSum
    win_rate: WinRate | None
    seed: int

    @property
    def selection_metric(self) -> str | None:
        """The metric by which weights are kept; None keeps those of the last evaluation."""
        if self.win_rate is not None:
            return "eval/win_rate"
        return None if self.heldout is None else "eval/heldout_scores"

    @console.part("validation")
    def evaluate(
        self, state: EvaluationState, sampler: Sampler, budget: TokenBudget, *, episode: int, update: int
    ) -> Metrics:
        """Sample a response to each selection prompt, score them, and keep the weights if they are best.

        Out-of-memory in the passes that measure the KL lowers the `budget`, for later evaluations too.

        Raises:
            NonFiniteError: on all ranks, if a number is NaN or infinite.
        """
        prompts = self.prompts
        ids = sampler.respond(prompts.queries, self.seed, update)
        scores, _ = self._score(prompts, ids)  # (B,)
        heldout = self.heldout_scores(prompts, ids)  # (B,)
        kl = self.kl(self.reference, ids, budget)  # (B,)
        texts = self.texts(prompts.queries, ids)
        state.responses += [
            {"episode": episode, "prompt": prompt, "reference": reference, "response": text}
            | columns.encoded(columns.of_row(prompts.columns, i))
            for i, (prompt, reference, text) in enumerate(
                zip(prompts.texts, self.references, texts, strict=True)
            )
        ]
        metrics = {
            "eval/scores": float(scores.mean()),
            "eval/response_length": sum(map(len, ids)) / len(ids),
            "eval/ended": sum(has_ended(response, self.ends) for response in ids) / len(ids),
            "eval/kl": float(kl.mean()),
        }
        if heldout is not None:
            metrics["eval/heldout_scores"] = float(heldout.mean())
            metrics["eval/reward_gap"] = metrics["eval/scores"] - metrics["eval/heldout_scores"]
            state.start = state.start or [moments(scores), moments(heldout)]
            gaps = standardized_gaps(scores, heldout, *state.start)
            if gaps is not None:
                metrics["eval/standardized_gap"] = float(gaps.mean())
            elif self.config.guards is not None and self.config.guards.gap_max is not None:
                raise UserError(
                    f"ppo.guards.gap_max={self.config.guards.gap_max:g} is in standard deviations of the "
                    "optimized and the held-out score before training, and one of them is the same for all "
                    "selection prompts; set it to null, or change ppo.scorers"
                )
        if self.win_rate is not None:
            metrics["eval/win_rate"] = self.win_rate(prompts.texts, texts, self.references, prompts.columns)
        name = self.selection_metric
        if name is None or metrics[name] > state.best:
            state.weights = {}  # else both are in memory
            state.weights = sharding.weights_of(self.policy, but=sharding.frozen_in(self.policy))
            kl = kl if self.sft is None else self.kl(self.sft, ids, budget)
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
        prompts = self.prompts.take(range(min(len(self.prompts), NUM_SAMPLE_PROMPTS)))
        ids = sampler.respond(prompts.queries, self.seed, update)
        total, parts = self._score(prompts, ids)
        scores = {"score": total, **(parts if len(parts) > 1 else {})}
        if (heldout := self.heldout_scores(prompts, ids)) is not None:
            scores["reward_heldout"] = heldout
        texts = self.texts(prompts.queries, ids)
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
        closed = close_responses(self.tokenizer, responses, self.ends)
        return response_texts(self.tokenizer, queries, closed)

    def score(self, responses: Sequence[Ids]) -> Tensor:
        """(B,) what PPO's reward gives responses to the first B prompts; errors as in an evaluation."""
        return self._score(self.prompts.take(range(len(responses))), responses)[0]

    def _score(self, prompts: Prompts, responses: Sequence[Ids]) -> tuple[Tensor, dict[str, Tensor]]:
        """(B,) the sum, `under_eos_rule`, and (B,) by scorer, unweighted."""
        parts = score_on_all_ranks(
            self.dist, self.scorers.parts, prompts, responses, self.tokenizer, self.ends
        )
        return self.under_eos_rule(self.scorers.total(parts), responses), parts
