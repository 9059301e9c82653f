"""Pages of Prefect and MLflow make no request to another machine: browsers refuse it by a content policy.

Both ask other machines for more than a page needs, and no setting stops that. `app` is MLflow's server with
the policy on every page: the plugin `rlhf` of MLflow's extension point `mlflow.app`, which pyproject.toml
declares.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

LOOPBACK = " ".join(
    f"{scheme}://{host}:*" for scheme in ("http", "ws") for host in ("127.0.0.1", "localhost")
)
POLICY = f"default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: {LOOPBACK}"
MLFLOW_APP = "rlhf"  # the plugin's name

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class WithPolicy:
    """An ASGI application whose answers have the policy as a header."""

    def __init__(self, application: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self._application = application

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", []), (b"content-security-policy", POLICY.encode("ascii"))
                ]  # fmt: skip
            await send(message)

        await self._application(scope, receive, send_with_policy)


def app() -> WithPolicy:
    """MLflow's own server, with the policy."""
    from mlflow.server.fastapi_app import app as mlflow_app

    return WithPolicy(mlflow_app)
