"""Inputs → what the template shows: headline, win rates, figures, samples, tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rlhf_tasks.config import flatten
from rlhf_tasks.evaluation.statistics import Summary, summarise
from rlhf_tasks.report import agreement, chain, charts, trust
from rlhf_tasks.report.charts import Figure
from rlhf_tasks.report.inputs import Curves, Inputs, Rows

KL_BAND = (0.0, 10.0)  # nats; where PPO's objective/kl should end
NUM_SAMPLES = 5  # of each kind: won most, lost most
NUM_TRAINING_SAMPLES = 3  # of an episode, for the first, middle and last that were kept
ANSWERERS = ("reference", "sft", "policy")
LANGUAGE_MODELS = ("base", "sft", "policy")
RETENTION = ("perplexity/", "choice/")
NAMES = {"base": "Base", "reference": "Reference", "sft": "SFT", "policy": "Policy"}
OPTIMISED = "the reward that PPO optimised: its word is no evidence that the policy got better"
JUDGES = {"gold": "Gold judge", "reward_model": "Reward model"}
FACTS = ("accuracy", "margin", "calibration", "length_correlation", "correlation", "agreement")


@dataclass(frozen=True)
class Rate:
    """A judge's win rate of A over B with its 95% interval; `counts` where the verdicts are there."""

    judge: str
    a: str
    b: str
    value: float
    low: float
    high: float
    counts: Summary | None

    @property
    def tone(self) -> str:
        return "ahead" if self.low > 0.5 else "behind" if self.high < 0.5 else "level"

    @property
    def conclusion(self) -> str:
        """What the interval lets one say."""
        if self.tone == "level":
            return "no clear winner"
        return f"{NAMES.get(self.a if self.tone == 'ahead' else self.b, self.b)} better"

    @property
    def bar(self) -> Markup:
        label = f"{_judge_name(self.judge)}, {NAMES.get(self.a, self.a)} against {NAMES.get(self.b, self.b)}"
        return charts.rate_bar(label, self.value, self.low, self.high, self.tone)


@dataclass(frozen=True)
class Sample:
    """A judged prompt: (who, answer, score or None) for each answerer, the policy's lead, and it in words."""

    index: int
    prompt: str
    lead: float
    words: str
    answers: Sequence[tuple[str, str, float | None]]


# stage, title, metrics, band, guide, what to look for
_PPO_FIGURES: tuple[tuple[str, tuple[str, ...], tuple[float, float] | None, float | None, str], ...] = (
    ("Reward", ("objective/rlhf_reward", "objective/scores"), None, None,
     "Scores of the reward model, and the same less the KL penalty. Both should rise."),
    ("KL from the reference", ("objective/kl",), KL_BAND, None,
     "Nats per response, from the SFT policy unless ppo.reference_sync moves it. The shaded band is 0 to 10; "
     "beyond it the reward model is out of its depth."),
    ("Clip fraction", ("policy/clipfrac_avg",), None, None, "Share of tokens whose ratio was clipped."),
    ("Probability ratio", ("val/ratio",), None, 1.0, "New over old policy; near 1 when updates are small."),
    ("Entropy", ("policy/entropy_avg",), None, None, "Nats per token; a collapse means one answer for all."),
    ("Policy loss", ("loss/policy_avg",), None, None, "Clipped surrogate."),
    ("Value loss", ("loss/value_avg",), None, None, "Clipped squared error; should fall, then settle."),
)  # fmt: skip
_LOSS_FIGURES = (
    ("sft", "loss", "SFT loss", "Cross-entropy of completion tokens, nats."),
    ("sft", "token_accuracy", "SFT token accuracy", "Share of completion tokens guessed right."),
    ("reward", "loss", "Reward model loss", "−log σ(chosen − rejected)."),
    ("reward", "accuracy", "Reward model accuracy", "Share of pairs ranked as labelled."),
    ("base", "loss", "Base model loss", "Cross-entropy of all tokens, nats."),
)


