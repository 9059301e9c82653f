"""Stage judge: the SFT and PPO policies against the references and each other, on the test prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.config.scorers import OPTIMISED
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.synthetic import gold_scores
from rlhf_tasks.evaluation import (
    accuracy,
    human_labels,
    progress,
    reward_diagnostics,
    statistics,
    summary,
    tables,
)
from rlhf_tasks.evaluation.contenders import (
    SAMPLED,
    Contenders,
    response_statistics,
    sample_contenders,
    sample_policy,
)
from rlhf_tasks.evaluation.human_labels import Label
from rlhf_tasks.evaluation.judges.build import build_judges
from rlhf_tasks.evaluation.judges.comparisons import Comparisons, Judge
from rlhf_tasks.evaluation.judges.optimised import optimised_judges
from rlhf_tasks.evaluation.length_control import matched_length_gain
from rlhf_tasks.evaluation.results import (
    ComparisonResult,
    EvaluationResults,
    HumanLabels,
    Interval,
    RetentionResult,
    RewardDiagnostic,
    RewardGaps,
    TaskChange,
)
from rlhf_tasks.evaluation.retention import Probes
from rlhf_tasks.evaluation.reward_diagnostics import Rows
from rlhf_tasks.modeling import contracts
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.runtime import Runtime

PAIRS = (("sft", "reference"), ("policy", "reference"), ("policy", "sft"))
MIN_PROMPTS_FOR_GAIN = 3


@dataclass(frozen=True)
class JudgeOutput:
    """The output of the judges: comparisons, scores by judge and contender, facets by judge and contender."""

    comparisons: dict[summary.Key, Comparisons]
    scores: dict[tuple[str, str], list[float]]
    facets: dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class DiagnosticOutput:
    """Reward diagnostics, and the rows of their figures."""

    diagnostics: tuple[RewardDiagnostic, ...]
    gaps: RewardGaps | None
    bins: Rows
    lengths: Rows


def run(config: JudgeView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write evaluation/judge: results.json, and tables of comparisons, responses, sources and diagnostics.

    The metrics are those of `EvaluationResults.metrics`. Curves: the win rate over the references in the
    course of PPO's training, by the judges that score.

    Raises:
        UserError: if a judge cannot work or fails too often, or a file of labels or texts cannot be read.
    """
    rt = Runtime(config.launch, config.seed)
    rows = read_table(paths, "prompts", "test")
    labels = human_labels.decided(human_labels.read(paths.root / config.judge.labels))
    labelled = {label.pair.prompt for label in labels}
    accuracy.check(config.judge, accuracy.judged_rows(paths, config.judge.num_examples, labelled))
    judges = build_judges(
        config.judge, config.data_source, rt.device, paths, trace=tracker.trace, labels=labels,
        columns=columns.of_rows(rows),
    )  # fmt: skip
    probes = None if config.judge.retention is None else Probes(config.judge.retention, paths)
    optimised = _warn_of_optimised(config, paths, tracker)
    contenders = sample_contenders(config, paths, rt.device)
    retention, task_changes = _retention(probes, paths, rt)
    judged = _judge(config, judges, contenders)
    scoring = [judge for judge in judges if judge.name in config.judge.scoring]
    progress.log(paths, scoring, tracker)
    people = _human_labels(labels, judges, paths)
    diagnosed = _diagnose(rt, config, paths, contenders, judged)
    results = EvaluationResults(
        comparisons=_results(judged, contenders),
        optimised_judges=optimised,
        responses={who: response_statistics(contenders, who) for who in SAMPLED},
        facets=judged.facets,
        accuracies=accuracy.measure(config.judge, contenders.texts, contenders.columns),
        retention=retention,
        task_changes=task_changes,
        reward_diagnostics=diagnosed.diagnostics,
        reward_gaps=diagnosed.gaps,
        human_labels=people,
        judge_kappas=summary.kappas(judged.comparisons),
    )
    if rt.is_main:
        _write(paths, results, contenders, judged, diagnosed)
        _show(config, results, contenders, judged, tracker)
    return results.metrics()


