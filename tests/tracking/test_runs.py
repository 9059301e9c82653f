"""A run per stage under a run per pipeline; nothing lost when MLflow is away."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
from filelock import FileLock
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import BAD_REQUEST, INVALID_PARAMETER_VALUE, REQUEST_LIMIT_EXCEEDED
from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient

from rlhf_tasks import config, tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import hashing
from rlhf_tasks.project.processes import free_port
from rlhf_tasks.tracking import context, courier, curves, dashboard, records, refusals
from rlhf_tasks.tracking import pipeline as tracking_pipeline
from rlhf_tasks.tracking.rendezvous import Post
from rlhf_tasks.tracking.spool import Spool, pending, table_json, tell_refused
from rlhf_tasks.tracking.store import Store, embedded_uri
from tests.flows.toy import until
from tests.tracking.toy import deliver, runs, served, view

UNREACHABLE = "http://127.0.0.1:9"  # the discard port: refused at once


def test_metrics_keep_their_names_steps_and_values(home: Path) -> None:
    with tracking.open_run("sft", view()) as tracker:
        for step, loss in [(1, 2.0), (5, 1.5)]:
            tracker.metrics({"train/loss": loss}, step=step)
    deliver(home)
    points = MlflowClient(embedded_uri(home)).get_metric_history(runs(home)["sft"].info.run_id, "train/loss")
    assert [(point.step, point.value) for point in points] == [(1, 2.0), (5, 1.5)]


def test_a_stage_run_names_its_parameters_inputs_commit_and_pipeline(home: Path, project: Path) -> None:
    with tracking.open_run("sft", view(), key="sft-k"):
        pass
    deliver(home)
    stage, pipeline = runs(home)["sft"], runs(home)["pipeline"]
    assert stage.data.params["sft.learning_rate"] == str(config.load().sft.learning_rate)
    assert stage.data.params["sft.from"] == "null"
    assert "ppo.kl_coef" not in stage.data.params
    assert stage.data.tags["mlflow.parentRunId"] == pipeline.info.run_id
    assert stage.data.tags["rlhf.run"] == "sft-k"
    assert stage.data.tags["git.rev"] == "none"  # the test's project is in no repository
    [given] = stage.inputs.dataset_inputs
    assert (given.dataset.name, given.dataset.digest) == ("data/sft", hashing.dvc_md5(project / "data/sft"))


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("boom"), "FAILED", "RuntimeError: boom"),
        (UserError("mend it"), "FAILED", "UserError: mend it"),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
    ],
)
def test_an_unfinished_stage_shows_why(home: Path, error: BaseException, status: str, reason: str) -> None:
    with pytest.raises(type(error)), tracking.open_run("sft", view()):
        raise error
    deliver(home)
    assert runs(home)["sft"].info.status == status
    assert runs(home)["sft"].data.tags["rlhf.reason"] == reason
    assert runs(home)["pipeline"].info.status == status
    assert runs(home)["pipeline"].data.tags["rlhf.reason"] == f"sft: {reason}"


def test_stages_of_one_pipeline_share_a_parent_that_ends_with_the_last(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    parents = []
    for stage, status in [("sft", "RUNNING"), ("ppo", "RUNNING"), ("report", "FINISHED")]:
        with tracking.open_run(stage, view(stage)):  # type: ignore[arg-type]
            pass
        deliver(home)
        assert runs(home)["pipeline"].info.status == status
        parents.append(runs(home)[stage].data.tags["mlflow.parentRunId"])
    assert parents == [runs(home)["pipeline"].info.run_id] * 3
    assert {"sft.learning_rate", "ppo.kl_coef"} <= runs(home)["pipeline"].data.params.keys()


def test_stages_under_dvc_live_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ancestor:
        def __init__(self, pid: int, *words: str) -> None:
            self.pid, self.words = pid, list(words)

        def cmdline(self) -> list[str]:
            return self.words

        def create_time(self) -> float:
            return 12.34

        def parents(self) -> list[Ancestor]:
            shell, dvc = (
                Ancestor(2, "/bin/sh", "-c", "rlhf sft"),
                Ancestor(3, "python", "/x/bin/dvc", "repro"),
            )
            return [shell, dvc, Ancestor(4, "make", "run")]

    for name in ("RLHF_PARENT_RUN", "MLFLOW_RUN_ID", "DVC_EXP_NAME"):
        monkeypatch.delenv(name, raising=False)
    name = f"{platform.node()}:3:1234"
    by_dvc = {"key": f"dvc-{name}", "owner": "dvc", "process": name}
    assert context.parent(Ancestor(1, "rlhf", "sft"), "sft-k") == by_dvc
    monkeypatch.setenv("DVC_EXP_NAME", "mine")
    assert context.parent(Ancestor(1, "rlhf", "sft"), "sft-k") == by_dvc | {"dvc.exp": "mine"}
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert context.parent(Ancestor(1, "rlhf", "sft"), "sft-k") == {"id": "abc", "owner": "given"}
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    found = context.parent(Ancestor(1, "rlhf", "sft"), "sft-k")
    assert found == {"key": "flow-1", "owner": "flow"}, "a flow tells itself of what it saved"


def under_dvc(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """The stages to come belong to a `dvc` that is this very process."""
    mine = context.process_name(psutil.Process())
    parent = {"key": f"dvc-{mine}", "owner": "dvc", "process": mine, **more}
    monkeypatch.setattr(context, "parent", lambda process, key: parent)


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_dvc_exp_run_names_no_experiment(
    home: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    under_dvc(monkeypatch, **{"dvc.exp": "mine"})
    with suppress(RuntimeError), tracking.open_run("report", view("report")):
        if fails:
            raise RuntimeError("boom")
    deliver(home)
    assert runs(home)["pipeline"].data.tags.get("dvc.exp") == (None if fails else "mine")


def test_a_repeated_stage_sets_a_failed_pipeline_running_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-1")
    with pytest.raises(RuntimeError), tracking.open_run("sft", view()):
        raise RuntimeError("boom")
    with tracking.open_run("sft", view()):
        pass
    deliver(home)
    assert runs(home)["pipeline"].info.status == "RUNNING"


def test_a_pipeline_whose_dvc_process_is_gone_is_closed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    name = f"{platform.node()}:{gone.pid}:1"
    left = {"key": f"dvc-{name}", "owner": "dvc", "process": name}
    monkeypatch.setattr(context, "parent", lambda process, key: left)
    with tracking.open_run("sft", view()):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(context, "is_alive", lambda name: True)
        deliver(home)
    assert runs(home)["pipeline"].info.status == "RUNNING"
    Store.open({"home": str(home), "uri": None, "experiment": "rlhf"})
    pipeline = runs(home)["pipeline"].info
    assert (pipeline.status, pipeline.end_time) == ("FINISHED", runs(home)["sft"].info.end_time)


def test_a_late_delivery_leaves_a_finished_flow_finished(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
    with tracking_pipeline.open_run("1", config.load().tracking, {}) as flow:
        with pytest.raises(RuntimeError), tracking.open_run("sft", view(), key="sft-k"):
            raise RuntimeError("boom")
        with tracking.open_run("sft", view(), key="sft-l"):
            pass
        assert flow.trouble() == "nobody delivers sft-k"
    assert courier.deliver(Spool(home / "spool", "flow-1")) is None
    assert runs(home)["pipeline"].info.status == "FINISHED"
    monkeypatch.setattr(context, "is_alive", lambda name: False)
    assert courier.sync(home) == (2, {})
    assert runs(home)["pipeline"].info.status == "FINISHED"
    assert "rlhf.reason" not in runs(home)["pipeline"].data.tags


def test_what_a_flow_has_not_sent_is_trouble_unless_somebody_sends_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tracking_pipeline.open_run("1", config.load().tracking, {}) as flow:
        with tracking.open_run("sft", view(), key="alone"):
            pass
        assert flow.trouble() is None, "a stage of another pipeline"
        monkeypatch.setenv("RLHF_PARENT_RUN", tracking_pipeline.key("1"))
        with tracking.open_run("ppo", view("ppo"), key="ppo-k"):
            pass
        spool = Spool(home / "spool", "ppo-k")
        with FileLock(spool.lock):
            assert flow.trouble() is None
            spool.trouble.write_text("refused\n", encoding="utf-8")
            assert flow.trouble() == "refused"


@pytest.mark.parametrize("in_time", [True, False])
def test_a_late_delivery_leaves_a_failed_pipeline_failed(
    home: Path, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """Of a dvc process whose PPO failed; its PPO delivered in time, or all of it late."""
    under_dvc(monkeypatch)
    with tracking.open_run("sft", view(), key="sft-k"):
        pass
    with pytest.raises(RuntimeError), tracking.open_run("ppo", view("ppo"), key="ppo-k"):
        raise RuntimeError("boom")
    if in_time:
        assert courier.deliver(Spool(home / "spool", "ppo-k")) is None
    monkeypatch.setattr(context, "is_alive", lambda name: False)
    assert courier.sync(home) == (1 if in_time else 2, {})
    pipeline = runs(home)["pipeline"]
    assert pipeline.info.status == "FAILED"
    assert pipeline.data.tags["rlhf.reason"] == "ppo: RuntimeError: boom"


def test_a_late_delivery_alone_leaves_no_pipeline_running(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_dvc(monkeypatch)
    with tracking.open_run("sft", view()):
        pass
    monkeypatch.setattr(context, "is_alive", lambda name: False)
    assert courier.sync(home) == (1, {})
    assert runs(home)["pipeline"].info.status == "FINISHED"


def test_of_a_run_on_another_machine_its_own_end_tells_that_it_is_over(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"key": "dvc-there", "owner": "dvc", "process": "there:1:1"}
    monkeypatch.setattr(context, "parent", lambda process, key: there)
    with tracking.open_run("sft", view()):
        pass
    with pytest.raises(RuntimeError), tracking.open_run("ppo", view("ppo")):
        raise RuntimeError("boom")
    with tracking.open_run("sft", view()):
        pass
    deliver(home)
    assert runs(home)["pipeline"].info.status == "FAILED"


def test_a_process_that_vanishes_leaves_a_failed_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking.open_run("sft", view()) as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
    [spool] = pending(home / "spool")
    lines = spool.file.read_text(encoding="utf-8").splitlines(keepends=True)
    spool.file.write_text("".join(lines[:2]), encoding="utf-8")  # no end
    monkeypatch.setattr(context, "is_alive", lambda name: False)
    deliver(home)
    assert runs(home)["sft"].info.status == "FAILED"
    assert runs(home)["sft"].data.tags["rlhf.reason"] == courier.VANISHED


def test_an_unreachable_store_stops_nothing_and_is_told_once(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tracking.open_run("sft", view(uri=UNREACHABLE), key="k") as tracker:
        tracker.metrics({"train/loss": 2.0}, step=1)
        spool = Spool(home / "spool", "k")
        spool.trouble.write_text("refused", encoding="utf-8")  # as its courier does
        tracker.metrics({"train/loss": 1.0}, step=2)
        tracker.metrics({"train/loss": 0.5}, step=3)
    assert capsys.readouterr().out.count("MLflow cannot be reached (refused)") == 1
    assert courier.Courier(Post.of(spool)).serve()
    assert spool.file.exists()
    assert spool.is_left
    assert "MlflowException" in str(spool.reason)


def test_sync_sends_only_the_steps_that_mlflow_lacks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tracking.open_run("sft", view(), key="k") as tracker:
        for step in (1, 2, 3):
            tracker.metrics({"train/loss": float(step)}, step=step)
    spool = Spool(home / "spool", "k")
    records, _ = spool.read()
    run = Store.open(records[0]).stage_run(records[0], last=True, live=True)
    run.send(records[1:3], spool.files)  # cut off after steps 1 and 2
    sent: list[int] = []
    log_batch = MlflowClient.log_batch

    def watched(self: MlflowClient, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        sent.extend(metric.step for metric in metrics if metric.key == "train/loss")
        return log_batch(self, run_id, metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", watched)
    assert courier.sync(home) == (1, {})
    assert sent == [3]
    history = MlflowClient(embedded_uri(home)).get_metric_history(runs(home)["sft"].info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3]
    assert pending(home / "spool") == []


def vanish(monkeypatch: pytest.MonkeyPatch, home: Path, key: str) -> None:
    """The run's last spool loses its end, as if its process had been killed."""
    spool = sorted(home.glob(f"spool/{key}*.jsonl"))[-1]
    lines = spool.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if '"kind": "end"' not in line and "curves.png" not in line]
    spool.write_text("".join(line for line in kept if '"plots' not in line), encoding="utf-8")


