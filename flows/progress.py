"""How far a run of the pipeline is, in its log, which Prefect's page reloads. No torch here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from rlhf_tasks import console
from rlhf_tasks.project import durations, dvc_files

LOG_SECONDS = 60.0  # between two lines within a stage, at least


class Progress:
    """The progress of the stages of a run, each weighted by the time that it took when it last ran."""

    def __init__(self, stages: Sequence[str], home: Path) -> None:
        self._logger, self._said_at = get_run_logger(), 0.0  # here: no run is known to the follower's thread
        self.ends = dict[str, str]()  # of each stage that is over, but for `inputs`: `ran` or `cached`
        self.stage, self.share = dvc_files.INPUTS, 0.0
        """The present stage, and how much of it is done."""
        self._stages = [stage for stage in stages if stage != dvc_files.INPUTS]
        seconds = durations.read(home)
        self._is_known = all(stage in seconds for stage in self._stages)
        self._weights = {stage: seconds[stage] if self._is_known else 1.0 for stage in self._stages}
        self._weights[dvc_files.INPUTS] = 0.0

    def say(self, *doing: str) -> int:
        """Log the percentage that is done, which is returned, and what the present stage does now."""
        present = 0.0 if self.stage in self.ends else self.share * self._weights[self.stage]
        done = sum(self._weights[stage] for stage in self.ends) + present
        percent = round(100 * done / (sum(self._weights.values()) or 1.0))
        self._logger.info("%s", f"{percent}%, {self.stage}: {', '.join(doing)}")
        self._said_at = time.monotonic()
        return percent

    def follow(self, doing: Mapping[str, Any]) -> None:
        """Say once a minute how far the present stage is, as it writes that itself."""
        self.share, left = doing["share"], doing["left"]
        if self._is_known and self.share < 1:
            self._weights[self.stage] = left / (1 - self.share)  # other parameters take another time
        if time.monotonic() - self._said_at < LOG_SECONDS:
            return
        later = sum(self._weights[stage] for stage in self._stages if stage not in (*self.ends, self.stage))
        whole = [f"{console.duration(left + later)} left of the run"] if self._is_known and later else []
        self.say(doing["work"], f"{console.duration(left)} left", *whole)
