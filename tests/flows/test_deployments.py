"""What is registered at the server, and how the watch uses a deployment's parameters; stages do not run."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.events import emit_event
from prefect.events.schemas.events import Event
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flow_engine import FlowRunEngine, run_flow
from prefect.server.events.schemas.automations import EventTrigger as ServerTrigger
from prefect.server.events.schemas.events import ReceivedEvent
from prefect.states import Completed, Pending, Running
from prefect.variables import Variable

from flows import automations, deployments, form, pipeline, settings, sweep, watch
from rlhf_tasks import presets
from rlhf_tasks.cli import main as cli
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import git
from tests.flows import toy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("server"),
    pytest.mark.filterwarnings("ignore"),  # those of Prefect and its server
]
Made = Callable[[], list[dict[str, Any]]]
RUNS, CHECKS = f"{settings.PIPELINE}/pipeline", f"{settings.WATCH}/watch"


def deployment(name: str) -> Any:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(name)


def update(name: str, **values: Any) -> None:
    with get_client(sync_client=True) as client:
        client.update_deployment(client.read_deployment_by_name(name).id, DeploymentUpdate(**values))


def test_applying_again_keeps_what_users_changed(root: Path) -> None:
    deployments.apply(root, None)
    first = deployment(CHECKS)
    (hourly,) = first.schedules
    assert (hourly.slug, hourly.active, hourly.schedule.interval) == ("hourly", False, timedelta(hours=1))
    with get_client(sync_client=True) as client:
        often = IntervalSchedule(interval=timedelta(minutes=5))
        client.update_deployment_schedule(first.id, hourly.id, active=True, schedule=often)
        client.create_work_queue("urgent", work_pool_name=settings.POOL)
    update(RUNS, work_pool_name=settings.POOL, work_queue_name="urgent")
    update(CHECKS, parameters={"preset": "smoke"}, job_variables={"env": {"A": "b"}}, description="mine")
    deployments.apply(root, None)
    again = deployment(CHECKS)
    assert again.id == first.id
    assert again.parameters == {"preset": "smoke", "deployment": RUNS}
    assert again.job_variables == {"env": {"A": "b"}, **first.job_variables}
    assert again.description == first.description, "the description comes from this project"
    (kept,) = again.schedules
    assert (kept.id, kept.active, kept.schedule.interval) == (hourly.id, True, timedelta(minutes=5))
    assert deployment(RUNS).work_queue_name == "urgent"


def test_the_form_gives_default_unit_and_range_and_refuses_wrong_keys(root: Path) -> None:
    toy.write_params(root, ppo={"kl_coef": 0.125}, tracking={"enabled": False})
    deployments.apply(root, None)
    made = deployment(RUNS)
    kl_coef = made.parameter_openapi_schema["definitions"]["Common"]["properties"]["kl_coef"]
    assert kl_coef["title"] == "ppo.kl_coef"
    assert kl_coef["description"] == (
        "Weight of the KL penalty, in score units per nat; 0: no penalty. Default: 0.125, from params.yaml. "
        "Range: ≥ 0."
    )
    wrong: Any = (
        {"comon": {}},
        {"common": {"kl_cof": 1}},
        {"common": {"kl_coef": -1}},
        {"common": {"seed": "x"}},
    )
    with get_client(sync_client=True) as client:
        for parameters in wrong:
            with pytest.raises(PrefectHTTPStatusError, match="409"):
                client.create_flow_run_from_deployment(made.id, parameters=parameters)
        empty = {"common": {"kl_coef": None, "temperature": 0.5}, "seed": None, "max_hours": None}
        client.create_flow_run_from_deployment(made.id, parameters=empty)


def test_the_form_has_a_sentence_and_a_recorded_duration_for_each_preset(root: Path) -> None:
    deployments.apply(root, None)
    for parameters in ({"preset": "smoke"}, {"preset": "trl", "common": {"kl_coef": 1}}):
        with get_client(sync_client=True) as client:
            run = client.create_flow_run_from_deployment(deployment(RUNS).id, parameters=parameters)
            client.set_flow_run_state(run.id, Running(), force=True)
            client.set_flow_run_state(run.id, Completed(), force=True)
    deployments.apply(root, None)
    text = deployment(RUNS).parameter_openapi_schema["properties"]["preset"]["description"]
    assert [name for name in presets.names() if f" • {name}: {presets.summary(name)}" not in text] == []
    assert f"{presets.summary('smoke')} (0s here)" in text
    assert f"{presets.summary('trl')} (" not in text, "that run changed more than the preset"


def test_projects_of_one_server_have_different_pools_and_names(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    deployments.apply(root, None)
    with pytest.raises(UserError, match=rf"belongs to the project {root}: give `--pool NAME`"):
        deployments.apply(other, None, is_shared=True)
    deployments.apply(root, None, is_shared=True)
    with pytest.raises(UserError, match="work pool 'two' does not exist"):
        deployments.apply(other, None, "two", makes_pool=False)
    deployments.apply(other, None, "two", is_shared=True)
    assert deployment(RUNS).job_variables["working_dir"] == str(root)
    made = deployment(f"{RUNS}-two")
    assert (made.work_pool_name, made.job_variables["working_dir"]) == ("two", str(other))
    for name in (f"{CHECKS}-two", f"{settings.SWEEP}/sweep-two"):
        assert deployment(name).parameters == {"deployment": f"{RUNS}-two"}, "not those of the first project"


def test_another_project_in_an_equal_folder_is_refused(root: Path) -> None:
    """As in containers, which all have their project in /project."""
    toy.git(root, "remote", "add", "origin", "git@example.org:one/rlhf.git")
    deployments.apply(root, None)
    toy.git(root, "remote", "set-url", "origin", "git@example.org:two/rlhf.git")
    with pytest.raises(UserError, match=r"belongs to the project example\.org/one/rlhf: give `--pool NAME`"):
        deployments.apply(root, None, is_shared=True)


def test_python_in_a_path_with_a_space_and_a_zone_that_is_none(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/my project/.venv/bin/python")
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    deployments.apply(root, None)
    command = deployment(RUNS).job_variables["command"]
    assert shlex.split(command) == ["/my project/.venv/bin/python", "-P", "-m", "prefect.engine"]


def test_projects_are_distinguished_in_a_pool_of_any_type(root: Path, tmp_path: Path) -> None:
    """If jobs run in containers, no deployment has the folder of its project."""
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="pods", type="kubernetes"))
    other = toy.make(tmp_path / "other")
    for made, team in ((root, "one"), (other, "two")):
        toy.git(made, "remote", "add", "origin", f"git@example.org:{team}/rlhf.git")

    def apply(folder: Path) -> None:
        deployments.apply(folder, None, "pods", makes_pool=False, is_shared=True)

    apply(root)
    name = f"{RUNS}-pods"
    assert "working_dir" not in deployment(name).job_variables
    assert deployment(name).tags == ["rlhf", "project:example.org/one/rlhf"]
    step = {"prefect.deployments.steps.set_working_directory": {"directory": "/project"}}
    assert deployment(name).pull_steps == [step], "else Prefect runs it in a temporary copy of the project"
    assert deployment("rlhf-sweep/sweep-pods").job_variables["gpus"] == 0, "it waits for others"
    with pytest.raises(UserError, match=r"belongs to the project example.org/one/rlhf: give `--pool NAME`"):
        apply(other)
    update(name, tags=["mine", *deployment(name).tags])
    clone = tmp_path / "clone"
    toy.git(tmp_path, "clone", "-q", str(root), str(clone))
    toy.git(clone, "remote", "set-url", "origin", "https://somebody:secret@example.org/one/rlhf")
    apply(clone)
    assert deployment(name).tags == ["rlhf", "project:example.org/one/rlhf", "mine"]
    update(name, tags=["mine"])  # as an earlier version left it, without an owner
    apply(other)
    assert deployment(name).tags == ["rlhf", "project:example.org/two/rlhf", "mine"]


def test_a_worker_starts_for_its_pool(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    with get_client(sync_client=True) as client:
        monkeypatch.setenv("PREFECT_API_URL", str(client.api_url).rstrip("/"))
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words))
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "")  # so that monkeypatch restores it
    monkeypatch.delenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY")
    cli.main(["up", "--work", "--pool", "three"])
    assert os.environ["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30", "Prefect's default is 180"
    monkeypatch.setenv("PREFECT_WORKER_WEBSERVER_PORT", "8080")
    cli.main(["up", "--work", "--pool", "three"])
    assert [words[words.index("--pool") + 1] for words in started] == ["three", "three"]
    assert ["--with-healthcheck" in words for words in started] == [False, True]
    assert deployment(f"{RUNS}-three").work_pool_name == "three"


@flow(name="somebody-elses")
def foreign() -> None:
    """A flow of another project on the same server."""


def started(of: Any, *, by: str | None = None) -> FlowRun:
    """A run that is running, of a flow by itself or `by` a deployment."""
    with get_client(sync_client=True) as client:
        if by is None:
            run = client.create_flow_run(of, state=Running())
        else:
            run = client.create_flow_run_from_deployment(client.read_deployment_by_name(by).id)
            client.set_flow_run_state(run.id, Running(), force=True)
        return client.read_flow_run(run.id)


def made_by_schedule(of: Any) -> FlowRun:
    """A run that a new schedule made, and that a worker takes at once."""
    hourly = DeploymentScheduleCreate(schedule=IntervalSchedule(interval=timedelta(hours=1)), active=True)
    with get_client(sync_client=True) as client:
        made = client.create_deployment(client.create_flow(of), str(uuid.uuid4()), schedules=[hourly])
        client._client.post(f"/deployments/{made}/schedule", json={})  # this server has no scheduler
        only = DeploymentFilter(id=DeploymentFilterId(any_=[made]))
        run, *_ = client.read_flow_runs(deployment_filter=only)
        client.set_flow_run_state(run.id, Pending(), force=True)
        return client.read_flow_run(run.id)


def taken_for_lost(run: FlowRun) -> bool:
    """Whether the automation has acted on this run."""
    query = {"event": {"name": ["prefect.automation.action.triggered"]}}
    with get_client(sync_client=True) as client:
        events = client._client.post("/events/filter", json={"filter": query, "limit": 50}).json()["events"]
    return any(str(run.id) in json.dumps(event) for event in events)


def heartbeat(of: Any, run: FlowRun) -> dict[str, Any]:
    """The event that the run's own process sends."""
    resource, related = FlowRunEngine(of, flow_run=run)._build_heartbeat_event_template()
    return {"event": automations.HEARTBEAT, "resource": resource, "related": related}