def interrupted_and_gone_on(home: Path, monkeypatch: pytest.MonkeyPatch, *, first_is_delivered: bool) -> None:
    """Killed after step 3, gone on with from the snapshot after step 2."""
    with tracking.open_run("sft", view(), key="k") as tracker:
        for step in (1, 2):
            tracker.metrics({"train/loss": float(step)}, step=step)
        tracker.table("samples", [{"query": "a"}])
        state = tracker.state_dict()
        tracker.metrics({"train/loss": 3.0}, step=3)
        tracker.table("samples", [{"query": "b"}])
    vanish(monkeypatch, home, "k")
    if first_is_delivered:
        with monkeypatch.context() as patch:
            patch.setattr(context, "is_alive", lambda name: False)
            deliver(home)
        assert runs(home)["sft"].info.status == "FAILED"
    with tracking.open_run("sft", view(), key="k") as tracker:
        tracker.load_state_dict(json.loads(json.dumps(state)))
        for step in (3, 4):
            tracker.metrics({"train/loss": float(step)}, step=step)
        assert [row["step"] for row in tracker.history()] == [1, 2, 3, 4]
        tracker.table("samples", [{"query": "c"}])


@pytest.mark.parametrize("first", ["delivered", "delivered last", "never over"])
def test_a_run_that_goes_on_is_one_run_without_doubled_points(
    home: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    interrupted_and_gone_on(home, monkeypatch, first_is_delivered=first == "delivered")
    if first == "delivered last":
        assert courier.deliver(Spool(home / "spool", "k.2")) is None
    monkeypatch.setattr(context, "is_alive", lambda name: False)
    assert courier.sync(home)[1] == {}
    assert pending(home / "spool") == []
    client = MlflowClient(embedded_uri(home))
    [run] = [r for r in client.search_runs(["1"]) if r.info.run_name == "sft"]
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((point.step, point.value) for point in points) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert run.info.status == "FINISHED"
    assert "rlhf.reason" not in run.data.tags
    assert runs(home)["pipeline"].info.status == "FINISHED"
    if first != "delivered last":
        table = client.download_artifacts(run.info.run_id, "tables/samples.json")
        assert json.loads(Path(table).read_text())["data"] == [["a"], ["c"]]


def test_a_run_that_goes_on_belongs_to_the_pipeline_that_ends_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for flow in ("flow-1", "flow-2"):
        monkeypatch.setenv("RLHF_PARENT_RUN", flow)
        with tracking.open_run("sft", view(), key="k"):
            pass
        deliver(home)
    client, run = MlflowClient(embedded_uri(home)), runs(home)["sft"]
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.data.tags["rlhf.pipeline"] == "flow-2"


def test_the_dashboard_says_where_the_runs_are(home: Path) -> None:
    made = MlflowClient(embedded_uri(home)).create_experiment("mine")
    assert dashboard.runs_pages(home, "http://here") == {
        "mine": f"http://here/#/experiments/{made}/runs?workflowType=machine_learning"
    }


def test_an_event_is_a_tag_and_a_row(home: Path) -> None:
    with tracking.open_run("ppo", view("ppo")) as tracker:
        tracker.event("guard.kl", "12 is above 10", step=512)
    deliver(home)
    run = runs(home)["ppo"]
    assert run.data.tags["guard.kl"] == "at 512: 12 is above 10"
    table = MlflowClient(embedded_uri(home)).download_artifacts(run.info.run_id, "tables/events.json")
    assert json.loads(Path(table).read_text())["data"] == [[512, "guard.kl", "12 is above 10"]]


def test_sync_leaves_a_running_stage_to_its_own_courier(home: Path) -> None:
    with tracking.open_run("sft", view()):
        assert courier.sync(home) == (0, {})


def test_final_metrics_do_not_double_a_curve(home: Path) -> None:
    with tracking.open_run("ppo", view("ppo")) as tracker:
        tracker.metrics({"objective/kl": 3.0, "lr": 0.1}, step=256)
        tracker.final({"objective/kl": 3.0, "lr": 0.2, "selected_episode": 128.0})
    deliver(home)
    assert runs(home)["ppo"].data.metrics == {
        "objective/kl": 3.0,
        "lr": 0.1,
        "final/lr": 0.2,
        "selected_episode": 128.0,
    }
    assert runs(home)["pipeline"].data.metrics == {"objective/kl": 3.0, "ppo/selected_episode": 128.0}


def test_tables_grow_and_artifacts_are_copies(home: Path, project: Path) -> None:
    with tracking.open_run("sft", view()) as tracker:
        tracker.table("samples", [{"query": "q", "score": 1.0}])
        tracker.table("samples", [{"query": "r", "note": "n"}])
        (project / "page.html").write_text("first", encoding="utf-8")
        tracker.artifact(project / "page.html", "pages")
        (project / "page.html").unlink()
    deliver(home)
    client, run = MlflowClient(embedded_uri(home)), runs(home)["sft"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "tables/samples.json")).read_text())
    assert table == {"columns": ["query", "score", "note"], "data": [["q", 1.0, None], ["r", None, "n"]]}
    assert Path(client.download_artifacts(run.info.run_id, "pages/page.html")).read_text() == "first"
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [
        {"path": "tables/samples.json", "type": "table"}
    ]


