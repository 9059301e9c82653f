"""Methods from the same start side by side: the page of `rlhf methods`. No torch.

A policy is judged against its seed's SFT model, on the same test prompts as those of the other methods. The
interval of a win rate, and of its difference to the first method's, is over seeds and prompts
(`statistics.mean_over_seeds`); those of the differences by one judge hold together. The cost is counted in
tokens that the base model could have read instead: 1 for each token of a forward pass, 2 more with gradients.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_tasks.config import Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.statistics import Floats
from rlhf_tasks.project import atomic, dvc_cli, git
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import comparison, document
from rlhf_tasks.tracking import catalogue
from rlhf_tasks.tracking.curves import Curve, Figure

BEST_OF = re.compile(r"best_of_(\d+)")
POLICY, BEST = "policy", "best_of_n"
SHARED: tuple[Stage, ...] = ("preferences", "reward")
OWN: tuple[Stage, ...] = ("dpo", "value", "ppo")
"""The stages whose cost counts: those of pairs and reward models, which methods share, and a method's own."""
COSTS = {
    "own": "Training, million tokens",
    "shared": "Pairs and reward models, million tokens",
    "seconds": "Training, seconds",
    "memory": "Training, GB at most",
    "response": "Tokens to answer a prompt",
}
COMPARISONS, LINEAGE = "evaluation/judge/comparisons.parquet", "models/lineage/{}.json"


@dataclass(frozen=True)
class Trial:
    """A run of a method with a seed."""

    run: comparison.Result
    outcomes: Mapping[tuple[str, str], Floats]
    """By judge and contender, `policy` or `best_of_n`: (N,) outcomes against the SFT model."""
    prompts: tuple[str, ...]
    seconds: float
    """Of the method's own stages, when they ran."""
    memory: float
    """GB at most in these stages, on one GPU or in one process."""

    def tokens(self, *stages: Stage) -> float:
        """What stages cost, in tokens that the base model reads in a forward pass."""
        metrics, curves = self.run.metrics, self.run.curves
        tflop = sum(metrics.get(f"{stage}/compute/forward_tflop", 0.0) for stage in stages)
        tflop += sum(
            max((row[name] for row in curves.get(stage, ()) if name in row), default=0.0)
            for stage in stages
            for name in ("compute/tflop", "heldout/compute/tflop")
        )
        return tflop * 1e12 / (2 * metrics["base/parameters"])

    @cached_property
    def course(self) -> list[tuple[float, float, float]]:
        """(cost, KL, score) of each evaluation on validation prompts; NaN without a held-out model.

        Of PPO after DPO there are none: its KL is from models/dpo there.
        """
        points, metrics, before = [], self.run.metrics, 0.0
        is_after_dpo = bool(self.run.curves.get("dpo"))
        for stage in OWN:  # no policy is evaluated in stage value, but it costs
            before += metrics.get(f"{stage}/compute/forward_tflop", 0.0)
            tflop = 0.0
            for row in self.run.curves.get(stage, ()):
                tflop = row.get("compute/tflop", tflop)
                if "eval/kl" in row and not (stage == "ppo" and is_after_dpo):
                    tokens = (before + tflop) * 1e12 / (2 * metrics["base/parameters"])
                    points.append((tokens, row["eval/kl"], row.get("eval/heldout_scores", math.nan)))
            before += tflop
        return points


def read(root: Path, experiment: str) -> Trial:
    """A finished run, by the name of its experiment."""
    run, revision = comparison.find(Paths(root), experiment), git.find_experiment(root, experiment)
    assert revision is not None
    compared, *lineages = dvc_cli.read_outs(root, revision, COMPARISONS, *map(LINEAGE.format, OWN))
    rows = dict[tuple[str, str], list[dict[str, Any]]]()
    for row in pq.read_table(io.BytesIO(compared)).to_pylist():
        if row["a"] in (POLICY, BEST) and row["b"] == "sft":
            rows.setdefault((row["judge"], row["a"]), []).append(row)
    outcomes = {key: np.array([row["outcome"] for row in own], np.float64) for key, own in rows.items()}
    prompts = tuple(row["prompt"] for row in next(iter(rows.values())))
    known = [json.loads(text) for text in lineages]
    seconds = sum(one["seconds"] for one in known)
    return Trial(run, outcomes, prompts, seconds, max(one.get("peak_memory_gb", 0.0) for one in known))


def write(root: Path, runs: Sequence[tuple[str, str]], out: Path) -> None:
    """Write the page of these runs, given as method and experiment.

    Raises:
        UserError: if no seed has a run of every method; if the seeds have different numbers of prompts.
    """
    trials = dict[str, dict[int, Trial]]()
    for method, experiment in runs:
        trial = read(root, experiment)
        trials.setdefault(method, {})[trial.run.seed] = trial
    seeds = sorted(set.intersection(*(set(own) for own in trials.values())))
    if not seeds:
        raise UserError("no seed has a finished run of every method, so that they cannot be compared")
    groups = {method: [own[seed] for seed in seeds] for method, own in trials.items()}
    if len({len(trial.prompts) for own in groups.values() for trial in own}) > 1:
        raise UserError("the seeds have different numbers of test prompts; lower judge.num_examples")
    atomic.write_text(out, document.render("methods.html", context(groups)))


