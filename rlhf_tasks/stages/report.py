"""Stage `report`: one page about this run, reports/index.html, that needs no network to read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_tasks.project import atomic
from rlhf_tasks.report import inputs, page

if TYPE_CHECKING:
    from rlhf_tasks.config import ReportView
    from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker


def run(config: ReportView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write reports/index.html from what the other stages left; no metrics of its own.

    Raises:
        UserError: if metrics/judge.json is missing, or a file that is there cannot be read.
    """
    html = page.render(inputs.read(Path()))
    with atomic.whole(Path("reports")) as folder:
        (folder / "index.html").write_text(html, encoding="utf-8")
    tracker.artifact(Path("reports/index.html"))
    return {}
