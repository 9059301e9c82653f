"""Builds the scorers of `ppo.scorers`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import scorers as config
from rlhf_tasks.modeling.load import TokenScores
from rlhf_tasks.scoring.combine import LengthPenalty, Part, WeightedSum, score_zero
from rlhf_tasks.scoring.function import FunctionScorer
from rlhf_tasks.scoring.http import HttpScorer
from rlhf_tasks.scoring.protocol import Scorer
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
    combine: config.Combination = "sum",
    columns: Collection[str] = (),
) -> WeightedSum:
    """The weighted sum of `ppo.scorers`; the kind `reward_model` with a null path needs `reward_model`.

    Functions are imported from files below `root`; the folders of reward models are below it too, and those
    models are put into the `placement`. `columns` are the names of the kept columns.

    Raises:
        UserError: for a function that cannot be imported or needs a column that is not kept, an invalid
            URL, or a folder without a trained reward model.
    """

    def make(one: config.Scorer) -> Scorer:
        match one:
            case config.RewardModelScorer(path=None):
                assert reward_model is not None, "the config guarantees a reward model"
                return RewardModel(reward_model, tokenizer, max_tokens, placement)
            case config.RewardModelScorer(path=str(path)):
                return load_foreign(root / path, tokenizer, max_tokens, placement)
            case config.FunctionScorer():
                return FunctionScorer(one.function, "ppo.scorers", root, columns)
            case config.HttpScorer():
                return HttpScorer(
                    one.url,
                    timeout_seconds=one.timeout_seconds,
                    batch_size=one.batch_size,
                    key_variable=one.key_variable,
                )
            case config.LengthPenalty():
                return LengthPenalty(one.max_tokens, one.buffer, tokenizer)
            case config.VerifierScorer():
                return Verifier(one.checks, one.format)
        return score_zero

    parts = [
        Part(name, 0.0 if isinstance(one, config.DummyScorer) else one.weight, make(one))
        for name, one in zip(config.scorer_names(settings), settings, strict=True)
    ]
    return WeightedSum(parts, combine)
