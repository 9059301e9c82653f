"""How positive a response is, by VADER (Hutto and Gilbert 2014): a lexicon and rules, no model."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_tasks.errors import UserError


def vader(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The compound score of each response, from −1 to 1; a text without a word of the lexicon has 0.

    Raises:
        UserError: if the package is not installed.
    """
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ImportError:
        raise UserError(f"{__name__}:vader needs `pip install vaderSentiment`") from None
    analyzer = SentimentIntensityAnalyzer()
    return [float(analyzer.polarity_scores(response)["compound"]) for response in responses]
