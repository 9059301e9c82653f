"""`rlhf`: what its commands check, write and print, and the exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rlhf_tasks import config
from rlhf_tasks.cli import main
from rlhf_tasks.config import StageView
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import Tracker, context
from rlhf_tasks.training import failures
from tests import families, small
from tests.conftest import Command

ROOT = Path(__file__).parents[2]
Run = Callable[[StageView, Paths, Tracker], dict[str, float]]
Install = Callable[[Run], None]


@pytest.fixture
def quiet_project(project: Path) -> Path:
    """A project with tracking off."""
    text = (project / "params.yaml").read_text(encoding="utf-8")
    (project / "params.yaml").write_text(text.replace("enabled: true", "enabled: false"), encoding="utf-8")
    return project


@pytest.fixture
def stage(quiet_project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Replaces the stages prepare, sft and report of the project by a function."""
    before = signal.getsignal(signal.SIGTERM)

    def install(run: Run) -> None:
        module = types.ModuleType("stage_of_the_test")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "stage_of_the_test", module)
        monkeypatch.setattr(runner, "module_of", lambda stage: "stage_of_the_test")

    yield install
    signal.signal(signal.SIGTERM, before)


def trained(view: StageView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    tracker.metrics({"train/loss": 2.0}, step=1)
    Path("models/sft").mkdir(parents=True)
    return {"perplexity": 4.0, "loss": 1.5}


def test_a_stage_writes_metrics_plots_and_lineage(quiet_project: Path, stage: Install, rlhf: Command) -> None:
    stage(trained)
    shown = rlhf("sft").out
    metrics = Path("metrics/sft.json").read_text(encoding="utf-8")
    assert metrics == '{\n  "loss": 1.5,\n  "perplexity": 4.0\n}\n'
    assert Path("plots/sft.csv").read_text(encoding="utf-8") == "step,train/loss\n1,2.0\n"
    assert json.loads(Path("models/lineage/sft.json").read_text())["rlhf.run"].startswith("sft-")
    line = rf"3/{len(config.STAGES)} sft  done in \ds  perplexity 4  loss 1.5\n"
    assert re.fullmatch(line, shown), "one line per stage"
    (log,) = (quiet_project / ".rlhf/logs").glob("sft-*.log")
    written = log.read_text(encoding="utf-8").splitlines()
    assert written[written.index("metric | value") + 1 :][:2] == ["perplexity | 4", "loss | 1.5"]
    assert "wrote models/sft, models/lineage/sft.json, metrics/sft.json" in written


@pytest.mark.parametrize(("environment", "is_shown"), [({}, True), ({"RLHF_STAGE_RUN": "a flow"}, False)])
def test_the_last_stage_shows_the_card_unless_a_flow_does(
    stage: Install,
    rlhf: Command,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    is_shown: bool,
) -> None:
    monkeypatch.delenv("RLHF_STAGE_RUN", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stage(trained)
    assert "Trained" not in rlhf("sft").out, "once, at the end of the pipeline"
    stage(lambda view, paths, tracker: {})
    assert ("Trained" in rlhf("report").out) == is_shown


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_stage_without_curves_writes_no_plot_and_one_without_finite_metrics_fails(
    stage: Install, rlhf: Command, value: float
) -> None:
    stage(lambda view, paths, tracker: {"loss": value})
    with pytest.raises(ValueError, match="loss="):
        main.main(["sft"])
    assert not Path("metrics").exists()
    stage(lambda view, paths, tracker: {"rows": 3})
    rlhf("prepare")
    assert not Path("plots").exists()


def test_a_missing_input_is_named_with_the_stage_that_makes_it(stage: Install, rlhf: Command) -> None:
    stage(trained)
    Path("data/sft").rename("data/moved")
    message = rlhf("sft", status=2).err
    assert message.startswith("rlhf: stage sft lacks data/sft (made by `rlhf prepare`)")
    assert not Path("models/sft").exists()


def test_a_function_that_only_the_judge_calls_is_imported_before_the_training(
    stage: Install, rlhf: Command
) -> None:
    stage(lambda view, paths, tracker: pytest.fail("the stage began"))
    Path("mine.py").write_text("import nothing_of_that_name\n\ndef score(prompts, responses): ...\n")
    own = "judge.judges=[{kind: function, name: mine, function: 'mine:score'}]"
    rlhf("preset --set", own, "promotion=null")
    message = rlhf("sft", status=2).err
    assert "judge.judges.0.function: mine:score cannot be imported: ModuleNotFoundError" in message


def test_all_problems_of_params_yaml_are_reported_before_anything_is_loaded(
    stage: Install, rlhf: Command
) -> None:
    stage(trained)
    text = Path("params.yaml").read_text(encoding="utf-8")
    Path("params.yaml").write_text(text.replace("kl_coef:", "kl_coeff:").replace("seed: 1", "seed: -1"))
    message = rlhf("sft", status=2).err
    assert "kl_coeff" in message
    assert "seed" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("command", ["judge models/policy", "compare ."])
@pytest.mark.parametrize(
    ("out", "why"),
    [
        ("folder.jsonl", "this is a folder"),
        ("params.yaml/v.jsonl", "its folder cannot be made"),
        ("shut/v.jsonl", "shut is not writable"),
    ],
)
def test_an_output_file_that_cannot_be_written_is_refused_before_anything_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command, command: str, out: str, why: str
) -> None:
    Path("folder.jsonl").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "shut")
    message = rlhf(command, "--out", out, status=2).err
    assert f"rlhf: --out {out}: " in message
    assert why in message


