"""Evaluation of the policy on fixed validation prompts: which weights to keep, and which samples to show.

B batch · R response.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo
from rlhf_tasks.config.ppo import EosTrick
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import Ids, TokenBudget, encode, picked, sizes, text_of
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.modeling.generation import Share, answer
from rlhf_tasks.modeling.scorers import Scorer
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.batch import interleaved
from rlhf_tasks.ppo.collector import Scorers, fail_together, stop_token
from rlhf_tasks.ppo.kl import k1
from rlhf_tasks.ppo.reference import Reference
from rlhf_tasks.ppo.rewards import truncated_scores
from rlhf_tasks.ppo.rollout import logprobs_of
from rlhf_tasks.ppo.rollout_metrics import standard_error
from rlhf_tasks.ppo.selection_judge import SelectionJudge
from rlhf_tasks.training import sharding
from rlhf_tasks.training.runtime import Runtime

NUM_SAMPLE_PROMPTS = 4
SELECTED_NAMES = {"eval/win_rate": "selected_win_rate", "eval/heldout_scores": "selected_heldout_score"}
Metrics = dict[str, float]
Respond = Callable[[Sequence[Ids], int], list[Ids] | None]
"""An engine's responses to queries, by a seed and on all processes; None if there is no engine."""


class Responses(NamedTuple):
    """Responses to some prompts, of all processes; scores are under the EOS rule."""

    queries: list[Ids]
    ids: list[Ids]
    scores: Tensor  # (B,)
    heldout: Tensor | None  # (B,)
    parts: dict[str, Tensor]  # (B,) by scorer, unweighted


