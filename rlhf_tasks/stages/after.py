"""What follows a stage and is no result, so that no stage depends on its code."""

from __future__ import annotations

import os

from rlhf_tasks.config import STAGES, Config, Stage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import command
from rlhf_tasks.report import run_facts
from rlhf_tasks.tracking import context


def run(stage: Stage, paths: Paths, settings: Config) -> None:
    """Register the policy with its verdict, and show the run's card at its end.

    A flow promotes with the same record. It and `rlhf run` show the card themselves: DVC may restore stages.
    """
    is_of_flow = context.STAGE_RUN in os.environ
    if stage == "verdict" and not is_of_flow:
        command.record_verdict(paths, settings)
    if stage == STAGES[-1] and not is_of_flow and context.RUN_NAME not in os.environ:
        run_facts.show_card(paths, settings)
