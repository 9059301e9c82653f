"""Win rates of the results document, as the report shows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rlhf_tasks.judging.results import ComparisonResult, EvaluationResults
from rlhf_tasks.report import charts, names

OPTIMISED = "the reward that PPO optimised: its win rate is no evidence that the policy got better"


@dataclass(frozen=True)
class WinRate:
    """One comparison with what its interval shows."""

    comparison: ComparisonResult

    @property
    def pair(self) -> tuple[str, str]:
        return names.model(self.comparison.a), names.model(self.comparison.b)

    @property
    def tone(self) -> str:
        """The class of the style sheet: `ahead`, `behind` or `level`."""
        rate = self.comparison.win_rate
        return "ahead" if rate.low > 0.5 else "behind" if rate.high < 0.5 else "level"

    @property
    def conclusion(self) -> str:
        if self.tone == "level":
            return "no clear winner"
        a, b = self.pair
        return f"{a if self.tone == 'ahead' else b} better"

    @property
    def bar(self) -> Markup:
        rate, (a, b) = self.comparison.win_rate, self.pair
        label = f"{names.judge(self.comparison.judge)}, {a} against {b}"
        return charts.rate_bar(label, rate.value, rate.low, rate.high, self.tone)


def win_rates(results: EvaluationResults) -> list[WinRate]:
    """All comparisons, sorted by judge and pair."""
    order = sorted(results.comparisons, key=lambda one: one.stem)
    return [WinRate(comparison) for comparison in order]


def leading_judge(rates: Sequence[WinRate], optimised: Collection[str]) -> str:
    """The judge of the headline: gold if there is one, and none that PPO optimised if there is another."""
    judges = [rate.comparison.judge for rate in rates]
    return next(iter(sorted(judges, key=lambda name: (name != "gold", name in optimised))), "")


def headline(results: EvaluationResults, judge: str, a: str, b: str) -> tuple[str, WinRate | None]:
    """The title of a headline card, and its win rate if the pair was judged."""
    comparison = results.comparison(judge, a, b)
    title = f"{names.model(a)} against {names.model(b)}"
    return title, None if comparison is None else WinRate(comparison)


def by_judge(rates: Sequence[WinRate], optimised: Collection[str]) -> dict[str, list[WinRate]]:
    """Win rates by the judge's title, which marks a judge that PPO optimised."""
    groups: dict[str, list[WinRate]] = {}
    for rate in rates:
        judge = rate.comparison.judge
        warning = f" ({OPTIMISED})" if judge in optimised else ""
        groups.setdefault(f"{names.judge(judge)}{warning}", []).append(rate)
    return groups
