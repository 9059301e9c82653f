"""Stage judge: SFT and PPO policies against the references and each other, on test prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rouge_score.rouge_scorer import RougeScorer

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.config.judge import OPTIMISED
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.evaluation import judges, labels, progress, statistics, summary, trust
from rlhf_tasks.evaluation.answers import Answers, sample
from rlhf_tasks.evaluation.judges import making
from rlhf_tasks.evaluation.judges.verdicts import Judge, Verdicts, check_failures
from rlhf_tasks.evaluation.retention import Probes
from rlhf_tasks.modeling import contracts
from rlhf_tasks.modeling.tensors import distinct
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker
from rlhf_tasks.training.runtime import Runtime

OUT = Path("evaluation/judge")
CONTENDERS = {"sft": Path("models/sft"), "policy": Path("models/policy")}
LANGUAGE_MODELS = {"base": Path("models/base"), **CONTENDERS}
FEWEST_FOR_GAIN = 3  # prompts that a gain at matched length can be told from
Rows = list[dict[str, Any]]
PAIRS = (("sft", "reference"), ("policy", "reference"), ("policy", "sft"))


@dataclass(frozen=True)
class Contest:
    """What everyone says to the same test prompts, and where the prompts come from."""

    prompts: list[str]
    sources: list[str]
    texts: dict[str, list[str]]
    sampled: dict[str, Answers]


def run(config: JudgeView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write evaluation/judge/{verdicts,answers,sources,calibration,lengths}.parquet.

    Metrics: `JUDGE/A_vs_B/…` for every judge and pair (README names them), what each judge measures of
    each contender, agreement between judges, ROUGE-L, lengths, the score gained at matched length, and how
    far the reward models can be trusted.
    Curves: how the win rate over the references went while PPO trained, by the judges that score.
    """
    rt = Runtime(config.launch, config.seed)
    panel = making.build(config.judge, config.data_source, rt.device, trace=tracker.trace)
    labelled = labels.decided(labels.read(Path(config.judge.labels)))
    probes = None if config.judge.retention is None else Probes(config.judge.retention)
    metrics = _warn(config, tracker)
    contest = _contest(rt, config)
    metrics |= _plain_metrics(contest)
    if probes is not None:
        for name, folder in LANGUAGE_MODELS.items():
            metrics |= probes(name, folder, rt.device)
    found: dict[summary.Comparison, Verdicts] = {}
    columns: dict[str, list[float]] = {}
    for judge in panel:
        for a, b in PAIRS:
            verdicts = judge.compare(contest.prompts, contest.texts[a], contest.texts[b])
            check_failures(judge.name, verdicts, config.judge.max_failure_share)
            found[judge.name, a, b] = verdicts
            metrics |= summary.metrics((judge.name, a, b), verdicts, contest.texts[a], contest.texts[b])
            if verdicts.scores is not None:
                columns |= {
                    f"{judge.name}/{who}": list(s) for who, s in zip((a, b), verdicts.scores, strict=True)
                }
        metrics |= _of_contenders(judge, contest, columns)
    progress.log([judge for judge in panel if judge.name in config.judge.scoring], tracker)
    metrics |= summary.kappas(found) | _human(labelled, panel)
    trusted, bins, lengths = _trusted(rt, config, contest, found, columns)
    metrics |= trusted
    if rt.is_main:
        _write(contest, found, columns, bins, lengths)
        _show(config, metrics, contest, found, tracker)
    return metrics


def _warn(config: JudgeView, tracker: Tracker) -> dict[str, float]:
    """Judges that PPO was trained to please are told loudly, and marked in the metrics."""
    told = judges.optimised(config.judge, CONTENDERS["policy"])
    for name, path in told.items():
        text = (
            f"judge {name} ({path}) is the reward model that PPO optimised: a win by its word says nothing "
            "about whether the policy got better; judge by models/reward_heldout, or by another"
        )
        console.say(f"WARNING: {text}")
        tracker.event("judge_is_the_optimised_reward", text, step=0)
    return {f"{name}/is_optimised_reward": 1.0 for name in told}


