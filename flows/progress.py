"""How far a run of the pipeline is: a percentage and a line, in an artifact of the run. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from prefect.artifacts import create_progress_artifact, update_progress_artifact

from flows import results
from rlhf_tasks import console
from rlhf_tasks.project import durations, dvc_files


class Progress:
    """The progress of the stages of a run, each weighted by the time that it took when it last ran."""

    def __init__(self, stages: Sequence[str], home: Path) -> None:
        self._artifact: Any = create_progress_artifact(0.0, key=results.PROGRESS_KEY, description="comparing")
        self.ends = dict[str, str]()  # of each stage that is over: `ran` or `cached`
        self.stage, self.share = dvc_files.INPUTS, 0.0
        """The present stage, and how much of it is done."""
        self._stages = [stage for stage in stages if stage != dvc_files.INPUTS]
        seconds = durations.read(home)
        self._is_known = all(seconds.get(stage) for stage in self._stages)
        self._weights = {stage: seconds[stage] if self._is_known else 1.0 for stage in self._stages}
        self._weights[dvc_files.INPUTS] = 0.0

    def begin(self, stage: str) -> None:
        """Make this stage the present one."""
        self.stage, self.share = stage, 0.0

    def end(self, result: str) -> None:
        """Record how the present stage ended. `inputs` always runs, so it is not listed."""
        if self.stage != dvc_files.INPUTS:
            self.ends[self.stage] = result

    def show(self, *doing: str) -> int:
        """Show the percentage that is done, what the run does now, and how each stage ended."""
        present = 0.0 if self.stage in self.ends else self.share * self._weights[self.stage]
        done = sum(self._weights[stage] for stage in self.ends) + present
        percent = round(100 * done / sum(self._weights.values()))
        now = ", ".join([f"{percent}%", *doing])
        ends = "; ".join(f"{stage}: {result}" for stage, result in self.ends.items())
        with suppress(httpx.HTTPError):  # the server is away: the stages go on
            description = f"{now}  \n{ends}".rstrip()
            update_progress_artifact(self._artifact, float(percent), description=description)
        return percent

    def follow(self, doing: Mapping[str, Any]) -> None:
        """Show how far the present stage is, as it writes that itself."""
        self.share, left = doing["share"], doing["left"]
        later = sum(self._weights[stage] for stage in self._stages if stage not in (*self.ends, self.stage))
        whole = f"{console.duration(left + later)} left of the run" if self._is_known and later else ""
        self.show(f"{self.stage}: {console.duration(left)} left", doing["work"], *filter(None, [whole]))