def _warn_of_optimised(config: JudgeView, paths: Paths, tracker: Tracker) -> dict[str, str]:
    """Warn of the judges that are the reward model which PPO optimised: name → folder."""
    optimised = optimised_judges(config.judge, paths.policy, paths.root)
    for name, path in optimised.items():
        text = (
            f"judge {name} ({path}) is the reward model that PPO optimised: its win rates do not show that "
            "the policy got better; use models/reward_heldout or another judge"
        )
        console.say(f"WARNING: {text}")
        tracker.event("judge_is_the_optimised_reward", text, step=0)
    return optimised


def _retention(
    probes: Probes | None, paths: Paths, rt: Runtime
) -> tuple[dict[str, RetentionResult], dict[str, TaskChange]]:
    if probes is None:
        return {}, {}
    return probes.measure_all({"base": paths.base, "sft": paths.sft, "policy": paths.policy}, rt.device)


# ---------------------------------------------------------------------------------------- judges


def _judge(config: JudgeView, judges: Sequence[Judge], contenders: Contenders) -> JudgeOutput:
    judged = JudgeOutput({}, {}, {})
    prompts, texts, kept = contenders.prompts, contenders.texts, contenders.columns
    for judge in judges:
        compared = summary.compare(judge, PAIRS, prompts, texts, config.judge.max_failure_share, kept)
        judged.comparisons.update(compared)
        for key, comparisons in compared.items():
            for who, scores in zip((key.a, key.b), comparisons.scores or (), strict=False):
                judged.scores[judge.name, who] = list(scores)
        judged.facets[judge.name] = {who: judge.facets(prompts, own, kept) for who, own in texts.items()}
    return judged


def _results(judged: JudgeOutput, contenders: Contenders) -> tuple[ComparisonResult, ...]:
    return tuple(
        result.model_copy(update={"matched_length_gain": _length_gain(result.judge, judged, contenders)})
        if (result.a, result.b) == ("policy", "sft")
        else result
        for result in summary.summarise_all(judged.comparisons, contenders.texts)
    )


def _length_gain(judge: str, judged: JudgeOutput, contenders: Contenders) -> Interval | None:
    """How much higher PPO's responses score than SFT's at equal length; None without enough scores."""
    scores = [judged.scores.get((judge, who)) for who in ("policy", "sft")]
    if scores[0] is None or scores[1] is None:
        return None
    if np.isfinite(np.subtract(scores[0], scores[1])).sum() < MIN_PROMPTS_FOR_GAIN:
        return None
    lengths = [[len(ids) for ids in contenders.sampled[who].ids] for who in ("policy", "sft")]
    return Interval.of(matched_length_gain(scores[0], scores[1], lengths[0], lengths[1]))


def _human_labels(labels: Sequence[Label], judges: Sequence[Judge], paths: Paths) -> HumanLabels | None:
    """How far each judge agrees with the human labels; None without labels.

    Where columns are kept, labels of prompts that data/prompts does not have are left out.
    """
    rows = {row["prompt"]: row for row in read_table(paths, "prompts", "test")} if labels else {}
    if any(columns.KEY in row for row in rows.values()):
        labels = [label for label in labels if label.pair.prompt in rows]
    if not labels:
        return None
    pairs = [label.pair for label in labels]
    kept = columns.of_rows([rows.get(pair.prompt, {}) for pair in pairs])
    agreements = {}
    for judge in judges:
        comparisons = judge.compare(
            [pair.prompt for pair in pairs],
            [pair.answer_a for pair in pairs],
            [pair.answer_b for pair in pairs],
            kept,
        )
        agreements[judge.name] = human_labels.agreement(labels, comparisons.outcomes)
    known = {name: one for name, one in agreements.items() if one is not None}
    return HumanLabels(labels=len(labels), judges=known)


# ---------------------------------------------------------------------------- reward diagnostics