def automation() -> Any:
    with get_client(sync_client=True) as client:
        (made,) = client.read_automations_by_name(automations.LOST)
        return made


def state_event(run: FlowRun, event: str) -> ReceivedEvent:
    """The event of a run's state, as the server sends it."""
    query = {"event": {"name": [event]}, "resource": {"id": [f"prefect.flow-run.{run.id}"]}}
    with get_client(sync_client=True) as client:
        events = toy.until(
            lambda: client._client.post("/events/filter", json={"filter": query}).json()["events"], event
        )
    return ReceivedEvent.model_validate(events[0])


def test_the_automation_covers_runs_of_these_flows_and_no_others(root: Path) -> None:
    deployments.apply(root, None)
    trigger = ServerTrigger.model_validate(automation().trigger.model_dump())
    ends = {
        "Completed",
        "Out of time",
        "Unpushed",
        "Promoted",
        "Not promoted",
        "Deferred",
        "Failed",
        "Cancelled",
        "Stopped",
        "Crashed",
    }
    assert trigger.expect == {
        automations.HEARTBEAT,
        automations.ENDED,
        *(f"prefect.flow-run.{end}" for end in ends),
    }
    ours = [(pipeline.pipeline, started(None, by=RUNS)), (sweep.sweep, started(sweep.sweep))]
    theirs = [(foreign, started(foreign))]
    for of, run in ours + theirs:
        beat = Event(**heartbeat(of, run)).model_dump(mode="json") | {"received": run.created}
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(run.id, Completed(), force=True)
        for event in (ReceivedEvent.model_validate(beat), state_event(run, "prefect.flow-run.Completed")):
            assert trigger.covers(event) == ((of, run) in ours), event


