"""Stage judge: the SFT and PPO policies against the references and each other, on the test prompts.

Where the data has prompts alone, nothing is compared with references.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.config.judge import SELECTOR
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.synthetic import gold_scores
from rlhf_tasks.data.tokenizer import load_tokenizer, read_plain
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import results as typed
from rlhf_tasks.judging import reward_diagnostics, summary
from rlhf_tasks.judging.judges.build import ScoringJudge, build_judges
from rlhf_tasks.judging.judges.comparisons import (
    Comparisons,
    Judge,
    describe_training,
    find_judges_by_weights,
)
from rlhf_tasks.judging.responses import (
    BASE,
    BEST_OF_N,
    SAMPLED,
    ModelResponses,
    sample_alike,
    sample_models,
)
from rlhf_tasks.judging.retention import Probes, measure_responses
from rlhf_tasks.judging.rows import Label, measure_agreement, read_labels
from rlhf_tasks.models import contracts
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.distributed import Distributed

PAIRS = (
    *(("sft", "reference"), ("policy", "reference"), ("policy", "sft"), ("policy", BASE)),
    *((BEST_OF_N, "reference"), (BEST_OF_N, "sft"), ("policy", BEST_OF_N)),
)
SHOWN_PROMPTS = 20  # whose responses MLflow shows


@dataclass(frozen=True)
class Judged:
    """What the judges say of the models."""

    comparisons: dict[summary.Key, Comparisons] = field(default_factory=dict)
    scores: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By judge and model."""
    facets: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """By judge and model."""


