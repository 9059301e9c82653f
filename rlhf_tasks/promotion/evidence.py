"""What the pipeline measured of its policy, read for the gate. No torch here.

    evaluation/judge/results.json    win rates, retention, judges that PPO optimized
    metrics/ppo.json                 the KL of the checkpoint that PPO kept

Nothing else is read of metrics/ppo.json: no score and no reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.config import VIEWS
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import dvc_files, hashing, inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.gate import Evidence, Kl

KL, KL_ERROR = "selected_kl", "selected_kl_standard_error"
DISPLAY_ONLY = ("labels", "num_samples_shown")  # keys of `judge` that change no comparison


def read(paths: Paths) -> Evidence:
    """The evidence in a project's files. A KL that metrics/ppo.json does not have is missing evidence.

    Raises:
        UserError: for a file that cannot be read, or without the results document.
    """
    return Evidence(results=EvaluationResults.read(paths.evaluation_results), kl=selected_kl(paths))


def selected_kl(paths: Paths) -> Kl | None:
    """The KL of the checkpoint that PPO kept; None if it was not measured.

    Raises:
        UserError: if metrics/ppo.json exists and cannot be read.
    """
    file = paths.metrics("ppo")
    if not file.exists():
        return None
    try:
        metrics = json.loads(file.read_text(encoding="utf-8"))
        if metrics.get(KL) is None:
            return None
        error = metrics.get(KL_ERROR)
        return Kl(mean=float(metrics[KL]), standard_error=None if error is None else float(error))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{paths.relative(file)} cannot be read ({error}); run `rlhf ppo` to write it again"
        ) from None


def is_trained_here(paths: Paths, md5: str) -> bool:
    """Whether metrics/ppo.json describes the policy with these bytes, according to dvc.lock."""
    locked = dvc_files.locked_by(paths.root, "ppo")
    metrics = paths.metrics("ppo")
    is_current = metrics.exists() and hashing.dvc_md5(metrics) == locked.get(paths.relative(metrics))
    return is_current and locked.get(paths.relative(paths.policy)) == md5


def is_judged_here(paths: Paths, md5: str) -> bool:
    """Whether the files in the project describe the policy with these bytes, according to dvc.lock.

    They do not if PPO has run since the judge did, if the files were replaced, or if `judge` in params.yaml
    has changed since.
    """
    root, folder = paths.root, paths.judge_results
    locked = dvc_files.locked_by(root, "judge")
    is_current = folder.exists() and hashing.dvc_md5(folder) == locked.get(paths.relative(folder))
    now = VIEWS["judge"].of(config.load(paths.params)).declared
    used = inputs.used(root, "judge").values
    return (
        is_trained_here(paths, md5)
        and is_current
        and locked.get(paths.relative(paths.policy)) == md5
        and _decisive(used) == _decisive(now)
    )


def reward_functions(paths: Paths) -> set[str]:
    """The functions that PPO optimized when it trained the policy of dvc.lock, and those of params.yaml.

    The cache may lack the record of the training.
    """
    now = dvc_files.parameters(paths.root).get("ppo", {}).get("scorers", [])
    scorers = [*inputs.used(paths.root, "ppo").values.get("ppo.scorers", []), *now]
    return {scorer["function"] for scorer in scorers if "function" in scorer}


def _decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    shown = tuple(f"judge.{key}" for key in DISPLAY_ONLY)
    return {k: v for k, v in values.items() if k.startswith("judge.") and k not in shown}
