"""The catalogue: every metric that the stages log, with its formula, its reading, its figure.

Tables of the docs, the report, MLflow's figure, DVC's plots and the summaries of a flow are made from it.
No torch and no MLflow here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from rlhf_tasks.config import Stage
from rlhf_tasks.tracking.metrics import data, judge, ppo, supervised, verdict
from rlhf_tasks.tracking.metrics.kinds import PLACEHOLDERS, Metric, Panel

__all__ = [
    "METRICS", "PLACEHOLDERS", "Metric", "Panel", "find", "headlines", "in_words", "ordered", "panels",
    "select_headlines",
]  # fmt: skip

METRICS: tuple[Metric, ...] = (
    *data.PREPARE,
    *supervised.BASE,
    *supervised.SFT,
    *data.PREFERENCES,
    *supervised.REWARD,
    *ppo.METRICS,
    *judge.METRICS,
    *verdict.METRICS,
)
"""In the order of the stages; within a stage in the order in which tables list them."""
_PANELS: tuple[Panel, ...] = (*supervised.PANELS, *ppo.PANELS, *judge.PANELS)


@cache
def panels(stage: Stage) -> tuple[Panel, ...]:
    """The figures of a stage, in their order, each with its metrics."""
    return tuple(
        replace(panel, metrics=tuple(m for m in METRICS if m.stage == stage and m.panel == panel.title))
        for panel in _PANELS
        if panel.stage == stage
    )


@cache
def headlines(stage: Stage) -> tuple[Metric, ...]:
    """The metrics of a stage that overview tables show."""
    return tuple(metric for metric in METRICS if metric.stage == stage and metric.headline)


def select_headlines(stage: Stage, names: Iterable[str]) -> list[str]:
    """Those of a stage's logged names that overview tables show, in the catalogue's order."""
    known = list(names)
    return [name for metric in headlines(stage) for name in metric.select(known)]


def ordered(stage: Stage, names: Iterable[str]) -> list[str]:
    """A stage's logged names: the headlines first, then the others in the catalogue's order."""
    known = sorted(names)
    chosen = select_headlines(stage, known)
    places = {name: METRICS.index(metric) for name in known if (metric := find(stage, name))}
    others = sorted({*known} - {*chosen}, key=lambda name: (places.get(name, len(METRICS)), name))
    return [*chosen, *others]


def in_words(stage: Stage, name: str) -> str:
    """What people read instead of a logged name; the name itself if the catalogue does not have it."""
    metric = find(stage, name)
    return name if metric is None else metric.in_words(name)


def find(stage: Stage, name: str) -> Metric | None:
    """The entry of a logged name, as in metrics/STAGE.json or plots/STAGE.csv; None if there is none."""
    own = [metric for metric in METRICS if metric.stage == stage and metric.matches(name)]
    return min(own, key=lambda metric: len(metric.placeholders), default=None)
