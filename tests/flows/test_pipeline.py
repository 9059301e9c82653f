"""The flow within one process: order, parent run, failures, interrupts, parameters."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from filelock import FileLock
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.flow_engine import run_flow
from prefect.states import Completed, Crashed, Failed, Running
from pyarrow import parquet

from flows import hooks, programs, request, results, stages, sweep, watch
from flows import pipeline as flows_pipeline
from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_files, experiments, git
from rlhf_tasks.report import comparison
from rlhf_tasks.tracking import uploader
from tests.flows import toy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("server"),
    pytest.mark.filterwarnings("ignore"),  # Prefect's and its server's own
]


def run_here() -> None:
    flows_pipeline.pipeline(where="checkout")


def test_stages_run_in_order_with_the_flow_as_parent(root: Path) -> None:
    toy.write_script(root, ["echo $RLHF_PARENT_RUN > parent.txt", toy.SECOND.strip()])
    run_here()
    assert (root / "second.txt").read_text(encoding="utf-8").startswith("rows\n")
    assert (root / "parent.txt").read_text(encoding="utf-8").startswith("prefect-")


def test_a_failed_stage_fails_the_flow_with_its_own_last_words(root: Path) -> None:
    toy.write_script(root, ["echo 'No space left on device'", "exit 3"])
    with pytest.raises(
        stages.StageFailed, match=r"second failed \(exit status 3\): No space left on device;"
    ):
        run_here()
    toy.write_script(root, ["echo 'rlhf: mend it'", "exit 2"])
    with pytest.raises(stages.StageMistaken, match="second refused: mend it"):
        run_here()


def test_what_dvc_itself_failed_of_is_told(root: Path) -> None:
    """No stage ran that could have said it."""
    shutil.rmtree(root / "given")
    with pytest.raises(stages.StageFailed, match=r"stage first failed .*given"):
        run_here()


def test_dvcs_word_of_a_failed_stage_hides_no_word_of_the_stages_own() -> None:
    error = "ERROR: failed to reproduce 'prepare'"
    missing = stages._failure("prepare", ["Running stage", f"{error}: [Errno 2] No such file: 'raw'"])
    assert (
        str(missing)
        == "stage prepare failed (dvc failed): failed to reproduce 'prepare': [Errno 2] No such file: 'raw'"
    )
    ran = stages._failure(
        "prepare", ["No space left", f"{error}: failed to run: rlhf prepare, exited with 3"]
    )
    assert str(ran).startswith("stage prepare failed (exit status 3): No space left;")


class Log(logging.Handler):
    """What a flow and its tasks log."""

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


def test_wrong_parameters_end_it_before_anything_starts(root: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'kl_coef'"):
        flows_pipeline.pipeline(overrides={"ppo.kl_cof": 1.0})
    with pytest.raises(UserError, match="takes it as it is"):
        flows_pipeline.pipeline(where="checkout", seed=3)
    with pytest.raises(UserError, match="name cannot be given for a run in the checkout"):
        flows_pipeline.pipeline(where="checkout", name="mine")
    with pytest.raises(UserError, match="is not a commit, branch or tag"):
        flows_pipeline.pipeline(revision="no-such")
    assert not (root / ".rlhf").exists()


def test_a_mistake_that_the_workspace_finds_is_one_message_in_log_and_state(root: Path, log: Log) -> None:
    os.mkfifo(root / "given/pipe")
    state: Any = flows_pipeline.pipeline(return_state=True)
    said = "data.path='given' has pipe: broken links, links to a parent folder, or special files; remove them"
    assert (state.type, state.message) == (StateType.FAILED, said)
    assert log.errors() == [said]
    assert [record for record in log.records if record.exc_info] == [], "no traceback"
    assert list((root / ".rlhf/workspaces").iterdir()) == []


def test_the_engine_of_a_worker_logs_a_mistake_no_second_time(root: Path, log: Log) -> None:
    engine = logging.getLogger("prefect.flow_runs")
    with pytest.raises(UserError, match="is no commit"):
        run_flow(flows_pipeline.pipeline, parameters={"revision": "no-such"}, error_logger=engine)
    (said,) = log.errors()
    assert said.startswith("revision='no-such' is no commit")
    assert [record for record in log.records if record.exc_info] == []
    engine.error("a fault", exc_info=ValueError("told"))
    assert log.errors()[-1] == "a fault", "all else is logged as ever"


def test_a_failed_stage_is_told_by_the_flow_without_a_traceback(root: Path, log: Log) -> None:
    toy.write_script(root, ["echo 'rlhf: mend it'", "exit 2"])
    state: Any = flows_pipeline.pipeline(return_state=True)
    assert state.message == "stage second refused: mend it"
    of_flow = [record for record in log.records if record.name == "prefect.flow_runs"]
    assert [record for record in of_flow if record.exc_info] == []


@pytest.mark.parametrize(
    ("lines", "status"),
    [(["true", toy.SECOND.strip()], 0), (["echo 'rlhf: mend it'", "exit 2"], 2), (["exit 3"], 1)],
)
def test_the_program_ends_as_its_stages_do(root: Path, lines: list[str], status: int) -> None:
    toy.write_script(root, lines)
    assert flows_pipeline.main() == status


def test_the_program_tells_a_params_yaml_that_it_cannot_read_in_one_message(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, told in [
        (b"ppo: [", "params.yaml is not readable as YAML"),
        (b"7", "must hold sections"),
        (b"ppo: {}", "ppo.kl_coef: is missing"),
        (b"ppo: \xff", "params.yaml is not readable as YAML"),
        (None, "params.yaml does not exist"),
    ]:
        if text is None:
            (root / "params.yaml").unlink()
        else:
            (root / "params.yaml").write_bytes(text)
        assert flows_pipeline.main() == 2
        said = capsys.readouterr().err
        assert said.startswith("rlhf pipeline: ")
        assert told in said
        assert "Traceback" not in said


def test_a_stage_that_takes_too_long_is_ended_whole_and_said_to_be(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second try, too: a timeout is a fault like others."""
    differs = {"second": {"retries": 1, "timeout_seconds": 3.0}}
    toy.write_params(root, tracking={"enabled": False}, service={"stages": differs})

    def repro(dvc: programs.Dvc, *words: str, name: str | None = None, logged: bool = True) -> str:
        """At once, however busy the machine."""
        if name == "second" and "--dry" not in words:
            command = ["sh", "-c", "echo $$ >> tries; exec sleep 600"]
            programs.run(command, root, toy.run_environment(), 5.0)
        return ""

    monkeypatch.setattr(stages, "_repro", repro)
    with pytest.raises(stages.StageFailed, match=r"stage second was ended: .*timeout of 3\.0 second"):
        run_here()
    pids = (root / "tries").read_text(encoding="utf-8").split()
    assert len(pids) == 2
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_a_run_of_a_commit_tells_what_it_did_not_see_at_its_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[results.Outcome] = []
    monkeypatch.setattr(results, "show", lambda outcome, *_: told.append(outcome))
    toy.write_script(root, ["touch ../../../later.txt", toy.SECOND.strip()])
    commit = toy.git(root, "rev-parse", "HEAD").strip()
    toy.write_script(root, ["exit 1"])
    (root / "second.sh").write_text("exit 2", encoding="utf-8")
    (root / "given/rows.txt").write_text("seen\n", encoding="utf-8")
    flows_pipeline.pipeline(revision=commit[:12], name="early")
    assert (root / "later.txt").exists()
    (outcome,) = told
    assert outcome.notes == ["this run saw the commit, not the uncommitted changes of second.sh"]
    assert outcome.revision == commit
    assert outcome.experiment is not None
    assert toy.git(root, "rev-parse", f"{outcome.experiment}^").strip() == commit


