"""How far judges agree, with each other and with people, and what a judge that compares costs and favours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlhf_tasks.report import charts


@dataclass(frozen=True)
class Agreement:
    """Cohen's κ of two judges, or of a judge and people; `share` where it is told."""

    who: str
    kappa: str
    interval: str
    share: str


@dataclass(frozen=True)
class Bias:
    """What only a judge that compares has, of one pair of contenders."""

    who: str
    flips: float
    first: float
    replies: float
    tokens: float


def agreements(judge: Mapping[str, float], named: Callable[[str], str]) -> list[Agreement]:
    """From `human/JUDGE/kappa` and `kappa/X_and_Y` of metrics/judge.json."""
    found = []
    for key in judge:
        person = re.fullmatch(r"human/([^/]+)/kappa", key)
        if person:
            share = f"human/{person[1]}/agreement"
            text = (
                f"{charts.percent(judge[share])} ({charts.percent(judge[f'{share}/low'])} to "
                f"{charts.percent(judge[f'{share}/high'])})"
                if share in judge
                else ""
            )
            found.append(_agreement(judge, key, f"{named(person[1])} and people", text))
    for key in judge:
        pair = re.fullmatch(r"kappa/(.+)_and_([^/]+)", key)
        if pair:
            found.append(_agreement(judge, key, f"{named(pair[1])} and {_lower(named(pair[2]))}", ""))
    return found


def _agreement(judge: Mapping[str, float], key: str, who: str, share: str) -> Agreement:
    interval = f"{judge[f'{key}/low']:.2f} to {judge[f'{key}/high']:.2f}".replace("-", "−")
    return Agreement(who, f"{judge[key]:.2f}".replace("-", "−"), interval, share)


def biases(judge: Mapping[str, float], named: Callable[[str], str]) -> list[Bias]:
    """From `JUDGE/A_vs_B/position_bias` and its neighbours."""
    found = []
    for key, flips in judge.items():
        pair = re.fullmatch(r"(.+)/(.+)_vs_(.+)/position_bias", key)
        if pair:
            stem = key.removesuffix("position_bias")
            first, replies, tokens = (
                judge[stem + name] for name in ("first_share", "cost/replies", "cost/tokens")
            )
            who = f"{named(pair[1])}: {named(pair[2])} against {named(pair[3])}"
            found.append(Bias(who, flips, first, replies, tokens))
    return found


def _lower(name: str) -> str:
    """Within a sentence; a judge's own name stays as it is."""
    return name[:1].lower() + name[1:]
