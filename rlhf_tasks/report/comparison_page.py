"""`rlhf compare RUN…`: runs side by side as one page, in the form of the report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic
from rlhf_tasks.report import charts, comparison, page
from rlhf_tasks.report.charts import Figure
from rlhf_tasks.report.comparison import Result
from rlhf_tasks.report.inputs import Curve

MAX_SETTINGS = 6  # lines that a figure can tell apart
SHOWN = 40  # characters of a setting beside its letter
WIN_RATE = "/win_rate"
HEADLINES = (
    "ppo/objective/kl", "ppo/objective/scores", "ppo/objective/rlhf_reward", "ppo/selected_episode",
    "reward/accuracy", "reward/calibration", "sft/perplexity", "judge/length/policy", "judge/rouge_l/policy",
    "judge/perplexity/sft_text/policy", "judge/choice/policy",
)  # fmt: skip
# stage, metric, title, band, guide
PANELS: tuple[tuple[str, str, str, tuple[float, float] | None, float | None], ...] = (
    ("ppo", "objective/kl", "KL from the reference", page.KL_BAND, None),
    ("ppo", "objective/scores", "Reward", None, None),
    ("ppo", "objective/rlhf_reward", "Reward less the KL penalty", None, None),
    ("ppo", "eval/heldout_scores", "Held-out reward", None, None),
    ("ppo", "policy/clipfrac_avg", "Clip fraction", None, None),
    ("ppo", "val/ratio", "Probability ratio", None, 1.0),
    ("ppo", "policy/entropy_avg", "Entropy", None, None),
    ("ppo", "loss/policy_avg", "Policy loss", None, None),
    ("ppo", "loss/value_avg", "Value loss", None, None),
    ("reward", "eval/loss", "Reward model’s validation loss", None, None),
    ("reward", "eval/accuracy", "Reward model’s validation accuracy", None, None),
    ("sft", "eval/loss", "SFT validation loss", None, None),
    ("base", "train/loss", "Base model’s loss", None, None),
)


def run(root: Path, asked: Sequence[str], out: Path) -> None:
    """Write the comparison of these runs to `out`, and show its headlines.

    Raises:
        UserError: for a run that is unknown, or more settings than a figure can show.
    """
    drawn = [*dict.fromkeys(metric for _, metric, *_ in PANELS), WIN_RATE]
    found: dict[str, Result] = {}
    for name in asked:
        result = comparison.find(root, name, drawn)
        if found.setdefault(result.identity, result).experiment != name:
            console.say(f"{name} is the same run as {found[result.identity].experiment}: it counts once")
    results = comparison.settled(list(found.values()))
    atomic.write_text(out, page.document("comparison.html", context(results)))
    groups = _groups(results)
    rows = [[name, *(_cell(own, name) for own in groups.values())] for name in _headlines(results)]
    console.table(f"{len(results)} run(s), {len(groups)} setting(s)", ["metric", *groups], rows)
    console.say(f"wrote {out}")


def context(results: Sequence[Result]) -> dict[str, Any]:
    """The template's variables."""
    groups = _groups(results)
    headlines = _headlines(results)
    others = sorted({name for result in results for name in result.metrics} - set(headlines))
    return {
        "num_runs": len(results),
        "groups": [
            (label, [(result.experiment, result.seed) for result in own]) for label, own in groups.items()
        ],
        "parameters": _parameters(groups),
        "headlines": [(name, [_cell(own, name) for own in groups.values()]) for name in headlines],
        "others": [(name, [_cell(own, name) for own in groups.values()]) for name in others],
        "figures_drawn": list(_figures(groups)),
    }


def _groups(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs by a letter and as much of their setting as fits."""
    by_setting: dict[str, list[Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, []).append(result)
    if len(by_setting) > MAX_SETTINGS:
        raise UserError(
            f"these runs have {len(by_setting)} different settings, and a figure shows {MAX_SETTINGS} at "
            "most; give fewer runs"
        )
    labels = (chr(ord("A") + order) for order in range(len(by_setting)))
    return {
        f"{letter}: {setting[:SHOWN]}{'…' if len(setting) > SHOWN else ''}" if setting else letter: own
        for letter, (setting, own) in zip(labels, by_setting.items(), strict=True)
    }


def _parameters(groups: Mapping[str, Sequence[Result]]) -> list[tuple[str, list[str]]]:
    """The parameters in which the settings differ, with the value of each."""
    firsts = [own[0].parameters for own in groups.values()]
    return [
        (key, [parameters.get(key, comparison.UNKNOWN) for parameters in firsts])
        for key in comparison.differing(firsts)
    ]


def _headlines(results: Sequence[Result]) -> list[str]:
    known = dict.fromkeys(name for result in results for name in result.metrics)
    rates = [name for name in known if re.fullmatch(rf"judge/.+_vs_.+{WIN_RATE}", name)]
    return rates + [name for name in HEADLINES if name in known]


def _cell(results: Sequence[Result], name: str) -> str:
    """One run: its value, with its interval if it has one; several: mean ± standard deviation."""
    own = [result for result in results if name in result.metrics]
    if len(own) != 1 or len(results) > 1:
        return comparison.cell(results, name)
    metrics = own[0].metrics
    stem = name.removesuffix(WIN_RATE) if name.endswith(WIN_RATE) else name
    text = charts.number(metrics[name])
    if f"{stem}/low" in metrics and f"{stem}/high" in metrics:
        low, high = (charts.number(metrics[f"{stem}/{end}"]) for end in ("low", "high"))
        text += f" ({low} to {high})"
    return text


def _figures(groups: Mapping[str, Sequence[Result]]) -> Iterator[Figure]:
    judged = dict.fromkeys(
        name
        for own in groups.values()
        for result in own
        for row in result.curves.get("judge", ())
        for name in row
        if name.endswith(WIN_RATE)
    )
    for name in judged:
        yield from _figure(groups, "judge", name, f"Win rate by {name.split('/')[0]}", None, 0.5)
    for stage, name, title, band, guide in PANELS:
        yield from _figure(groups, stage, name, title, band, guide)


def _figure(
    groups: Mapping[str, Sequence[Result]],
    stage: str,
    name: str,
    title: str,
    band: tuple[float, float] | None,
    guide: float | None,
) -> Iterator[Figure]:
    """A line and a band a setting; nothing where no run has the curve.

    A setting without it keeps its place, so that a setting has one colour in all figures.
    """
    curves = [_curve(label[0], own, stage, name) for label, own in groups.items()]
    if not any(curve.x for curve in curves):
        return
    rows = (row for own in groups.values() for r in own for row in r.curves.get(stage, ()) if name in row)
    axis = next(iter(next(rows)))
    svg = charts.line_chart(title, axis, curves, band=band, guide=guide)
    yield Figure(title, f"{stage}, {name}", svg, [curve.name for curve in curves])


def _curve(label: str, results: Sequence[Result], stage: str, name: str) -> Curve:
    xs, means, deviations = comparison.band(results, name, stage)
    if len(results) == 1:
        return Curve(label, tuple(xs), tuple(means))
    low, high = (tuple(m + side * d for m, d in zip(means, deviations, strict=True)) for side in (-1, 1))
    return Curve(label, tuple(xs), tuple(means), low=low, high=high)
