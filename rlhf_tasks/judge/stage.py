"""Stage judge: SFT and PPO policies against the references and each other, on test prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rouge_score.rouge_scorer import RougeScorer

from rlhf_tasks import console, models, statistics
from rlhf_tasks.checkpoint import whole
from rlhf_tasks.config import StageView
from rlhf_tasks.data.batches import Ids, load_tokenizer, read_table, text_of
from rlhf_tasks.data.synthetic import gold_scores
from rlhf_tasks.generation import answer, stop_of
from rlhf_tasks.judge import judges
from rlhf_tasks.runtime import Runtime
from rlhf_tasks.tracking import Tracker

OUT = Path("evaluation/judge")
CONTENDERS = {"sft": Path("models/sft"), "policy": Path("models/policy")}
REWARDS = {"reward": Path("models/reward"), "reward_heldout": Path("models/reward_heldout")}
PAIRS = (("sft", "reference"), ("policy", "reference"), ("policy", "sft"))


@dataclass(frozen=True)
class Answers:
    """What everyone says to the same test prompts; token counts and endings of the sampled ones."""

    prompts: list[str]
    texts: dict[str, list[str]]
    lengths: dict[str, list[int]]
    ended: dict[str, float]


def run(config: StageView, tracker: Tracker) -> dict[str, float]:
    """Write evaluation/judge/{verdicts,answers}.parquet.

    Metrics: `JUDGE/A_vs_B/{win_rate,low,high}` for every judge and pair, what each judge measures of
    each contender, ROUGE-L, lengths, and the score gained at matched length.
    """
    rt = Runtime(config.launch, config.seed)
    answers = _answers(rt, config)
    metrics = _plain_metrics(answers)
    verdicts: list[dict[str, Any]] = []
    columns: dict[str, list[float]] = {}
    for name in config.judge.judges:
        judge = judges.build(name, config.data.source, rt.device)
        scores = {who: judge.scores(answers.prompts, texts) for who, texts in answers.texts.items()}
        for who, texts in answers.texts.items():
            columns[f"{name}/{who}"] = scores[who]
            found = judge.facets(answers.prompts, texts)
            metrics |= {f"{name}/{who}/{key}": value for key, value in found.items()}
        for a, b in PAIRS:
            metrics |= _verdict(name, a, b, scores, verdicts)
        gain = statistics.matched_length_gain(
            scores["policy"], scores["sft"], answers.lengths["policy"], answers.lengths["sft"]
        )  # fmt: skip
        key = f"{name}/policy_vs_sft/matched_length_gain"
        metrics |= {key: gain.value, f"{key}/low": gain.low, f"{key}/high": gain.high}
    if config.data.source == "synthetic":
        metrics |= _agreement_on_samples(rt, config, answers)
    if rt.is_main:
        _write(answers, verdicts, columns)
        _show(config, metrics, answers, tracker)
    return metrics


def _answers(rt: Runtime, config: StageView) -> Answers:
    rows = read_table("prompts", "test")[: config.judge.num_examples]
    prompts = [row["prompt"] for row in rows]
    texts = {"reference": [row["reference"] for row in rows]}
    lengths: dict[str, list[int]] = {}
    ended: dict[str, float] = {}
    with console.progress("judge", len(CONTENDERS), unit="models") as bar:
        for name, folder in CONTENDERS.items():
            responses, stop = _sample(rt, config, folder, prompts, config.seed)
            tokenizer = load_tokenizer(folder)
            texts[name] = [text_of(tokenizer, r) for r in responses]
            lengths[name] = [len(r) for r in responses]
            ended[name] = sum(r[-1] == stop for r in responses) / len(responses)
            bar.advance()
    return Answers(prompts, texts, lengths, ended)


def _sample(
    rt: Runtime, config: StageView, folder: Path, prompts: Sequence[str], seed: int
) -> tuple[list[Ids], int]:
    """Answers at the judge's temperature, and what ends them; contenders are sampled with the same seed."""
    model, tokenizer = models.place(models.load_causal(folder), rt.device).eval(), load_tokenizer(folder)
    answers = answer(
        model, tokenizer, prompts, max_new_tokens=config.data.max_completion_tokens,
        temperature=config.judge.temperature, seed=seed,
    )  # fmt: skip
    return answers, stop_of(model, tokenizer)


