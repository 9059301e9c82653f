"""The content policy of Prefect's and MLflow's pages: by it, browsers refuse what they ask of other machines.

No setting of either stops such requests. `app` is MLflow's server as the plugin `rlhf` of MLflow's extension
point `mlflow.app`, which pyproject.toml declares. It sends the policy with every answer.
"""

from __future__ import annotations

from typing import Any

LOOPBACK = " ".join(
    f"{scheme}://{host}:*" for scheme in ("http", "ws") for host in ("127.0.0.1", "localhost")
)
POLICY = f"default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: {LOOPBACK}"
MLFLOW_APP = "rlhf"  # the plugin's name


def app() -> Any:
    """MLflow's server, an ASGI application, with the policy in every answer."""
    from mlflow.server.fastapi_app import app as mlflow_app

    async def with_policy(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY.encode("ascii"))
                message["headers"] = [*message.get("headers", []), policy]
            await send(message)

        await mlflow_app(scope, receive, send_with_policy)

    return with_policy
