"""The report's page: what its template shows, and how a template becomes a document."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jinja2
from markupsafe import Markup, escape

from rlhf_tasks.config import Stage, flatten
from rlhf_tasks.report import (
    agreement,
    chain,
    charts,
    figures,
    measures,
    names,
    numbers,
    reward_diagnostics,
    samples,
)
from rlhf_tasks.report.inputs import Inputs
from rlhf_tasks.report.win_rates import by_judge, headline, leading_judge, win_rates
from rlhf_tasks.tracking import catalogue

KL = "objective/kl"


def render(inputs: Inputs, run: Mapping[str, str]) -> str:
    """The whole page as one HTML document that loads nothing. Equal inputs give equal text.

    `run` says which run this is: see `identity.facts`.
    """
    return document("page.html", {"run": run, **context(inputs)})


def document(template: str, variables: Mapping[str, Any]) -> str:
    """A template of this folder, filled in; its variable `style` is the style sheet."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": numbers.number, "percent": numbers.percent, "hundredths": numbers.hundredths,
        "named": names.model, "judge_named": names.judge, "code": _code, "key": _key,
        "in_words": _in_words,
    }  # fmt: skip
    style = Markup((here / "page.css").read_text(encoding="utf-8"))  # our own file, so trusted
    return environment.get_template(template).render(style=style, **variables)


def context(inputs: Inputs) -> dict[str, Any]:
    """The template's variables."""
    return {
        **_win_rates(inputs),
        **_measured(inputs),
        "gate": inputs.verdict or {"criteria": []},
        "gate_is_off": inputs.verdict == {},
        "kl": _kl(inputs.metrics.get("ppo", {})),
        "ppo_figures": figures.of_stages(inputs.curves, ("judge", "ppo")),
        "loss_figures": figures.of_stages(inputs.curves, ("sft", "reward", "base")),
        "trips": inputs.trips,
        "training_samples": samples.of_training(inputs.ppo_samples),
        "metrics": inputs.metrics,
        "chain": chain.links(inputs.lineage, inputs.outs),
        "lineage": {stage: _flat(tree) for stage, tree in inputs.lineage.items()},
        "missing": inputs.missing,
    }


def _win_rates(inputs: Inputs) -> dict[str, Any]:
    results = inputs.results
    rates = win_rates(results)
    judge = leading_judge(rates, results.optimised_judges)
    won, lost = samples.clearest(inputs, judge)
    return {
        "judge_name": names.judge(judge),
        "headlines": [headline(results, judge, "policy", other) for other in ("reference", "sft")],
        "rates": by_judge(rates, results.optimised_judges),
        "rate_scale": charts.rate_scale(),
        "agreements": agreement.agreements(results),
        "biased": agreement.biased(results),
        "sample_groups": [("Where the policy won most", won), ("Where the policy lost most", lost)],
    }


def _measured(inputs: Inputs) -> dict[str, Any]:
    results = inputs.results
    return {
        "tables": [
            ("Responses to the judged prompts", names.RESPONDERS, measures.responses(results)),
            ("What the language models still know", names.LANGUAGE_MODELS, measures.retention(results)),
        ],
        "facts": measures.reward_facts(inputs.metrics.get("reward", {}), results),
        "diagnostic_figures": [
            *reward_diagnostics.calibration(inputs.calibration, results),
            *reward_diagnostics.lengths(inputs.lengths),
        ],
    }


def _kl(ppo: Mapping[str, float]) -> dict[str, Any] | None:
    """The card of the kept checkpoint's KL, as in the gate, else of the last rollout's; None without both."""
    selected, last = ppo.get("selected_kl"), ppo.get(KL)
    value = last if selected is None else selected
    if value is None or not math.isfinite(value):
        return None
    low, high = _kl_band()
    side = "inside" if low <= value <= high else "outside"
    label = f"KL {numbers.number(value)} nats, {side} the band from {low:g} to {high:g}"
    return {
        "value": value,
        "band": (low, high),
        "side": side,
        "svg": charts.gauge(label, value, (low, high)),
        "episode": ppo.get("selected_episode"),
        "standard_error": ppo.get("selected_kl_standard_error"),
        "is_selected": selected is not None,
        "last": last,
    }


def _kl_band() -> tuple[float, float]:
    """The catalogue's band of the KL's figure."""
    bands = (p.band for p in catalogue.panels("ppo") if any(metric.name == KL for metric in p.metrics))
    band = next(bands)
    assert band is not None, "the catalogue gives the KL a band"
    return band


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in flatten(tree).items()
    }


def _in_words(name: str) -> str:
    """The words for a metric `STAGE/NAME`."""
    stage, _, own = name.partition("/")
    return catalogue.in_words(cast(Stage, stage), own)


def _key(name: str) -> Markup:
    """A metric's name, a parameter or a path, which a narrow page may break after `/`, `_` and `.` only."""
    parts = re.split(r"(?<=[/_.])", name)
    return Markup("<code>{}</code>").format(Markup("<wbr>").join(parts))


def _code(text: str) -> Markup:
    """A text of the catalogue as HTML: what stands between backticks is code."""
    parts = str(text).split("`")
    pieces = [Markup("<code>{}</code>").format(p) if i % 2 else escape(p) for i, p in enumerate(parts)]
    return Markup("").join(pieces)