def test_only_one_run_at_a_time_works_in_the_checkout(root: Path) -> None:
    (root / ".rlhf").mkdir()
    with (
        FileLock(root / ".rlhf/checkout.lock"),
        pytest.raises(UserError, match="another flow run"),
    ):
        run_here()


def test_the_form_is_typed_and_described() -> None:
    for flow in (flows_pipeline.pipeline, sweep.sweep, watch.data_watch):
        fields = flow.parameters.model_dump()["properties"]
        assert [name for name, field in fields.items() if not field.get("description")] == []
    schema = flows_pipeline.pipeline.parameters.model_dump()["properties"]
    assert set(schema) == {"preset", "seed", "overrides", "where", "revision", "name", "push"}
    assert "smoke" in str(schema["preset"])
    assert schema["where"]["enum"] == ["workspace", "checkout"]


def test_stages_of_service_must_exist(root: Path) -> None:
    toy.write_params(root, service={"stages": {"pppo": {"retries": 1}}})
    toy.commit(root)
    with pytest.raises(UserError, match="names pppo; the stages of"):
        request.settle(root, Request(), "HEAD")


def test_care_is_what_is_told_for_all_and_what_differs(root: Path) -> None:
    differs = {"second": {"retries": 4, "retry_delay_seconds": 1.5, "timeout_seconds": 60.0}}
    toy.write_params(root, service={"retries": 1, "stages": differs})
    service = config.load(root / "params.yaml").service
    task = stages.with_care("second", service.care("second"))
    assert (task.name, task.retries, task.timeout_seconds) == ("second", 4, 60.0)
    assert task.retry_delay_seconds == [1.5, 3.0, 6.0, 12.0]
    assert stages.with_care("first", service.care("first")).retries == 1
    toy.write_params(root, service={"stages": {"second": {"retry": 4}}})
    with pytest.raises(UserError, match="known keys are retries"):
        config.load(root / "params.yaml")


