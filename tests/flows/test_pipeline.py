"""The flow within one process: order, parent run, failures, interrupts, parameters."""

from __future__ import annotations

import itertools
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from prefect import flow
from prefect.artifacts import Artifact
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ParameterTypeError
from prefect.flow_engine import run_flow
from prefect.states import Cancelled, Completed, Crashed, Failed, Running

from flows import form, progress, results, run_folder, settings, stage_tasks, subprocesses, sweep, watch
from flows import pipeline as flows_pipeline
from flows.stage_tasks import Dvc, StageFailed
from rlhf_tasks import config
from rlhf_tasks.config.schema import MixedSet
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import durations, dvc_cli, git
from tests.conftest import Command
from tests.flows import toy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("server"),
    pytest.mark.filterwarnings("ignore"),  # those of Prefect and its server
]


class Log(logging.Handler):
    """Collects what a flow and its tasks log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def errors(self) -> list[str]:
        return [record.getMessage() for record in self.records if record.levelno >= logging.ERROR]


@pytest.fixture
def log() -> Iterator[Log]:
    made, names = Log(), ("prefect.flow_runs", "prefect.task_runs")
    for name in names:
        logging.getLogger(name).addHandler(made)
    yield made
    for name in names:
        logging.getLogger(name).removeHandler(made)


def test_invalid_parameters_fail_before_anything_starts(root: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'kl_coef'"):
        flows_pipeline.pipeline(overrides={"ppo.kl_cof": 1.0})
    with pytest.raises(UserError, match="a run in the checkout does not change it"):
        form.resolve(root, Request(seed=3), None)
    with pytest.raises(UserError, match="name cannot be given for a run in the checkout"):
        form.commit_of(root, "checkout", None, "mine")
    with pytest.raises(UserError, match="is not a commit, branch or tag"):
        form.commit_of(root, "workspace", "no-such", None)
    assert not (root / ".rlhf").exists()


def test_a_refused_workspace_is_one_message_in_log_and_state(root: Path, log: Log) -> None:
    os.mkfifo(root / "given/pipe")
    state: Any = flows_pipeline.pipeline(return_state=True)
    assert state.type == StateType.FAILED
    assert state.message.startswith("data.path='given' has pipe")
    assert log.errors() == [state.message]
    assert [record for record in log.records if record.exc_info] == [], "no traceback"
    assert list((root / ".rlhf/workspaces").iterdir()) == []


def test_the_engine_of_a_worker_does_not_log_a_mistake_again(root: Path, log: Log) -> None:
    engine = logging.getLogger("prefect.flow_runs")
    with pytest.raises(UserError, match="is not a commit"):
        run_flow(flows_pipeline.pipeline, parameters={"revision": "no-such"}, error_logger=engine)
    (message,) = log.errors()
    assert message.startswith("revision='no-such' is not a commit")
    assert [record for record in log.records if record.exc_info] == []
    engine.error("a fault", exc_info=ValueError("logged"))
    assert log.errors()[-1] == "a fault", "faults are still logged"


def test_rlhf_flow_runs_the_stages_in_order_with_the_flow_as_parent_and_with_interrupts(
    root: Path, rlhf: Command
) -> None:
    """A stage gets interrupts though its parent ignores them, as a shell's background does."""
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (root / "handler.py").write_text(code, encoding="utf-8")
    handler = f"{sys.executable} handler.py > handler.txt"
    toy.write_script(root, ["echo $RLHF_PARENT_RUN > parent.txt", handler, toy.SECOND.strip()])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rlhf("run --flow")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (root / "second.txt").read_text(encoding="utf-8").startswith("rows\n")
    assert (root / "parent.txt").read_text(encoding="utf-8").startswith("prefect-")
    assert (root / "handler.txt").read_text(encoding="utf-8") == "True\n"


@pytest.mark.parametrize(
    ("lines", "status", "message"),
    [(toy.refusal("fix it"), 2, "stage second refused: fix it"), (["exit 3"], 1, "stage second failed: ")],
)
def test_rlhf_flow_ends_as_its_stages_do_and_says_what_each_did(
    root: Path, log: Log, rlhf: Command, lines: list[str], status: int, message: str
) -> None:
    toy.write_script(root, lines)
    rlhf("run --flow", status=status)
    of_flow = [record for record in log.records if record.name == "prefect.flow_runs"]
    assert [record for record in of_flow if record.exc_info] == [], "no traceback"
    assert any(record.getMessage().startswith(message) for record in of_flow)
    assert [text for text in map(logging.LogRecord.getMessage, of_flow) if "%, " in text] == [
        "0%, first: runs: the checkout has no result of it",
        "50%, second: runs: the checkout has no result of it",
        "50%, second: failed",
    ]


