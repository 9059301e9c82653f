"""The catalogue: every metric that the stages log, with its formula, its reading, its figure.

The entries are in metrics/STAGE.toml, in the order in which tables list them. Tables of the docs, the report,
MLflow's figure, DVC's plots and the summaries of a flow are made from them. No torch and no MLflow here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from rlhf_tasks.config import STAGES, Stage
from rlhf_tasks.config.judge import RESERVED, Judge

FOLDER = Path(__file__).parent / "metrics"
_JUDGE = rf"(?!(?:{RESERVED})/)[a-z][a-z0-9_]*"
PLACEHOLDERS: Mapping[str, tuple[str, str]] = {
    "JUDGE": (_JUDGE, "the name of a judge in `judge.judges`"),
    "OTHER": (_JUDGE, "the name of another judge in `judge.judges`"),
    "A": (r"best_of_n|[a-z0-9]+", "the first model: `policy`, `sft` or `best_of_n`"),
    "B": (r"best_of_n|[a-z0-9]+", "`sft`, `reference`, `base`, `best_of_n`, or `champion` of `rlhf promote`"),
    "MODEL": (r"policy|sft|reference|base|best_of_n", "`policy`, `sft` or `base`; of responses any A or B"),
    "REWARD": (r"reward|reward_heldout", "which reward model: `reward` or `reward_heldout`"),
    "POSITION": (r"first|middle|last", "which token of a response: `first`, `middle` or `last`"),
    "ORIGIN": (
        r"given|sft_samples|policy_samples",
        "where the pairs come from: `given` in the data, two `sft_samples`, or two `policy_samples`",
    ),
    "SET": (r"[A-Za-z0-9][\w.-]*", "the name of a set of `data.mix`, if there are several"),
    "VALUE": (r"[\w.-]+", "a column of the verifier's `by` with one of its values, as `COLUMN.VALUE`"),
    "ROLE": (r"sft|preferences|prompts", "`sft` (demonstrations), `preferences` or `prompts`"),
    "SPLIT": (r"train|validation|test", "`train`, `validation` or `test`"),
    "REASON": (r"[a-z0-9_]+", "why a row cannot be used, such as `too_long` or `duplicate`"),
    "SCORER": (
        r"[a-z0-9_]+",
        "a scorer of `ppo.scorers`: its `name`, else its kind, and the second of a kind ends in `_2`",
    ),
    "TEXT": (
        r"sft_text|general",
        "`sft_text` (test demonstrations) or `general` (`judge.retention.general`)",
    ),
    "TASK": (r"[\w.-]+", "a task or group of `judge.retention.tasks`"),
    "MEASURE": (r"\w+", "a metric of the task, such as `acc`; with the name of its filter, if it has one"),
    "PART": (
        r"value|bound|margin|passed",
        "`value` (measured), `bound` (allowed), `margin` (distance to the bound, negative if missed) or "
        "`passed` (1 or 0)",
    ),
}  # words in capitals in a metric's name: what they match, and what they stand for
_PLACEHOLDER = re.compile(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])")
WORDS: Mapping[str, str] = {
    "sft": "SFT",
    "gold": "the gold judge",
    "reward_model": "the reward model",
    "reward": "the reward model that PPO optimizes",
    "reward_heldout": "the held-out reward model",
    "given": "given pairs",
    "sft_samples": "SFT samples",
    "sft_text": "SFT text",
    "general": "general text",
}  # how people read what stands for a placeholder; other values are words already
ENDS: Mapping[str, str] = {"low": ", low end of the interval", "high": ", high end of the interval"}


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Metric:
    """One metric, or a family of metrics whose name has placeholders in capitals."""

    name: str
    label: str  # what people read instead of the name; it has the same placeholders
    stage: Stage
    formula: str
    reading: str = ""  # how to interpret the value; empty where the formula leaves nothing to explain
    unit: str = ""  # empty for a number without a unit
    panel: str | None = None  # title of the figure that shows it
    headline: bool = False  # whether overview tables show it
    curve: bool = False
    """True: one point per step in plots/STAGE.csv. False: a final value in metrics/STAGE.json."""
    interval: bool = False  # whether NAME/low and NAME/high hold a 95% interval
    heldout: bool = False  # whether heldout/NAME holds the same for models/reward_heldout
    when: str = ""  # the condition under which it is logged; empty: always
    shipped: bool = True  # whether the condition holds with the shipped params.yaml

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_PLACEHOLDER.findall(self.name)))

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pieces = re.split(f"({_PLACEHOLDER.pattern})", self.name)
        body = "".join(
            f"(?P<{p}>{PLACEHOLDERS[p][0]})" if p in PLACEHOLDERS else re.escape(p) for p in pieces
        )
        prefix, suffix = "(?P<heldout>heldout/)?" * self.heldout, "(?:/(?P<end>low|high))?" * self.interval
        return re.compile(prefix + body + suffix)

    def matches(self, name: str) -> bool:
        """Whether a logged name is this metric, an end of its interval, or its held-out counterpart."""
        return self._pattern.fullmatch(name) is not None

    def in_words(self, name: str, words: Mapping[str, str] = WORDS) -> str:
        """The label of a logged name that matches: `policy_vs_sft` is `Policy against SFT`."""
        match = self._pattern.fullmatch(name)
        assert match, f"{name} is not {self.name}"
        values = match.groupdict()
        if self.stage == "ppo":
            words = WORDS  # a scorer may have the name of a judge
        text = _PLACEHOLDER.sub(
            lambda word: placeholder_in_words(values.get(word[0]) or word[0], words), self.label
        )
        heldout = " (held-out reward model)" if values.get("heldout") else ""
        return f"{text[0].upper()}{text[1:]}{heldout}{ENDS.get(values.get('end') or '', '')}"

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of the logged names that are this metric's values: no interval ends, held-out ones last."""
        ends = ("/low", "/high") if self.interval else ()
        own = [name for name in dict.fromkeys(names) if self.matches(name) and not name.endswith(ends)]
        return sorted(own, key=lambda name: self.heldout and name.startswith("heldout/"))


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Panel:
    """One figure: metrics of one stage that share an axis and a unit."""

    title: str
    stage: Stage
    note: str  # what to look for
    band: tuple[float, float] | None = None  # the range in which the values should stay
    guide: float | None = None  # a value to compare with, drawn as a dashed line

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(metric for metric in metrics(self.stage) if metric.panel == self.title)

    def select(self, names: Iterable[str]) -> list[str]:
        """Those of the logged names that the figure draws, in its order."""
        known = list(names)
        return [name for metric in self.metrics for name in metric.select(known)]


