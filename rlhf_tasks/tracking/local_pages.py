"""Pages of Prefect and MLflow make no request to another machine: browsers refuse it by a content policy.

Both ask other machines for more than a page needs, and no setting stops that. `app` is MLflow's server with
the policy on every page: the plugin `rlhf` of MLflow's extension point `mlflow.app`, which pyproject.toml
declares.
"""

from __future__ import annotations

from typing import Any

LOOPBACK = " ".join(
    f"{scheme}://{host}:*" for scheme in ("http", "ws") for host in ("127.0.0.1", "localhost")
)
POLICY = f"default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: {LOOPBACK}"
MLFLOW_APP = "rlhf"  # the plugin's name


def app() -> Any:
    """MLflow's own server, an ASGI application, with the policy as a header of every answer."""
    from mlflow.server.fastapi_app import app as mlflow_app

    async def with_policy(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode("ascii"))
                message["headers"] = [*message.get("headers", []), policy]
            await send(message)

        await mlflow_app(scope, receive, send_with_policy)

    return with_policy
