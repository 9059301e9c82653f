"""A small finished pipeline in a folder, which the report reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks.config import STAGES
from rlhf_tasks.judging.results import (
    ComparisonResult,
    Cost,
    EvaluationResults,
    HumanAgreement,
    HumanLabels,
    JudgeKappa,
    RetentionResult,
    RewardDiagnostic,
    TaskChange,
    TaskScore,
)
from rlhf_tasks.judging.statistics import Interval

TEXTS = ("prompt", "reference", "sft", "policy")


def interval(value: float, low: float | None = None, high: float | None = None) -> Interval:
    return Interval(value=value, low=value if low is None else low, high=value if high is None else high)


def comparison(judge: str, a: str, b: str, rate: Interval, **changes: Any) -> ComparisonResult:
    """One comparison on four prompts, of which one is a tie."""
    rates: Any = dict.fromkeys(("win_rate", "decisive", "length_controlled"), rate)
    counts: Any = {"ties": 1, "examples": 4, "failures": 0, "p_value": 0.03}
    return ComparisonResult(judge=judge, a=a, b=b, **rates, **counts, **changes)


GPT = {"position_bias": 0.25, "first_share": 0.6, "cost": Cost(replies=40, tokens=1234)}
ARC = TaskScore(value=0.625, standard_error=0.05, examples=96)
HUMAN = HumanAgreement(kappa=interval(0.61, 0.5, 0.7), agreement=interval(0.8, 0.7, 0.9))
RESULTS = EvaluationResults(
    comparisons=(
        comparison("gold", "sft", "reference", interval(0.3617, 0.3329, 0.3906)),
        comparison("gold", "policy", "reference", interval(0.7125, 0.684, 0.741)),
        comparison("gold", "policy", "sft", interval(0.7731, 0.748, 0.7982)),
        comparison("reward_model", "policy", "reference", interval(0.502, 0.471, 0.533)),
        comparison("gpt", "policy", "sft", interval(0.6), **GPT),
    ),
    facets={"gold": {"sft": {"coverage": 0.6218}, "policy": {"coverage": 0.8432}}},
    retention={
        "base": RetentionResult(perplexity={"general": 12.0}, multiple_choice=interval(0.5, 0.4, 0.6)),
        "policy": RetentionResult(perplexity={}, multiple_choice=None, tasks={"arc": {"acc": ARC}}),
    },
    task_changes={"arc": TaskChange(metric="acc", drop=0.03, standard_error=0.01)},
    reward_diagnostics=(
        RewardDiagnostic(model="reward", origin="given", calibration_error=0.125, agreement=None),
        RewardDiagnostic(
            model="reward", origin="policy_samples", calibration_error=0.2, agreement=interval(0.7654)
        ),
    ),
    human_labels=HumanLabels(labels=20, judges={"gold": HUMAN}),
    selecting_judges={"reward_model": "models/reward_heldout"},
    judge_kappas=(JudgeKappa(first="gold", second="gpt", kappa=interval(-0.1, -0.2, 0.0)),),
)


def put_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def put_json(path: Path, tree: Any) -> None:
    put_text(path, json.dumps(tree))


def put_rows(path: Path, columns: str, *rows: tuple[Any, ...]) -> None:
    """A Parquet table; `columns` are names between spaces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = columns.split()
    pq.write_table(pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows]), path)


def put_responses(root: Path, text: str = "") -> None:
    """Four prompts and the responses to them; each contains `text`."""
    rows = [(i, *(f"{name} number {i} {text}" for name in TEXTS)) for i in range(4)]
    put_rows(root / "evaluation/judge/answers.parquet", "index prompt reference sft policy", *rows)


def put_training_samples(root: Path, text: str = "") -> None:
    rows = [(episode, f"a post {text}", f"sampled at {episode} {text}", 0.5) for episode in (256, 768)]
    put_rows(root / "evaluation/ppo/samples.parquet", "episode prompt response score", *rows)


