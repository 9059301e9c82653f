"""MLflow's pages as this project opens them, and the server over the embedded store, on loopback.

MLflow keeps a shared view of an experiment's page of runs in a tag. An address with the view's key opens it:
a row per pipeline, the columns and charts that matter. No torch or MLflow here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks import console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.processes import HOST, free_port
from rlhf_tasks.tracking import local_pages
from rlhf_tasks.tracking.curves import HEADLINES
from rlhf_tasks.tracking.sync import sync

UNNAMED = "0"  # MLflow's default experiment, for runs that name none
KEY = "rlhf"
VIEW_TAG = f"mlflow.sharedViewState.{KEY}"
MODEL_TRAINING = "workflowType=machine_learning"  # selects one of the two layouts of MLflow's pages
MAX_COLUMNS = 24  # an experiment's tag has 5,000 characters
TAGS = ("verdict", "preset", "changes")  # columns before those of metrics
SECTION = {
    "uuid": KEY,
    "name": "PPO",
    "display": True,
    "isReordered": True,
    "columns": 2,  # three columns would leave no room for the charts' titles
    "cardHeight": 300,
}


def serve(home: Path, port: int) -> int:
    """Deliver pending runs, then serve until Ctrl-C, on `port` or the next free one.

    Raises:
        UserError: without a store, or without a free port.
    """
    sync(home)
    database = home / "mlflow.db"
    if not database.exists():
        raise UserError(f"there is no MLflow store yet ({database}); run `make run` first")
    free = free_port(port)
    for name, page in runs_pages(home, f"http://{HOST}:{free}").items():
        console.say(f"MLflow, runs of {name}: {page}")
    console.say("Ctrl-C ends the server")
    with subprocess.Popen(server_command(home, free), env=server_environment(os.environ)) as server:
        try:
            return server.wait()
        except BaseException:
            server.terminate()  # if it were killed, as `subprocess.run` does, its workers would live on
            server.wait()
            raise


def server_command(home: Path, port: int) -> list[str]:
    """The command that serves the embedded store and its artifacts on loopback."""
    words = ["-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"]
    store = ["--backend-store-uri", f"sqlite:///{home / 'mlflow.db'}"]
    pages = ["--app-name", local_pages.MLFLOW_APP]
    return [sys.executable, *words, *pages, *store, "--default-artifact-root", str(home / "mlartifacts")]


def server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """No telemetry, and no job runners: nothing here gives jobs to MLflow."""
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return {**quiet, **environment, "OMP_NUM_THREADS": "1"}


def runs_pages(home: Path, address: str, experiment: str | None = None) -> dict[str, str]:
    """The page with the runs of each experiment; `experiment` is created if there is none of that name."""
    from mlflow.tracking import MlflowClient

    from rlhf_tasks.tracking.store import embedded_uri, open_experiment

    client, pages = MlflowClient(embedded_uri(home)), dict[str, str]()
    names = [one.name for one in client.search_experiments() if one.experiment_id != UNNAMED]
    for name in dict.fromkeys([*names, *([experiment] if experiment else [])]):
        identity = open_experiment(client, name, (home / "mlartifacts").as_uri())
        opened = f"{MODEL_TRAINING}&compareRunsMode=CHART&viewStateShareKey={KEY}"
        pages[name] = f"{address}/#/experiments/{identity}/runs?{opened}"
    return pages


def run_page(server: str, experiment: str, run: str, tab: str = "") -> str:
    """The address of one run's page, or of one of its tabs such as `/model-metrics`."""
    return f"{server}/#/experiments/{experiment}/runs/{run}{tab}?{MODEL_TRAINING}"


def view(metrics: Iterable[str]) -> str:
    """The view, as MLflow reads it; `metrics` are the names that the runs of pipelines have."""
    names = sorted(metrics, key=lambda name: (name not in HEADLINES, not name.endswith("win_rate"), name))
    columns = [f"tags.`{name}`" for name in TAGS] + [f"metrics.`{name}`" for name in names[:MAX_COLUMNS]]
    state: dict[str, Any] = {
        "searchFilter": "tags.`rlhf.pipeline` LIKE '%'",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": columns,
        "columnWidths": {"attributes.`Run Name`": 260},
        "compareRunCharts": [_chart(number, name) for number, name in enumerate(HEADLINES)],
        "compareRunSections": [SECTION],
        "isAccordionReordered": True,
    }
    return json.dumps(state, separators=(",", ":"))


def _chart(number: int, name: str) -> dict[str, Any]:
    """A line per run over PPO's episodes, which are the steps."""
    return {
        "uuid": f"{KEY}-{number}",
        "type": "LINE",
        "metricSectionId": KEY,
        "metricKey": name,
        "selectedMetricKeys": [name],
        "displayName": name.rpartition("/")[2],
        "runsCountToCompare": 10,
        "xAxisKey": "step",
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "isGenerated": False,
        "deleted": False,
    }
