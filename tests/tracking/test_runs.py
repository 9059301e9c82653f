"""What MLflow shows of stages and pipelines."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import hashing, processes
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, curves, dashboard
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking import runs as stored
from rlhf_tasks.tracking import view as shared_view
from rlhf_tasks.tracking.store import Delivery, embedded_uri
from rlhf_tasks.tracking.sync import sync
from tests.report import workspace
from tests.tracking.toy import (
    UNREACHABLE,
    artifact,
    log,
    points,
    reason,
    record,
    runs,
    status,
    step,
    table,
    view,
)


def test_more_metrics_than_one_request_may_hold_all_arrive(home: Path) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="sft-k") as tracker:
        for step in range(300):
            tracker.metrics({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, step=step)
    assert sync(home) == (1, {})
    assert [len(points(home, name=name)) for name in "abcd"] == [300] * 4


def test_a_stage_run_names_its_parameters_inputs_commit_and_pipeline(home: Path, project: Path) -> None:
    log("sft-k")
    sync(home)
    stage, pipeline = runs(home)["sft"], runs(home)["pipeline"]
    assert stage.data.params["sft.learning_rate"] == str(config.load().sft.learning_rate)
    assert stage.data.params["sft.from"] == "null"
    assert "ppo.kl_coef" not in stage.data.params
    assert stage.data.tags["mlflow.parentRunId"] == pipeline.info.run_id
    assert stage.data.tags["rlhf.run"] == "sft-k"
    assert stage.data.tags["git.rev"] == "none"  # the test's project is in no repository
    assert stage.data.tags["versions"].startswith("Python 3")
    assert len([tag for tag in stage.data.tags if not tag.startswith("mlflow.")]) <= 8
    [data] = stage.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("data/sft", hashing.dvc_md5(project / "data/sft"))


@pytest.mark.parametrize(
    ("error", "end", "why"),
    [
        (RuntimeError("boom"), "FAILED", "RuntimeError: boom"),
        (UserError("fix it"), "FAILED", "UserError: fix it"),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (SystemExit(1), "FAILED", "the process ended with exit status 1"),
    ],
)
def test_a_stage_that_does_not_finish_shows_why(home: Path, error: BaseException, end: str, why: str) -> None:
    with pytest.raises(type(error)), tracking.open_run(Paths(), "sft", view(), key="sft-k"):
        raise error
    sync(home)
    assert status(home, "sft", "pipeline") == [end, end]
    assert (reason(home, "sft"), reason(home, "pipeline")) == (why, f"sft: {why}")


def test_stages_of_one_pipeline_share_a_parent_that_ends_with_the_last(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_dvc(monkeypatch)
    parents = []
    for stage in ("sft", "ppo", "report"):
        with tracking.open_run(Paths(), stage, view(stage), key=f"{stage}-k"):
            step(home)
            assert status(home, "pipeline") == ["RUNNING"]
        sync(home)
        assert status(home, "pipeline") == ["FINISHED"]
        parents.append(runs(home)[stage].data.tags["mlflow.parentRunId"])
    assert parents == [runs(home)["pipeline"].info.run_id] * 3
    assert {"sft.learning_rate", "ppo.kl_coef"} <= runs(home)["pipeline"].data.params.keys()


def test_a_stage_finds_its_pipeline_by_the_dvc_process_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dvc = ["python", "/x/bin/dvc", "repro"]

    class Ancestor:
        def __init__(self, pid: int, *command: str) -> None:
            self.pid, self.command = pid, list(command)

        def cmdline(self) -> list[str]:
            return self.command

        def parents(self) -> list[Ancestor]:
            inner = [Ancestor(2, "/bin/sh", "-c", "rlhf sft"), Ancestor(5, "make", "-C", "dvc")]
            return [*inner, Ancestor(3, *dvc), Ancestor(4, "make", "run")]

    def parent() -> dict[str, str]:
        return context.parent(Ancestor(1, "rlhf", "sft"), "sft-k")

    for name in ("RLHF_PARENT_RUN", "DVC_EXP_NAME", "RLHF_RUN_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "start", lambda ancestor: f"boot-{ancestor.pid}")
    by_dvc = {"key": f"dvc-{platform.node()}:3:boot-3", "owner": "dvc"}
    assert parent() == by_dvc
    for words in ("/x/bin/dvc repro", "/x/MacOS/Python -X dev -m dvc repro"):
        dvc[:] = words.split()
        assert parent() == by_dvc
    monkeypatch.setenv("DVC_EXP_NAME", "mine")
    assert parent() == by_dvc | {"dvc.exp": "mine", "name": "mine"}
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    of_flow = {"key": "flow-1", "owner": "flow", "name": "mine"}
    assert parent() == of_flow, "a flow tags its run with its experiment itself"
    monkeypatch.setenv("RLHF_RUN_NAME", "default-7f3a")
    assert parent()["name"] == "default-7f3a"


def under_dvc(monkeypatch: pytest.MonkeyPatch, **tags: str) -> None:
    """The stages to come belong to a dvc process that lives as long as this one."""
    parent = {"key": f"dvc-{processes.name_of(psutil.Process())}", "owner": "dvc", **tags}
    monkeypatch.setattr(context, "parent", lambda *_: parent)


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_dvc_exp_run_names_no_experiment(
    home: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    under_dvc(monkeypatch, **{"dvc.exp": "mine"})
    with suppress(RuntimeError), tracking.open_run(Paths(), "report", view("report"), key="report-k"):
        if fails:
            raise RuntimeError("boom")
    sync(home)
    assert runs(home)["pipeline"].data.tags.get("dvc.exp") == (None if fails else "mine")


def test_a_repeated_stage_sets_a_failed_pipeline_to_running(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    with pytest.raises(RuntimeError), tracking.open_run(Paths(), "sft", view(), key="sft-1"):
        raise RuntimeError("boom")
    with tracking.open_run(Paths(), "sft", view(), key="sft-2"):
        step(home)
        assert status(home, "pipeline") == ["RUNNING"]
        assert reason(home, "pipeline") is None


def test_a_pipeline_without_a_report_is_finished_when_its_last_stage_was(home: Path) -> None:
    log("sft-k")
    assert sync(home) == (1, {})
    pipeline = runs(home)["pipeline"].info
    assert (pipeline.status, pipeline.end_time) == ("FINISHED", runs(home)["sft"].info.end_time)


def test_a_late_delivery_leaves_a_finished_flow_finished(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
    flow = tracking_pipeline.open_run(Paths(), "1", config.load().tracking, {})
    with flow, pytest.raises(RuntimeError), tracking.open_run(Paths(), "sft", view(), key="sft-k"):
        raise RuntimeError("boom")
    assert sync(home) == (2, {})
    assert status(home, "sft", "pipeline") == ["FAILED", "FINISHED"]
    assert reason(home, "pipeline") is None


@pytest.mark.parametrize("in_time", [True, False])
def test_a_late_delivery_leaves_a_failed_pipeline_failed(
    home: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """PPO of a dvc process failed. It is delivered before that process ends, or late like SFT."""
    under_dvc(monkeypatch)
    log("sft-k")
    with pytest.raises(RuntimeError), tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-k"):
        raise RuntimeError("boom")
    if in_time:
        Delivery(record(home, "ppo-k")).step()
    assert sync(home) == (1 if in_time else 2, {})
    assert status(home, "sft", "pipeline") == ["FINISHED", "FAILED"]
    assert reason(home, "pipeline") == "ppo: RuntimeError: boom"


def test_the_dashboard_lists_the_runs_page_of_each_experiment(home: Path) -> None:
    identity = MlflowClient(embedded_uri(home)).create_experiment("mine")
    address = f"http://here/#/experiments/{identity}/runs?workflowType=machine_learning"
    pages = dashboard.runs_pages(home, "http://here", "new")
    assert pages["mine"] == f"{address}&compareRunsMode=CHART&viewStateShareKey=rlhf"
    assert pages.keys() == {"mine", "new"}, "the experiment of the first run exists before it"
    charts = [chart["metricKey"] for chart in experiment_view(home, "mine")["compareRunCharts"]]
    assert charts[:3] == ["objective/kl", "objective/rlhf_reward", "policy/clipfrac_avg"]
    assert set(charts[3:]) == {"objective/scores", "val/ratio"}


def experiment_view(home: Path, name: str) -> Any:
    experiment = MlflowClient(embedded_uri(home)).get_experiment_by_name(name)
    assert experiment is not None
    return json.loads(experiment.tags["mlflow.sharedViewState.rlhf"])


def test_the_view_of_metrics_with_long_names_fits_into_a_tag() -> None:
    names = [f"judge/{'name' * 30}_{i}/win_rate" for i in range(20)]
    found = shared_view.text(["objective/kl", *names])
    assert 4000 < len(found) <= 5000
    assert f"metrics.`{names[0]}`" in json.loads(found)["selectedColumns"]


def test_the_pipeline_has_ppos_curves_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_dvc(monkeypatch)
    for steps in ((256, 512), (512, 768)):  # the second process resumes the stage at its last snapshot
        with tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-k") as tracker:
            for step in steps:
                tracker.metrics({"objective/kl": step / 256, "lr": 0.1}, step=step)
            tracker.final({"objective/kl": 9.0, "selected_kl": 2.5})
        sync(home)
    assert points(home, "pipeline", "objective/kl") == [(256, 1.0), (512, 2.0), (768, 3.0)]
    assert runs(home)["pipeline"].data.metrics == {"objective/kl": 3.0, "ppo/selected_kl": 2.5}


def test_the_pipeline_has_the_curves_of_dpo_where_it_alone_trains(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under names of their own, with a section in the view and their figure; no empty one of PPO."""
    under_dvc(monkeypatch)
    with tracking.open_run(Paths(), "dpo", view("dpo"), key="dpo-k") as tracker:
        tracker.metrics({"eval/kl": 1.5, "eval/loss": 0.5, "train/loss": 0.6}, step=3)
    sync(home)
    assert runs(home)["pipeline"].data.metrics == {"dpo/eval/kl": 1.5, "dpo/eval/loss": 0.5}
    Path("plots").mkdir(exist_ok=True)
    Path("plots/dpo.csv").write_text("step,eval/kl\n3,1.5\n6,2.5\n", encoding="utf-8")
    Path("plots/ppo.csv").write_text("episode\n", encoding="utf-8")
    log("report-k", stage="report")
    sync(home)
    assert points(home, "pipeline", "dpo/eval/kl") == [(3, 1.5), (6, 2.5)]
    assert artifact(home, "pipeline", "curves.png").exists()
    saved = experiment_view(home, "rlhf")
    assert [one["name"] for one in saved["compareRunSections"]] == ["DPO"]
    assert [one["metricKey"] for one in saved["compareRunCharts"]] == ["dpo/eval/kl", "dpo/eval/loss"]
    assert not [name for name in saved["selectedColumns"] if "dpo/eval" in name]