def test_curves_go_along_as_csv_and_figure(home: Path) -> None:
    with tracking.open_run("ppo", view("ppo")) as tracker:
        tracker.metrics({"objective/kl": 0.5, "episode": 256.0}, step=256)
    deliver(home)
    client, run = MlflowClient(embedded_uri(home)), runs(home)["ppo"]
    text = Path(client.download_artifacts(run.info.run_id, "plots/ppo.csv")).read_text()
    assert text == "episode,objective/kl\n256,0.5\n"
    assert Path(client.download_artifacts(run.info.run_id, "curves.png")).read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("rank", "enabled"), [("1", True), ("0", False)])
def test_other_ranks_and_disabled_tracking_write_no_spool_but_keep_curves(
    home: Path, monkeypatch: pytest.MonkeyPatch, rank: str, enabled: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    with tracking.open_run("sft", view(enabled=enabled)) as tracker:
        tracker.metrics({"train/loss": 1.0}, step=1)
        tracker.metrics({"eval/loss": 2.0}, step=1)
    assert tracker.history() == [{"step": 1, "train/loss": 1.0, "eval/loss": 2.0}]
    assert not (home / "spool").exists()


def test_no_metric_is_sent_in_batches_beyond_the_limit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    log_batch = MlflowClient.log_batch

    def watched(self: MlflowClient, run_id: str, metrics: Any = (), **rest: Any) -> Any:
        sizes.append(len(metrics))
        return log_batch(self, run_id, metrics, **rest)

    monkeypatch.setattr(MlflowClient, "log_batch", watched)
    with tracking.open_run("sft", view()) as tracker:
        for step in range(300):
            tracker.metrics({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, step=step)
    deliver(home)
    assert sum(sizes) == 1200
    assert max(sizes) == 1000


def test_a_half_written_line_waits(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "k")
    spool.append("metrics", step=1, values={})
    with spool.file.open("ab") as file:
        file.write(b'{"kind": "met')
    records, offset = spool.read()
    assert [record["step"] for record in records] == [1]
    with spool.file.open("ab") as file:
        file.write(b'rics", "step": 2}\n')
    assert [record["step"] for record in spool.read(offset)[0]] == [2]


def test_table_columns_come_in_order_of_appearance() -> None:
    assert json.loads(table_json([{"b": 1}, {"a": Path("x"), "b": 2}])) == {
        "columns": ["b", "a"],
        "data": [[1, None], [2, "x"]],
    }


def test_csv_leaves_a_cell_empty_where_a_step_has_no_value() -> None:
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "eval/loss": 1.5}]
    assert curves.csv_text(rows, "step") == "step,train/loss,eval/loss\n1,2.0,\n2,1.0,1.5\n"