def test_rlhf_flow_refuses_an_invalid_params_yaml_in_one_message(root: Path, rlhf: Command) -> None:
    (root / "params.yaml").write_text("ppo: {kl_coeff: 1.0}", encoding="utf-8")
    message = rlhf("run --flow", status=2).err
    assert message.startswith("rlhf: ")
    assert "ppo.kl_coeff: unknown key" in message
    assert "Traceback" not in message


def test_common_fields_are_overrides_and_an_empty_one_is_none() -> None:
    request = form.build_request(
        "smoke", None, {"kl_coef": 0.5, "learning_rate": None}, {"judge.num_examples": 9}
    )
    assert request == Request("smoke", None, {"ppo.kl_coef": 0.5, "judge.num_examples": 9})
    assert form.build_request("default", 3, None, None) == Request(None, 3, {})
    with pytest.raises(UserError, match=r"ppo\.kl_coef: `common` and `overrides` both give it"):
        form.build_request("default", None, form.Common(kl_coef=0.5), {"ppo.kl_coef": 0.5})
    with pytest.raises(UserError, match="seed: the field and `overrides` both give it"):
        form.build_request("default", 3, None, {"seed": 5})
    with pytest.raises(UserError, match="`preset` alone only names the run"):
        form.build_request("default", None, None, {"preset": "rloo"})


@pytest.mark.usefixtures("interruptible")
def test_a_deadline_ends_a_run_with_its_state_and_a_later_one_goes_on(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """An hour passes when the second stage has begun."""

        sleep = staticmethod(time.sleep)

        def monotonic(self) -> float:
            return time.monotonic() + 3600 * (root / "begun").exists()

    monkeypatch.setattr(subprocesses, "time", Clock())
    lines = [
        "trap 'touch ../../../kept; exit 130' INT",
        "touch ../../../begun",
        "while :; do sleep 0.1; done",
    ]
    toy.write_script(root, ["[ -e ../../../kept ] || {", *lines, "}", toy.SECOND.strip()])
    state: Any = flows_pipeline.pipeline(max_hours=0.5, return_state=True)
    assert (state.type, state.name) == (StateType.CANCELLED, "Out of time")
    assert state.message == "max_hours=0.5 is over; state kept at 50%; Retry resumes"
    assert (root / "kept").exists(), "the stage was interrupted, not killed"
    assert list((root / ".rlhf/workspaces").iterdir()) == []
    (root / "begun").unlink()
    state = flows_pipeline.pipeline(max_hours=0.5, return_state=True)
    assert state.message.startswith("ran second"), "the first stage is restored"


def test_a_run_says_its_percentage_and_the_time_left_once_a_minute(
    root: Path, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations.record(root / ".rlhf", "first", 30.0)
    durations.record(root / ".rlhf", "second", 10.0)
    minutes = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 30.0 * next(minutes)))

    class Following(Dvc):
        def plans(self, stages: Sequence[str]) -> list[stage_tasks.Plan]:
            return ["run"] * len(stages)

        def reproduce(self, stage: str, gpus: Sequence[str] = ()) -> None:
            for share in (0.25, 0.5, 0.75):
                self.follow({"share": share, "work": f"{share:.0%} of 3 epochs", "left": 30 * (1 - share)})

    values = config.load(root / "params.yaml")

    @flow
    def stages_only() -> None:
        flows_pipeline.run_stages(["first", "second"], values, Following(root, toy.run_environment(), 5.0))

    stages_only()
    assert [text for text in map(logging.LogRecord.getMessage, log.records) if "%, " in text] == [
        "0%, first: runs: the checkout has no result of it",
        "38%, first: 50% of 3 epochs, 15s left, 25s left of the run",
        "75%, second: runs: the checkout has no result of it",
        "75%, second: 50% of 3 epochs, 15s left",
    ]


