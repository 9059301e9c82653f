"""How a template becomes one HTML document, and how numbers become text.

Digits follow the interval: ±1 keeps one decimal, ±1.5 none. A number without an interval has three
significant digits.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import jinja2
from markupsafe import Markup, escape

from rlhf_tasks.config import Stage
from rlhf_tasks.judging.results import ComparisonResult
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.tracking import catalogue, curves
from rlhf_tasks.tracking.curves import Figure

FOLDER = Path(__file__).parent
NUM_FIRST = 3  # figures of a policy's training that a page shows unfolded, such as KL, reward, clip fraction
MODELS = {"base": "Base model", "sft": "SFT model", "policy": "Policy", "best_of_n": "Best of n"}
MODELS |= {"reference": "References"}
"""Titles of the models. References are the responses of the data; no model is called a reference."""


def render(template: str, variables: Mapping[str, Any], script_name: str = "page.js") -> str:
    """A template of this folder, filled in. Only the page's own script can run, by its hash."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for one in (number, share, metric, without_ends, model, tone, in_words, key, code, describe):
        environment.filters[one.__name__] = one
    environment.filters["judge"] = catalogue.placeholder_in_words  # in a sentence: `the gold judge`
    environment.filters["svg"] = lambda figure: Markup(curves.draw_svg(figure))
    style, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", script_name))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"style": Markup(style), "script": Markup(script), "script_hash": f"sha256-{digest}"}
    return environment.get_template(template).render(**own, **variables)


def number(value: float, error: float | None = None) -> str:
    """A number as text; with a standard error, `2.10 ± 0.07`."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if error is not None and 0 < error < math.inf:
        digits = _decimals(error)
        return f"{value:,.{digits}f} ± {error:.{digits}f}".replace("-", "−")
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:#.3g}".rstrip(".").replace("-", "−")


def interval(one: Interval, scale: float = 1, unit: str = "") -> str:
    """`0.66 (0.64 to 0.68)`. An end that is not one half is not rounded to one half."""
    digits = _decimals(scale * (one.high - one.low) / 2) if one.high > one.low else 1 if unit else 3
    ends = [x for x in (one.low, one.high) if x != 0.5]
    while digits < 6 and any(round(scale * x, digits) == scale / 2 for x in ends):
        digits += 1
    rounded = (round(scale * x, digits) + 0.0 for x in (one.value, one.low, one.high))  # −0.0 becomes 0.0
    value, low, high = (f"{x:,.{digits}f}{unit}" for x in rounded)
    return f"{value} ({low} to {high})".replace("-", "−")


def share(one: Interval | float) -> str:
    """`78% (76% to 80%)`; a share without an interval has one decimal."""
    return interval(one, 100, "%") if isinstance(one, Interval) else f"{100 * one:.1f}%"


def metric(metrics: Mapping[str, float], key: str) -> str:
    """A metric as text, with its interval or standard error if it has one."""
    stem = key.removesuffix("/win_rate")
    low, high = metrics.get(f"{stem}/low"), metrics.get(f"{stem}/high")
    if low is None or high is None:
        return number(metrics[key], metrics.get(f"{key}/standard_error"))
    return interval(Interval(value=metrics[key], low=low, high=high))


def without_ends(metrics: Mapping[str, float]) -> list[str]:
    """The names of metrics that are no end of another metric's interval, and no standard error."""
    ends = ("low", "high", "standard_error")
    own = {f"{key.removesuffix('/win_rate')}/{end}" for key in metrics for end in ends}
    return [key for key in metrics if key not in own]


def _decimals(error: float) -> int:
    """Decimals of a value with this error, at most 6."""
    return min(6, max(0, -math.floor(math.log10(error / 1.2)))) if 0 < error < math.inf else 1


def model(name: str) -> str:
    return MODELS.get(name, name)


def tone(one: ComparisonResult) -> str:
    """What the interval of a win rate shows of A, as the style sheet's class: ahead, behind or level."""
    return "ahead" if one.win_rate.low > 0.5 else "behind" if one.win_rate.high < 0.5 else "level"


def in_words(name: str, words: Mapping[str, str] = catalogue.WORDS) -> str:
    """The words for a metric `STAGE/NAME`; `words` are those of the judges."""
    stage, _, own = name.partition("/")
    return catalogue.in_words(cast(Stage, stage), own, words)


def key(name: str) -> Markup:
    """A metric's name, a parameter or a path, which a narrow page may break after `/`, `_` and `.` only."""
    parts = re.split(r"(?<=[/_.])", name)
    return Markup("<code>{}</code>").format(Markup("<wbr>").join(parts))


def code(text: str) -> Markup:
    """A text of the catalogue as HTML: what stands between backticks is code."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )


def describe(figure: Figure) -> str:
    """A figure for readers who do not see it: its title, and the ends of its curves."""
    values = (
        f"{c.name} from {number(c.y[0])} to {number(c.y[-1])}, lowest {number(min(c.y))}, "
        f"highest {number(max(c.y))}"
        for c in figure.curves
        if c.y
    )
    return f"{figure.title}, by {figure.axis}: {'; '.join(values)}"


def split(figures: Iterable[Figure]) -> tuple[list[Figure], list[Figure]]:
    """The figures that a page shows at once, and the rest."""
    trained: tuple[Stage, ...] = ("ppo", "dpo")
    titles = [panel.title for stage in trained for panel in catalogue.panels(stage)[:NUM_FIRST]]
    all_figures = list(figures)
    first = [figure for figure in all_figures if figure.title in titles]
    return first, [figure for figure in all_figures if figure.title not in titles]
