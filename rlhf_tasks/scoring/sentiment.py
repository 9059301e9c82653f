"""How positive a response is, by VADER (Hutto and Gilbert 2014): a lexicon and rules, no model."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_tasks.errors import UserError

try:  # here, so that a stage finds out before it samples
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
except ImportError:
    raise UserError(f"{__name__} needs `pip install vaderSentiment`") from None


def vader(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The compound score of each response, from −1 to 1; a text without a word of the lexicon has 0."""
    analyzer = SentimentIntensityAnalyzer()
    return [float(analyzer.polarity_scores(response)["compound"]) for response in responses]
