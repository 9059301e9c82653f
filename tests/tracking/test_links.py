"""Links to MLflow's pages are best effort: a missing one fails no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks import config
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import context, pipeline, sync
from rlhf_tasks.tracking.record import REPORT
from tests.tracking.toy import UNREACHABLE, log, runs


def test_a_flow_links_its_own_run_and_those_of_its_stages(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own run is waited for: a flow whose stages are all cached ends before it is delivered."""
    monkeypatch.setattr(sync, "BATCH_SECONDS", 0.05)
    log("sft-1")
    with pipeline.open_run(Paths(), "1", config.load().tracking, {}) as flow:
        assert flow.pages({"sft": "sft-1"}) == {}, "no server is known"
        monkeypatch.setenv(context.MLFLOW_URL, "http://browser")
        pages = flow.pages({"sft": "sft-1", "ppo": "ppo-1"})
    ids = {name: run.info.run_id for name, run in runs(store).items()}
    query, start = "?workflowType=machine_learning", "http://browser/#/experiments/1/runs/"
    assert pages["sft"] == f"{start}{ids['sft']}/model-metrics{query}"
    assert pages.keys() == {"sft", "pipeline", REPORT}


def test_there_are_no_links_if_mlflow_does_not_answer(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config.load().tracking.model_copy(update={"uri": UNREACHABLE})
    with pipeline.open_run(Paths(), "1", settings, {}) as flow:
        assert flow.pages({"sft": "sft-1"}) == {}


def test_a_flow_without_tracking_logs_nothing(store: Path) -> None:
    settings = config.load().tracking.model_copy(update={"enabled": False})
    with pipeline.open_run(Paths(), "1", settings, {"a": "b"}) as flow:
        assert (flow.last_error(), flow.pages({"sft": "sft-1"})) == (None, {})
    assert not (store / "outbox").exists()
