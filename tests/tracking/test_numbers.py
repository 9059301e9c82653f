"""One number, one name: what the pages, the console and metrics/ say of one finished run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flows import results
from rlhf_tasks import config, presets, tracking
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import run_facts
from rlhf_tasks.stages import report
from rlhf_tasks.tracking.sync import sync
from tests.flows import toy
from tests.report import workspace
from tests.report.test_page import Document
from tests.tracking.toy import artifact, log, runs, view

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Prefect


def test_every_page_says_the_same_of_the_checkpoint_that_was_kept(
    home: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last rollout's KL is 4.321, that of the kept checkpoint is 3.5."""
    shipped, change = (project / "params.yaml").read_text("utf-8"), "ppo.kl_coef: 0.03 → 0.05"
    toy.git(project, "init", "-q")
    workspace.put_text(project / ".gitignore", "*\n!params.yaml\n")
    toy.commit(project)
    commit = toy.git(project, "rev-parse", "HEAD").strip()
    workspace.put_all(project, commit)
    workspace.put_text(project / "params.yaml", presets.combine(shipped, [], ["ppo.kl_coef=0.05"])[0])
    paths, settings = Paths(), config.load()
    with tracking.open_run(paths, "report", view("report"), key="report-k") as tracker:
        report.run(config.ReportView.of(settings), paths, tracker)
    sync(home)
    run_facts.show_card(paths, settings)
    came_out = run_facts.outcome(paths, settings.judge.judges)
    outcome = results.Outcome(name="n", how={}, revision=commit, changes=[change], card=came_out)
    run = runs(home)["pipeline"].data
    pages = {
        "card": capsys.readouterr().out,
        "MLflow": run.tags["mlflow.note.content"],
        "Prefect": results.page(outcome, project, {}),
        "report": Document((project / "reports/index.html").read_text(encoding="utf-8")).text,
    }
    for text in ("30m30s for all stages", "KL 11.2 > 10", commit[:10], change):
        assert [name for name, page in pages.items() if text not in page] == [], text
    html = pages.pop("report")
    for text in ("77% win rate", "95% interval 75% to 80%", "3.5 nats How far", "± 0.2. 0 is no change"):
        assert text in html
    rates = "77% (75% to 80%) over the SFT model; 71% (68% to 74%) over the references; by the gold judge"
    for text in (rates, "3.5 ± 0.2 nats from SFT", "refused: KL 11.2 > 10"):
        assert [name for name, page in pages.items() if text not in page] == [], text
    assert not [name for name, page in pages.items() if "4.3" in page]
    ppo, judged = (json.loads(paths.metrics(stage).read_text("utf-8")) for stage in ("ppo", "judge"))
    name = "gold/policy_vs_sft/win_rate"
    assert run.metrics["ppo/selected_kl"] == ppo["selected_kl"] == 3.5
    assert run.metrics[name] == judged[name] == 0.7731


def test_a_copied_project_keeps_its_own_store(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log("old", [(1, 2.0)])
    sync(home)
    log("late", [(1, 3.0)], stage="ppo")  # it is delivered in the new place
    there = home.parent / "elsewhere %d/_/.rlhf"
    shutil.copytree(home, there)
    assert sync(there) == (1, {})
    assert f"its artifacts are those at {(there / 'mlartifacts').as_uri()}" in capsys.readouterr().out
    for stage, run in runs(there).items():
        assert run.info.artifact_uri.startswith((there / "mlartifacts").as_uri())
        assert stage == "pipeline" or artifact(there, stage, f"plots/{stage}.csv").exists()
    assert "ppo" not in runs(home)
