"""How positive a response is, by VADER (Hutto and Gilbert 2014): a lexicon and rules, no model."""

from collections.abc import Sequence

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer


def vader(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The compound score of each response, from −1 to 1; a text without a word of the lexicon has 0."""
    analyzer = SentimentIntensityAnalyzer()
    return [float(analyzer.polarity_scores(response)["compound"]) for response in responses]