def context(groups: Mapping[str, Sequence[Trial]]) -> dict[str, Any]:
    """The template's variables, from the runs of each method, of the same seeds in the same order."""
    first = next(iter(groups.values()))
    judges = [name for name, who in first[0].outcomes if who == POLICY]
    shown = {method: [_outcomes(own, judge, POLICY) for judge in judges] for method, own in groups.items()}
    of_sft = first[0].run.parameters.get("judge.best_of_n_model", "sft") == "sft"  # else it has another start
    if of_sft and (judges[0], BEST) in first[0].outcomes:
        name = f"best of {json.loads(first[0].run.parameters['judge.best_of_n'])} by models/reward"
        shown[name] = [_outcomes(first, judge, BEST) for judge in judges]
    by_judge = dict[str, str]()
    for judge in judges:
        by_judge[judge] = f"Over SFT by {catalogue.placeholder_in_words(judge)}"
        by_judge[f"{judge}/lead"] = f"… less {next(iter(groups))}, points"
    same = len({trial.prompts for trial in first}) == 1
    rows = dict[str, dict[str, str]]()
    for method, values in shown.items():
        rows[method] = {}
        for judge, own, reference in zip(judges, values, next(iter(shown.values())), strict=True):
            rate = statistics.mean_over_seeds(own, same_prompts=same)
            rate = replace(rate, low=max(0.0, rate.low), high=min(1.0, rate.high))  # t knows no bounds
            rows[method][judge] = document.share(rate)
            if own is not reference:
                lead = statistics.mean_over_seeds(
                    own - reference, same_prompts=same, num_intervals=len(shown) - 1
                )
                rows[method][f"{judge}/lead"] = document.interval(lead, 100)
        rows[method] |= _costs(groups[method]) if method in groups else _costs_of_best(first)
    return {
        "rows": rows,
        "worth": {**by_judge, "kl": "KL from SFT, nats"},
        "costs": COSTS,
        "groups": groups,
        "optimized": {method: optimizes(own[0].run.parameters) for method, own in groups.items()},
        "is_synthetic": first[0].run.parameters.get("data.source") == "synthetic",
        "curves": list(_figures(groups)),
    }


def _outcomes(trials: Sequence[Trial], judge: str, who: str) -> Floats:
    """(S, N) by seed and prompt."""
    return np.stack([trial.outcomes[judge, who] for trial in trials])


def _costs(trials: Sequence[Trial]) -> dict[str, str]:
    runs = [trial.run for trial in trials]
    own, shared = (fmean(trial.tokens(*stages) for trial in trials) for stages in (OWN, SHARED))
    return {
        "kl": comparison.cell(runs, "ppo/selected_kl"),
        "own": f"{own / 1e6:,.1f}",
        "shared": f"{shared / 1e6:,.1f}",
        "seconds": f"{fmean(trial.seconds for trial in trials):,.0f}",
        "memory": f"{max(trial.memory for trial in trials):,.1f}",
        "response": comparison.cell(runs, "judge/length/policy"),
    }


def _costs_of_best(trials: Sequence[Trial]) -> dict[str, str]:
    runs = [trial.run for trial in trials]
    shared = fmean(trial.tokens(*SHARED) for trial in trials)
    kl, response = (comparison.cell(runs, f"judge/{BEST}/{name}") for name in ("kl", "tokens"))
    nothing = {"own": "0", "seconds": "0", "memory": "0"}
    return nothing | {"kl": kl, "shared": f"{shared / 1e6:,.1f}", "response": response}


def optimizes(parameters: Mapping[str, str]) -> str:
    """What a method is trained on, and what chooses its weights, from a run's parameters."""
    parts, is_held_out = [], parameters.get("reward.train") != "false"
    chooser = "models/reward_heldout" if is_held_out else "its validation loss"
    if parameters.get("dpo.train") == "true":
        source = "noisy gold labels" if parameters.get("data.source") == "synthetic" else "the data's labels"
        labels = parameters.get("preferences.function", "null")
        parts.append(f"pairs by {source if labels == 'null' else labels}")
    if parameters.get("ppo.train") != "false":
        scorers = json.loads(parameters.get("ppo.scorers", "[]"))
        parts.append(f"scores by {', '.join(dict.fromkeys(one['kind'] for one in scorers))}")
        last = chooser if is_held_out else "nothing: the last"
        chooser = parameters.get("ppo.select_by.judge.name", last)
    return f"{', then '.join(parts)}; weights chosen by {chooser}"


def _figures(groups: Mapping[str, Sequence[Trial]]) -> Iterator[Figure]:
    """The held-out score over KL and over cost in the course of training; without a score KL over cost."""
    axes = ("million tokens of a forward pass", "KL from the SFT model, nats per response", "held-out score")
    titles = ("Cost", "KL", "Held-out score")
    scale = (1e6, 1.0, 1.0)
    courses = {  # (E, S, 3), as far as all seeds were evaluated
        method: np.array([*zip(*(trial.course for trial in trials), strict=False)]).reshape(
            -1, len(trials), 3
        )
        for method, trials in groups.items()
    }
    is_scored = all(np.isfinite(course).all() for course in courses.values())
    for x, y in ((1, 2), (0, 2)) if is_scored else ((0, 1),):
        curves = []
        for method, course in courses.items():
            mean = course.mean(1) / scale
            error = course[..., y].std(1, ddof=1) if course.shape[1] > 1 else np.zeros(len(course))
            low, high = mean[:, y] - error, mean[:, y] + error
            curves.append(Curve(method, *([*map(float, of)] for of in (mean[:, x], mean[:, y], low, high))))
        note = "On validation prompts; mean and standard deviation over seeds."
        yield Figure(f"{titles[y]} over {'cost' if x == 0 else 'KL'}", note, axes[x], curves)
