"""What is told of the ends of runs: in Prefect, and to a webhook, which is a receiver on loopback here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import State
from prefect.states import Completed, Crashed, Failed, Running

from flows import automations, deployments, settings
from tests import loopback
from tests.conftest import Command
from tests.flows import toy

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # those of Prefect and its server


class Receiver(loopback.Server):
    """Keeps what is posted to it."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.received: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"{super().url}/secret-of-the-hook"


class Handler(loopback.Handler):
    protocol_version = "HTTP/1.0"  # a connection ends with its reply
    server: Receiver

    def do_POST(self) -> None:
        self.server.received.append({"path": self.path, **self.body()})
        self.send(200, None)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with loopback.serving(Receiver()) as made:
        yield made


def automation() -> Any:
    with get_client(sync_client=True) as client:
        (found,) = client.read_automations_by_name(automations.NOTIFY)
    return found


def end(deployment: str, state: State[Any]) -> str:
    """A run of a deployment that ends so, as the server sees it; its name."""
    with get_client(sync_client=True) as client:
        run = client.create_flow_run_from_deployment(client.read_deployment_by_name(deployment).id)
        client.set_flow_run_state(run.id, Running(), force=True)
        client.set_flow_run_state(run.id, state, force=True)
    return run.name


def logged() -> list[str]:
    wanted = ArtifactFilter.model_validate({"key": {"any_": [automations.LOG_KEY]}})
    with get_client(sync_client=True) as client:
        return [str(found.data) for found in client.read_artifacts(artifact_filter=wanted)]


def test_runs_that_fail_crash_are_promoted_or_refused_are_notified_of(
    server: None, root: Path, receiver: Receiver
) -> None:
    deployments.apply(root, None)
    automations.notify(receiver.url)
    pipeline = f"{settings.PIPELINE}/pipeline"
    message = 'KL 11.2 > "10"\nsecond line'  # must survive the way through templates and JSON
    ends = {
        "Failed": end(pipeline, Failed(message=message)),
        "Crashed": end(pipeline, Crashed(message="its worker is gone")),
        "Not promoted": end(pipeline, Completed(name="Not promoted", message="KL is too high")),
        "Promoted": end(f"{settings.SWEEP}/sweep", Completed(name="Promoted", message="it is champion now")),
    }
    silent = [end(pipeline, Completed()), end(pipeline, Completed(name="Deferred", message="no MLflow"))]
    toy.until(lambda: len(receiver.received) >= len(ends), "the notifications")
    toy.until(lambda: len(logged()) >= len(ends), "the log")
    told = {one["text"].partition("\n")[0]: one for one in receiver.received}
    assert set(told) == {f"{state}: {name}" for state, name in ends.items()}
    assert all(one["path"] == "/secret-of-the-hook" for one in receiver.received)
    failed = told[f"Failed: {ends['Failed']}"]["text"]
    assert failed == f"Failed: {ends['Failed']}\n{settings.PIPELINE}: {message} ", "and no link without a UI"
    assert sorted(text.partition("\n")[0] for text in logged()) == sorted(told)
    assert not any(name in json.dumps(receiver.received) + str(logged()) for name in silent)


def test_applying_again_changes_nothing_and_keeps_what_a_user_switched_off(
    server: None, root: Path, receiver: Receiver
) -> None:
    automations.notify(receiver.url)
    first = automation()
    assert len(first.actions) == 2
    with get_client(sync_client=True) as client:
        client.pause_automation(first.id)
        automations.notify(None)
        again = automation()
        assert (again.id, again.enabled, again.actions) == (first.id, False, first.actions)
        automations.notify("http://127.0.0.1:9/other")
        assert automation().actions == first.actions, "the block has the new address"
        shown = client.read_block_document_by_name(
            automations.WEBHOOK, "custom-webhook", include_secrets=False
        )
        assert "127.0.0.1:9" not in str(shown.data), "the address may be a secret"
        automations.notify("")
        (only,) = automation().actions
        assert only == first.actions[0]
        automations.notify(None)
        assert automation().actions == [only]
        client.resume_automation(first.id)


@pytest.mark.parametrize("given", ["example.org/hook", "ftp://example.org", "https://", "http:///x"])
def test_an_address_that_is_none_is_refused(given: str, rlhf: Command, root: Path) -> None:
    message = rlhf("up --webhook", given, status=2).err
    assert f"must begin with http:// or https:// and a host (given: {given})" in message