def run(config: JudgeView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write evaluation/judge: results.json, and tables of comparisons, responses, sources and diagnostics.

    The metrics are those of `EvaluationResults.metrics`. Curves: the win rate over the references in the
    course of PPO's training, by the judges that score.

    Raises:
        UserError: if a judge cannot work or fails too often, or a file of labels or texts cannot be read.
    """
    dist, settings = Distributed(config.launch, config.seed), config.judge
    # 1. Whatever can fail is built and checked before anything is sampled.
    labels = read_labels(paths.root / settings.labels) if settings.labels else []
    if labels:
        asked = read_plain(load_tokenizer(paths.tokenizer), [label.prompt for label in labels])
        labels = [one.model_copy(update={"prompt": text}) for one, text in zip(labels, asked, strict=True)]
    labeled = {label.prompt for label in labels}
    summary.check_verifiers(settings, summary.read_judged_rows(paths, settings.num_examples, labeled))
    rows = read_table(paths, "prompts", "test")
    if settings.bar == "reference" and rows[0]["reference"] is None:
        raise UserError(
            "judge.bar: reference needs references, and data/prompts has prompts alone; set it to base"
        )
    chosen_by = set() if settings.best_of_n is None else {contracts.fingerprint(paths.reward)}
    for name, path in find_judges_by_weights(settings, chosen_by, paths.root).items():
        raise UserError(f"judge.best_of_n: the judge {name} ({path}) is models/reward, {SELECTOR}")
    judges = build_judges(settings, dist.device, paths, columns=columns.of_rows(rows))
    probes = None if settings.retention is None else Probes(settings.retention, paths)
    training = describe_training(settings, paths.policy, paths.root)
    for name, path in training["optimised_judges"].items():
        text = (
            f"judge {name} ({path}) is a reward that PPO optimized: its win rates do not show that "
            "the policy got better; use models/reward_heldout or another judge"
        )
        console.say(f"WARNING: {text}")
        tracker.event("judge_is_the_optimised_reward", text, step=0)
    # 2. Responses, and what the language models retain.
    sampled = sample_models(config, paths, dist.device)
    models = {"base": paths.base, "sft": paths.sft, "policy": paths.policy}
    retention, task_changes = probes.measure_all(models, dist.device) if probes else ({}, {})
    responses = {who: own for who, own in sampled.sampled.items() if who != BASE}
    references = sampled.texts.get("reference")
    response_statistics = measure_responses(
        paths.sft, sampled.prompts, responses, references, settings.retention, dist.device
    )
    # 3. The judges, on the responses, on samples of PPO's training and on pairs that people labeled.
    judged = _judge(config, judges, sampled)
    summary.log_curve(paths, [judge for judge in judges if judge.name in settings.scoring], tracker)
    people = _compare_with_people(labels, judges, rows)
    # 4. The reward models, on pairs.
    rewards = reward_diagnostics.load_rewards(paths, dist.device)
    pairs: dict[str, reward_diagnostics.OrderedPairs] = {}
    if rewards and config.data_source == "synthetic":
        # two samples of each policy per prompt, ordered by the gold judge, which knows this data alone
        second = sample_alike(
            config, paths, sampled.prompts, dist.device, names=SAMPLED, seed=config.seed + 1
        )
        for who in SAMPLED:
            both = sampled.texts[who], second[who].texts
            pairs[f"{who}_samples"] = reward_diagnostics.order_by(gold_scores, sampled.prompts, *both)
    given = reward_diagnostics.read_pairs(paths) if rewards else {}
    diagnosed, bins = reward_diagnostics.diagnose(rewards, given, pairs)
    # 5. The results document and the tables.
    results = typed.EvaluationResults(
        comparisons=tuple(summary.summarize(judged.comparisons, sampled.texts, sampled.sets)),
        **training,
        has_demonstrations=probes is None or probes.has_demonstrations,
        responses=response_statistics,
        facets=judged.facets,
        accuracies=summary.measure_accuracies(settings, sampled.texts, sampled.columns),
        retention=retention,
        task_changes=task_changes,
        best_of_n=sampled.best_of_n,
        reward_diagnostics=diagnosed,
        human_labels=people,
        judge_kappas=summary.measure_kappas(judged.comparisons),
    )
    if dist.is_main:
        compared = summary.comparison_table(
            judged.comparisons, sampled.prompts, sampled.texts, sampled.columns
        )
        with whole(paths.judge_results) as folder:
            results.write(folder / paths.evaluation_results.name)
            pq.write_table(compared.select(summary.COMPARISONS.names), folder / "comparisons.parquet")
            calibration = pa.Table.from_pylist(bins, reward_diagnostics.CALIBRATION)
            pq.write_table(calibration, folder / "calibration.parquet")
            responses = _response_table(sampled, judged)
            pq.write_table(responses, folder / paths.judged_responses.name)
        rates = summary.show_win_rates(results.comparisons, len(sampled.prompts))
        for name, accuracy in results.accuracies.items():
            header = ["responses to", "sft", "policy", "gain in points (95% interval)"]
            console.table(f"right by {name}", header, summary.accuracy_table(accuracy))
        tracker.table("win_rates", rates)
        tracker.table("comparisons", compared.to_pylist())
        tracker.table("responses", responses.slice(0, SHOWN_PROMPTS).to_pylist())
    return results.metrics()


def _judge(config: JudgeView, judges: Sequence[Judge], sampled: ModelResponses) -> Judged:
    judged, prompts, texts, kept = Judged(), sampled.prompts, sampled.texts, sampled.columns
    for judge in judges:
        pairs = [(a, b) for a, b in PAIRS if {a, b} <= set(texts)]
        compared = summary.compare(judge, pairs, prompts, texts, config.judge.max_failure_share, kept)
        judged.comparisons.update(compared)
        for key, comparisons in compared.items():
            for who, scores in zip((key.a, key.b), comparisons.scores or (), strict=False):
                judged.scores[judge.name, who] = list(scores)
        if isinstance(judge, ScoringJudge):
            judged.facets[judge.name] = {who: judge.facets(prompts, own, kept) for who, own in texts.items()}
    return judged


def _compare_with_people(
    labels: Sequence[Label], judges: Sequence[Judge], rows: Sequence[Mapping[str, Any]]
) -> typed.HumanLabels | None:
    """How far each judge agrees with the human labels; None without labels.

    Where columns are kept, labels of prompts that data/prompts does not have are left out.
    """
    known = {row["prompt"]: row for row in rows}
    if any(columns.KEY in row for row in rows):
        labels = [label for label in labels if label.prompt in known]
    if not labels:
        return None
    prompts, first, second = zip(*((one.prompt, one.answer_a, one.answer_b) for one in labels), strict=True)
    kept = columns.of_rows([known.get(prompt, {}) for prompt in prompts])
    agreements = {
        judge.name: measure_agreement(labels, judge.compare(prompts, first, second, kept).outcomes)
        for judge in judges
    }
    decided = {name: one for name, one in agreements.items() if one is not None}
    return typed.HumanLabels(labels=len(labels), judges=decided)


def _response_table(sampled: ModelResponses, judged: Judged) -> pa.Table:
    """A row per prompt: its kept columns, all responses and all scores."""
    table: dict[str, Any] = {"index": list(range(len(sampled.prompts))), "prompt": sampled.prompts}
    shown = [columns.shown(columns.of_row(sampled.columns, i)) for i in table["index"]]
    table |= {name: [row[name] for row in shown] for name in shown[0]}
    scores = {f"{judge}/{who}": values for (judge, who), values in judged.scores.items()}
    return pa.table(table | sampled.texts | scores)