def render(inputs: Inputs) -> str:
    """The whole page, as one HTML document that loads nothing. The same inputs give the same text."""
    return document("page.html", context(inputs))


def document(template: str, variables: Mapping[str, Any]) -> str:
    """A template of this folder, filled; its `style` is the style sheet."""
    here = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(here),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": charts.number, "percent": charts.percent, "named": _name}
    style = Markup((here / "page.css").read_text(encoding="utf-8"))  # our own file, so trusted
    return environment.get_template(template).render(style=style, **variables)


def context(inputs: Inputs) -> dict[str, Any]:
    """The template's variables."""
    judge = inputs.metrics["judge"]
    rates = list(_rates(judge, inputs.verdicts))
    optimised = {key.split("/")[0] for key in judge if key.endswith("/is_optimised_reward")}
    by_rank = sorted((r.judge for r in rates), key=lambda name: (name != "gold", name in optimised))
    lead = next(iter(by_rank), "")
    won, lost = _samples(inputs, lead)
    return {
        "judge_name": _judge_name(lead),
        "headlines": [_headline(rates, lead, "policy", other) for other in ("reference", "sft")],
        "gate": inputs.gate or {"criteria": []},
        "gate_is_off": inputs.gate == {},
        "kl": _kl(inputs.metrics.get("ppo", {})),
        "rates": _grouped(rates, optimised),
        "rate_scale": charts.rate_scale(),
        "agreements": agreement.agreements(judge, _judge_name),
        "biases": agreement.biases(judge, lambda key: NAMES.get(key, _judge_name(key))),
        "tables": [
            ("Answers to the judged prompts", ANSWERERS, _measures(judge)),
            ("What the language model still knows", LANGUAGE_MODELS, _retained(judge)),
        ],
        "ppo_figures": [
            *_win_figures(inputs.curves.get("judge")),
            *_ppo_figures(inputs.curves.get("ppo")),
        ],
        "loss_figures": list(_loss_figures(inputs.curves)),
        "facts": _facts(inputs.metrics),
        "trust_figures": [
            *trust.calibration(inputs.calibration, judge),
            *trust.lengths(inputs.lengths, JUDGES, {who: NAMES[who] for who in reversed(ANSWERERS)}),
        ],
        "sample_groups": [("Where the policy won most", won), ("Where the policy lost most", lost)],
        "trips": inputs.trips,
        "training_samples": _training_samples(inputs.ppo_samples),
        "metrics": inputs.metrics,
        "chain": chain.links(inputs.lineage, inputs.outs),
        "lineage": {stage: _flat(tree) for stage, tree in inputs.lineage.items()},
        "missing": inputs.missing,
    }


def _name(key: str) -> str:
    return NAMES.get(key, key)


def _judge_name(judge: str) -> str:
    return JUDGES.get(judge, judge)


def _rates(judge: Mapping[str, float], verdicts: Rows) -> Iterator[Rate]:
    """Every JUDGE/A_vs_B/win_rate of metrics/judge.json, in its order, with counts from the verdicts."""
    given: dict[tuple[str, str, str], list[float]] = {}
    for row in verdicts:
        outcome = math.nan if row["outcome"] is None else row["outcome"]
        given.setdefault((row["judge"], row["a"], row["b"]), []).append(outcome)
    for key, value in judge.items():
        found = re.fullmatch(r"(.+)/(.+)_vs_([^/]+)/win_rate", key)
        if found:
            who, a, b = found.groups()
            stem = key.removesuffix("win_rate")
            outcomes = given.get((who, a, b), [])
            counts = summarise(outcomes) if any(not math.isnan(o) for o in outcomes) else None
            yield Rate(who, a, b, value, judge[f"{stem}low"], judge[f"{stem}high"], counts)


def _headline(rates: Sequence[Rate], judge: str, a: str, b: str) -> tuple[str, Rate | None]:
    found = next((r for r in rates if (r.judge, r.a, r.b) == (judge, a, b)), None)
    return f"{NAMES[a]} against {NAMES[b]}", found