def _contest(rt: Runtime, config: JudgeView) -> Contest:
    rows = read_table(Paths(), "prompts", "test")[: config.judge.num_examples]
    prompts = [row["prompt"] for row in rows]
    sampled: dict[str, Answers] = {}
    with console.progress("judge", len(CONTENDERS), unit="models") as bar:
        for name in CONTENDERS:
            sampled[name] = _sample(rt, config, name, prompts, config.seed)
            bar.advance()
    texts = {"reference": [row["reference"] for row in rows]}
    texts |= {name: answers.texts for name, answers in sampled.items()}
    return Contest(prompts, [row.get("source", "") for row in rows], texts, sampled)


def _sample(rt: Runtime, config: JudgeView, who: str, prompts: list[str], seed: int) -> Answers:
    """Answers at the judge's temperature; contenders are sampled with the same seed."""
    return sample(
        CONTENDERS[who], prompts, max_new_tokens=config.max_completion_tokens,
        temperature=config.judge.temperature, seed=seed, device=rt.device,
    )  # fmt: skip


def _plain_metrics(contest: Contest) -> dict[str, float]:
    """ROUGE-L against the references (Lin 2004, F measure), mean lengths in tokens, share that ended.

    Of each contender's answers too: how often they repeat themselves. And how much longer PPO made them.
    """
    scorer = RougeScorer(["rougeL"])
    metrics: dict[str, float] = {}
    for who, answers in contest.sampled.items():
        pairs = zip(contest.texts["reference"], answers.texts, strict=True)
        found = [scorer.score(reference, text)["rougeL"].fmeasure for reference, text in pairs]
        metrics[f"rouge_l/{who}"] = sum(found) / len(found)
        metrics[f"length/{who}"] = sum(map(len, answers.ids)) / len(answers.ids)
        metrics[f"ended/{who}"] = sum(answers.ended) / len(answers.ended)
        for n in (1, 2):
            metrics[f"distinct_{n}/{who}"] = float(distinct(answers.ids, n).mean())
        metrics[f"repetition/{who}"] = 1 - float(distinct(answers.ids, 3).mean())
    return metrics | {"length/policy_over_sft": metrics["length/policy"] / metrics["length/sft"]}


def _of_contenders(judge: Judge, contest: Contest, columns: Mapping[str, list[float]]) -> dict[str, float]:
    """What a judge measures of each set of answers; what PPO gained by its scores beyond length."""
    metrics = {
        f"{judge.name}/{who}/{key}": value
        for who, texts in contest.texts.items()
        for key, value in judge.facets(contest.prompts, texts).items()
    }
    scores = [columns.get(f"{judge.name}/{who}") for who in ("policy", "sft")]
    if scores[0] is None or scores[1] is None:
        return metrics
    lengths = [[len(ids) for ids in contest.sampled[who].ids] for who in ("policy", "sft")]
    if np.isfinite(np.subtract(scores[0], scores[1])).sum() < FEWEST_FOR_GAIN:
        return metrics
    gain = statistics.matched_length_gain(scores[0], scores[1], lengths[0], lengths[1])
    key = f"{judge.name}/policy_vs_sft/matched_length_gain"
    return metrics | {key: gain.value, f"{key}/low": gain.low, f"{key}/high": gain.high}


def _human(labelled: Sequence[labels.Label], panel: list[Judge]) -> dict[str, float]:
    """How far each judge agrees with what people said of pairs, if they did: `human/…`."""
    if not labelled:
        return {}
    pairs = [label.pair for label in labelled]
    metrics: dict[str, float] = {"human/labels": len(labelled)}
    for judge in panel:
        verdicts = judge.compare(
            [pair.prompt for pair in pairs],
            [pair.answer_a for pair in pairs],
            [pair.answer_b for pair in pairs],
        )
        metrics |= labels.agreement(judge.name, labelled, verdicts.outcomes)
    return metrics