def test_what_dvc_tells_of_one_stage_is_not_what_the_stage_prints() -> None:
    told = (
        "Stage 'data' didn't change, skipping\nRunning stage 'ppo':\n> rlhf ppo\nlr didn't change, skipping"
    )
    assert stages.verdict("data", told) == stages.UNCHANGED
    assert stages.verdict("ppo", told) is None
    restored = "Stage 'ppo' is cached - skipping run, checking out outputs\nRunning stage 'ppo':"
    assert stages.verdict("ppo", restored) == stages.RESTORED


def test_what_dvc_advises_people_at_a_terminal_is_not_logged(root: Path) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "dvc", "repro"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert "git add" in said
    told = [line for line in said.splitlines() if programs.is_told(line)]
    assert [line for line in told if "git" in line or "autostage" in line or "push" in line] == []
    assert "Running stage 'second':" in told


def test_data_has_another_fingerprint_exactly_when_its_content_differs(root: Path) -> None:
    values = config.load(root / "params.yaml")
    before = watch.fingerprint(root, values)
    (root / "given/rows.txt").touch()
    (root / "second.sh").write_text("exit 1\n", encoding="utf-8")
    assert watch.fingerprint(root, values) == before
    (root / "given/rows.txt").write_text("other\n", encoding="utf-8")
    assert watch.fingerprint(root, values) != before


def test_data_below_links_is_part_of_the_data(root: Path) -> None:
    """As a run sees it, which follows them."""
    (root.parent / "corpus").mkdir()
    (root.parent / "corpus/rows.txt").write_text("linked\n", encoding="utf-8")
    (root / "given/more").symlink_to(root.parent / "corpus")
    (root / "given/up").symlink_to("..")  # a run would refuse it; to look at it must end
    values = config.load(root / "params.yaml")
    before = watch.fingerprint(root, values)
    assert watch.fingerprint(root, values) == before
    (root.parent / "corpus/rows.txt").write_text("changed\n", encoding="utf-8")
    assert watch.fingerprint(root, values) != before


def test_a_new_pinned_revision_of_a_hub_set_is_new_data(root: Path) -> None:
    values = config.load(root / "params.yaml")

    def at(revision: str) -> str:
        hub = {"sft": {"id": "some/set", "revision": revision * 40, "name": None}, "preferences": None}
        data = values.data.model_copy(update={"hub": config.HubSources.model_validate(hub)})
        return watch.fingerprint(root, values.model_copy(update={"data": data}))

    assert at("a") == at("a") != at("b")