def test_the_same_curves_draw_the_same_bytes(tmp_path: Path) -> None:
    rows = [{"step": i, "train/loss": 1 / i} for i in range(1, 30)]
    for name in ("a.png", "b.png"):
        curves.draw(rows, "sft", tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_pid_used_again_is_another_process() -> None:
    mine = context.process_name(psutil.Process())
    host, pid, start = mine.rsplit(":", 2)
    assert context.is_alive(mine)
    assert not context.is_alive(f"{host}:{pid}:{int(start) - 100}")
    assert context.is_alive(f"elsewhere:{pid}:{start}")  # unknown is not gone


def test_two_first_stages_at_once_make_one_store(project: Path) -> None:
    """Of two pipelines; real couriers, an empty folder: the tables and the experiment are made once."""
    code = (
        "from rlhf_tasks import config, tracking\n"
        "view = config.SftView.of(config.load())\n"
        "with tracking.open_run('sft', view) as tracker: tracker.metrics({'train/loss': 1.0}, step=1)\n"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"RLHF_PARENT_RUN": flow})
        for flow in ("flow-2", "flow-3")
    ]
    assert [one.wait() for one in both] == [0, 0]
    home = project / ".rlhf"
    until(lambda: pending(home / "spool") == [], "the figures")
    client = MlflowClient(embedded_uri(home))
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    names = [run.info.run_name.split("-")[0] for run in client.search_runs([experiment.experiment_id])]
    assert sorted(names) == ["pipeline", "pipeline", "sft", "sft"]


