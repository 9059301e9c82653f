"""A finished pipeline with planted results: files, dvc.lock and a cache, nothing trained."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.judging.results import (
    ComparisonResult,
    EvaluationResults,
    ResponseStatistics,
    RetentionResult,
    TaskChange,
)
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.project import hashing
from rlhf_tasks.promotion.verdict import Kl
from tests import small

ROOT = Path(__file__).parents[2]
JUDGES = ("gold", "reward_model")
KL, KL_ERROR = 1.5, 0.02


def interval(value: float, low: float | None = None) -> Interval:
    return Interval(value=value, low=value - 0.02 if low is None else low, high=value + 0.02)


def comparison(
    judge: str, b: str, low: float, *, examples: int = 1000, failures: int = 0
) -> ComparisonResult:
    """The policy against another model; the gate reads the low end of the win rate."""
    rate = interval(low + 0.02, low)
    rates = {"win_rate": rate, "decisive": rate, "length_controlled": rate}
    counts = {"p_value": 0.01, "ties": 0, "examples": examples, "failures": failures}
    return ComparisonResult.model_validate({"judge": judge, "a": "policy", "b": b} | rates | counts)


def retention(
    policy: Mapping[str, float], sft: Mapping[str, float], accuracy: tuple[float, float] = (0.97, 0.98)
) -> dict[str, RetentionResult]:
    """Perplexities and multiple-choice accuracy of the policy and SFT."""
    given = {"policy": (policy, accuracy[0]), "sft": (sft, accuracy[1])}
    return {
        name: RetentionResult(perplexity=dict(perplexity), multiple_choice=interval(share))
        for name, (perplexity, share) in given.items()
    }


RETENTION = retention({"sft_text": 2.0}, {"sft_text": 1.6})


def responses(policy: tuple[float, float], sft: tuple[float, float]) -> dict[str, ResponseStatistics]:
    """Perplexity by SFT, and share of different 2-grams, of the responses of policy and SFT."""
    plain = dict.fromkeys(("length", "ended", "distinct_1", "distinct_2", "repetition"), 1.0)
    return {
        name: ResponseStatistics(**plain, rouge_l=None, sft_perplexity=perplexity, corpus_distinct_2=share)
        for name, (perplexity, share) in {"policy": policy, "sft": sft}.items()
    }


RESPONSES = responses((3.0, 0.4), (2.0, 0.5))


def results(
    *,
    gold: float | None = 0.82,
    second: float | None = 0.8,
    examples: tuple[int, int] = (1000, 990),
    failures: tuple[int, int] = (0, 10),
    retention: Mapping[str, RetentionResult] = RETENTION,
    optimized: Sequence[str] = (),
    base: float = 0.9,
    selecting: Sequence[str] = (),
    has_reward: bool = True,
    task_changes: Mapping[str, TaskChange] | None = None,
    responses: Mapping[str, ResponseStatistics] = RESPONSES,
) -> EvaluationResults:
    """Results of a policy that is better than SFT by both judges; None leaves a judge out."""
    lows = [*zip(JUDGES, (gold, second), examples, failures, strict=True)]
    comparisons = [
        comparison(judge, "sft", low, examples=count, failures=failed)
        for judge, low, count, failed in lows
        if low is not None
    ]
    comparisons += [comparison(judge, "base", base) for judge, low, *_ in lows if low is not None]
    return EvaluationResults(
        comparisons=tuple(comparisons),
        responses=dict(responses),
        retention=dict(retention),
        task_changes=dict(task_changes or {}),
        optimised_judges={name: f"models/{name}" for name in optimized},
        selecting_judges={name: f"models/{name}" for name in selecting},
        has_reward=has_reward,
    )


def over_champion(gold: float = 0.55, second: float = 0.53) -> EvaluationResults:
    lows = zip(JUDGES, (gold, second), strict=True)
    return EvaluationResults(comparisons=tuple(comparison(judge, "champion", low) for judge, low in lows))


def cost(
    kl: float | None = KL, error: float = KL_ERROR, retention: Mapping[str, RetentionResult] = RETENTION
) -> tuple[EvaluationResults, Kl | None]:
    """What PPO cost a policy."""
    measured = None if kl is None else Kl(mean=kl, standard_error=error)
    return EvaluationResults(responses=RESPONSES, retention=dict(retention)), measured


shipped = functools.partial(small.params, gate=True)
"""The shipped params.yaml, gate and all, with `{"promotion.max_kl": 5.0, …}` changed."""
params = functools.partial(small.write_params, gate=True)
"""Write that to a folder."""


def pipeline(
    folder: Path, weights: str = "better", *, kl: float | None = KL, results: EvaluationResults | None = None
) -> str:
    """Write a policy of these bytes and its results to `folder`; returns the policy's md5."""
    policy = folder / "models/policy"
    shutil.rmtree(policy, ignore_errors=True)
    policy.mkdir(parents=True)
    (policy / "weights").write_text(weights, encoding="utf-8")
    (policy / "config.json").write_text("{}", encoding="utf-8")
    for name in ("metrics", "models/lineage", "evaluation/judge"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (BETTER if results is None else results).write(folder / "evaluation/judge/results.json")
    put(policy / "rlhf.json", {"kind": "policy"} | ({} if kl is None else {"kl": [kl, KL_ERROR]}))
    put(folder / "metrics/ppo.json", {"selected_episode": 512.0, "objective/kl": 99.0, "selected_kl": 99.0})
    put(folder / "models/lineage/ppo.json", {"rlhf.run": f"ppo-of-{weights}", "git.rev": "c" * 40})
    if not (folder / "params.yaml").exists():
        params(folder)
    lock(folder)
    return hashing.dvc_md5(policy)


def lock(folder: Path) -> None:
    """Write dvc.lock as DVC leaves it after the stages ppo and judge."""

    def entries(*paths: str) -> list[dict[str, str]]:
        return [{"path": path, "md5": hashing.dvc_md5(folder / path)} for path in paths]

    ppo = entries("models/policy", "metrics/ppo.json", "models/lineage/ppo.json")
    values = config.VIEWS["judge"].of(config.load(folder / "params.yaml")).declared
    record(folder, "judge", values)
    deps, outs = entries("models/policy", "inputs/judge.json"), entries("evaluation/judge")
    judge = {"cmd": "rlhf judge", "deps": deps, "outs": outs}
    stages = {"ppo": {"cmd": "rlhf ppo", "outs": ppo}, "judge": judge}
    with (folder / "dvc.lock").open("w", encoding="utf-8") as file:
        YAML().dump({"schema": "2.0", "stages": stages}, file)


def record(
    folder: Path, stage: str, values: Mapping[str, Any], files: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Write inputs/STAGE.json, with the md5 of these files; returns its entry of dvc.lock."""
    (folder / "inputs").mkdir(exist_ok=True)
    put(folder / f"inputs/{stage}.json", {"values": values, "files": files or {}, "packages": {}})
    return {"path": f"inputs/{stage}.json", "md5": hashing.dvc_md5(folder / f"inputs/{stage}.json")}


def cached(folder: Path, cache: Path) -> None:
    """Copy a folder's files and their listing to where DVC's cache has them."""
    listing = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        md5 = hashing.dvc_md5(file)
        listing.append({"md5": md5, "relpath": file.relative_to(folder).as_posix()})
        target = blob(cache, md5)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    target = blob(cache, hashing.dvc_md5(folder))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(listing), encoding="utf-8")


def blob(cache: Path, md5: str) -> Path:
    return cache / "files/md5" / md5[:2] / md5[2:]


def put(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree), encoding="utf-8")


BETTER = results()
