"""Looking at the policy's answers to fixed validation prompts: which weights to keep, and what to show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config import Ppo
from rlhf_tasks.data.batches import Ids, encode, read_table, text_of
from rlhf_tasks.modeling.generation import answer
from rlhf_tasks.modeling.scorers import RewardScorer
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.ppo.collect import Scorers, agreed
from rlhf_tasks.ppo.referee import Referee
from rlhf_tasks.ppo.rewards import truncated_scores
from rlhf_tasks.ppo.trainer import stop_token
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training.runtime import Runtime

NUM_SAMPLE_PROMPTS = 4
NAMES = {"eval/win_rate": "selected_win_rate", "eval/heldout_scores": "selected_heldout_score"}
Metrics = dict[str, float]


class Watch:
    """Keeps the weights that the referee, else models/reward_heldout, likes best; without either, the last.

    The checkpoint is never chosen by the reward that is optimised, by the gold judge or on test data.
    """

    def __init__(
        self,
        rt: Runtime,
        settings: Ppo,
        policy: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        scorers: Scorers,
        heldout: RewardScorer | None,
        referee: Referee | None,
        seed: int,
    ) -> None:
        self._rt, self._settings, self._policy, self._seed = rt, settings, policy, seed
        self._tokenizer = tokenizer
        self._scorers, self._heldout, self._referee = scorers, heldout, referee
        rows = read_table(Paths(), "prompts", "validation")[: settings.num_selection_prompts]
        self._prompts = [row["prompt"] for row in rows]
        self._references = [row["reference"] for row in rows]
        self.best, self.episode = -float("inf"), 0
        self._weights: dict[str, Tensor] = {}
        self.samples: list[dict[str, Any]] = []
        """What was shown, kept for evaluation/ppo."""
        self.answers: list[dict[str, Any]] = []
        """To the selection prompts, each time: the judge tells from them how the win rate went."""

    def select(self, episode: int) -> Metrics:
        """Score answers by what is optimised and by those who choose, scores under the EOS rule."""
        answers, scores, heldout, _ = self._answered(self._prompts)
        texts = [text_of(self._tokenizer, answer) for answer in answers]
        self.answers += [
            {"episode": episode, "prompt": prompt, "reference": reference, "response": text}
            for prompt, reference, text in zip(self._prompts, self._references, texts, strict=True)
        ]
        metrics = {
            "eval/scores": float(scores.mean()),
            "eval/response_length": sum(map(len, answers)) / len(answers),
        }
        if heldout is not None:
            metrics["eval/heldout_scores"] = float(heldout.mean())
            metrics["eval/reward_gap"] = metrics["eval/scores"] - metrics["eval/heldout_scores"]
        if self._referee is not None:
            metrics["eval/win_rate"] = self._referee(self._prompts, texts, self._references)
        liked = metrics.get(self.chooses) if self.chooses else None
        if liked is None:
            self._keep(episode)
        elif liked > self.best:
            self.best = liked
            self._keep(episode)
        return metrics

    @property
    def chooses(self) -> str | None:
        """The metric by which weights are kept, if any."""
        if self._referee is not None:
            return "eval/win_rate"
        return None if self._heldout is None else "eval/heldout_scores"

    def _keep(self, episode: int) -> None:
        self.episode = episode
        self._weights = {key: value.detach().cpu().clone() for key, value in trained(self._policy).items()}

    def restore(self) -> None:
        """Put the kept weights back into the policy."""
        self._policy.load_state_dict(self._weights, strict=False)

    @property
    def result(self) -> Metrics:
        chosen = {"selected_episode": float(self.episode)}
        return chosen if self.chooses is None else chosen | {NAMES[self.chooses]: self.best}

    def show(self, episode: int) -> list[dict[str, Any]]:
        """A few answers with their scores."""
        prompts = self._prompts[:NUM_SAMPLE_PROMPTS]
        answers, scores, heldout, parts = self._answered(prompts)
        columns = {"score": scores, **(parts if len(parts) > 1 else {})}
        if heldout is not None:
            columns["reward_heldout"] = heldout
        rows = [
            {"episode": episode, "prompt": prompt, "response": text_of(self._tokenizer, response)}
            | {name: float(column[i]) for name, column in columns.items()}
            for i, (prompt, response) in enumerate(zip(prompts, answers, strict=True))
        ]
        self.samples += rows
        return rows

    @torch.no_grad()
    def _answered(self, prompts: list[str]) -> tuple[list[Ids], Tensor, Tensor | None, dict[str, Tensor]]:
        """The answers, their score and the held-out one under the EOS rule, and each scorer's own.

        Raises:
            NonFiniteError: on all processes, if any of it is NaN or infinite; the answers are its `batch`.
        """
        stop = stop_token(self._settings, self._tokenizer)
        answers = agreed(self._rt, lambda: self._sampled(prompts, stop), {"prompts": prompts})
        queries = encode(self._tokenizer, prompts)
        batch = {"prompts": prompts, "responses": answers}
        parts, heldout = agreed(self._rt, lambda: self._scored(queries, answers), batch)
        ended = torch.tensor([a[-1] == stop for a in answers])

        def ruled(scores: Tensor) -> Tensor:
            rule = self._settings.truncation
            if rule.startswith("bootstrap"):  # what an unfinished answer goes on to is worth nothing here
                rule = "none"
            return truncated_scores(
                scores, ended, rule, missing_eos_score=self._settings.missing_eos_score,
                gamma=self._settings.gamma, last_values=torch.zeros_like(scores),
            )  # fmt: skip

        return answers, ruled(self._scorers.total(parts)), None if heldout is None else ruled(heldout), parts

    def _sampled(self, prompts: list[str], stop: int) -> list[Ids]:
        training = self._policy.training
        self._policy.eval()
        try:
            with self._rt.autocast():
                return answer(
                    self._policy, self._tokenizer, prompts, max_new_tokens=self._settings.response_length,
                    temperature=self._settings.temperature, seed=self._seed, stop=stop,
                )  # fmt: skip
        finally:
            self._policy.train(training)

    def _scored(
        self, queries: Sequence[Ids], answers: Sequence[Ids]
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        parts = self._scorers.parts(queries, answers)
        heldout = None if self._heldout is None else self._heldout(queries, answers)
        if heldout is not None and not bool(heldout.isfinite().all()):
            raise NonFiniteError("models/reward_heldout gave NaN or infinity")
        return parts, heldout

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "episode": self.episode,
            "weights": self._weights,
            "samples": list(self.samples),
            "answers": list(self.answers),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.episode = state["best"], state["episode"]
        self._weights = state["weights"]
        self.samples, self.answers = list(state["samples"]), list(state["answers"])


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The weights that training changes: all of them, or a LoRA adapter's."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {name: value for name, value in model.state_dict().items() if name not in frozen}
