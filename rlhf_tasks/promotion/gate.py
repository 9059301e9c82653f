"""The gate: measured values against the criteria of `promotion`. Pure; no file, no registry.

Win rates are held to the lower end of their 95% interval, so that luck promotes nothing. Two judges agree
here when both put that end above the bound. Cohen's kappa would not do: it falls as a policy gets so much
better that there is little left to disagree about (both judges see 95% wins, and kappa is near 0), and it
is taken over SFT's answers too, which say nothing about this policy.

A value that is not there, or is no finite number, fails its criterion and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rlhf_tasks import console
from rlhf_tasks.config import Promotion

Relation = Literal[">", ">=", "<="]
Value = float | str
"""What was measured, or why it is not known."""
OPPOSITES: Mapping[str, str] = {">": "≤", ">=": "<", "<=": ">"}
TEXTS = {"sft_text": "SFT text", "general": "general text"}


@dataclass(frozen=True)
class Criterion:
    """What is asked of one value; `key` is its name among metrics and tags, `title` the one for people."""

    key: str
    title: str
    value: float | None
    relation: Relation
    bound: float
    lacking: str = ""
    """Why there is no value."""

    @property
    def margin(self) -> float | None:
        """How far the value is on the right side of its bound; negative on the wrong one."""
        if self.value is None:
            return None
        return self.bound - self.value if self.relation == "<=" else self.value - self.bound

    @property
    def passed(self) -> bool:
        margin = self.margin
        return margin is not None and (margin > 0 if self.relation == ">" else margin >= 0)

    @property
    def complaint(self) -> str:
        """Why it failed, such as `KL 11.2 > 10`."""
        if self.value is None:
            return f"{self.title} is not known: {self.lacking}"
        return f"{self.title} {self.value:.4g} {OPPOSITES[self.relation]} {self.bound:g}"


@dataclass(frozen=True)
class Verdict:
    criteria: Sequence[Criterion]

    @property
    def passed(self) -> bool:
        return all(criterion.passed for criterion in self.criteria)

    @property
    def summary(self) -> str:
        failed = [criterion.complaint for criterion in self.criteria if not criterion.passed]
        return "; ".join(failed) if failed else f"all {len(self.criteria)} criteria are met"

    def withheld(self, title: str) -> Verdict:
        """The same, and refused for a reason that is none of the policy's numbers."""
        return Verdict((*self.criteria, Criterion("withheld", title, 1.0, "<=", 0.0)))

    def tree(self) -> dict[str, Any]:
        """As JSON holds it."""
        criteria = [asdict(c) | {"margin": c.margin, "passed": c.passed} for c in self.criteria]
        return {"passed": self.passed, "summary": self.summary, "criteria": criteria}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> Verdict:
        """Back from JSON."""
        names = [field.name for field in fields(Criterion)]
        return cls(tuple(Criterion(**{name: told[name] for name in names}) for told in tree["criteria"]))

    def metrics(self) -> dict[str, float]:
        """`KEY/value`, `KEY/bound`, `KEY/margin`, `KEY/passed` (1 or 0), and `gate/passed` of all."""
        found = {"gate/passed": float(self.passed)}
        for criterion in self.criteria:
            numbers = {"value": criterion.value, "bound": criterion.bound, "margin": criterion.margin}
            numbers["passed"] = float(criterion.passed)
            found |= {f"{criterion.key}/{name}": x for name, x in numbers.items() if x is not None}
        return found

    def rows(self) -> list[dict[str, str]]:
        """A table's rows, for people."""
        return [
            {
                "criterion": c.title,
                "value": "not known" if c.value is None else f"{c.value:.4g}",
                "asked": f"{c.relation} {c.bound:g}",
                "margin": "" if c.margin is None else f"{c.margin:+.4g}",
                "result": "passed" if c.passed else "FAILED",
            }
            for c in self.criteria
        ]