def test_a_sweep_is_checked_whole_and_named_by_what_decides_its_results(root: Path) -> None:
    listed = sweep.combinations({"ppo.kl_coef": [0.1, 0.2], "ppo.gamma": [1.0, 0.9]}, None)
    assert listed == [
        {"ppo.kl_coef": a, "ppo.gamma": b} for a in (0.1, 0.2) for b in (1.0, 0.9)
    ]  # fmt: skip
    cells, _ = sweep.cells(root, "s", None, listed, [1, 2], "HEAD", sweep.Data(root))
    assert len({cell.experiment for cell in cells}) == 8
    assert cells == sweep.cells(root, "s", None, listed, [1, 2], "HEAD", sweep.Data(root))[0]
    other = [{**overrides, "service.retries": 5} for overrides in listed]
    again, _ = sweep.cells(root, "s", None, other, [1, 2], "HEAD", sweep.Data(root))
    assert [c.experiment for c in again] == [c.experiment for c in cells], "retries decide no result"
    with pytest.raises(UserError, match=r"(?s)ppo.kl_coef=-1.*nothing=1"):
        sweep.cells(root, "s", None, [{"ppo.kl_coef": -1}, {"nothing": 1}], [1], "HEAD", sweep.Data(root))
    with pytest.raises(UserError, match="either grid"):
        sweep.combinations(None, None)


def test_under_another_gate_a_sweeps_run_has_another_verdict_and_no_other_training(root: Path) -> None:
    file = root / "dvc.yaml"
    third = "  third:\n    cmd: grep max_kl params.yaml > third.txt\n    params: [promotion]\n"
    file.write_text(
        f"{file.read_text(encoding='utf-8')}{third}    deps: [second.txt]\n    outs: [third.txt]\n",
        encoding="utf-8",
    )
    toy.write_script(root, ["echo once >> ../../trained", toy.SECOND.strip()])
    listed = [{"promotion.max_kl": bound} for bound in (10.0, 1.0)]
    cells, _ = sweep.cells(root, "s", None, listed, [1], "HEAD", sweep.Data(root))
    made = []
    for cell in cells:
        flows_pipeline.pipeline(seed=cell.seed, overrides=dict(cell.overrides), name=cell.experiment)
        revision = experiments.find(root, cell.experiment)
        assert revision is not None
        made.append(dvc_files.locked_in(git.show(root, revision, "dvc.lock")))
    assert made[0]["second.txt"] == made[1]["second.txt"]
    assert made[0]["third.txt"] != made[1]["third.txt"]
    assert (root / ".rlhf/trained").read_text(encoding="utf-8") == "once\n"