@cache
def _read(stage: Stage) -> Mapping[str, Any]:
    file = FOLDER / f"{stage}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


@cache
def metrics(stage: Stage) -> tuple[Metric, ...]:
    return tuple(Metric(stage=stage, **entry) for entry in _read(stage).get("metrics", ()))


@cache
def panels(stage: Stage) -> tuple[Panel, ...]:
    """The figures of a stage, in the catalogue's order."""
    return tuple(Panel(stage=stage, **entry) for entry in _read(stage).get("panels", ()))


def select_headlines(stage: Stage, names: Iterable[str]) -> list[str]:
    """Those of a stage's logged names that overview tables show, in the catalogue's order."""
    known = list(names)
    return [name for metric in metrics(stage) if metric.headline for name in metric.select(known)]


def headlines(names: Iterable[str], stages: Iterable[Stage] = STAGES) -> list[str]:
    """Those of the metrics `STAGE/NAME` that overview tables show, by stage and in the catalogue's order."""
    split = [name.partition("/") for name in names]
    own = {stage: [name for first, _, name in split if first == stage] for stage in stages}
    return [f"{stage}/{name}" for stage in own for name in select_headlines(stage, own[stage])]


def order(stage: Stage, names: Iterable[str]) -> list[str]:
    """A stage's logged names: the headlines first, then the others in the catalogue's order, train first."""
    known, own = sorted(names), metrics(stage)
    chosen = select_headlines(stage, known)
    places = {name: own.index(metric) for name in known if (metric := find(stage, name))}
    others = sorted(
        {*known} - {*chosen}, key=lambda name: (places.get(name, len(own)), not name.endswith("/train"), name)
    )
    return [*chosen, *others]


def words_of(judges: Iterable[Judge]) -> dict[str, str]:
    """WORDS, where the name of a judge that is a reward model of the pipeline is read as that model's."""
    models = (one for one in judges if one.kind == "reward_model" and one.is_of_pipeline)
    return {**WORDS, **{one.name: WORDS[Path(one.path).name] for one in models}}


def placeholder_in_words(value: str, words: Mapping[str, str] = WORDS) -> str:
    """A placeholder's value as people read it: `sft_samples` is `SFT samples`."""
    return words.get(value, value.replace("_", " "))


def in_words(stage: Stage, name: str, words: Mapping[str, str] = WORDS) -> str:
    """What people read instead of a logged name; the name itself if the catalogue does not have it."""
    metric = find(stage, name)
    return name if metric is None else metric.in_words(name, words)


def find(stage: Stage, name: str) -> Metric | None:
    """The entry of a logged name, as in metrics/STAGE.json or plots/STAGE.csv; None if there is none."""
    own = [metric for metric in metrics(stage) if metric.matches(name)]
    return min(own, key=lambda metric: len(metric.placeholders), default=None)
