"""MLflow's pages of runs and of a run as this project opens them: the columns and charts that matter first.

MLflow keeps a shared view of the page of runs in a tag of the experiment. An address with the view's key
opens it. No torch or MLflow here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_tasks.tracking.curves import HEADLINES, PPO_HEADLINES

KEY = "rlhf"
TAG = f"mlflow.sharedViewState.{KEY}"
PIPELINES = "tags.`rlhf.pipeline` LIKE '%'"  # the runs that are no stage's
MODEL_TRAINING = "workflowType=machine_learning"  # selects one of the two layouts of MLflow's pages
NUM_RUNS = 10  # the newest, whose curves lie over each other and whose metrics are columns
MAX_METRICS = 17  # as charts and as columns
MAX_CHARACTERS = 5000  # of an experiment's tag
NAME, TAGS = "attributes.`Run Name`", ("tags.`verdict`", "tags.`preset`", "tags.`changes`")
LAST = ("objective/scores", "val/ratio")
"""Charts shown after the KL, the reward and the clip fraction."""
ENDS_OF_CURVES = ("objective/kl", *HEADLINES["dpo"].values())
"""No columns: the values of a run are those of the kept checkpoint, and these end with the last one's."""
SECTION = {
    "display": True,
    "isReordered": True,
    "columns": 2,  # three columns would leave no room for the charts' titles
    "cardHeight": 300,
}
CHART = {  # a line per run over the steps, which are PPO's episodes
    "type": "LINE",
    "runsCountToCompare": NUM_RUNS,
    "xAxisKey": "step",
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": False,
    "lineSmoothness": 0,
    "isGenerated": False,
    "deleted": False,
}


def page(server: str, experiment: str) -> str:
    """The address of the page of runs, by the experiment's id."""
    address = f"{server}/#/experiments/{experiment}/runs"
    return f"{address}?{MODEL_TRAINING}&compareRunsMode=CHART&viewStateShareKey={KEY}"


def run_page(server: str, experiment: str, run: str, tab: str = "") -> str:
    """The address of one run's page, or of one of its tabs such as `/model-metrics`."""
    return f"{server}/#/experiments/{experiment}/runs/{run}{tab}?{MODEL_TRAINING}"


def text(logged: Iterable[str]) -> str:
    """The view, as MLflow reads it; `logged` are the metrics that the runs of pipelines have."""
    known = set(logged)
    drawn = {stage: [name for name in names.values() if name in known] for stage, names in HEADLINES.items()}
    if not any(drawn.values()):  # no run came that far
        drawn["ppo"] = [*PPO_HEADLINES]
    charts = [
        CHART
        | {"uuid": f"{KEY}-{stage}-{number}", "metricSectionId": f"{KEY}-{stage}", "metricKey": name}
        | {"selectedMetricKeys": [name], "displayName": name.rpartition("/")[2]}
        for stage, names in drawn.items()
        for number, name in enumerate(sorted(names, key=LAST.__contains__))
    ]
    ranks = {"ppo/selected_kl": 0, **dict.fromkeys(PPO_HEADLINES, 1)}
    names = sorted(
        known - {*ENDS_OF_CURVES}, key=lambda name: (ranks.get(name, 2), not name.endswith("win_rate"), name)
    )
    metrics = [f"metrics.`{name}`" for name in names[: MAX_METRICS - len(charts)]]
    while len(found := _text(drawn, charts, metrics)) > MAX_CHARACTERS and metrics:
        metrics.pop()
    return found


def _text(
    drawn: Mapping[str, Sequence[str]], charts: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> str:
    """The view with these charts, by section, and these columns."""
    state: dict[str, Any] = {
        "searchFilter": PIPELINES,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": [*TAGS, *metrics],
        # MLflow's own order has tags last. "0" is the column of check boxes.
        "columnOrder": ["0", NAME, *TAGS, *metrics, "runDateAndNestInfo", "duration"],
        "columnWidths": {"0": 75, NAME: 190, **dict(zip(TAGS, (110, 110, 220), strict=True))}
        | {one: 7 * len(one) for one in metrics},
        "compareRunCharts": charts,
        "compareRunSections": [
            SECTION | {"uuid": f"{KEY}-{stage}", "name": stage.upper()} for stage in drawn if drawn[stage]
        ],
        "isAccordionReordered": True,
    }
    return json.dumps(state, separators=(",", ":"))