def _grouped(rates: Sequence[Rate], optimised: Collection[str]) -> dict[str, list[Rate]]:
    groups: dict[str, list[Rate]] = {}
    for rate in rates:
        warning = f" ({OPTIMISED})" if rate.judge in optimised else ""
        groups.setdefault(f"{_judge_name(rate.judge)}{warning}", []).append(rate)
    return groups


def _kl(ppo: Mapping[str, float]) -> dict[str, Any] | None:
    value = ppo.get("objective/kl")
    if value is None or not math.isfinite(value):
        return None
    low, high = KL_BAND
    side = "inside" if low <= value <= high else "outside"
    label = f"KL {charts.number(value)} nats, {side} the band from {low:g} to {high:g}"
    return {
        "value": value,
        "inside": side == "inside",
        "svg": charts.gauge(label, value, KL_BAND),
        "episode": ppo.get("selected_episode"),
    }


def _measures(judge: Mapping[str, float]) -> dict[str, dict[str, str]]:
    """`gold/policy/coverage`, `rouge_l/policy`, …: measure → answerer → value."""
    return _by_who({k: v for k, v in judge.items() if not k.startswith(RETENTION)}, ANSWERERS)


def _retained(judge: Mapping[str, float]) -> dict[str, dict[str, str]]:
    """`perplexity/sft_text/base`, `choice/base` with its interval, …: measure → model → value."""
    return _by_who({k: v for k, v in judge.items() if k.startswith(RETENTION)}, LANGUAGE_MODELS)


def _by_who(values: Mapping[str, float], names: Collection[str]) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for key in values:
        parts = key.split("/")
        who = [part for part in parts if part in names]
        if len(who) == 1 and not _is_end(values, key):
            measure = "/".join(p for p in parts if p not in names)
            table.setdefault(measure, {})[who[0]] = _with_interval(values, key)
    return table


def _ppo_figures(curves: Curves | None) -> Iterator[Figure]:
    if curves is None:
        return
    for title, names, band, guide, note in _PPO_FIGURES:
        yield from _figure(curves, title, names, note, band=band, guide=guide)
    yield from _figure(
        curves,
        "Held-out reward",
        ("eval/scores", "eval/heldout_scores"),
        "On validation prompts: the reward that is optimised, and a second reward model that never is and "
        "chooses the checkpoint. The first rising alone is over-optimisation.",
    )


def _win_figures(curves: Curves | None) -> Iterator[Figure]:
    """How the win rate went while PPO trained."""
    if curves is None:
        return
    names = tuple(name for name in curves.by_name if name.endswith("/win_rate"))
    note = (
        "Over the references, as training went, on the validation prompts by which the "
        "checkpoint was chosen: who chose it, models/reward_heldout or ppo.select_by's judge, flatters it."
    )
    yield from _figure(curves, "Win rate", names, note, guide=0.5)


def _loss_figures(curves: Mapping[str, Curves]) -> Iterator[Figure]:
    for stage, kind, title, note in _LOSS_FIGURES:
        if stage in curves:
            names = tuple(n for n in curves[stage].by_name if n.rpartition("/")[2] == kind)
            yield from _figure(curves[stage], title, names, note)


def _figure(
    curves: Curves,
    title: str,
    names: Sequence[str],
    note: str,
    *,
    band: tuple[float, float] | None = None,
    guide: float | None = None,
) -> Iterator[Figure]:
    """One figure of those named curves that have points; nothing when none has."""
    drawn = [curves.by_name[n] for n in names if n in curves.by_name and curves.by_name[n].x]
    if drawn:
        lost = sum(curve.num_not_finite for curve in drawn)
        if lost:
            note = f"{note} {lost} value(s) were not finite and are not drawn."
        svg = charts.line_chart(title, curves.axis, drawn, band=band, guide=guide)
        yield Figure(title, note, svg, [curve.name for curve in drawn])