class Sweep:
    """A sweep without a pipeline: its runs fail as told, and a commit is made while they run."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.fails = root, True
        self.commits: list[str] = []
        monkeypatch.setattr(sweep, "run_cells", self._run)
        monkeypatch.setattr(watch, "parameters_of", lambda _: {})
        monkeypatch.setattr(
            comparison, "read", lambda root, setting, seed, run: comparison.Result(setting, seed, run, {}, {})
        )

    def _run(self, todo: list[sweep.Cell], *given: Any) -> list[sweep.Lost]:
        self.commits.append(given[2])
        toy.write_script(self.root, [f"exit {len(self.commits)}"])
        return [sweep.Lost(cell, "Failed: no disk") for cell in todo if self.fails]

    def run(self, **asked: Any) -> str:
        state = sweep.sweep(settings_list=[{"ppo.gamma": 0.9}], seeds=[1], return_state=True, **asked)
        return str(state.message)


def test_a_sweep_that_broke_off_goes_on_with_its_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Sweep(root, monkeypatch)
    first = toy.git(root, "rev-parse", "HEAD").strip()
    assert "a new run does these only, of the same commit" in made.run()
    made.run()
    assert made.commits == [first, first]
    last = toy.git(root, "rev-parse", "HEAD").strip()
    made.run(revision="HEAD")
    made.run(name="another")
    made.fails = False
    assert made.run() == "1 setting(s), 1 runs, 0 of them done before"
    assert made.commits[2] == made.commits[4] == last, "asked for, and gone on with"
    newest = toy.git(root, "rev-parse", "HEAD").strip()
    made.run()
    assert made.commits[5] == newest, "one that came to its end is not gone on with"


def test_a_sweep_with_a_lost_run_is_failed_and_its_comparison_says_which_and_why(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.write_params(root, tracking={"enabled": True})
    toy.commit(root)
    monkeypatch.setattr(uploader, "start", lambda outbox: subprocess.Popen(["true"]))
    monkeypatch.setattr(
        comparison,
        "read",
        lambda root, setting, seed, run: comparison.Result(
            setting, seed, run, {"ppo/objective/kl": seed}, {}
        ),
    )
    monkeypatch.setattr(
        sweep,
        "run_cells",
        lambda todo, *_: [
            sweep.Lost(c, "Failed: no disk") for c in todo if (c.setting, c.seed) != ("a=1", 1)
        ],
    )
    monkeypatch.setattr(sweep, "cells", cells_of("a=1", "a=2"))
    monkeypatch.setattr(watch, "parameters_of", lambda _: {})
    state: Any = sweep.sweep(grid={"ppo.gamma": [1.0]}, seeds=[1, 2], return_state=True)
    told = "a=1, seed 2: Failed: no disk; a=2, seed 1: Failed: no disk; a=2, seed 2: Failed: no disk"
    assert state.type == StateType.FAILED
    assert state.message.startswith(f"3 of 4 runs failed ({told}); a new run does these only")
    (file,) = (root / ".rlhf/outbox").glob("flow-*.jsonl")
    end = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    assert (end["kind"], end["status"]) == ("end", "FAILED")
    assert told in end["reason"]
    rows = json.loads((file.with_suffix("") / "comparison.json").read_text(encoding="utf-8"))
    assert rows == [
        {"setting": "a=1", "seeds": 1, "ppo/objective/kl": "1 ± 0", "missing": "seed 2: Failed: no disk"},
        {"setting": "a=2", "seeds": 0, "ppo/objective/kl": "–",
         "missing": "seed 1: Failed: no disk; seed 2: Failed: no disk"},
    ]  # fmt: skip


def cells_of(*settings: str) -> Any:
    """Of two seeds each, whatever the sweep was asked for."""

    def made(root: Path, *_: object) -> tuple[list[sweep.Cell], config.Config]:
        cells = [sweep.Cell(s, seed, {}, f"x-{s}-{seed}") for s in settings for seed in (1, 2)]
        return cells, config.load(root / "params.yaml")

    return made


def test_all_runs_of_a_sweep_are_told_its_commit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def start(deployment: str, *, parameters: dict[str, Any], **_: Any) -> FlowRun:
        asked.append(parameters)
        return FlowRun(flow_id=uuid.uuid4(), state=Completed())

    monkeypatch.setattr(sweep, "run_deployment", start)
    monkeypatch.setattr(sweep, "get_client", lambda **_: Answers(Completed()))
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.0)
    todo = [sweep.Cell("a", seed, {}, f"s-{seed}") for seed in (1, 2, 3)]
    assert sweep.run_cells(todo, "any", None, "c0ffee", 2, sweep.Data(root)) == []
    assert [(run["seed"], run["revision"], run["name"]) for run in asked] == [
        (seed, "c0ffee", f"s-{seed}") for seed in (1, 2, 3)
    ]


class Answers:
    """A client whose runs all have the same state."""

    def __init__(self, state: State[Any]) -> None:
        self._state = state

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_flow_run(self, identity: uuid.UUID) -> FlowRun:
        return FlowRun(flow_id=identity, state=self._state)


def test_a_change_of_data_is_tried_a_few_times_and_a_finished_run_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, FlowRun] = {}

    def start(deployment: str, *, idempotency_key: str, **_: Any) -> FlowRun:
        """As Prefect's server: a key that it knows makes no run."""
        name = f"run-{len(made) + 1}"
        return made.setdefault(idempotency_key, FlowRun(flow_id=uuid.uuid4(), name=name, state=Running()))

    def look(change: str = "a") -> str:
        return str(watch.ask_for_run("any", {}, change).message)

    monkeypatch.setattr(watch, "run_deployment", start)
    assert look() == look() == "the data changed: its run is run-1"
    made["a-try-1"].state = Failed()
    assert look() == look() == "the data changed: its run is run-2, after run-1 failed"
    made["a-try-2"].state = Crashed()
    assert look().startswith("the data changed: its run is run-3")
    made["a-try-3"].state = Completed()
    look()
    assert len(made) == 3
    made["a-try-3"].state = Failed()
    assert "its runs run-1, run-2, run-3 failed" in look()
    assert len(made) == watch.TRIES
    assert look("b") == "the data changed: its run is run-4"