def test_a_run_is_read_back_with_its_stages_by_any_of_its_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PARENT_RUN", "flow-7")
    for stage, name in (("sft", "perplexity"), ("ppo", "objective/kl")):
        with tracking.open_run(stage, view(stage), key=f"{stage}-1") as tracker:  # type: ignore[arg-type]
            tracker.metrics({name: 1.0, "lr": 0.1}, step=64)
            tracker.metrics({name: 3.0, "lr": 0.1}, step=128)
            tracker.final({name: 2.0})
    deliver(home)
    identity = runs(home)["pipeline"].info.run_id
    for asked in (identity, "flow-7", runs(home)["pipeline"].info.run_name):
        whole = records.find(None, home, asked, ["objective/kl"])
        assert whole is not None
        assert whole.metrics["sft"]["perplexity"] == whole.metrics["ppo"]["objective/kl"] == 2.0
        assert whole.curves["ppo"] == [
            {"episode": 64, "objective/kl": 1.0}, {"episode": 128, "objective/kl": 3.0}
        ]  # fmt: skip
        assert whole.curves["sft"] == [], "not asked for"
        assert whole.parameters["ppo.kl_coef"] == "0.03"
    alone = records.find(None, home, "ppo-1", [])
    assert alone is not None
    assert list(alone.metrics) == ["ppo"]
    for asked in ("ppo-2", "0" * 32, "it's"):
        assert records.find(None, home, asked, []) is None
    with pytest.raises(UserError, match=f"MLflow at {UNREACHABLE} cannot be asked for ppo-1"):
        records.find(UNREACHABLE, home, "ppo-1", [])


