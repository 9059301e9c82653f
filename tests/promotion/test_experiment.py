"""An experiment is promoted after `dvc exp apply`, as the refusal of `rlhf promote EXPERIMENT` says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from rlhf_tasks import console
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_cli, git, workspaces
from rlhf_tasks.tracking.store import embedded_uri
from tests.conftest import Command
from tests.flows import toy
from tests.promotion import planted
from tests.promotion.conftest import Measured

pytestmark = [pytest.mark.usefixtures("measured"), pytest.mark.e2e]
NAME = "rlhf-policy"
STAGES = f"""\
stages:
  inputs:
    cmd: {sys.executable} -m rlhf_tasks.cli inputs
    always_changed: true
    outs: [inputs/ppo.json, inputs/judge.json]
  ppo:
    cmd: sh given/ppo.sh
    deps: [given, inputs/ppo.json]
    outs: [models/policy, models/reward_heldout, models/lineage/ppo.json]
    metrics: [{{metrics/ppo.json: {{cache: false}}}}]
  judge:
    cmd: mkdir -p evaluation/judge && cp given/results.json evaluation/judge/results.json
    deps: [models/policy, given, inputs/judge.json]
    outs: [evaluation/judge]
"""
PPO = """\
mkdir -p models/policy models/reward_heldout models/lineage metrics
grep '^seed:' params.yaml | cut -d' ' -f2 | tr -d '\\n' > models/policy/weights
echo '{}' > models/policy/config.json
cp given/rlhf.json models/policy/rlhf.json
echo its own > models/reward_heldout/w
cp given/lineage.json models/lineage/ppo.json
cp given/ppo.json metrics/ppo.json
"""


@pytest.fixture
def root(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a committed project with the experiment `one`, and an empty MLflow store."""
    for name in ("MLFLOW_TRACKING_URI", "RLHF_PARENT_RUN"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "project"
    shutil.copytree(toy.repository(), root)
    given = root / "given"
    given.mkdir()
    (given / "ppo.sh").write_text(PPO, encoding="utf-8")
    planted.put(given / "ppo.json", {"selected_episode": 256.0})
    planted.put(given / "rlhf.json", {"kl": [planted.KL, planted.KL_ERROR]})
    planted.put(given / "lineage.json", {"rlhf.run": "ppo-of-it", "git.rev": "c" * 40})
    planted.BETTER.write(given / "results.json")
    (root / "general.txt").write_text("then", encoding="utf-8")
    planted.params(root, {"data.path": "given", "judge.retention.general": "general.txt"})
    (root / "dvc.yaml").write_text(STAGES, encoding="utf-8")
    (root / ".gitignore").write_text(".rlhf/\n", encoding="utf-8")
    (root / ".dvcignore").write_text(".rlhf\n", encoding="utf-8")
    shutil.copy(planted.ROOT / ".dvc/config", root / ".dvc/config")  # else DVC's daemon writes files later
    toy.commit(root)
    text, settings, _ = Request().resolve(git.committed(root, "params.yaml"))
    workspace = workspaces.create(root, "one", text, settings)
    dvc_cli.run(workspace.folder, "repro")
    workspace.save("one", instead="one-2")
    workspace.remove()
    shutil.rmtree(root / ".rlhf")
    (root / ".rlhf").mkdir()
    shutil.copyfile(empty_store, root / ".rlhf/mlflow.db")
    monkeypatch.chdir(root)
    console.set_quiet(False)
    return root


def test_an_experiment_is_refused_with_the_commands_that_promote_it(
    root: Path, measured: Measured, rlhf: Command
) -> None:
    """Judges' files that changed since have it judged again."""
    client, revision = MlflowClient(embedded_uri(root / ".rlhf")), git.find_experiment(root, "one")
    message = rlhf("promote one", status=2).err
    assert "one is not a checkpoint's folder (it has no config.json)" in message
    assert "run `dvc exp apply EXPERIMENT`, then `rlhf promote`\n" in message
    assert client.search_registered_models() == []
    dvc_cli.run(root, "exp", "apply", "one")
    (root / "general.txt").write_text("now", encoding="utf-8")
    said = rlhf("promote").out
    assert "the results here were measured with another general.txt: the policy is judged" in said
    assert measured.compared == ["models/sft", "models/base"]
    version = client.get_model_version_by_alias(NAME, "champion")
    where = [version.tags[tag] for tag in ("dvc.exp", "dvc.rev", "dvc.path", "rlhf.run", "verdict")]
    assert where == ["one", revision, "models/policy", "ppo-of-it", "passed"]
    assert "rlhf.folder" not in version.tags, "the cache has it"