class Evaluator:
    """Keeps the weights that score best by the selection judge, else by models/reward_heldout, else the last.

    The checkpoint is never chosen by the reward that is optimised, by the gold judge or on test data.
    The KL is to the reference in use: with `reference_sync` that one has moved from the SFT model.
    """

    def __init__(
        self,
        rt: Runtime,
        settings: Ppo,
        policy: PreTrainedModel,
        reference: Reference,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Mapping[str, Any]],
        *,
        scorers: Scorers,
        heldout: Scorer | None,
        judge: SelectionJudge | None,
        seed: int,
        respond: Respond = lambda queries, seed: None,
    ) -> None:
        """`rows` are of data/prompts; the first `num_selection_prompts` of them are used.

        Where `respond` gives nothing, each process samples a share of the responses from the policy.
        """
        self._rt, self._settings, self._policy, self._reference = rt, settings, policy, reference
        self._tokenizer, self._scorers, self._heldout, self._judge = tokenizer, scorers, heldout, judge
        self._seed, self._engine = seed, respond
        rows = rows[: settings.num_selection_prompts]
        self._prompts = [row["prompt"] for row in rows]
        self._references = [row["reference"] for row in rows]
        self._columns = columns.of_rows(rows)
        self._selected: Metrics = {"selected_episode": 0.0}
        self._best = -float("inf")
        self._weights: dict[str, Tensor] = {}
        self.samples: list[dict[str, Any]] = []
        """The samples shown so far, rows of samples.parquet."""
        self.answers: list[dict[str, Any]] = []
        """The responses of each evaluation, rows of answers.parquet, from which the judge's curve is made."""

    @property
    def selection_metric(self) -> str | None:
        """The metric by which weights are kept; None keeps those of the last evaluation."""
        if self._judge is not None:
            return "eval/win_rate"
        return None if self._heldout is None else "eval/heldout_scores"

    @property
    def selected(self) -> Metrics:
        """`selected_…`: episode, KL to the reference and score of the weights that are kept."""
        return dict(self._selected)

    def evaluate(self, episode: int) -> Metrics:
        """Sample a response to each selection prompt, score them, and keep the weights if they are best."""
        result = self._respond(len(self._prompts))
        kl = self._kl(result.queries, result.ids)
        texts = [text_of(self._tokenizer, ids) for ids in result.ids]
        self.answers += [
            {"episode": episode, "prompt": prompt, "reference": reference, "response": text}
            | columns.encoded(columns.of_row(self._columns, i))
            for i, (prompt, reference, text) in enumerate(
                zip(self._prompts, self._references, texts, strict=True)
            )
        ]
        metrics = {
            "eval/scores": float(result.scores.mean()),
            "eval/response_length": sum(map(len, result.ids)) / len(result.ids),
        }
        if result.heldout is not None:
            metrics["eval/heldout_scores"] = float(result.heldout.mean())
            metrics["eval/reward_gap"] = metrics["eval/scores"] - metrics["eval/heldout_scores"]
        if self._judge is not None:
            metrics["eval/win_rate"] = self._judge.win_rate(
                self._prompts, texts, self._references, self._columns
            )
        metrics["eval/kl"] = float(kl.mean())
        self._select(episode, metrics, kl)
        return metrics

    def _select(self, episode: int, metrics: Metrics, kl: Tensor) -> None:
        """Keep the weights and their KL, unless earlier ones scored as well."""
        name = self.selection_metric
        if name is not None and metrics[name] <= self._best:
            return
        self._weights = trained(self._policy)
        mean = metrics["eval/kl"]
        self._selected = {
            "selected_episode": float(episode),
            "selected_kl": mean,
            "selected_kl_standard_error": standard_error(mean, float((kl**2).sum()), len(kl)),
        }
        if name is not None:
            self._best = metrics[name]
            self._selected[SELECTED_NAMES[name]] = self._best

    def restore(self) -> None:
        """Put the kept weights back into the policy."""
        sharding.load_weights(self._policy, self._weights)

    def show(self, episode: int) -> list[dict[str, Any]]:
        """Responses to the first few prompts with their scores, rows of samples.parquet."""
        prompts = self._prompts[:NUM_SAMPLE_PROMPTS]
        result = self._respond(len(prompts))
        scores = {"score": result.scores, **(result.parts if len(result.parts) > 1 else {})}
        if result.heldout is not None:
            scores["reward_heldout"] = result.heldout
        rows = [
            {"episode": episode, "prompt": prompt, "response": text_of(self._tokenizer, ids)}
            | columns.shown(columns.of_row(self._columns, i))
            | {name: float(values[i]) for name, values in scores.items()}
            for i, (prompt, ids) in enumerate(zip(prompts, result.ids, strict=True))
        ]
        self.samples += rows
        return rows

    # ----------------------------------------------------------------------- sampling and scoring

    @torch.no_grad()
    def _respond(self, count: int) -> Responses:
        """Responses to the first prompts: each process has and scores a share, and all receive the whole.

        Raises:
            NonFiniteError: on all processes, if a number is NaN or infinite; the responses are its `batch`.
        """
        rt, own = self._rt, self._rt.share(self._prompts[:count])
        ids = fail_together(rt, lambda: self._sampled(own, count), {"prompts": own})
        batch, queries = {"prompts": own, "responses": ids}, encode(self._tokenizer, own)
        everything = interleaved(rt.each({"queries": queries, "ids": ids}))
        kept = columns.take(self._columns, range(count))
        parts = self._scored(everything["queries"], everything["ids"], kept, batch)
        heldout = None
        if self._heldout is not None:
            heldout = interleaved(
                rt.each(fail_together(rt, lambda: self._heldout_scores(queries, ids), batch))
            )
            heldout = self._under_eos_rule(heldout, everything["ids"])
        scores = self._under_eos_rule(self._scorers.total(parts), everything["ids"])
        return Responses(everything["queries"], everything["ids"], scores, heldout, parts)

    def _sampled(self, prompts: list[str], total: int) -> list[Ids]:
        answered = self._engine(encode(self._tokenizer, self._prompts[:total]), self._seed)
        if answered is not None:
            return self._rt.share(answered)
        with self._rt.whole(self._policy) as policy, self._rt.autocast():
            return answer(
                policy, self._tokenizer, prompts, max_new_tokens=self._settings.response_length,
                temperature=self._settings.temperature, seed=self._seed,
                stop=stop_token(self._settings, self._tokenizer),
                share=Share(self._rt.rank, self._rt.world_size, total),
            )  # fmt: skip

    @torch.no_grad()
    def _kl(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """(B,) float64: Σ_t log π − log π_ref of each response, in nats; each process measures its share.

        Raises:
            NonFiniteError: on all processes, if a KL is NaN or infinite.
        """
        rt, own = self._rt, (self._rt.share(queries), self._rt.share(responses))
        batch = {"prompts": self._rt.share(self._prompts), "responses": own[1]}
        kl = fail_together(rt, lambda: self._own_kl(*own), batch)
        result: Tensor = interleaved(rt.each(kl))
        return result

    def _own_kl(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        """The KL of these responses, at the sampling temperature."""
        temperature, result = self._settings.temperature, torch.zeros(len(queries), dtype=torch.float64)

        def measure(rows: list[int]) -> None:
            padded = picked(queries, responses, rows, self._tokenizer.pad_token_id)
            batch = padded.to(self._rt.device)
            with self._rt.autocast():
                logprobs = logprobs_of(self._policy, batch, temperature).float()
                ref_logprobs = self._reference.logprobs(batch, temperature).float()
            kl = torch.where(batch.response_mask, k1(logprobs, ref_logprobs), 0).double().sum(1)
            result[rows] = kl.cpu()[: len(rows)]

        budget = TokenBudget(self._settings.micro_batch_tokens)
        self._rt.run_batches(budget, sizes(queries, responses), measure)
        if not bool(result.isfinite().all()):
            raise NonFiniteError("the KL to the reference is NaN or infinite at the selection prompts")
        return result

    def _scored(
        self, queries: Sequence[Ids], responses: Sequence[Ids], kept: Columns, batch: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """(B,) by scorer of all rows, on all processes; the first process alone sends requests."""
        rt = self._rt
        # but passes of a sharded reward model need all processes
        if any(scorer.kind == "http" for scorer in self._settings.scorers) and not rt.shards:
            ask = rt.is_main
            parts = fail_together(
                rt, lambda: self._scorers.parts(queries, responses, kept) if ask else {}, batch
            )
            result: dict[str, Tensor] = rt.from_main(parts)
            return result
        shares = {name: rt.share(values) for name, values in kept.items()}
        own = rt.share(queries), rt.share(responses), shares
        parts = fail_together(rt, lambda: self._scorers.parts(*own), batch)
        result = interleaved(rt.each(parts))
        return result

    def _heldout_scores(self, queries: Sequence[Ids], responses: Sequence[Ids]) -> Tensor:
        assert self._heldout is not None
        scores = self._heldout(queries, responses)
        if not bool(scores.isfinite().all()):
            raise NonFiniteError("models/reward_heldout gave NaN or infinity")
        return scores

    def _under_eos_rule(self, scores: Tensor, responses: Sequence[Ids]) -> Tensor:
        stop, rule = stop_token(self._settings, self._tokenizer), self._settings.truncation
        is_bootstrapped = rule.kind.startswith("bootstrap")  # no critic here values an unfinished response
        return truncated_scores(
            scores,
            torch.tensor([ids[-1] == stop for ids in responses]),
            "none" if is_bootstrapped else rule.kind,
            missing_eos_score=rule.missing_eos_score if isinstance(rule, EosTrick) else 0.0,
        )

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self._best,
            "selected": dict(self._selected),
            "weights": self._weights,
            "samples": list(self.samples),
            "answers": list(self.answers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best, self._selected = state["best"], dict(state["selected"])
        self._weights = sharding.kept(self._policy, state["weights"])
        self.samples, self.answers = list(state["samples"]), list(state["answers"])


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights that training changes, on the CPU: all of them, or a LoRA adapter's."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return sharding.weights_of(model, but=frozen)
