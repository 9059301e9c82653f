"""Prefect automations: crash detection and notifications.

Applying them again updates triggers and actions only: an automation that a user switched off stays off. No
torch here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from datetime import timedelta
from typing import Any, Literal
from uuid import UUID

from prefect import Flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events import emit_event
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from prefect.types import SecretDict

from flows import results, settings, subprocesses

SILENCE = timedelta(minutes=5)  # ten heartbeats; a server that restarts is not a lost run
LOST = "rlhf: a run that is silent has crashed"
NOTIFY = "rlhf: notify of the ends of runs"
HEARTBEAT, ENDED = "prefect.flow-run.heartbeat", "rlhf.flow-run.ended"
ENDS = (
    *("Completed", "Failed", "Cancelled", "Crashed", "Unpushed", settings.STOPPED, settings.OUT_OF_TIME),
    *results.VERDICTS,
)
NOTIFIED = ("Failed", "Crashed", results.PROMOTED, results.NOT_PROMOTED)
LOG, WEBHOOK = "rlhf-log", "rlhf-webhook"  # the blocks
LOG_KEY = "rlhf-notifications"  # the artifact whose versions are the notifications
NOISE = re.compile(rf"Running hook|Hook '|Finished in state (Running\(|.*{subprocesses.STOPPED})")
"""What Prefect logs of itself at the end of a run, where the run's own last lines stand."""
for _name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(_name).addFilter(lambda record: not NOISE.match(record.getMessage()))
SUBJECT = "{{ flow_run.state.name }}: {{ flow_run.name }}"
BODY = "{{ flow.name }}: {{ flow_run.state.message }} {{ flow_run|ui_url or '' }}"


def apply(client: SyncPrefectClient) -> None:
    """Bring the automation that every server needs up to date.

    A run whose heartbeat stops, because its machine or its worker is gone, becomes Crashed.
    """
    action = ChangeFlowRunState(
        name="Crashed", state=StateType.CRASHED, message="its heartbeat stopped", force=False
    )
    trigger = _trigger(ENDS, Posture.Proactive, within=SILENCE, after={HEARTBEAT}, also={ENDED})
    _apply(client, AutomationCore(name=LOST, trigger=trigger, actions=[action]))


def notify(webhook: str | None) -> None:
    """Notify of runs that failed, crashed, were promoted or refused: in Prefect, and by the webhook.

    Args:
        webhook: The address that gets each notification. None keeps the current address; "" removes it.
    """
    # An artifact of the server itself needs no account and no other program.
    artifact = {
        "key": LOG_KEY,
        "type": "markdown",
        "description": "{{subject}}",
        "data": "{{subject}}\n\n{{body}}",
    }
    with get_client(sync_client=True) as client:
        blocks = [_save(LOG, f"{str(client.api_url).rstrip('/')}/artifacts/", artifact)]
        try:
            existing = client.read_block_document_by_name(WEBHOOK, "custom-webhook").id
        except ObjectNotFound:
            existing = None
        if webhook:
            blocks.append(_save(WEBHOOK, webhook, {"text": "{{subject}}\n{{body}}"}))
        elif existing is not None and webhook is None:
            blocks.append(existing)
        elif existing is not None:
            client.delete_block_document(existing)
        actions = [SendNotification(block_document_id=block, subject=SUBJECT, body=BODY) for block in blocks]
        trigger = _trigger(NOTIFIED, Posture.Reactive, within=timedelta(0))
        _apply(client, AutomationCore(name=NOTIFY, trigger=trigger, actions=[*actions]))


def emit_end(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's hook: emit an event that tells the server that the heartbeats of a run have ended.

    It takes the way of the heartbeats, so that it is behind the last one; the event of the final state may
    overtake it, and servers other than ours may hold that event back (`server.CausalOrdering` says why).
    """
    emit_event(
        ENDED,
        {"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.name": flow_run.name},
        related=[
            {
                "prefect.resource.id": f"prefect.flow.{flow_run.flow_id}",
                "prefect.resource.role": "flow",
                "prefect.resource.name": flow.name,
            }
        ],
    )


def _trigger(
    ends: tuple[str, ...],
    posture: Literal[Posture.Reactive, Posture.Proactive],
    *,
    within: timedelta,
    after: Collection[str] = (),
    also: Collection[str] = (),
) -> EventTrigger:
    """A trigger for the final states of this project's flow runs.

    Args:
        after: Events upon which it waits for one of those states.
        also: Events that count as such a state.
    """
    flows: dict[str, str | list[str]] = {
        "prefect.resource.role": ["flow"],
        "prefect.resource.name": list(settings.FLOWS),
    }
    return EventTrigger(
        posture=posture,
        within=within,
        after=set(after),
        expect={*after, *also, *(f"prefect.flow-run.{end}" for end in ends)},
        threshold=1,
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        match_related=ResourceSpecification(flows),
        for_each={"prefect.resource.id"},
    )


def _apply(client: SyncPrefectClient, automation: AutomationCore) -> None:
    automations = client.read_automations_by_name(automation.name)
    if not automations:
        client.create_automation(automation)
    for existing in automations:
        current = existing.model_dump(exclude={"id", "owner_resource"})
        updated = current | automation.model_dump(include={"trigger", "actions"})
        if updated != current:  # an update drops the runs whose heartbeats it has seen
            client.update_automation(existing.id, AutomationCore(**updated))


def _save(name: str, address: str, content: dict[str, Any]) -> UUID:
    """Make or update a block that posts this content. Prefect's pages hide the address, often a secret."""
    block: Any = CustomWebhookNotificationBlock(
        name=name,
        url="{{address}}",
        json_data=content,
        headers=None,
        cookies=None,
        secrets=SecretDict({"address": address}),
    )
    return UUID(str(block.save(name, overwrite=True)))
