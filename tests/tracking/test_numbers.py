"""One number, one name: what the pages, the console and metrics/ say of one finished run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flows import results
from rlhf_tasks import config, presets, tracking
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, run_card, run_facts
from rlhf_tasks.stages import report
from rlhf_tasks.tracking.store import open_store
from rlhf_tasks.tracking.sync import sync
from tests.flows import toy
from tests.report import workspace
from tests.report.test_page import Document
from tests.tracking.toy import artifact, log, runs, view

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Prefect
WIN_RATE = "77% (75% to 80%) over the SFT model; 71% (68% to 74%) over the references; by the gold judge"


def test_every_page_says_the_same_of_the_checkpoint_that_was_kept(
    home: Path, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last rollout's KL is 4.321, that of the kept checkpoint is 3.5."""
    shipped = (project / "params.yaml").read_text("utf-8")
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
    run_card.show(paths, settings)
    outcome = results.Outcome(
        name="n",
        how={},
        revision=commit,
        changes=["ppo.kl_coef: 0.03 → 0.05"],
        card=run_facts.outcome(paths, settings.judge.judges),
    )
    run = runs(home)["pipeline"].data
    pages = {
        "card": capsys.readouterr().out,
        "MLflow": run.tags["mlflow.note.content"],
        "Prefect": results.page(outcome, project, {}, {}, {}),
    }
    html = Document((project / "reports/index.html").read_text(encoding="utf-8")).text
    for text in ("24m24s for all stages", "KL 11.2 > 10", commit[:10], "ppo.kl_coef: 0.03 → 0.05"):
        assert {name for name, page in {**pages, "report": html}.items() if text not in page} == set(), text
    for text in (WIN_RATE, "3.5 ± 0.2 nats from SFT", "refused: KL 11.2 > 10"):
        assert {name for name, page in pages.items() if text not in page} == set(), text
    assert not [name for name, page in pages.items() if "4.3" in page]
    for text in ("77% win rate", "95% interval 75% to 80%", "3.5 nats How far", "± 0.2. 0 is no change"):
        assert text in html
    ppo, judged = (json.loads(paths.metrics(stage).read_text("utf-8")) for stage in ("ppo", "judge"))
    rate = Interval(value=judged["gold/policy_vs_sft/win_rate"], low=0.748, high=0.7982)
    assert WIN_RATE.startswith(document.share(rate))
    assert ppo["selected_kl"] == run.metrics["ppo/selected_kl"] == 3.5
    assert run.metrics["gold/policy_vs_sft/win_rate"] == rate.value


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_copied_or_moved_project_keeps_its_own_store(
    home: Path, capsys: pytest.CaptureFixture[str], how: object
) -> None:
    log("old", [(1, 2.0)])
    sync(home)
    log("late", [(1, 3.0)], stage="ppo")  # it is delivered in the new place
    before = artifact(home, "sft", "plots/sft.csv").read_bytes()
    there = home.parent / "elsewhere %d/_/.rlhf"
    shutil.copytree(home, there)
    if how is shutil.move:
        shutil.rmtree(home)
    assert sync(there) == (1, {})
    assert f"its artifacts are those at {(there / 'mlartifacts').as_uri()}" in capsys.readouterr().out
    for name, run in runs(there).items():
        assert run.info.artifact_uri.startswith((there / "mlartifacts").as_uri()), name
    assert artifact(there, "sft", "plots/sft.csv").read_bytes() == before
    assert artifact(there, "ppo", "plots/ppo.csv").exists()
    assert home.exists() == (how is shutil.copytree)
    if home.exists():
        assert "ppo" not in runs(home)
    open_store(None, there)
    assert capsys.readouterr().out == ""
