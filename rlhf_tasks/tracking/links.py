"""Addresses of runs in MLflow's dashboard, by its REST API. No torch or MLflow here."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

from rlhf_tasks.config import Tracking
from rlhf_tasks.tracking import view

MLFLOW_URL = "RLHF_MLFLOW_URL"  # the environment's name for the dashboard's address, as a browser sees it
REQUEST_SECONDS = 5.0
WAIT_SECONDS, POLL_SECONDS = 10.0, 0.25  # until MLflow was imported and has the first run


def server(uri: str | None) -> str | None:
    """The MLflow server: the configured one, or else the service's own; None if there is none."""
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    return uri if uri and uri.startswith("http") else os.environ.get(MLFLOW_URL)


def run_links(
    tracking: Tracking, keys: Mapping[str, str], parent: str, seconds: float = WAIT_SECONDS
) -> dict[str, str]:
    """`{stage: address}` of the runs with these keys, and `pipeline` for the run of `parent`.

    The pipeline's run is waited for: a flow whose stages are all cached ends before its run is delivered. The
    result is empty if no server is known or it does not answer: a missing link must not fail a run.
    """
    mlflow = server(tracking.uri)
    if mlflow is None or not tracking.enabled:
        return {}
    pipeline = {"pipeline": f"tags.`rlhf.pipeline` = '{parent}'"}
    conditions = {stage: f"tags.`rlhf.run` = '{key}'" for stage, key in keys.items()}
    deadline = time.monotonic() + seconds
    try:
        while not _pages(mlflow, tracking.experiment, pipeline) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        pages = _pages(mlflow, tracking.experiment, conditions | pipeline)
    except (httpx.HTTPError, httpx.InvalidURL):
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return {}  # what answers is not MLflow
    address = os.environ.get(MLFLOW_URL, mlflow)
    return {
        stage: view.run_page(address, *ids, "" if stage == "pipeline" else "/model-metrics")
        for stage, ids in pages.items()
    }


def _pages(mlflow: str, experiment: str, conditions: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The ids of the experiment and of the run that meets each condition; empty before the first run."""
    with httpx.Client(base_url=f"{mlflow}/api/2.0/mlflow/", auth=_login(), timeout=REQUEST_SECONDS) as client:
        response = client.get("experiments/get-by-name", params={"experiment_name": experiment})
        if response.status_code == httpx.codes.NOT_FOUND:
            return {}
        identity, pages = _json(response)["experiment"]["experiment_id"], {}
        for stage, condition in conditions.items():
            search = {"experiment_ids": [identity], "filter": condition, "max_results": 1}
            runs = _json(client.post("runs/search", json=search)).get("runs", [])
            if runs:
                pages[stage] = identity, runs[0]["info"]["run_id"]
    return pages


def _login() -> tuple[str, str] | None:
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD"))
    return (user, password) if user and password else None


def _json(response: httpx.Response) -> dict[str, Any]:
    response.raise_for_status()
    tree: dict[str, Any] = response.json()
    return tree