def _facts(metrics: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """Numbers that say how far the reward model can be trusted, from its stage and the judge's."""
    reward = {k: v for k, v in metrics.get("reward", {}).items() if any(word in k for word in FACTS)}
    judge = {k: v for k, v in metrics["judge"].items() if k.startswith(("agreement/", "reward_gap/"))}
    return [
        (key, _with_interval(own, key)) for own in (reward, judge) for key in own if not _is_end(own, key)
    ]


def _is_end(values: Mapping[str, float], key: str) -> bool:
    """Whether this is the low or high end of another value's interval."""
    stem, _, end = key.rpartition("/")
    return end in ("low", "high") and stem in values


def _with_interval(values: Mapping[str, float], key: str) -> str:
    text = charts.number(values[key])
    if f"{key}/low" not in values or f"{key}/high" not in values:
        return text
    return f"{text} ({charts.number(values[f'{key}/low'])} to {charts.number(values[f'{key}/high'])})"


def _samples(inputs: Inputs, judge: str) -> tuple[list[Sample], list[Sample]]:
    """Prompts with the policy's greatest lead over the reference, and those with its greatest lag."""
    answers = {row["index"]: row for row in inputs.answers}
    rows = {
        row["index"]: row
        for row in inputs.verdicts
        if (row["judge"], row["a"], row["b"]) == (judge, "policy", "reference") and row["index"] in answers
    }
    leads = [(lead, index) for index, row in rows.items() if (lead := _lead(row)) is not None]
    won = sorted((-lead, index) for lead, index in leads if lead > 0)[:NUM_SAMPLES]
    lost = sorted((lead, index) for lead, index in leads if lead < 0)[:NUM_SAMPLES]
    return (
        [_sample(answers[index], -lead, judge, rows[index]) for lead, index in won],
        [_sample(answers[index], lead, judge, rows[index]) for lead, index in lost],
    )


def _lead(row: Mapping[str, Any]) -> float | None:
    """How far A is ahead: by score; by probability over both orders, beyond ½; by the bare verdict.

    None where the judge failed; 0 for a tie.
    """
    if row["outcome"] is None or math.isnan(row["outcome"]):
        return None
    if row["score_a"] is not None and row["score_b"] is not None:
        return float(row["score_a"] - row["score_b"])
    if _orders(row) and row["outcome"] != 0.5:
        return sum(_orders(row)) / 2 - 0.5
    return float(row["outcome"]) - 0.5


def _orders(row: Mapping[str, Any]) -> list[float]:
    """Probability that A is better, A shown first and second; empty of a judge that was not shown both."""
    given = [row.get(name) for name in ("a_shown_first", "a_shown_second")]
    return [] if None in given else [float(p) for p in given if p is not None]


def _lead_in_words(row: Mapping[str, Any], lead: float) -> str:
    side = "ahead" if lead > 0 else "behind"
    if row["score_a"] is not None and row["score_b"] is not None:
        return f"{side} by {charts.number(abs(lead))}"
    return f"{side} with {charts.percent(abs(lead) + 0.5)}" if _orders(row) else side


def _sample(row: Mapping[str, Any], lead: float, judge: str, verdict: Mapping[str, Any]) -> Sample:
    answers = [(who, row[who] or "", row.get(f"{judge}/{who}")) for who in ANSWERERS if who in row]
    return Sample(row["index"], row["prompt"], lead, _lead_in_words(verdict, lead), answers)


def _training_samples(rows: Rows) -> Rows:
    """A few of the samples kept in training, at the first, the middle and the last of their episodes."""
    episodes = sorted({row["episode"] for row in rows})
    chosen = sorted({episodes[i] for i in (0, len(episodes) // 2, -1)}) if episodes else []
    return [row for at in chosen for row in [r for r in rows if r["episode"] == at][:NUM_TRAINING_SAMPLES]]


def _flat(tree: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in flatten(tree).items()
    }
