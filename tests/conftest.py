"""A small project in a folder of its own: params.yaml as shipped, a dvc.yaml of three stages."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rlhf_tasks import console
from rlhf_tasks.cli import main
from rlhf_tasks.training import checkpoint

ROOT = Path(__file__).parents[1]
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; stages inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMALL_DVC = """\
stages:
  prepare:
    cmd: rlhf prepare
    deps: [given]
    outs: [data/sft, models/lineage/prepare.json]
    metrics: [{metrics/prepare.json: {cache: false}}]
  sft:
    cmd: rlhf sft
    deps: [data/sft, code.py]
    outs: [models/sft, models/lineage/sft.json]
    metrics: [{metrics/sft.json: {cache: false}}]
  report:
    cmd: rlhf report
    deps: [models/lineage/sft.json]
    outs: [reports, models/lineage/report.json]
"""


class Said(NamedTuple):
    """What a command printed."""

    out: str
    err: str


Command = Callable[..., Said]
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def rlhf(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command of `rlhf` and further words in this process; it must end with `status`."""

    def run(command: str, *words: object, status: int = 0) -> Said:
        capsys.readouterr()
        found = main.main([*command.split(), *map(str, words)])
        said = Said(*capsys.readouterr())
        assert found == status, said
        return said

    return run


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test; it is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test, outside any git repository; data/sft is there, models/sft is not."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("RANK", "LOCAL_RANK", "RLHF_PARENT_RUN", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "dvc.yaml").write_text(SMALL_DVC, encoding="utf-8")
    (tmp_path / "data/sft").mkdir(parents=True)
    (tmp_path / "data/sft/train.txt").write_text("rows\n", encoding="utf-8")
    (tmp_path / "given").mkdir()
    (tmp_path / "given/a.txt").write_text("given\n", encoding="utf-8")
    console.set_quiet(False)
    return tmp_path


@pytest.fixture
def snapshots_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """`resume.every_seconds` alone says how often snapshots are saved in this process."""
    for share in ("COPY_SHARE", "WAIT_SHARE"):
        monkeypatch.setattr(checkpoint, share, math.inf)
    is_due = checkpoint.SavedSnapshots.due

    def due(snapshots: checkpoint.SavedSnapshots) -> bool:
        if math.isinf(checkpoint.COPY_SHARE):
            snapshots.wait()  # or one that a busy disk is late with would take the place of the next
        return is_due(snapshots)

    monkeypatch.setattr(checkpoint.SavedSnapshots, "due", due)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small synthetic data and random models of every role, to be copied by what changes them."""
    from tests import small

    return small.workspace(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def models_here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the test, with a copy of that data and those models."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer that has a chat template."""
    from rlhf_tasks import config
    from rlhf_tasks.data import tokenizer

    folder = tmp_path_factory.mktemp("chat-model")
    words = tokenizer.train(
        config.Scratch(
            family="llama", hidden_size=8, num_layers=1, num_heads=2, vocab_size=300, tokenizer="bpe"
        ),
        ["some words to train a tokenizer on", "<user>hello<assistant>"],
        max_length=512,
    )
    words.chat_template = CHAT
    words.save_pretrained(folder)
    return folder
