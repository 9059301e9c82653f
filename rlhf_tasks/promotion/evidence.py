"""What the pipeline measured of its policy, read for the gate. No torch here.

Stage verdict imports no more than this: `measurement` would make it depend on the code of all judges.
"""

from __future__ import annotations

import json

from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.gate import Evidence, Kl


def read(paths: Paths) -> Evidence:
    """The evidence in a project's files. A KL that metrics/ppo.json does not have is missing evidence.

    Raises:
        UserError: for a results document that is missing or cannot be read.
    """
    return Evidence(results=EvaluationResults.read(paths.evaluation_results), kl=selected_kl(paths))


def selected_kl(paths: Paths) -> Kl | None:
    """The KL of the checkpoint that PPO kept, by metrics/ppo.json; None if it was not measured.

    No score and no reward is read there, nor the KL of the last update.
    """
    file = paths.metrics("ppo")
    metrics = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if metrics.get("selected_kl") is None:
        return None
    return Kl(mean=metrics["selected_kl"], standard_error=metrics.get("selected_kl_standard_error"))