def _diagnose(
    rt: Runtime, config: JudgeView, paths: Paths, contenders: Contenders, judged: JudgeOutput
) -> DiagnosticOutput:
    rewards = reward_diagnostics.load_rewards(paths, rt.device)
    samples = _sampled_pairs(rt, config, paths, contenders) if rewards else {}
    labelled = reward_diagnostics.labelled_pairs(paths) if rewards else {}
    diagnostics, bins = reward_diagnostics.measure(rewards, labelled, samples)
    scores, gaps = dict(judged.scores), None
    if "reward" in rewards and _is_optimised(paths):
        texts = contenders.texts
        own: dict[str, list[float]] = {
            who: rewards["reward"](Responses.of_texts(contenders.prompts, texts[who])).tolist()
            for who in texts
        }
        scores |= {(OPTIMISED, who): values for who, values in own.items()}
        gaps = _reward_gaps(own, judged.comparisons)
    lengths = reward_diagnostics.by_length(scores, contenders.texts)
    return DiagnosticOutput(diagnostics, gaps, bins, lengths)


def _is_optimised(paths: Paths) -> bool:
    """Whether PPO optimised models/reward, by its weights, when it trained the policy."""
    return contracts.fingerprint(paths.reward) in contracts.optimized_rewards(paths.policy)


def _reward_gaps(own: Mapping[str, list[float]], compared: summary.ByKey) -> RewardGaps:
    """PPO's win rate over SFT by the scores `own` of the reward that it optimised, minus each judge's."""
    by_reward = statistics.rate(statistics.outcomes(own["policy"], own["sft"])).value
    return RewardGaps(
        win_rate_by_reward=by_reward,
        by_judge={
            key.judge: by_reward - statistics.rate(comparisons.outcomes).value
            for key, comparisons in compared.items()
            if (key.a, key.b) == ("policy", "sft")
        },
    )


def _sampled_pairs(
    rt: Runtime, config: JudgeView, paths: Paths, contenders: Contenders
) -> dict[str, reward_diagnostics.Pairs]:
    """Two samples of each policy per prompt, ordered by gold; empty for data without a gold judge."""
    if config.data_source != "synthetic":
        return {}
    pairs = {}
    for who in SAMPLED:
        second = sample_policy(config, paths, who, contenders.prompts, config.seed + 1, rt.device)
        pairs[f"{who}_samples"] = reward_diagnostics.order_by(
            gold_scores, contenders.prompts, contenders.texts[who], second.texts
        )
    return pairs


# ------------------------------------------------------------------------------------ the output


def _write(
    paths: Paths,
    results: EvaluationResults,
    contenders: Contenders,
    judged: JudgeOutput,
    diagnosed: DiagnosticOutput,
) -> None:
    scores = {f"{judge}/{who}": values for (judge, who), values in judged.scores.items()}
    table: dict[str, Any] = {"index": list(range(len(contenders.prompts))), "prompt": contenders.prompts}
    shown = [columns.shown(columns.of_row(contenders.columns, i)) for i in table["index"]]
    table |= {name: [row[name] for row in shown] for name in shown[0]}
    with whole(paths.judge_results) as folder:
        results.write(folder / paths.evaluation_results.name)
        pq.write_table(tables.comparison_table(judged.comparisons), folder / "comparisons.parquet")
        pq.write_table(
            tables.source_table(judged.comparisons, contenders.sources), folder / "sources.parquet"
        )
        pq.write_table(
            pa.Table.from_pylist(diagnosed.bins, reward_diagnostics.CALIBRATION),
            folder / "calibration.parquet",
        )
        pq.write_table(
            pa.Table.from_pylist(diagnosed.lengths, reward_diagnostics.LENGTHS), folder / "lengths.parquet"
        )
        pq.write_table(pa.table(table | contenders.texts | scores), folder / paths.judged_responses.name)


def _show(
    config: JudgeView,
    results: EvaluationResults,
    contenders: Contenders,
    judged: JudgeOutput,
    tracker: Tracker,
) -> None:
    prompts, texts = contenders.prompts, contenders.texts
    rows = tables.win_rates(results.comparisons)
    tables.show(f"win rates on {len(prompts)} test prompts (ties count half)", rows)
    tracker.table("win_rates", rows)
    tracker.table(
        "comparisons", tables.text_table(judged.comparisons, prompts, texts, contenders.columns).to_pylist()
    )
    shown = range(min(config.judge.num_samples_shown, len(prompts)))
    tracker.table(
        "responses", [{"prompt": prompts[i], **{who: t[i] for who, t in texts.items()}} for i in shown]
    )
