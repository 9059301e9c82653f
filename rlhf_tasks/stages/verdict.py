"""Stage verdict: whether the policy may be promoted, as far as this run can tell.

Whether it beats the champion is for `rlhf promote` to find out, who is champion being no input of a run.
No torch, and no registry here.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.config import VerdictView
from rlhf_tasks.config.promotion import parts
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import evidence, gate
from rlhf_tasks.tracking import Tracker

OUT = Path("evaluation/verdict.json")


def run(config: VerdictView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write evaluation/verdict.json; the same as numbers comes back. With `promotion: null` it is empty."""
    if config.promotion is None:
        atomic.write_json(OUT, {})
        console.say("promotion: null, so there is no gate to pass")
        return {}
    suspects = {one for name in config.promotion.named for one in parts(config.judges, name)}
    verdict = gate.decide(config.promotion, evidence.read(Path()), suspects=suspects, champion=False)
    atomic.write_json(OUT, verdict.tree())
    tracker.table("gate", verdict.rows())
    gate.show(verdict)
    console.say(("may be promoted: " if verdict.passed else "refused: ") + verdict.summary)
    return verdict.metrics()