def test_a_run_restores_what_the_checkout_made_and_says_what_has_changed(root: Path, log: Log) -> None:
    """The commit's dvc.lock may be of another machine, whose outs of the same inputs are others."""
    toy.write_script(root, ["date +%s%N > second.txt", "mkdir -p plots && cp given/ppo.csv plots/ppo.csv"])
    dvc_cli.run(root, "repro")
    toy.commit(root)
    for path in (".dvc/cache", ".dvc/tmp"):
        shutil.rmtree(root / path)
    dvc_cli.run(root, "repro", "--force")
    state: Any = flows_pipeline.pipeline(return_state=True)
    assert state.message.startswith("nothing had to run")
    toy.write_script(root, ["exit 5"])
    flows_pipeline.pipeline(return_state=True)
    assert "changed since its last run in the checkout: second.sh" in [
        record.getMessage().partition("runs: ")[2] for record in log.records
    ]


def test_a_server_that_is_gone_is_one_line(
    root: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    (line,) = rlhf("run --flow", status=2).err.splitlines()
    assert "PREFECT_API_URL=http://127.0.0.1:9/api does not answer" in line


class SlowDvc(Dvc):
    """Without DVC's own start, so that a timeout meets the stage however busy the machine is."""

    def plans(self, stages: Sequence[str]) -> list[stage_tasks.Plan]:
        return ["unchanged", "run"]

    def reproduce(self, stage: str, gpus: Sequence[str] = ()) -> None:
        command = ["sh", "-c", "echo $$ >> tries; exec sleep 600"]
        subprocesses.run(command, Path.cwd(), toy.run_environment(), 5.0)


def test_a_stage_that_exceeds_its_timeout_is_ended_with_its_processes_and_retried(root: Path) -> None:
    differs = {"second": {"retries": 1, "timeout_seconds": 3.0}}
    toy.write_params(root, tracking={"enabled": False}, service={"stages": differs, "gpu_slots": 0})
    values = config.load(root / "params.yaml")

    @flow
    def stages_only() -> None:
        flows_pipeline.run_stages(["first", "second"], values, SlowDvc(root, toy.run_environment(), 5.0))

    with pytest.raises(StageFailed, match=r"stage second was ended: .*timeout of 3\.0 second"):
        stages_only()
    pids = (root / "tries").read_text(encoding="utf-8").split()
    assert len(pids) == 2
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_run_of_a_commit_shows_which_changes_it_did_not_see(root: Path) -> None:
    toy.write_script(root, ["touch ../../../later.txt", toy.SECOND.strip()])
    commit = toy.git(root, "rev-parse", "HEAD").strip()
    toy.write_script(root, ["exit 1"])
    (root / "second.sh").write_text("exit 2", encoding="utf-8")
    (root / "given/rows.txt").write_text("seen\n", encoding="utf-8")
    flows_pipeline.pipeline(revision=commit[:12], name="early")
    assert (root / "later.txt").exists()
    artifact: Any = Artifact.get(results.RESULTS_KEY)
    page = str(artifact.data)
    assert "> this run saw the commit, not the uncommitted changes of second.sh" in page
    assert f"commit `{commit}`, experiment `early`" in page
    assert toy.git(root, "rev-parse", f"{git.find_experiment(root, 'early')}^").strip() == commit


def test_the_checkout_has_one_run_at_a_time(root: Path) -> None:
    (root / ".rlhf").mkdir()
    with FileLock(root / ".rlhf/checkout.lock"), pytest.raises(UserError, match="another flow run"):
        flows_pipeline.pipeline(where="checkout")


def test_a_push_that_fails_names_the_reason(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flows_pipeline, "_push", flows_pipeline._push.with_options(retries=0))
    reason = flows_pipeline.send(root) or ""
    assert reason.startswith("failed to push data to the cloud - config file error: no remote")


def test_a_push_without_a_remote_is_refused_before_the_stages(root: Path) -> None:
    with pytest.raises(UserError, match="no default DVC remote"):
        flows_pipeline.pipeline(push=True)
    assert not git.experiments(root)
    dvc_cli.run(root, "config", "core.remote", "gone")
    with pytest.raises(UserError, match=r"core\.remote: gone"):
        dvc_cli.check_remote(root)
    dvc_cli.run(root, "remote", "add", "gone", "elsewhere")
    dvc_cli.check_remote(root)


def test_a_run_never_replaces_the_experiment_of_another_result(root: Path) -> None:
    flows_pipeline.pipeline(name="mine", promote=False)
    first = git.find_experiment(root, "mine")
    flows_pipeline.pipeline(name="mine", overrides={"ppo.kl_coef": 0.5}, promote=False)
    assert first is not None
    assert git.find_experiment(root, "mine") == first
    (other,) = (name for _, name in git.experiments(root) if name != "mine")
    assert re.fullmatch("mine-[0-9a-f]{4}", other)
    page = str(Artifact.get(results.RESULTS_KEY).data)  # type: ignore[union-attr]
    assert f"> experiment mine is another result of this commit: this run's is {other}" in page
    flows_pipeline.pipeline(name="mine", promote=False)
    assert len(git.experiments(root)) == 2, "the same result has the same experiment"


def test_a_name_too_long_for_an_experiment_is_refused_before_a_run() -> None:
    for one in (flows_pipeline.pipeline, sweep.sweep):
        assert one.validate_parameters({"name": "x" * 100})
        with pytest.raises(ParameterTypeError, match="at most 100 characters"):
            one.validate_parameters({"name": "x" * 101})


def test_every_field_of_the_form_has_a_type_and_a_description() -> None:
    for one in (flows_pipeline.pipeline, sweep.sweep, watch.data_watch):
        fields = one.parameters.model_dump()["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == []
        # Prefect's form has no editor for a nullable object or list, and no choice for a nullable enum.
        nullable = [part for field in fields.values() for part in field.get("anyOf", [])]
        assert {part["type"] for part in nullable} <= {"integer", "number", "string", "null"}
        assert not [part for part in nullable if "enum" in part]
    schema = flows_pipeline.pipeline.parameters.model_dump()["properties"]
    text = {"overrides", "where", "revision", "name", "push", "promote", "max_hours"}
    assert set(schema) == {"preset", "common", "seed"} | text
    assert schema["preset"]["default"] == "default"
    assert {"default", "smoke"} <= set(schema["preset"]["enum"])
    assert schema["where"]["enum"] == ["workspace", "checkout"]


def test_stages_of_service_must_exist(root: Path) -> None:
    toy.write_params(root, service={"stages": {"pppo": {"retries": 1}}})
    toy.commit(root)
    with pytest.raises(UserError, match="names pppo; the stages of"):
        form.resolve(root, Request(), "HEAD")


def test_the_policy_of_a_stage_replaces_the_common_values(root: Path) -> None:
    differs = {"second": {"retries": 4, "retry_delay_seconds": 1.5, "timeout_seconds": 60.0}}
    toy.write_params(root, service={"retries": 1, "stages": differs})
    service = config.load(root / "params.yaml").service
    task = stage_tasks.stage_task("second", service.policy("second"))
    assert (task.name, task.retries, task.timeout_seconds) == ("second", 4, 60.0)
    assert task.retry_delay_seconds == [1.5, 3.0, 6.0, 12.0]
    assert stage_tasks.stage_task("first", service.policy("first")).retries == 1
    assert (service.policy("first").gpu_slots, service.policy("prepare").gpu_slots) == (1, 0)
    toy.write_params(root, service={"stages": {"second": {"retry": 4}}})
    with pytest.raises(UserError, match="known keys are retries"):
        config.load(root / "params.yaml")


def test_the_fingerprint_changes_exactly_when_the_data_does(root: Path) -> None:
    values = config.load(root / "params.yaml")
    before = watch.fingerprint(root, values)
    (root / "given/rows.txt").touch()
    (root / "second.sh").write_text("exit 1\n", encoding="utf-8")
    assert watch.fingerprint(root, values) == before
    (root / "given/rows.txt").write_text("other\n", encoding="utf-8")
    assert watch.fingerprint(root, values) != before
    (root / "mixed.jsonl").write_text("{}\n", encoding="utf-8")
    mixed = values.data.model_copy(update={"mix": (MixedSet(name="one", path="mixed.jsonl"),)})
    values = values.model_copy(update={"data": mixed})
    before = watch.fingerprint(root, values)
    (root / "mixed.jsonl").write_text("{ }\n", encoding="utf-8")
    assert watch.fingerprint(root, values) != before


def test_the_fingerprint_includes_data_that_links_to_files_lead_to(root: Path) -> None:
    """A run follows these too, and no links to folders."""
    (root.parent / "corpus").mkdir()
    (root.parent / "corpus/rows.txt").write_text("linked\n", encoding="utf-8")
    (root / "given/more.txt").symlink_to(root.parent / "corpus/rows.txt")
    (root / "given/up").symlink_to("..")
    values = config.load(root / "params.yaml")
    before = watch.fingerprint(root, values)
    assert watch.fingerprint(root, values) == before
    (root.parent / "corpus/rows.txt").write_text("changed\n", encoding="utf-8")
    assert watch.fingerprint(root, values) != before


def test_a_change_of_data_gets_three_tries_and_no_run_after_one_completed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, FlowRun] = {}

    def start(deployment: str, *, idempotency_key: str, **_: Any) -> FlowRun:
        """Like Prefect's server: a known key makes no run."""
        name = f"run-{len(made) + 1}"
        return made.setdefault(idempotency_key, FlowRun(flow_id=uuid.uuid4(), name=name, state=Running()))

    def check(change: str = "a") -> str:
        return str(watch.start_run("any", {}, change).message)

    monkeypatch.setattr(watch, "run_deployment", start)
    message = check()
    assert message == check()
    assert message.startswith("the data changed: its run is run-1, http")
    assert message.endswith(str(made["a-try-1"].id))
    made["a-try-1"].state = Failed()
    assert check().startswith("the data changed: its run is run-2, after run-1 failed, ")
    made["a-try-2"].state = Crashed()
    assert check().startswith("the data changed: its run is run-3")
    ends: list[Any] = [Completed(), Completed(name="Not promoted"), Completed(name="Deferred")]
    for done in ends:
        made["a-try-3"].state = done
        assert check().startswith("the data changed: its run is run-3")
    made["a-try-3"].state = Cancelled(name=settings.STOPPED)  # by `rlhf down`; nobody cancelled it
    assert "its runs run-1, run-2, run-3 failed" in check()
    assert len(made) == watch.TRIES
    assert check("b").startswith("the data changed: its run is run-4, ")


def test_a_cancelled_run_of_changed_data_is_reported_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[str] = []

    def start(deployment: str, *, idempotency_key: str, **_: Any) -> FlowRun:
        keys.append(idempotency_key)
        return FlowRun(flow_id=uuid.uuid4(), id=uuid.UUID(int=0xABCD), name="run-1", state=Cancelled())

    monkeypatch.setattr(watch, "run_deployment", start)
    for _ in range(2):
        state = watch.start_run("f/d", {"preset": "smoke"}, "a")
        assert state.is_failed()
        assert "its run run-1 was cancelled" in str(state.message)
        assert "`prefect deployment run f/d --param preset=smoke`" in str(state.message)
    assert keys == ["a-try-1"] * 2


def test_an_interrupted_flow_interrupts_its_stage_and_the_next_run_restores_what_was_done(
    root: Path, interruptible: None
) -> None:
    (root / "slow.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('started').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path('interrupted').touch()\n",
        encoding="utf-8",
    )
    wait = f"[ -e interrupted ] || exec {sys.executable} slow.py"
    toy.write_script(root, [wait, toy.SECOND.strip()])

    def interrupt() -> None:
        toy.until((root / "started").exists, "the stage")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(BaseException):  # noqa: B017, PT011  Prefect chooses which one
        flows_pipeline.pipeline(where="checkout")
    assert (root / "interrupted").exists()
    state: Any = flows_pipeline.pipeline(where="checkout", return_state=True)
    assert state.message.startswith("ran second"), "DVC is unlocked, and the first stage is as it was"


def test_runs_that_were_scheduled_together_have_different_names() -> None:
    """Their ids begin with the same millisecond."""
    ids = ["01a1fdb4-5afd-7904-8b6e-2f1d0c9a7e31", "01a1fdb4-5afd-7737-9c42-6a5b4c3d2e1f"]
    assert len({run_folder.name_workspace(run) for run in ids}) == 2
    names = [Request(seed=2).name(run) for run in ids]
    assert names == ["default-seed=2-7e31", "default-seed=2-2e1f"]