@pytest.mark.slow
def test_a_run_without_heartbeats_crashes_and_ended_or_foreign_runs_do_not(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automations, "SILENCE", timedelta(seconds=10))
    deployments.apply(root, None)
    lost, ended, theirs = started(pipeline.pipeline), started(pipeline.pipeline), started(foreign)
    for of, run in ((foreign, theirs), (pipeline.pipeline, ended), (pipeline.pipeline, lost)):
        emit_event(**heartbeat(of, run))
    scheduled = made_by_schedule(watch.data_watch)
    emit_event(**heartbeat(watch.data_watch, scheduled))
    given = {"deployment": "rlhf-pipeline/none"}
    refused: Any = run_flow(watch.data_watch, scheduled, parameters=given, return_type="state")
    assert refused.is_failed()
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(ended.id, Completed(), force=True)

        def state(run: FlowRun) -> Any:
            return client.read_flow_run(run.id).state

        toy.until(lambda: state(lost).is_crashed(), "the crash of the silent run")
        assert state(lost).message == "its heartbeat stopped"
        time.sleep(10.0)  # long enough for a foreign run to crash as well
        assert state(theirs).is_running()
        assert state(ended).is_completed()
        assert [taken_for_lost(run) for run in (lost, ended, scheduled)] == [True, False, False]
        client.delete_automation(automation().id)