def decide(
    settings: Promotion, measured: Mapping[str, float], *, suspects: Collection[str], champion: bool
) -> Verdict:
    """Every criterion that is asked for.

    Args:
        measured: By the names of metrics/judge.json; `JUDGE/policy_vs_champion/…` likewise; and `kl`.
        suspects: The judges that the gate goes by and those they mix: none may be what PPO optimised.
        champion: Whether there is one to be beaten.
    """
    return Verdict(tuple(_criteria(settings, measured, suspects, champion)))


def _criteria(
    settings: Promotion, measured: Mapping[str, float], suspects: Collection[str], champion: bool
) -> Iterator[Criterion]:
    bounds = {"sft": settings.over_sft, "champion": settings.over_champion if champion else None}
    pairs = [(judge, b) for b, bound in bounds.items() if bound is not None for judge in settings.named]
    for judge, b in pairs:
        title = f"win rate over {'SFT' if b == 'sft' else 'the champion'} by {judge} (95% low)"
        low = _of(measured, f"{judge}/policy_vs_{b}/low")
        yield from _asked(f"over_{b}/{judge}", title, low, ">", bounds[b])
    yield from _cost(settings, measured)
    stems = [f"{judge}/policy_vs_{b}" for judge, b in pairs]
    share = _with(lambda *all: max(all), *(_failure_share(measured, stem) for stem in stems))
    yield from _asked("failure_share", "share of failed verdicts", share, "<=", settings.max_failure_share)
    fewest = _with(lambda *all: min(all), *(_of(measured, f"{stem}/examples") for stem in stems))
    yield from _asked("examples", "judged examples", fewest, ">=", settings.min_examples)
    told = [name for name in sorted(suspects) if measured.get(f"{name}/is_optimised_reward")]
    title = "judges that are the optimised reward" + (f" ({', '.join(told)})" if told else "")
    yield Criterion("optimised_judges", title, float(len(told)), "<=", 0.0)


def _cost(settings: Promotion, measured: Mapping[str, float]) -> Iterator[Criterion]:
    """How far the policy went from SFT, and what it forgot on the way."""
    yield from _asked("kl", "KL", _of(measured, "kl"), "<=", settings.max_kl)
    for text, name in TEXTS.items():
        policy, sft = (f"perplexity/{text}/{who}" for who in ("policy", "sft"))
        if text == "general" and policy not in measured and sft not in measured:
            continue  # judge.retention.general is off
        growth = _with(lambda p, s: p / s, _of(measured, policy), _of(measured, sft))
        title = f"perplexity on {name} over SFT's"
        yield from _asked(f"perplexity/{text}", title, growth, "<=", settings.max_perplexity_growth)
    drop = _with(lambda s, p: s - p, _of(measured, "choice/sft"), _of(measured, "choice/policy"))
    yield from _asked("choice_drop", "right choices lost since SFT", drop, "<=", settings.max_choice_drop)


def _asked(
    key: str, title: str, value: Value, relation: Relation, bound: float | None
) -> Iterator[Criterion]:
    """Nothing where the bound is null."""
    if bound is None:
        return
    if isinstance(value, str):
        yield Criterion(key, title, None, relation, float(bound), value)
    else:
        yield Criterion(key, title, float(value), relation, float(bound))


def _of(measured: Mapping[str, float], key: str) -> Value:
    value = measured.get(key)
    if value is None:
        return f"{key} was not measured of this policy"
    return value if math.isfinite(value) else f"{key} is {value}"


def _with(function: Callable[..., float], *values: Value) -> Value:
    """Of all values, or why one of them is not known."""
    lacking = next((value for value in values if isinstance(value, str)), None)
    return lacking if lacking is not None else function(*values)


def _failure_share(measured: Mapping[str, float], stem: str) -> Value:
    counts = (_of(measured, f"{stem}/{name}") for name in ("failures", "examples"))
    return _with(lambda failed, judged: failed / (failed + judged), *counts)


def show(verdict: Verdict) -> None:
    rows = verdict.rows()
    console.table("the gate", list(rows[0]), [list(row.values()) for row in rows])
