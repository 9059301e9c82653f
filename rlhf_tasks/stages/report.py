"""Stage report: pages about this run in reports/, which need no network to read."""

from __future__ import annotations

from rlhf_tasks import console
from rlhf_tasks.config import ReportView
from rlhf_tasks.project import atomic
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, page, rollouts, run_facts
from rlhf_tasks.tracking import Tracker, context


@console.part("drawing the page")
def run(config: ReportView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write reports/index.html from the files of the other stages, and rollouts.html if PPO has kept some.

    The stage has no metrics.

    Raises:
        UserError: if the results document of stage judge does not exist, or a file cannot be read.
    """
    shown = page.context(paths, config, context.run_name())
    pages = {"index.html": document.render("page.html", shown)}
    if shown["rollouts"]:
        kept = rollouts.context(shown["rollouts"], shown["trips"] or [], config.ppo)
        pages["rollouts.html"] = document.render("rollouts.html", kept, "rollouts.js")
    with atomic.whole(paths.reports) as folder:
        for name, html in pages.items():
            (folder / name).write_text(html, encoding="utf-8")
    tracker.facts = run_facts.outcome(paths, config.judge.judges) | shown["run"]
    for name in pages:
        tracker.artifact(paths.reports / name)
    return {}