@pytest.mark.parametrize("command", ["sync", "mlflow", "status", "down", "lineage x", "compare x"])
def test_a_folder_below_the_project_is_refused(
    quiet_project: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command, command: str
) -> None:
    """`rlhf sync` would otherwise report that it had nothing to deliver."""
    (quiet_project / "docs").mkdir()
    monkeypatch.chdir(quiet_project / "docs")
    assert "run from the project's folder" in rlhf(command, status=2).err


def test_a_folder_without_write_permission_is_one_message(stage: Install, rlhf: Command) -> None:
    def shut_out(view: StageView, paths: Paths, tracker: Tracker) -> dict[str, float]:
        raise PermissionError(errno.EACCES, "Permission denied", "models/sft")

    stage(shut_out)
    message = rlhf("sft", status=2).err
    assert message.startswith("rlhf: [Errno 13] Permission denied: 'models/sft'; ")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_unwinds_the_stage(stage: Install, rlhf: Command, number: int, status: int) -> None:
    closed = []

    def interrupted(view: StageView, paths: Paths, tracker: Tracker) -> dict[str, float]:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            closed.append(True)
        return {}

    stage(interrupted)
    rlhf("sft", status=status)
    assert closed == [True]


def test_other_ranks_write_and_print_nothing(
    stage: Install, rlhf: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in context.GROUP:
        monkeypatch.setenv(name, "1")
    stage(lambda view, paths, tracker: {"loss": 1.0})
    assert rlhf("sft").out == ""
    assert not Path("metrics").exists()


def test_a_mistake_ends_with_2_a_fault_keeps_its_traceback_and_both_are_reported_to_the_starter(
    quiet_project: Path, stage: Install, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    """The flow and the launcher read this file; they need not understand what the stage printed."""
    file = quiet_project / "failure.json"
    monkeypatch.setenv(failures.FAILURE, str(file))

    def refusing(view: StageView, paths: Paths, tracker: Tracker) -> dict[str, float]:
        raise UserError("fix it")

    def faulty(view: StageView, paths: Paths, tracker: Tracker) -> dict[str, float]:
        raise RuntimeError("boom")

    def written() -> dict[str, str]:
        failure: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
        assert failure.pop("process") == str(os.getpid())
        return failure

    stage(refusing)
    assert rlhf("sft", status=2).err == "rlhf: fix it\n"
    assert written() == {"kind": "user", "message": "fix it"}
    file.unlink()
    stage(faulty)
    with pytest.raises(RuntimeError, match="boom"):
        main.main(["sft"])
    assert written() == {"kind": "fault", "message": "RuntimeError: boom"}
    file.unlink()
    Path("params.yaml").write_text("seed: -1\n", encoding="utf-8")
    rlhf("sft", status=2)
    assert written()["kind"] == "user"


@pytest.mark.parametrize(
    ("given", "expected"), [("", "127.0.0.1,localhost"), ("a.org", "a.org,127.0.0.1,localhost"), ("*", "*")]
)
def test_a_proxy_never_gets_what_is_meant_for_our_own_servers(
    project: Path, rlhf: Command, monkeypatch: pytest.MonkeyPatch, given: str, expected: str
) -> None:
    monkeypatch.setenv("NO_PROXY", given)
    monkeypatch.delenv("no_proxy", raising=False)
    for _ in range(2):
        rlhf("params")
        assert os.environ["NO_PROXY"] == expected
    assert os.environ["no_proxy"] == "127.0.0.1,localhost"


def test_help_lists_every_command_in_a_group_and_loads_no_heavy_module() -> None:
    code = (
        "import sys; from rlhf_tasks.cli import main\n"
        "code = main.main(['--help'])\n"
        "heavy = {'torch', 'transformers', 'mlflow', 'prefect', 'matplotlib', 'numpy', 'pyarrow', 'dvc',\n"
        "         'httpx', 'jinja2', 'sqlalchemy'} & sys.modules.keys()\n"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    named = {line.strip("│ ").split(" ")[0] for line in done.stdout.splitlines()}
    commands = main.parser().commands
    assert {*config.STAGES, "inputs"} <= {*commands} <= named
    assert len({*commands} - {*config.STAGES, "inputs"}) <= 17
    assert all(command.rich_help_panel and command.help for command in commands.values())


Calls = list[tuple[str, dict[str, object]]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of the model; each response is the prompt in capitals."""
    calls: Calls = []
    loaded: list[Path] = []
    module = types.ModuleType("rlhf_tasks.models.sampling")

    def load_for_texts(folder: Path) -> tuple[Path, None]:
        loaded.append(folder)
        return folder, None

    def sample_texts(model: Path, tokenizer: None, prompt: str, **settings: object) -> list[str]:
        calls.append((prompt, settings))
        return [prompt.upper()] * int(str(settings["num_samples"]))

    module.sample_texts = sample_texts  # type: ignore[attr-defined]
    module.loaded = loaded  # type: ignore[attr-defined]
    module.load_for_texts = load_for_texts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rlhf_tasks.models.sampling", module)
    return calls


def test_generate_answers_a_prompt(tmp_path: Path, answers: Calls, rlhf: Command) -> None:
    options = "--prompt hello --num-samples 2 --temperature 0.7 --max-new-tokens 5 --seed 3"
    assert rlhf("generate", tmp_path, *options.split()).out == "HELLO\nHELLO\n"
    assert answers == [("hello", {"temperature": 0.7, "max_new_tokens": 5, "num_samples": 2, "seed": 3})]


def test_generate_shows_a_prompt_of_the_data_before_one_types(
    tmp_path: Path, answers: Calls, rlhf: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data/prompts").mkdir(parents=True)
    rows = [{"prompt": f"POST: my {thing} is here\nTL;DR:"} for thing in ("boat", "car")]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "data/prompts/test.parquet")
    typed = iter(["hello", "a\\nb"])

    def read(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    lines = rlhf("generate .").out.splitlines()
    assert lines[2:] == ["  'POST: my boat is here\\nTL;DR:'", "HELLO", "A", "B"]
    assert sys.modules["rlhf_tasks.models.sampling"].loaded == [Path()], "once for all prompts"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("promote models/other --rollback", "--"),
        ("judge --out x.jsonl", "--"),
        ("up --work --gpu-slots 2", "--"),
        ("plan --gpus 8,", "--"),
        ("plan --gpus ²", "--"),
        ("plan --gpus 0", "--"),
        ("generate . --temperature 0", "Invalid value for '--temperature': "),
        ("generate . --temperature nan", "Invalid value for '--temperature': "),
        ("generate . --seed -1", "Invalid value for '--seed': "),
        ("generate . --num-samples 0", "Invalid value for '--num-samples': "),
        ("generate models/none --prompt x", "models/none is not a folder"),
        ("check-model nowhere", "nowhere: there is no such folder or file, and it is not a hub model"),
        ("check-model models/at/all", "models/at/all: there is no such folder or file, and it is not a hub"),
    ],
)
def test_what_is_out_of_range_absent_or_without_effect_is_one_message(
    project: Path, command: str, message: str, rlhf: Command
) -> None:
    told = rlhf(command, status=2).err
    assert told.startswith(f"rlhf: {message}")
    assert len(told.splitlines()) == 1


def test_all_values_in_force_are_printed_with_their_source(project: Path, rlhf: Command) -> None:
    Path("params.yaml").write_text("ppo: {advantages: {lam: 0.9}, guards: null}\n", encoding="utf-8")
    rows = [[word for word in line.split() if word != "|"] for line in rlhf("params").out.splitlines()]
    for row in (
        ["ppo.advantages.lam", "0.9", "params.yaml"],
        ["ppo.advantages.gamma", "1.0", "default"],
        ["ppo.guards", "null", "params.yaml"],
        ["ppo.micro_batch_tokens", "4096", "default:", "auto"],
    ):
        assert row in rows


# ----------------------------------- `rlhf check-model`: a table, and the exit status that a script can read


def test_a_right_model_ends_with_0(tmp_path: Path, rlhf: Command) -> None:
    small.causal().save_pretrained(tmp_path)
    shown = rlhf("check-model", tmp_path).out
    assert shown.count("| passed") == 6
    assert "is fit for PPO" in shown


def test_a_wrong_model_ends_with_2_and_its_likely_cause(tmp_path: Path, rlhf: Command) -> None:
    families.causal("recurrent_gemma").save_pretrained(tmp_path)
    shown = rlhf("check-model", tmp_path, status=2).out
    assert "ended rows do not change the others: off by" in shown
    assert "likely cause: the model's cache does not drop the rows that have ended" in shown
    assert "is not fit for PPO" in shown


def test_a_reward_model_is_checked_by_its_scores(tmp_path: Path, rlhf: Command) -> None:
    small.scores().model.save_pretrained(tmp_path)
    shown = rlhf("check-model", tmp_path).out
    assert "scores of a padded batch and of single rows agree" in shown


def test_positions_that_depend_on_the_batch_are_named_with_their_length(
    tmp_path: Path, rlhf: Command
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    families.causal("llama", max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    assert "above 64 tokens" in rlhf("check-model", tmp_path).out
