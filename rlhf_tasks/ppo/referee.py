"""A judge that tells, on validation prompts, which of PPO's checkpoints to keep (`ppo.select_by`)."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_tasks.config.judge import Selection
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.build import build_judge
from rlhf_tasks.evaluation.judges.comparisons import check_failures
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training.runtime import Runtime

KEY = "ppo.select_by.judge"


class Referee:
    """The first process judges, the others are told: no verdict is asked for, or paid, twice.

    Raises:
        UserError: if the judge cannot be made.
    """

    def __init__(self, rt: Runtime, settings: Selection, paths: Paths) -> None:
        self._rt, self._max_failure_share = rt, settings.max_failure_share
        self.name = settings.judge.name
        self._judge = (
            build_judge(settings.judge, rt.device, settings.max_failure_share, paths, key=KEY)
            if rt.is_main
            else None
        )

    def __call__(self, prompts: Sequence[str], answers: Sequence[str], references: Sequence[str]) -> float:
        """Share of prompts at which the answer wins over the reference; ties count half.

        Raises:
            UserError: if the judge cannot go on, or fails too often.
        """
        rate = None
        if self._judge is not None:
            found = self._judge.compare(prompts, answers, references)
            check_failures(self.name, found, self._max_failure_share)
            rate = statistics.rate(found.outcomes).value
        won: float = self._rt.from_main(rate)
        return won
