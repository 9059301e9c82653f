"""A small finished pipeline in a folder, which the report reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks.judging.results import (
    ComparisonResult,
    EvaluationResults,
    ResponseStatistics,
    RewardDiagnostic,
)
from rlhf_tasks.judging.statistics import Interval


def interval(value: float, low: float | None = None, high: float | None = None) -> Interval:
    return Interval(value=value, low=value if low is None else low, high=value if high is None else high)


def comparison(judge: str, a: str, b: str, rate: Interval, **changes: Any) -> ComparisonResult:
    """One comparison on four prompts, of which one is a tie."""
    return ComparisonResult(
        judge=judge, a=a, b=b, win_rate=rate, decisive=rate, length_controlled=rate, p_value=0.03, ties=1,
        examples=4, failures=0, **changes,
    )  # fmt: skip


RESULTS = EvaluationResults(
    comparisons=(
        comparison("gold", "sft", "reference", interval(0.3617, 0.3329, 0.3906)),
        comparison("gold", "policy", "reference", interval(0.7125, 0.684, 0.741)),
        comparison("gold", "policy", "sft", interval(0.7731, 0.748, 0.7982)),
        comparison("reward_model", "policy", "reference", interval(0.502, 0.471, 0.533)),
    ),
    responses={
        "policy": ResponseStatistics(
            rouge_l=0.3154, length=12.0, ended=0.9, distinct_1=0.8, distinct_2=0.95, repetition=0.01
        )
    },
    facets={"gold": {"sft": {"coverage": 0.6218}, "policy": {"coverage": 0.8432}}},
    reward_diagnostics=(
        RewardDiagnostic(model="reward", origin="given", calibration_error=0.125, agreement=None),
        RewardDiagnostic(
            model="reward", origin="policy_samples", calibration_error=0.2, agreement=interval(0.7654)
        ),
    ),
)


def responses() -> list[dict[str, Any]]:
    return [
        {
            "index": i,
            "prompt": f"post number {i}",
            "reference": f"reference {i}",
            "sft": f"demonstrated {i}",
            "policy": f"optimised {i}",
        }
        for i in range(4)
    ]


def comparisons() -> list[dict[str, Any]]:
    """The policy leads on prompt 2 (by .75) and 0 (by .25), ties on 1 and lags on 3."""
    scores = {0: (0.75, 0.5), 1: (0.5, 0.5), 2: (1.0, 0.25), 3: (0.25, 0.75)}
    return [
        {
            "judge": "gold",
            "a": "policy",
            "b": "reference",
            "index": index,
            "outcome": (a > b) + (a == b) / 2,
            "score_a": a,
            "score_b": b,
        }
        for index, (a, b) in scores.items()
    ]


def put_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def put_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def put_results(root: Path, results: EvaluationResults = RESULTS) -> None:
    """The one document that the report needs."""
    results.write(root / "evaluation/judge/results.json")


def put_all(root: Path) -> None:
    put_results(root)
    put_text(root / "metrics/judge.json", json.dumps(RESULTS.metrics()))
    put_text(root / "metrics/ppo.json", json.dumps({"objective/kl": 4.321, "selected_episode": 768}))
    put_text(root / "metrics/reward.json", json.dumps({"accuracy": 0.8123, "calibration": 0.0345}))
    for stage in ("prepare", "base", "sft", "preferences"):
        put_text(root / f"metrics/{stage}.json", json.dumps({"loss": 1.25}))
    put_text(
        root / "plots/ppo.csv",
        "episode,objective/kl,objective/scores,objective/rlhf_reward,eval/reward_heldout\n"
        "256,0.5,0.1,0.075,\n512,2.0,0.6,0.5,0.3\n768,4.321,1.1,0.884,\n",
    )
    for stage in ("base", "sft", "reward"):
        put_text(root / f"plots/{stage}.csv", "step,train/loss,eval/loss\n1,2.0,\n2,1.5,1.6\n3,1.25,\n")
    for stage in ("prepare", "base", "sft", "preferences", "reward", "ppo", "judge"):
        put_text(
            root / f"models/lineage/{stage}.json",
            json.dumps({"run": f"run-of-{stage}", "inputs": {"data": "md5:12"}}),
        )
    put_rows(root / "evaluation/judge/answers.parquet", responses())
    put_rows(root / "evaluation/judge/comparisons.parquet", comparisons())
    bins = [
        {"model": "reward", "origin": "given", "confidence": c, "right": r, "low": r - 0.1, "high": r + 0.1,
         "pairs": 20}
        for c, r in ((0.55, 0.5), (0.95, 0.8))
    ]  # fmt: skip
    put_rows(root / "evaluation/judge/calibration.parquet", bins)
    lengths = [
        {"judge": "gold", "who": "policy", "length": n, "score": s, "low": s - 0.1, "high": s + 0.1,
         "answers": 20}
        for n, s in ((10.0, 0.2), (30.0, 0.8))
    ]  # fmt: skip
    put_rows(root / "evaluation/judge/lengths.parquet", lengths)
    samples = [
        {"episode": e, "prompt": "a post", "response": f"sampled at {e}", "score": 0.5} for e in (256, 768)
    ]
    put_rows(root / "evaluation/ppo/samples.parquet", samples)
    put_text(root / "evaluation/ppo/guards.json", json.dumps({"trips": []}))