@pytest.fixture
def made(root: Path) -> Made:
    """The parameters of the runs of the pipeline's deployment that this test makes, in their order."""
    deployments.apply(root, None)
    update(RUNS, parameters={})

    def runs() -> list[FlowRun]:
        only = DeploymentFilter(id=DeploymentFilterId(any_=[deployment(RUNS).id]))
        with get_client(sync_client=True) as client:
            return client.read_flow_runs(deployment_filter=only)

    before = {run.id for run in runs()}

    def parameters() -> list[dict[str, Any]]:
        new = [run for run in runs() if run.id not in before]
        return [run.parameters for run in sorted(new, key=lambda run: str(run.created))]

    return parameters


def check(**parameters: Any) -> str:
    state: Any = watch.data_watch(**parameters, return_state=True)
    return str(state.message)


def complete(root: Path, request: Request) -> None:
    """Record a completed run of this request, as such a run does at its end."""
    _, values, _ = form.resolve(root, request, git.resolve(root, None))
    last = {"data": watch.fingerprint(root, values), "flow_run": "an-id"}
    Variable.set(watch.variable(root, request, values), last, overwrite=True)


UNCHANGED = "the data is that of the last completed run"


def test_each_preset_has_its_own_last_completed_run(root: Path, made: Made) -> None:
    run: Any = pipeline.pipeline(promote=False, return_state=True)
    assert run.is_completed()
    assert check() == UNCHANGED
    first = check(preset="smoke")
    assert first.startswith("the data changed: its run is ")
    assert check(preset="smoke") == first, "one change makes one run, however often it is checked"
    assert check(preset="trl") not in (first, UNCHANGED), "another preset makes another run"
    complete(root, Request("smoke"))
    assert check(preset="smoke") == UNCHANGED
    (root / "given/rows.txt").write_text("other\n", encoding="utf-8")
    assert check() != UNCHANGED
    assert made() == [{"preset": "smoke"}, {"preset": "trl"}, {}]


def test_equal_projects_of_one_server_have_a_last_completed_run_each(root: Path, tmp_path: Path) -> None:
    """Their clones share it: they have the same git remote."""
    toy.git(root, "remote", "add", "origin", "https://host/team/project.git")
    clone, other = tmp_path / "clone", tmp_path / "other"
    for folder, project in ((clone, "project"), (other, "other-project")):
        toy.git(root, "clone", "--quiet", str(root), str(folder))
        toy.git(folder, "remote", "set-url", "origin", f"git@host:team/{project}.git")
    names = [watch.variable(folder, Request(), Config()) for folder in (root, clone, other)]
    assert names[0] == names[1] != names[2]


def test_the_watch_uses_the_parameters_of_the_deployment(root: Path, made: Made) -> None:
    (root / "elsewhere").mkdir()
    given = {"preset": "smoke", "seed": 5, "overrides": {"data.path": "elsewhere"}}
    update(RUNS, parameters=given)
    complete(root, Request())
    complete(root, Request("smoke", 5, {"data.path": "elsewhere"}))
    assert check() == UNCHANGED
    (root / "given/rows.txt").write_text("not read by that run\n", encoding="utf-8")
    assert check() == UNCHANGED
    (root / "elsewhere/rows.txt").write_text("new\n", encoding="utf-8")
    assert check().startswith("the data changed")
    assert made() == [given]


def test_the_watch_reports_an_unreadable_params_yaml_and_starts_nothing(root: Path, made: Made) -> None:
    (root / "params.yaml").write_text("data: {pth: x}", encoding="utf-8")
    toy.commit(root)
    state: Any = watch.data_watch(return_state=True)
    assert state.type == StateType.FAILED
    assert "data.pth: unknown key" in str(state.message)
    assert made() == []


def test_watch_and_sweep_refuse_a_wrong_deployment_before_anything_starts(root: Path, made: Made) -> None:
    problem = "deployment='a/b/c': give FLOW/DEPLOYMENT, such as rlhf-pipeline/pipeline"
    assert problem in check(deployment="a/b/c")
    name = "rlhf-pipeline/pipelin"
    state: Any = sweep.sweep(deployment=name, return_state=True)
    assert state.type == StateType.FAILED
    problem = f"deployment={name!r}: no deployment has this name; `prefect deployment ls` lists"
    assert problem in str(state.message)
    assert made() == []
