"""The scorers of `ppo.scorers`: built, and added up by weight.

B responses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data import synthetic
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.function import ImportedScorer
from rlhf_tasks.scoring.http import ScoringService
from rlhf_tasks.scoring.protocol import NonFiniteScore, Responses, Scorer
from rlhf_tasks.scoring.retokenize import special_names
from rlhf_tasks.scoring.reward_model import Placement, RewardModel, load_foreign
from rlhf_tasks.scoring.verifier import Verifier


def build(
    settings: Sequence[config.Scorer],
    tokenizer: PreTrainedTokenizerBase,
    *,
    reward_model: TokenScores | None,
    max_tokens: int,
    root: Path,
    placement: Placement,
    columns: Collection[str] = (),
) -> WeightedSum:
    """The weighted sum of `ppo.scorers`; the kind `reward_model` with a null path needs `reward_model`.

    Functions are imported from files below `root`; the folders of reward models are below it too, and those
    models are put into the `placement`. `columns` are the names of the kept columns.

    Raises:
        UserError: for a function that cannot be imported or needs a column that is not kept, an unset
            key, or a folder without a trained reward model.
    """

    def make(one: config.Scorer, name: str) -> Scorer:
        match one:
            case config.RewardModelScorer(path=None):
                assert reward_model is not None, "the config guarantees a reward model"
                return RewardModel(reward_model, tokenizer, max_tokens, placement)
            case config.RewardModelScorer(path=str(path)):
                return load_foreign(root / path, tokenizer, max_tokens, placement)
            case config.FunctionScorer():
                return ImportedScorer(one.function, "ppo.scorers", root, columns)
            case config.HttpScorer():
                return ScoringService(one)
            case config.LlmScorer():
                # The import takes a second: only configurations with such a scorer pay for it.
                from rlhf_tasks.scoring.rubric import RubricScorer

                return RubricScorer(one, name, Paths(root), special_names(tokenizer))
            case config.LengthPenalty():
                return OverlongPenalty(one.max_tokens, one.buffer, tokenizer)
            case config.VerifierScorer():
                return Verifier(one.checks, one.format)
        return lambda rows: torch.zeros(len(rows))  # it runs the pipeline with nothing to learn

    parts = [
        WeightedScorer(name, 0.0 if isinstance(one, config.DummyScorer) else one.weight, make(one, name))
        for name, one in zip(config.scorer_names(settings), settings, strict=True)
    ]
    return WeightedSum(parts)


class WeightedScorer(NamedTuple):
    """A scorer with its name in the metrics and its weight."""

    name: str
    weight: float
    scorer: Scorer


class WeightedSum:
    """Σ weight · score over the parts."""

    def __init__(self, parts: Sequence[WeightedScorer]) -> None:
        self._rewards = [part for part in parts if isinstance(part.scorer, RewardModel)]
        self._others = [part for part in parts if not isinstance(part.scorer, RewardModel)]
        self._names = [part.name for part in parts]

    def parts(self, rows: Responses) -> dict[str, Tensor]:
        """Each part's scores, unweighted: (B,) float32 on the CPU.

        Raises:
            ScorerError: if one of them is not finite, or the scorer fails.
        """
        # Reward models come first: where they are sharded, all processes make their passes together, and a
        # part that raises must not keep one process from them.
        scores = {part.name: part.scorer(rows).float() for part in [*self._rewards, *self._others]}
        for name in self._names:
            wrong = (~scores[name].isfinite()).nonzero().flatten().tolist()
            if wrong:
                raise NonFiniteScore(
                    f"ppo.scorers: {name} gave {float(scores[name][wrong[0]])} for response {wrong[0]} of "
                    f"{len(rows)} ({len(wrong)} of them are not finite)"
                )
        return {name: scores[name] for name in self._names}

    def total(self, parts: Mapping[str, Tensor]) -> Tensor:
        """(B,): Σ weight · score."""
        weighted = [part.weight * parts[part.name] for part in self._others]
        if self._rewards:
            rewards = torch.stack([part.weight * parts[part.name] for part in self._rewards])
            weighted.insert(0, rewards.sum(dim=0))
        return torch.stack(weighted).sum(dim=0)


class OverlongPenalty:
    """The soft over-length penalty of DAPO (arXiv 2503.14476, eq. 13), 0 to −1.

    0 up to max_tokens − buffer, then (max_tokens − buffer − length) / buffer, and −1 above max_tokens.
    """

    def __init__(self, max_tokens: int, buffer: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self._start, self._buffer, self._tokenizer = max_tokens - buffer, buffer, tokenizer

    def __call__(self, rows: Responses) -> Tensor:
        lengths = torch.tensor([len(response) for response in rows.ids(self._tokenizer)[1]]).float()
        return ((self._start - lengths) / self._buffer).clamp(-1.0, 0.0)


def score_gold(rows: Responses) -> Tensor:
    """(B,) float64: the synthetic task's own score, which knows the facts of every post."""
    return torch.tensor(synthetic.gold_scores(rows.prompts, rows.texts), dtype=torch.float64)