def _trusted(
    rt: Runtime,
    config: JudgeView,
    contest: Contest,
    found: summary.Found,
    columns: Mapping[str, list[float]],
) -> tuple[dict[str, float], Rows, Rows]:
    """How far the reward models can be trusted: metrics, bins of calibration, scores by length."""
    rewards = trust.made(rt.device)
    metrics, bins = trust.measured(rewards, _sampled_pairs(rt, config, contest) if rewards else {})
    scores = _scores(columns)
    if "reward" in rewards and _is_optimised(trust.REWARDS["reward"]):
        own = {who: rewards["reward"].scores(contest.prompts, texts) for who, texts in contest.texts.items()}
        scores |= {(OPTIMISED, who): values for who, values in own.items()}
        metrics |= _reward_gaps(own, found)
    return metrics, bins, trust.by_length(scores, contest.texts)


def _scores(columns: Mapping[str, list[float]]) -> dict[tuple[str, str], list[float]]:
    """`JUDGE/WHO` columns by judge and contender."""
    found = {}
    for key, values in columns.items():
        judge, _, who = key.partition("/")
        found[judge, who] = values
    return found


def _is_optimised(reward: Path) -> bool:
    """Whether the policy was made with this very reward model."""
    return contracts.parents_of(CONTENDERS["policy"]).get("reward") == contracts.fingerprint(reward)


def _reward_gaps(own: Mapping[str, list[float]], found: summary.Found) -> dict[str, float]:
    """PPO's win rate over SFT by the reward that it optimised (`own` scores), less the one by each judge.

    A gap that grows is over-optimisation.
    """
    by_reward = statistics.rate(statistics.outcomes(own["policy"], own["sft"])).value
    return {"reward_gap/win_rate_by_reward": by_reward} | {
        f"reward_gap/{judge}": by_reward - statistics.rate(verdicts.outcomes).value
        for (judge, a, b), verdicts in found.items()
        if (a, b) == ("policy", "sft")
    }


def _sampled_pairs(rt: Runtime, config: JudgeView, contest: Contest) -> dict[str, trust.Pairs]:
    """Two samples of each policy to the same prompts, ordered by gold; empty where there is no gold judge."""
    if config.data_source != "synthetic":
        return {}
    pairs = {}
    for who in CONTENDERS:
        second = _sample(rt, config, who, contest.prompts, config.seed + 1)
        pairs[f"{who}_samples"] = trust.by_gold(contest.prompts, contest.texts[who], second.texts)
    return pairs


def _write(
    contest: Contest,
    found: summary.Found,
    columns: Mapping[str, list[float]],
    bins: Rows,
    lengths: Rows,
) -> None:
    with whole(OUT) as folder:
        pq.write_table(summary.verdict_table(found), folder / "verdicts.parquet")
        pq.write_table(summary.source_table(found, contest.sources), folder / "sources.parquet")
        pq.write_table(pa.Table.from_pylist(bins, trust.CALIBRATION), folder / "calibration.parquet")
        pq.write_table(pa.Table.from_pylist(lengths, trust.LENGTHS), folder / "lengths.parquet")
        table: dict[str, Any] = {"index": list(range(len(contest.prompts))), "prompt": contest.prompts}
        pq.write_table(pa.table(table | contest.texts | dict(columns)), folder / "answers.parquet")


def _show(
    config: JudgeView,
    metrics: Mapping[str, float],
    contest: Contest,
    found: summary.Found,
    tracker: Tracker,
) -> None:
    rows = summary.table_rows(found, metrics)
    summary.show(f"win rates on {len(contest.prompts)} test prompts (ties count half)", rows)
    tracker.table("win_rates", rows)
    tracker.table("verdicts", summary.judged_table(found, contest.prompts, contest.texts).to_pylist())
    shown = range(min(config.judge.num_samples_shown, len(contest.prompts)))
    tracker.table(
        "answers",
        [{"prompt": contest.prompts[i], **{who: t[i] for who, t in contest.texts.items()}} for i in shown],
    )
