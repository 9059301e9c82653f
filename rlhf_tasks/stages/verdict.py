"""Stage verdict: the gate's verdict about the policy, as far as one run can decide it.

Whether the policy beats the champion, which is no input of a run, is left to `rlhf promote`. No torch here.
"""

from __future__ import annotations

from rlhf_tasks import console
from rlhf_tasks.config import VerdictView
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.verdict import decide, read_kl, show
from rlhf_tasks.tracking import Tracker


def run(config: VerdictView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write evaluation/verdict.json and return its numbers; with `promotion: null` both are empty."""
    if config.promotion is None:
        atomic.write_json(paths.verdict, {})
        console.say("promotion is null, so there is no gate to pass")
        return {}
    results, kl = EvaluationResults.read(paths.evaluation_results), read_kl(paths.policy)
    verdict = decide(config.promotion, results, kl, judges=config.judges, champion=False, bar=config.bar)
    atomic.write_json(paths.verdict, verdict.tree())
    tracker.table("gate", verdict.rows())
    show(verdict)
    console.say(("may be promoted: " if verdict.passed else "refused: ") + verdict.summary)
    return verdict.metrics()
