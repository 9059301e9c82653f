"""A finished pipeline whose metrics are planted: files, dvc.lock and a cache, nothing trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_tasks.project import hashing
from tests import small

ROOT = Path(__file__).parents[2]
BETTER: Mapping[str, float] = {
    "gold/policy_vs_sft/win_rate": 0.84, "gold/policy_vs_sft/low": 0.82,
    "gold/policy_vs_sft/examples": 1000, "gold/policy_vs_sft/failures": 0,
    "reward_model/policy_vs_sft/win_rate": 0.82, "reward_model/policy_vs_sft/low": 0.8,
    "reward_model/policy_vs_sft/examples": 990, "reward_model/policy_vs_sft/failures": 10,
    "perplexity/sft_text/sft": 1.6, "perplexity/sft_text/policy": 2.0,
    "choice/sft": 0.98, "choice/policy": 0.97,
}  # fmt: skip
KL = 1.5
CURVE = "objective/kl_k1"


def over_champion(low: float = 0.55, second: float = 0.53) -> dict[str, float]:
    lows = {"gold": low, "reward_model": second}
    found = {f"{judge}/policy_vs_champion/low": value for judge, value in lows.items()}
    found |= {f"{judge}/policy_vs_champion/examples": 1000.0 for judge in lows}
    return found | {f"{judge}/policy_vs_champion/failures": 0.0 for judge in lows}


def shipped(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The shipped params.yaml, gate and all, with `{"promotion.max_kl": 5.0, …}` changed."""
    return small.params(changes, gate=True)


def params(folder: Path, changes: Mapping[str, Any] | None = None) -> None:
    """That as a file."""
    with (folder / "params.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(shipped(changes), file)


def pipeline(
    folder: Path,
    weights: str = "better",
    *,
    kl: float = KL,
    changes: Mapping[str, float | None] | None = None,
) -> str:
    """A policy of these bytes and its metrics in `folder`; its md5. A change to None takes a metric away."""
    given: dict[str, float | None] = {**BETTER, **(changes or {})}
    metrics = {key: value for key, value in given.items() if value is not None}
    policy = folder / "models/policy"
    shutil.rmtree(policy, ignore_errors=True)
    policy.mkdir(parents=True)
    (policy / "weights").write_text(weights, encoding="utf-8")
    (policy / "config.json").write_text("{}", encoding="utf-8")
    for name in ("metrics", "plots", "models/lineage", "evaluation"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    put(folder / "metrics/judge.json", metrics)
    put(folder / "metrics/ppo.json", {"selected_episode": 512.0, "objective/kl": kl})
    (folder / "plots/ppo.csv").write_text(
        f"episode,{CURVE},objective/scores\n256,0.5,1\n512,0.7,2\n768,{kl},3\n1024,99,4\n", encoding="utf-8"
    )
    put(folder / "models/lineage/ppo.json", {"rlhf.run": f"ppo-of-{weights}", "git.rev": "c" * 40})
    if not (folder / "params.yaml").exists():
        params(folder)
    lock(folder)
    return hashing.dvc_md5(policy)


def lock(folder: Path) -> None:
    """dvc.lock, as DVC leaves it after stages ppo and judge, and the policy in DVC's cache."""

    def entries(*paths: str) -> list[dict[str, str]]:
        return [{"path": path, "md5": hashing.dvc_md5(folder / path)} for path in paths]

    ppo = entries("models/policy", "metrics/ppo.json", "plots/ppo.csv", "models/lineage/ppo.json")
    asked = YAML(typ="safe", pure=True).load((folder / "params.yaml").read_text(encoding="utf-8"))["judge"]
    judge = {
        "cmd": "rlhf judge",
        "deps": entries("models/policy"),
        "params": {"params.yaml": {"seed": 1, "judge": asked}},
        "outs": entries("metrics/judge.json"),
    }
    stages = {"ppo": {"cmd": "rlhf ppo", "outs": ppo}, "judge": judge}
    with (folder / "dvc.lock").open("w", encoding="utf-8") as file:
        YAML().dump({"schema": "2.0", "stages": stages}, file)


def cached(folder: Path, cache: Path) -> None:
    """A folder's files and their list, where DVC's cache would have them."""
    listing = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        md5 = hashing.dvc_md5(file)
        listing.append({"md5": md5, "relpath": file.relative_to(folder).as_posix()})
        blob = cache / "files/md5" / md5[:2] / md5[2:]
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, blob)
    md5 = hashing.dvc_md5(folder)
    blob = cache / "files/md5" / md5[:2] / md5[2:]
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_text(json.dumps(listing), encoding="utf-8")


def put(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree), encoding="utf-8")