@pytest.mark.filterwarnings("ignore:.*Any type hint")  # of MLflow's own modules, when tracing begins
def test_calls_of_models_are_traces_of_the_run_and_none_is_sent_twice(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def experiment() -> str:
        found = client.get_experiment_by_name("rlhf")
        assert found is not None
        return str(found.experiment_id)

    client = MlflowClient(embedded_uri(home))
    try:
        with tracking.open_run("judge", view("judge"), key="judge-1") as tracker:
            said = {"text": "A", "first_is_better": 1.0}
            tracker.trace("judge gpt", {"model": "m"}, said, start=1_700_000_000_000, end=1_700_000_000_250)
            tracker.trace("judge gpt", {"model": "m"}, {"failure": "no verdict"}, start=5, end=5)
            spool = pending(home / "spool")[0]
            records, _ = spool.read()
            store = Store.open(records[0]).run(records[0], last=True, live=True)
            assert not store.send(records, spool.files), "some of it, then the courier dies"
            tracker.trace("judge gpt", {"model": "m"}, said, start=9, end=10)
        deliver(home)
        run = runs(home)["judge"].info.run_id
        found = client.search_traces(locations=[experiment()], run_id=run)
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]  # as if none had been set
    assert sorted(trace.info.tags["rlhf.trace"] for trace in found) == ["0", "1", "2"]
    first = next(trace for trace in found if trace.info.tags["rlhf.trace"] == "0")
    assert first.info.request_time == 1_700_000_000_000
    assert first.info.execution_duration == 250
    assert first.data.spans[0].outputs == {"text": "A", "first_is_better": 1.0}
    states = {trace.info.tags["rlhf.trace"]: trace.info.state.value for trace in found}
    assert states == {"0": "OK", "1": "ERROR", "2": "OK"}