def put_rollouts(root: Path, text: str = "") -> None:
    """Three rollouts of the first update and two of the third; the second one's gap is the largest."""
    columns = "episode update rollouts prompt response length notes score heldout gap kl advantage"
    numbers = ((0.5, 0.4, 0.1), (2.0, -1.5, 3.5), (-1.0, -1.0, 0.25), (0.7, 0.9, -0.5), (0.6, 0.6, 0.0))
    rows = []
    for i, (score, heldout, gap) in enumerate(numbers):
        episode, update, note = (256, 1, "") if i < 3 else (768, 3, "no end within 9 tokens")
        texts = f"post {i // 2} {text}", f"sampled as number {i} {text}"
        rows.append((episode, update, 256, *texts, 9 + i, note, score, heldout, gap, 0.1 * i, -0.2))
    put_rows(root / "evaluation/ppo/rollouts.parquet", columns, *rows)


def put_verdict(root: Path, num_criteria: int = 3) -> None:
    names = ("key", "title", "value", "relation", "bound", "lacking", "standard_error", "margin", "passed")
    lacking = "choice/sft was not measured"
    rows = (
        ("kl", "KL", 11.2, "<=", 10.0, "", 0.25, -1.2, False),
        ("examples", "judged examples", 990.0, ">=", 200.0, "", None, 790.0, True),
        ("choice", "right choices <lost>", None, "<=", 0.05, lacking, None, None, False),
    )
    criteria = [dict(zip(names, rows[i % 3], strict=True)) for i in range(num_criteria)]
    verdict = {"passed": False, "summary": "KL 11.2 > 10", "criteria": criteria}
    put_json(root / "evaluation/verdict.json", verdict)


def put_all(root: Path, commit: str = "f" * 40) -> None:
    RESULTS.write(root / "evaluation/judge/results.json")
    put_verdict(root)
    put_responses(root)
    put_training_samples(root)
    put_rollouts(root)
    # The policy leads on prompt 2 (by .75) and 0 (by .25), ties on 1 and lags on 3.
    scores = ((0, 1.0, 0.75, 0.5), (1, 0.5, 0.5, 0.5), (2, 1.0, 1.0, 0.25), (3, 0.0, 0.25, 0.75))
    put_rows(
        root / "evaluation/judge/comparisons.parquet",
        "judge a b index outcome score_a score_b",
        *(("gold", "policy", "reference", *row) for row in scores),
    )
    put_rows(
        root / "evaluation/judge/calibration.parquet",
        "model origin confidence right low high pairs",
        *(("reward", "given", c, r, r - 0.1, r + 0.1, 20) for c, r in ((0.55, 0.5), (0.95, 0.8))),
    )
    put_json(root / "evaluation/ppo/guards.json", {"trips": []})
    put_json(root / "evaluation/ppo/audit.json", {"empty": {"score": 0.25, "beats_reference": 0.75}})
    kept = {"selected_episode": 768, "selected_kl": 3.5, "selected_kl_standard_error": 0.25}
    metrics: dict[str, dict[str, float]] = {
        "prepare": {"rows/sft/train": 600, "rows/prompts/train": 2000},
        "base": {"loss": 1.25},
        "sft": {"loss": 1.25},
        "reward": {"accuracy": 0.8123, "heldout/margin": 1.5, "margin": 2.5},
        "ppo": {"episode": 8192, "objective/kl": 4.321, **kept},
        "judge": RESULTS.metrics(),
    }
    stages = [stage for stage in STAGES if stage != "report"]
    for minute, stage in enumerate(stages):
        if stage in metrics:
            put_json(root / f"metrics/{stage}.json", metrics[stage])
        key = f"{stage}-20260102T03{5 * minute:02}00-aa"
        lineage = {"rlhf.run": key, "seconds": 183.0, "inputs": {"models/sft": "ab" * 16}, "git.rev": commit}
        put_json(root / f"models/lineage/{stage}.json", lineage)
    put_text(
        root / "plots/ppo.csv",
        "episode,objective/kl,objective/scores,objective/rlhf_reward,time/train_seconds\n"
        "256,0.5,0.1,0.075,\n512,2.0,0.6,0.5,100\n768,4.321,1.1,0.884,80\n",
    )
    for stage in ("base", "sft", "reward"):
        put_text(root / f"plots/{stage}.csv", "step,train/loss,eval/loss\n1,2.0,\n2,1.5,1.6\n3,1.25,\n")
    put_text(root / "params.yaml", "{}")
    put_text(root / "dvc.yaml", "stages: {sft: {cmd: rlhf sft, outs: [models/sft]}}\n")