def _plain_metrics(answers: Answers) -> dict[str, float]:
    """ROUGE-L against the references (Lin 2004, F measure), mean lengths in tokens, share that ended."""
    scorer = RougeScorer(["rougeL"])
    metrics: dict[str, float] = {}
    for who in CONTENDERS:
        pairs = zip(answers.texts["reference"], answers.texts[who], strict=True)
        found = [scorer.score(reference, text)["rougeL"].fmeasure for reference, text in pairs]
        metrics[f"rouge_l/{who}"] = sum(found) / len(found)
        metrics[f"length/{who}"] = sum(answers.lengths[who]) / len(answers.prompts)
        metrics[f"ended/{who}"] = answers.ended[who]
    return metrics


def _verdict(
    judge: str, a: str, b: str, scores: Mapping[str, Sequence[float]], verdicts: list[dict[str, Any]]
) -> dict[str, float]:
    outcomes = statistics.outcomes(scores[a], scores[b])
    found = statistics.verdict(outcomes)
    verdicts += [
        {"judge": judge, "a": a, "b": b, "index": i, "verdict": float(o), "score_a": x, "score_b": y}
        for i, (o, x, y) in enumerate(zip(outcomes, scores[a], scores[b], strict=True))
    ]
    key, rate = f"{judge}/{a}_vs_{b}", found.win_rate
    return {
        f"{key}/win_rate": rate.value,
        f"{key}/low": rate.low,
        f"{key}/high": rate.high,
        f"{key}/ties": found.ties,
    }


def _agreement_on_samples(rt: Runtime, config: StageView, answers: Answers) -> dict[str, float]:
    """How often each reward model orders two samples of one policy as the gold judge does.

    This, not accuracy on given pairs, says whether a reward model is fit to be optimised; gold ties
    are left out. Empty where no reward model was made.
    """
    metrics: dict[str, float] = {}
    rewards = {name: folder for name, folder in REWARDS.items() if models.is_made(folder)}
    if not rewards:
        return metrics
    for who, folder in CONTENDERS.items():
        tokenizer = load_tokenizer(folder)
        responses, _ = _sample(rt, config, folder, answers.prompts, config.seed + 1)
        second = [text_of(tokenizer, response) for response in responses]
        both = (answers.texts[who], second)
        gold = statistics.outcomes(*(gold_scores(answers.prompts, texts) for texts in both))
        for name, reward in rewards.items():
            judge = judges.RewardJudge(reward, rt.device)
            agreed = statistics.agreement(
                statistics.outcomes(*(judge.scores(answers.prompts, t) for t in both)), gold
            )
            key = f"agreement/{name}/{who}_samples"
            metrics |= {key: agreed.value, f"{key}/low": agreed.low, f"{key}/high": agreed.high}
    return metrics


def _write(answers: Answers, verdicts: list[dict[str, Any]], columns: Mapping[str, list[float]]) -> None:
    with whole(OUT) as folder:
        pq.write_table(pa.Table.from_pylist(verdicts), folder / "verdicts.parquet")
        table: dict[str, Any] = {"index": list(range(len(answers.prompts))), "prompt": answers.prompts}
        pq.write_table(pa.table(table | answers.texts | dict(columns)), folder / "answers.parquet")


def _show(config: StageView, metrics: Mapping[str, float], answers: Answers, tracker: Tracker) -> None:
    rows = [
        (
            judge,
            f"{a} vs {b}",
            *(f"{metrics[f'{judge}/{a}_vs_{b}/{key}']:.1%}" for key in ("win_rate", "low", "high")),
        )
        for judge in config.judge.judges
        for a, b in PAIRS
    ]
    console.table(
        f"win rates on {len(answers.prompts)} test prompts (ties count half)",
        ["judge", "pair", "win rate", "low", "high"],
        rows,
    )
    shown = range(min(config.judge.num_samples_shown, len(answers.prompts)))
    tracker.table(
        "answers",
        [{"prompt": answers.prompts[i], **{who: t[i] for who, t in answers.texts.items()}} for i in shown],
    )