def traced(home: Path, run: str, uri: str | None = None) -> list[str]:
    client = MlflowClient(uri or embedded_uri(home))
    experiment = client.get_experiment_by_name("rlhf")
    assert experiment is not None
    found = client.search_traces(locations=[str(experiment.experiment_id)], run_id=run)
    assert all(trace.data.spans[0].inputs == {"model": "m"} for trace in found), "with all that was said"
    return sorted(trace.info.tags["rlhf.trace"] for trace in found)


@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_a_trace_that_was_refused_is_sent_again_and_holds_nothing_else_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow swallows the error; the run has its end and its metrics all the same."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    real, refused = TracingClient.start_trace, ["1"]

    def refusing(self: TracingClient, info: Any) -> Any:
        if info.tags["rlhf.trace"] in refused:
            raise MlflowException("too busy")
        return real(self, info)

    monkeypatch.setattr(TracingClient, "start_trace", refusing)
    try:
        with tracking.open_run("judge", view("judge"), key="judge-1") as tracker:
            for number in range(3):
                tracker.trace("judge gpt", {"model": "m"}, {"text": "A"}, start=number, end=number + 1)
            tracker.metrics({"gold/win_rate": 0.5}, step=1)
        delivered, failed = courier.sync(home)
        assert (delivered, list(failed)) == (0, ["judge-1"])
        assert "has not taken 1 of 3 traces" in failed["judge-1"]
        run = runs(home)["judge"]
        assert (run.info.status, run.data.metrics) == ("FINISHED", {"gold/win_rate": 0.5})
        refused.clear()
        assert courier.sync(home) == (1, {})
        assert traced(home, run.info.run_id) == ["0", "1", "2"]
        assert runs(home)["judge"].info.status == "FINISHED"
        assert pending(home / "spool") == []
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (MlflowException("bad tag", error_code=INVALID_PARAMETER_VALUE), True),
        (MlflowException("API request to endpoint /x failed with error code 413 != 200. Too large"), True),
        (MlflowException("API request to endpoint /x failed with error code 403 != 200. Key"), False),
        (MlflowException("QueuePool limit reached", error_code=BAD_REQUEST), False),
        (OSError("gone"), False),
    ],
)
def test_what_another_key_or_hour_mends_and_a_database_s_trouble_is_no_refusal(
    error: BaseException, for_good: bool
) -> None:
    assert (refusals.reason(error) is not None) is for_good


