"""Stage report: one page about this run, reports/index.html, which needs no network to read."""

from __future__ import annotations

from rlhf_tasks import console
from rlhf_tasks.config import ReportView
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, page
from rlhf_tasks.tracking import Tracker, context


@console.part("drawing the page")
def run(config: ReportView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write reports/index.html from the files of the other stages; the stage has no metrics.

    Raises:
        UserError: if the results document of stage judge does not exist, or a file cannot be read.
    """
    html = document.render("page.html", page.context(paths, config, context.run_name()))
    with atomic.whole(paths.reports) as folder:
        (folder / "index.html").write_text(html, encoding="utf-8")
    tracker.artifact(paths.reports / "index.html")
    return {}
