"""A judge that chooses, on validation prompts, which of PPO's checkpoints is kept (`ppo.select_by`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlhf_tasks.config.judge import Selection
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.evaluation import statistics
from rlhf_tasks.evaluation.judges.build import build_judge
from rlhf_tasks.evaluation.judges.comparisons import check_failures
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training.runtime import Runtime

KEY = "ppo.select_by.judge"


class SelectionJudge:
    """The first process judges and sends the result to the others, so that no comparison is paid for twice.

    Raises:
        UserError: if the judge cannot be made.
    """

    def __init__(self, rt: Runtime, settings: Selection, paths: Paths, columns: Collection[str] = ()) -> None:
        self._rt, self._max_failure_share = rt, settings.max_failure_share
        self.name = settings.judge.name
        self._judge = (
            build_judge(
                settings.judge, rt.device, settings.max_failure_share, paths, columns=columns, key=KEY
            )
            if rt.is_main
            else None
        )

    def win_rate(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        references: Sequence[str],
        columns: Columns = NONE,
    ) -> float:
        """The share of prompts at which the response wins over the reference; a tie counts half.

        Raises:
            UserError: if the judge stops, or fails at too many prompts.
        """
        rate = None
        if self._judge is not None:
            comparisons = self._judge.compare(prompts, responses, references, columns)
            check_failures(self.name, comparisons, self._max_failure_share)
            rate = statistics.rate(comparisons.outcomes).value
        result: float = self._rt.from_main(rate)
        return result