def test_a_repros_run_has_the_results_of_restored_stages_too(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_dvc(monkeypatch, **{"dvc.exp": "mine"})
    paths = Paths()
    for file, text in {
        paths.curves("ppo"): "episode,objective/kl,lr\n256,1.5,0.1\n512,2.5,0.1\n",
        paths.metrics("judge"): '{"gold/policy_vs_sft/win_rate": 0.75, "length/policy": 20.0}',
        paths.reports / "index.html": "<html>",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    workspace.put_responses(project)
    log("report-k", stage="report")
    sync(home)
    run = runs(home)["pipeline"]
    assert run.info.run_name == "mine", "it has the name of the experiment of `dvc exp run`"
    assert points(home, "pipeline", "objective/kl") == [(256, 1.5), (512, 2.5)]
    assert run.data.metrics == {"objective/kl": 2.5, "gold/policy_vs_sft/win_rate": 0.75}
    for path in ("curves.png", "report/index.html", "plots/ppo.csv"):
        assert artifact(home, "pipeline", path).exists()
    samples = artifact(home, "pipeline", "samples.txt").read_text(encoding="utf-8").split("\n\n")
    assert len(samples) == 4
    assert samples[0].splitlines()[-1].startswith("policy: ")
    note, page = run.data.tags["mlflow.note.content"], f"#/experiments/1/runs/{run.info.run_id}/artifacts"
    assert "**DVC experiment:** mine" in note
    assert f"[Samples]({page}/samples.txt?" in note
    assert f"[Report]({page}/report/index.html?" in note
    assert note.endswith(f"(get-artifact?path=curves.png&run_uuid={run.info.run_id})")
    assert len([tag for tag in run.data.tags if not tag.startswith("mlflow.")]) <= 8
    columns = experiment_view(home, "rlhf")["selectedColumns"]
    assert columns[:3] == ["tags.`verdict`", "tags.`preset`", "tags.`changes`"]
    assert columns[3:] == ["metrics.`gold/policy_vs_sft/win_rate`"], "no KL but that of the kept checkpoint"
    assert [one["name"] for one in experiment_view(home, "rlhf")["compareRunSections"]] == ["PPO"]
    monkeypatch.setattr(context, "parent", lambda *_: {"key": "dvc-2", "owner": "dvc"})
    with suppress(KeyboardInterrupt), tracking.open_run(Paths(), "sft", view(), key="sft-2"):
        raise KeyboardInterrupt
    with tracking_pipeline.open_run(Paths(), "2", view().tracking, {}):
        pass
    sync(home)
    assert experiment_view(home, "rlhf")["selectedColumns"] == columns, (
        "a run without metrics takes none away"
    )


def test_an_event_is_a_tag_and_a_row(home: Path) -> None:
    with tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-k") as tracker:
        tracker.event("guard.kl", "12 is above 10", step=512)
    sync(home)
    assert runs(home)["ppo"].data.tags["guard.kl"] == "at 512: 12 is above 10"
    assert table(home, "ppo", "events")["data"] == [[512, "guard.kl", "12 is above 10"]]


def test_final_metrics_do_not_double_a_curve(home: Path) -> None:
    with tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-k") as tracker:
        tracker.metrics({"objective/kl": 3.0, "lr": 0.1}, step=256)
        tracker.final({"objective/kl": 3.0, "lr": 0.2, "selected_episode": 128.0})
    sync(home)
    assert runs(home)["ppo"].data.metrics == {
        "objective/kl": 3.0,
        "lr": 0.1,
        "final/lr": 0.2,
        "selected_episode": 128.0,
    }
    assert runs(home)["pipeline"].data.metrics == {"objective/kl": 3.0, "ppo/selected_episode": 128.0}


def test_tables_grow_and_artifacts_are_copies(home: Path, project: Path) -> None:
    with tracking.open_run(Paths(), "sft", view(), key="k") as tracker:
        tracker.table("samples", [{"query": "q", "score": 1.0}])
        tracker.table("samples", [{"query": "r", "note": "n"}])
        (project / "page.html").write_text("first", encoding="utf-8")
        tracker.artifact(project / "page.html")
        (project / "page.html").unlink()
    sync(home)
    rows = [["q", 1.0, None], ["r", None, "n"]]
    assert table(home, "sft", "samples") == {"columns": ["query", "score", "note"], "data": rows}
    assert artifact(home, "sft", "page.html").read_text(encoding="utf-8") == "first"
    tables = json.loads(runs(home)["sft"].data.tags["mlflow.loggedArtifacts"])
    assert tables == [{"path": "tables/samples.json", "type": "table"}]
    texts = artifact(home, "sft", "tables/samples.txt").read_text(encoding="utf-8")
    assert texts == "query: q\nscore: 1\n\nquery: r\nnote: n"
    assert not (home / "outbox/k").exists(), "delivered copies are removed"


def test_curves_are_delivered_as_csv_and_as_the_figure_that_they_give(home: Path, project: Path) -> None:
    with tracking.open_run(Paths(), "ppo", view("ppo"), key="ppo-k") as tracker:
        for episode, kl in enumerate([2.0, 1 / 3, 1e-12], start=1):
            tracker.metrics({"objective/kl": kl, "episode": float(episode)}, step=64 * episode)
        tracker.metrics({"lr": 0.5}, step=128)
        rows = tracker.history()
    sync(home)
    assert artifact(home, "ppo", "plots/ppo.csv").read_text(encoding="utf-8") == curves.csv_text(
        rows, "episode"
    )
    curves.draw(rows, "ppo", project / "direct.png")
    assert artifact(home, "ppo", "curves.png").read_bytes() == (project / "direct.png").read_bytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_whose_curves_cannot_be_drawn_is_delivered_and_shows_why(home: Path) -> None:
    log("k", [(1, 1e308), (2, -1e308)])
    assert sync(home) == (1, {})
    assert points(home) == [(1, 1e308), (2, -1e308)]
    assert status(home, "sft") == ["FINISHED"]
    assert runs(home)["sft"].data.tags["rlhf.figure"].startswith("curves.png cannot be drawn: ")


@pytest.mark.parametrize(("rank", "enabled"), [("1", True), ("0", False)])
def test_other_ranks_and_disabled_tracking_keep_curves_and_write_no_record(
    home: Path, monkeypatch: pytest.MonkeyPatch, rank: str, enabled: bool
) -> None:
    for name in context.GROUP:
        monkeypatch.setenv(name, rank)
    with tracking.open_run(Paths(), "sft", view(enabled=enabled), key="sft-k") as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
        tracker.metrics({"eval/loss": 2.0}, step=1)
    assert tracker.history() == [{"step": 1, "train/loss": 1.0, "eval/loss": 2.0}]
    assert not (home / "outbox").exists()


def test_a_run_is_read_with_its_stages_by_id_key_or_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-7")
    for stage, name in (("sft", "perplexity"), ("ppo", "objective/kl")):
        with tracking.open_run(Paths(), stage, view(stage), key=f"{stage}-1") as tracker:  # type: ignore[arg-type]
            tracker.metrics({name: 1.0, "lr": 0.1}, step=64)
            tracker.metrics({name: 3.0, "lr": 0.1}, step=128)
            tracker.final({name: 2.0})
    sync(home)
    pipeline = runs(home)["pipeline"].info
    for name in (pipeline.run_id, "flow-7", pipeline.run_name):
        whole = stored.find(None, home, name, ["objective/kl"])
        assert whole is not None
        assert whole.metrics["sft"]["perplexity"] == whole.metrics["ppo"]["objective/kl"] == 2.0
        kl = [{"episode": 64, "objective/kl": 1.0}, {"episode": 128, "objective/kl": 3.0}]
        assert whole.curves == {"sft": [], "ppo": kl}
        assert whole.parameters["ppo.kl_coef"] == "0.03"
    alone = stored.find(None, home, "ppo-1", [])
    assert alone is not None
    assert list(alone.metrics) == ["ppo"]
    assert [stored.find(None, home, name, []) for name in ("ppo-2", "0" * 32, "it's")] == [None] * 3
    with pytest.raises(UserError, match=f"run ppo-1 cannot be read from MLflow at {UNREACHABLE}"):
        stored.find(UNREACHABLE, home, "ppo-1", [])