def test_win_rates_are_told_with_their_intervals() -> None:
    values = {
        "judge/gold/policy_vs_sft/win_rate": 0.75,
        "judge/gold/policy_vs_sft/low": 0.7,
        "judge/gold/policy_vs_sft/high": 0.8,
        "judge/reward_gap/win_rate_by_reward": 0.9,
        "ppo/objective/kl": 1.0,
    }
    assert results.win_rates(values) == [
        {"judge": "gold", "pair": "policy vs sft", "win rate": "75.0%", "95% interval": "70.0% – 80.0%"}
    ]


def test_metrics_stand_against_those_of_the_last_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[Any] = []
    monkeypatch.setattr(results, "create_table_artifact", lambda rows, **_: tables.append(rows))
    monkeypatch.setattr(results, "create_markdown_artifact", lambda *_, **__: None)
    monkeypatch.setattr(results, "last_metrics", lambda: {"first/rows": 1.0, "gone/by": 3.0})
    (root / "metrics").mkdir()
    (root / "metrics/first.json").write_text('{"rows": 1.5, "new": 2.0}', encoding="utf-8")
    outcome = results.Outcome("n", {}, [], "c", None, [])
    results.show(outcome, root, {})
    assert tables == [[
        {"metric": "first/new", "value": 2.0, "last run": None, "change": None},
        {"metric": "first/rows", "value": 1.5, "last run": 1.0, "change": 0.5},
    ]]  # fmt: skip


def test_the_first_answers_are_shown_cut_and_in_one_line_each(root: Path) -> None:
    file = root / results.ANSWERS
    file.parent.mkdir(parents=True)
    row = {"prompt": "a | b", "reference": "x\ny", "sft": "s" * 400, "policy": "p", "other": "z"}
    parquet.write_table(pyarrow.Table.from_pylist([row] * 9), file)
    page = results.page(results.Outcome("n", {}, [], "c", None, []), root, {}, {}, {})
    lines = page.partition("## Answers\n\n")[2].splitlines()
    assert lines[0] == "| prompt | reference | sft | policy |"
    assert lines[2:] == [f"| a \\| b | x<br>y | {'s' * 300} | p |"] * 5


def test_the_changes_asked_for_come_after_the_results_and_stay_code(root: Path) -> None:
    changes = ["seed: 1 → 2", 'ppo.x: "a`b" → null']
    outcome = results.Outcome("n", {}, changes, "c", None, [], "Refused: it lost")
    page = results.page(outcome, root, {"ppo/objective/kl": 1.0}, {}, {})
    places = [
        page.index(title) for title in ("## Promotion", "## Metrics", "## Changes asked for", "## Stages")
    ]
    assert places == sorted(places)
    assert '- `seed: 1 → 2`\n- `` ppo.x: "a`b" → null ``\n' in page


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a foreground shell, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_stage_hears_interrupts_though_its_parent_does_not(root: Path) -> None:
    asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (root / "asks.py").write_text(asks, encoding="utf-8")
    toy.write_script(root, [f"{sys.executable} asks.py > asked.txt", toy.SECOND.strip()])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run_here()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (root / "asked.txt").read_text(encoding="utf-8") == "True\n"


def test_an_interrupted_flow_stops_the_stage_itself(root: Path, interruptible: None) -> None:
    (root / "slow.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('started').touch()\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path('interrupted').touch()\n",
        encoding="utf-8",
    )
    toy.write_script(root, [f"exec {sys.executable} slow.py"])

    def interrupt() -> None:
        while not (root / "started").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(BaseException):  # noqa: B017, PT011  which one is Prefect's to choose
        run_here()
    assert (root / "interrupted").exists()
    status = subprocess.run(
        [sys.executable, "-m", "dvc", "status"], cwd=root, capture_output=True, text=True, check=True
    )
    assert "second" in status.stdout, "DVC is unlocked, and the stage is still to do"


def test_runs_that_were_scheduled_together_have_names_of_their_own() -> None:
    """Their ids begin with the millisecond in which they were made."""
    ids = ["01a1fdb4-5afd-7904-8b6e-2f1d0c9a7e31", "01a1fdb4-5afd-7737-9c42-6a5b4c3d2e1f"]
    assert len({hooks.workspace_name(run) for run in ids}) == 2
    names = [request.default_name("my run / nightly", run) for run in ids]
    assert names == ["my-run-nightly-7e31", "my-run-nightly-2e1f"]
    for name in names:
        request.check_name(name)
    request.check_name(request.default_name("…", ids[0]))
