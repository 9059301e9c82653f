"""MLflow's pages as this project's server sends them, and the content policy of Prefect's and MLflow's pages.

`app` is MLflow's server as the plugin `rlhf` of MLflow's extension point `mlflow.app`, which pyproject.toml
declares. It sends MLflow's one HTML file with a script of ours (pages.js): the root goes to the page of runs,
a run's charts begin with PPO's, and no assistant or telemetry notice opens. No setting of MLflow does that.

Prefect's and MLflow's pages ask other machines for more than they need, and no setting stops that either: the
policy makes browsers refuse such requests.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

from rlhf_tasks.tracking import view

LOOPBACK = " ".join(
    f"{scheme}://{host}:*" for scheme in ("http", "ws") for host in ("127.0.0.1", "localhost")
)
POLICY = f"default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: {LOOPBACK}"
MLFLOW_APP = "rlhf"  # the plugin's name
NO_ASSISTANT = "[data-assistant-ui] { display: none !important }"  # nor its button, which covers charts
STORE = "MLFLOW_BACKEND_STORE_URI"  # from which `mlflow server` takes its store


def app() -> Any:
    """MLflow's server, an ASGI application, with our script in its page and the policy in every answer."""
    from mlflow.server import app as flask_app
    from mlflow.server.fastapi_app import app as mlflow_app
    from mlflow.tracking import MlflowClient

    html = (Path(str(flask_app.static_folder)) / "index.html").read_text(encoding="utf-8")
    script = Path(__file__).with_name("pages.js").read_text(encoding="utf-8")
    client = MlflowClient(os.environ[STORE])

    def page() -> bytes:
        ours = {
            "runs": newest_runs(client),
            "first": view.FIRST,
            "section": view.SECTION,
            "chart": view.CHART,
        }
        head = (
            f"<head><style>{NO_ASSISTANT}</style><script>const ours = {json.dumps(ours)};\n{script}</script>"
        )
        return html.replace("<head>", head, 1).encode("utf-8")

    async def with_policy(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode("ascii"))
                message["headers"] = [*message.get("headers", []), policy]
            await send(message)

        if scope["type"] == "http" and scope["path"] == "/":
            headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-store")]
            await send_with_policy({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": await asyncio.to_thread(page)})
        else:
            await mlflow_app(scope, receive, send_with_policy)

    return with_policy


def newest_runs(client: Any) -> str:
    """The page with the newest run of a pipeline, by its fragment of an address; empty without such a run."""
    experiments = [one.experiment_id for one in client.search_experiments()]
    order = ["attributes.start_time DESC"]
    newest = client.search_runs(experiments, view.PIPELINES, max_results=1, order_by=order)
    return view.page("", newest[0].info.experiment_id).removeprefix("/") if newest else ""