def test_refusals_are_told_though_a_line_is_torn_and_another_process_tells_them_too(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = Spool(home / "spool", "judge-1")
    spool.refuse("1", "status 400: bad tag")
    with spool.refused.open("a", encoding="utf-8") as file:
        file.write('{"number": "2", "rea')
    assert spool.refusals() == {"1": "status 400: bad tag"}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: tell_refused(home / "spool"), range(8)))
    assert capsys.readouterr().out.count("MLflow refused 1 trace(s) of judge-1 for good") == 1
    assert spool.refusals() == {}
    assert list((home / "spool").iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_a_trace_that_is_refused_for_good_is_told_once_and_never_sent_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside one that another hour will take, which stays to be sent."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    real, sent = TracingClient.start_trace, list[str]()
    answers = {
        "0": MlflowException("bad tag", error_code=INVALID_PARAMETER_VALUE),
        "1": MlflowException("API request to endpoint /x failed with error code 413 != 200. Too large"),
        "2": MlflowException("API request to endpoint /x failed with error code 503 != 200. Away"),
        "3": MlflowException("slower", error_code=REQUEST_LIMIT_EXCEEDED),
    }

    def answering(self: TracingClient, info: Any) -> Any:
        number = info.tags["rlhf.trace"]
        sent.append(number)
        if number in answers:
            raise answers[number]
        return real(self, info)

    monkeypatch.setattr(TracingClient, "start_trace", answering)
    try:
        with tracking.open_run("judge", view("judge"), key="judge-1") as tracker:
            for number in range(5):
                tracker.trace("judge gpt", {"model": "m"}, {"text": "A"}, start=number, end=number + 1)
        _, failed = courier.sync(home)
        assert "has not taken 2 of 5 traces" in failed["judge-1"]
        assert (sent, capsys.readouterr().out) == (["0", "1", "2", "3", "4"], "")
        sent.clear()
        del answers["2"], answers["3"]
        assert courier.sync(home) == (1, {})
        assert sent == ["2", "3"], "neither what was refused for good, nor what was taken"
        kept = home / "spool/delivered/judge-1.jsonl"
        told = "MLflow refused 2 trace(s) of judge-1 for good (status 400: MlflowException: bad tag)"
        assert f"{told}; they are not sent again, and stay in {kept}" in capsys.readouterr().out
        lines = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
        assert [line["number"] for line in lines if line["kind"] == "trace"] == [0, 1, 2, 3, 4]
        run = runs(home)["judge"]
        assert traced(home, run.info.run_id) == ["2", "3", "4"]
        assert run.data.tags["rlhf.refused_traces"] == "2 of 5, such as status 400: MlflowException: bad tag"
        assert courier.sync(home) == (0, {})
        assert capsys.readouterr().out == ""
        assert list((home / "spool").glob("judge-1*")) == []
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore:.*Any type hint")
def test_a_server_takes_traces_and_those_that_it_was_away_for_later(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: some of them delivered, the server killed, and the rest when it is there again."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    port = free_port(28600)
    url = f"http://127.0.0.1:{port}"

    try:
        with tracking.open_run("judge", view("judge", uri=url), key="judge-1") as tracker:
            tracker.trace("judge gpt", {"model": "m"}, {"text": "A", "tokens": 9}, start=5, end=7)
            with served(home, port):
                spool = pending(home / "spool")[0]
                records, _ = spool.read()
                store = Store.open(records[0]).run(records[0], last=True, live=True)
                assert not store.send(records, spool.files)
                run = runs(home, url)["judge"].info.run_id
                assert traced(home, run, url) == ["0"]
            tracker.trace("judge gpt", {"model": "m"}, {"failure": "no verdict"}, start=8, end=9)
            tracker.trace("judge gpt", {"model": "m"}, {"text": "B"}, start=9, end=12)
        delivered, failed = courier.sync(home)
        assert (delivered, list(failed)) == (0, ["judge-1"])
        with served(home, port):
            assert courier.sync(home) == (1, {})
            assert traced(home, run, url) == ["0", "1", "2"]
            assert runs(home, url)["judge"].info.status == "FINISHED"
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("is_back", ["before the end", "after it"])
def test_a_server_that_dies_midway_stops_nothing_and_has_every_point_once_when_it_is_back(
    project: Path, empty_database: Path, capsys: pytest.CaptureFixture[str], is_back: str
) -> None:
    """With a courier of the stage's own, over HTTP."""
    home, port = project / ".rlhf", free_port(28700)
    home.mkdir()
    shutil.copy(empty_database, home)
    url, spool = f"http://127.0.0.1:{port}", Spool(home / "spool", "sft-1")
    losses = [(step, 1 / step) for step in range(1, 31)]

    def train(tracker: tracking.Tracker, first: int, last: int) -> None:
        for step, loss in losses[first - 1 : last]:
            tracker.metrics({"train/loss": loss}, step=step)

    def seen(name: str) -> list[tuple[int, float]]:
        with suppress(AssertionError, KeyError):  # there is no experiment, no run yet
            history = MlflowClient(url).get_metric_history(runs(home, url)["sft"].info.run_id, name)
            return [(point.step, point.value) for point in history]
        return []

    with ExitStack() as again:
        with tracking.open_run("sft", view(uri=url), key="sft-1") as tracker:
            with served(home, port):
                train(tracker, 1, 10)
                until(lambda: len(seen("train/loss")) == 10, "the first points")
            train(tracker, 11, 20)
            until(spool.trouble.exists, "the courier to be refused")
            train(tracker, 21, 30)
            tracker.final({"perplexity": 2.0})
            assert "training goes on, metrics are kept in" in capsys.readouterr().out
            if is_back == "before the end":
                again.enter_context(served(home, port))
        if is_back == "after it":
            assert [left.name for left in pending(home / "spool")] == ["sft-1"]
            again.enter_context(served(home, port))
            assert courier.sync(home) == (1, {})
        until(lambda: pending(home / "spool") == [], "the figure")
        assert seen("train/loss") == losses
        assert seen("perplexity") == [(30, 2.0)]
        assert runs(home, url)["sft"].info.status == "FINISHED"
