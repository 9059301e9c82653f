"""`rlhf promote` and `rlhf promote --rollback` with planted results and a real MLflow store."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from rlhf_tasks import config
from rlhf_tasks.models import contracts
from rlhf_tasks.project import atomic, git, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import command, registry
from rlhf_tasks.promotion.command import verdict_file
from rlhf_tasks.promotion.registry import Registry, Unreachable
from rlhf_tasks.promotion.verdict import Verdict
from rlhf_tasks.stages import runner
from rlhf_tasks.stages import verdict as stage
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.tracking.store import embedded_uri
from tests.conftest import Command, Said
from tests.promotion import planted
from tests.promotion.conftest import Measured

NAME = "rlhf-policy"
KNOWN = {"kl": [planted.KL, planted.KL_ERROR]}
pytestmark = pytest.mark.usefixtures("measured")


def client() -> MlflowClient:
    return MlflowClient(embedded_uri(Path(".rlhf").resolve()))


def aliases() -> dict[str, str]:
    """Alias → the weights of its version."""
    store = client()
    by_alias = store.get_registered_model(NAME).aliases
    return {alias: store.get_model_version(NAME, v).tags["weights"] for alias, v in by_alias.items()}


def num_versions() -> int:
    return len(client().search_model_versions(f"name = '{NAME}'"))


def label(md5: str, weights: str) -> None:
    """Tag a version with its weights, so that tests can name it."""
    store = client()
    for version in store.search_model_versions(f"name = '{NAME}'"):
        if version.tags["dvc.md5"] == md5:
            store.set_model_version_tag(NAME, version.version, "weights", weights)


@pytest.fixture
def promote(project: Path, rlhf: Command) -> Command:
    """Plants a policy of these weights, keeps it in the cache, and promotes it by the command line."""

    def run(weights: str, *words: str, status: int = 0) -> Said:
        md5 = planted.pipeline(project, weights)
        planted.cached(project / "models/policy", project / ".dvc/cache")
        said = rlhf("promote", *words, status=status)
        label(md5, weights)
        return said

    return run


def new_run() -> str:
    """An MLflow run of the policy of weights `one`."""
    experiment = client().get_experiment_by_name("rlhf")
    assert experiment is not None
    run_id = client().create_run(experiment.experiment_id, tags={"rlhf.run": "ppo-of-one"}).info.run_id
    return str(run_id)


def plant_foreign_policy(project: Path) -> None:
    """A policy that the pipeline did not train, in a folder of its own."""
    shutil.copytree(project / "models/policy", project / "elsewhere")
    (project / "elsewhere/weights").write_text("foreign", encoding="utf-8")


def test_the_first_policy_that_passes_becomes_champion(promote: Command) -> None:
    shown = promote("one").out
    assert aliases() == {"champion": "one"}
    assert "KL | 1.5 ± 0.02 | <= 10 | +8.5 | passed" in shown
    assert f"; {NAME} version 1 (models/policy) is champion now; before: no champion yet" in shown
    version = client().get_model_version(NAME, "1")
    tags = version.tags
    assert (tags["verdict"], tags["rlhf.run"], tags["git.rev"]) == ("passed", "ppo-of-one", "c" * 40)
    assert "| KL | 1.5 ± 0.02 | <= 10 | +8.5 | passed |" in str(version.description).splitlines()
    file = verdict_file(Paths().home, hashing.dvc_md5(Path("models/policy")))
    assert json.loads(file.read_text(encoding="utf-8"))["passed"] is True


@pytest.mark.parametrize("sampler", [None, "vLLM 0.32.0"])
def test_a_version_names_its_run_its_commit_and_the_program_that_sampled_its_rollouts(
    project: Path, rlhf: Command, sampler: str | None
) -> None:
    planted.pipeline(project, "one")
    identity = {"kind": "policy", "parents": {}} | KNOWN | ({"sampler": sampler} if sampler else {})
    planted.put(project / "models/policy/rlhf.json", identity)
    planted.lock(project)
    for words in (["add", "dvc.lock"], ["commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], check=True)
    run = new_run()
    rlhf("promote")
    version = client().get_model_version(NAME, "1")
    assert (version.run_id, version.tags["dvc.rev"]) == (run, git.commit(project))
    assert version.tags.get("rlhf.sampler") == sampler
    assert "dvc.exp" not in version.tags


def test_a_better_policy_replaces_the_champion_until_a_rollback_and_returns_only_with_again(
    promote: Command, rlhf: Command, measured: Measured
) -> None:
    """Otherwise the next nightly run would promote what a person has rolled back."""
    promote("one")
    promote("two")
    assert measured.compared == ["one"]
    assert aliases() == {"champion": "two"}
    said = rlhf("promote --rollback").out
    assert f"{NAME} version 1 is champion again instead of version 2" in said
    assert aliases() == {"champion": "one"}
    message = rlhf("promote --rollback", status=2).err
    assert "is the first champion; there is no former one to roll back to" in message
    assert "it was rolled back" in promote("two", status=3).out
    assert aliases() == {"champion": "one", "challenger": "two"}
    promote("two", "--again")
    assert aliases() == {"champion": "two"}


def test_a_worse_policy_is_refused_with_the_reason(promote: Command, measured: Measured) -> None:
    promote("one")
    measured.champion = planted.over_champion(gold=0.44)
    reason = "win rate over the champion by the gold judge (95% low) 0.44 ≤ 0.5"
    shown = promote("worse", status=3).out
    assert f"Not promoted: {reason}; it is {NAME} version 2 (models/policy)" in shown
    assert aliases() == {"champion": "one", "challenger": "worse"}
    version = client().get_model_version(NAME, "2")
    assert (version.tags["verdict"], version.tags["verdict.against"]) == ("refused", "version 1")
    criterion = "| win rate over the champion by the gold judge (95% low) | 0.44 | > 0.5 | -0.06 | FAILED |"
    assert criterion in str(version.description).splitlines()


def test_unless_judging_does_nothing_where_something_must_be_judged(
    project: Path, promote: Command, rlhf: Command, measured: Measured
) -> None:
    promote("one", "--unless-judging")  # the results are known, and there is no champion
    promote("one", "--unless-judging")  # champion already
    promote("one")  # which is not judged again
    said = promote("two", "--unless-judging", status=command.UNDECIDED).out
    assert "Undecided: models/policy must be judged first" in said, "there is a champion to judge it against"
    plant_foreign_policy(project)
    rlhf("promote elsewhere --unless-judging", status=command.UNDECIDED)  # the results are of another
    assert measured.compared == []
    assert num_versions() == 1, "nothing is registered"
    promote("two")


def test_a_policy_without_results_of_its_own_is_judged_now(
    project: Path, measured: Measured, rlhf: Command
) -> None:
    """Against models/sft, with its KL and retention. What cannot be measured refuses it."""
    plant_foreign_policy(project)
    measured.cost = planted.cost(None, retention={})
    shown = rlhf("promote elsewhere", status=3).out
    assert measured.compared == ["models/sft", "models/base"]
    assert "KL is not known: it was not measured of this policy" in shown
    assert "is not in the DVC cache" in shown
    measured.cost = planted.cost(11.0, 0.5)
    assert "KL 11 ± 0.5 > 10" in rlhf("promote elsewhere", status=3).out
    measured.cost = planted.cost(9.0, 0.5)
    rlhf("promote elsewhere/")


OLDER = planted.results().model_dump(mode="json")
del OLDER["responses"]["policy"]["sft_perplexity"]


@pytest.mark.parametrize("form", [None, '{"verdicts": []}', json.dumps(OLDER)])
def test_results_of_another_version_of_the_code_are_measured_again(
    form: str | None, project: Path, measured: Measured, rlhf: Command
) -> None:
    """They have no results document or another one, and no KL, though dvc.lock describes them."""
    planted.pipeline(project, kl=None)
    document = project / "evaluation/judge/results.json"
    if form is None:
        document.rename(document.with_name("verdicts.parquet"))
    else:
        document.write_text(form, encoding="utf-8")
    planted.lock(project)
    assert "are of another version of the code" in rlhf("promote").out
    assert measured.compared == ["models/sft", "models/base"]
    assert measured.costs == 1


def test_a_policy_of_an_older_version_has_its_kl_measured(
    project: Path, measured: Measured, rlhf: Command
) -> None:
    planted.pipeline(project, kl=None)
    assert "the results here lack a KL: models/policy/rlhf.json, by an older version" in rlhf("promote").out
    assert measured.costs == 1


@pytest.mark.e2e
def test_a_judge_that_ppo_optimised_refuses_by_its_weights_and_loads_no_torch(project: Path) -> None:
    """A judge that is the reward model of PPO is known by its weights, whatever its folder is called."""
    heldout = project / "models/reward_heldout"
    heldout.mkdir()
    (heldout / "config.json").write_text("{}", encoding="utf-8")
    save_file({"w": np.arange(3.0)}, heldout / "model.safetensors")
    planted.pipeline(project, "one")
    parents = {"reward": contracts.fingerprint(heldout)}
    planted.put(project / "models/policy/rlhf.json", contracts.identity("policy", parents) | KNOWN)
    planted.lock(project)
    code = (
        "import sys\nfrom rlhf_tasks.cli import main\nstatus = main.main(['promote'])\n"
        "heavy = {'torch', 'transformers', 'openai'} & sys.modules.keys()\n"
        "sys.exit(f'{heavy} loaded' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "judges that are the optimized reward (reward_model) 1 > 0" in done.stdout
    assert "is judged" not in done.stdout


def test_a_champion_without_weights_is_a_user_error(project: Path, promote: Command) -> None:
    promote("one")
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project / ".rlhf/policies", ignore_errors=True)
    message = promote("two", status=2).err
    assert "cannot be restored: the DVC cache does not hold all of them" in message
    assert aliases()["champion"] == "one"


def test_user_errors_have_exit_status_2(project: Path, rlhf: Command) -> None:
    assert "has no champion" in rlhf("promote --rollback", status=2).err
    store = client()
    store.create_registered_model(NAME)
    store.create_model_version(NAME, "somewhere", await_creation_for=0)
    store.set_registered_model_alias(NAME, "champion", "1")
    assert "the champion has no tag dvc.md5" in rlhf("promote", status=2).err, "registered otherwise"
    planted.params(project, {"promotion": None})
    for words in ("promote", "promote --rollback"):
        assert "promotion: null" in rlhf(words, status=2).err


def test_an_mlflow_that_does_not_answer_defers(
    project: Path, rlhf: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    planted.params(project, {"tracking.uri": "http://127.0.0.1:9"})
    assert "Deferred: MLflow does not answer" in rlhf("promote", status=4).out
    rlhf("promote --rollback", status=4)


# ------------------------------------------------------------------------------ killed, then repeated


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


CALLS = (
    *("create_registered_model", "create_model_version", "update_model_version", "set_model_version_tag"),
    *("set_registered_model_alias", "delete_registered_model_alias", "delete_model_version_tag"),
)
ACTS = ("promote", "promote again")


def test_calls_lists_every_request_that_changes_the_registry() -> None:
    """Read from the registry's own code: a new request must be tested for kills too."""
    text = Path(str(registry.__file__)).read_text(encoding="utf-8")
    requests = set(re.findall(r"self\.client\.(\w+)\(", text))
    assert {name for name in requests if not name.startswith(("get_", "search_"))} == set(CALLS)


def registry_state(store: MlflowClient) -> dict[str, Any]:
    """Aliases and tags, without the times and what became challenger in between."""
    timed = ("champion.rolled_back", "verdict.time")
    versions = store.search_model_versions(f"name = '{NAME}'")
    tags = {v.version: {k: "then" if k in timed else value for k, value in v.tags.items()} for v in versions}
    return {"aliases": dict(store.get_registered_model(NAME).aliases), "versions": tags}


def run_act(act: str) -> int:
    if act == "rollback":
        return command.rollback(Paths())
    return command.promote(Paths(), "models/policy", again=act == "promote again")


@pytest.mark.parametrize("act", [*(pytest.param(a, marks=pytest.mark.slow) for a in ACTS), "rollback"])
def test_a_command_that_was_killed_before_any_request_ends_alike_when_repeated(
    project: Path, promote: Command, rlhf: Command, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request that changes the registry is once the first that is not made.

    "promote again": a champion that was rolled back has a tag to lose, and an older verdict another one.
    """
    promote("one")
    if act != "promote":
        promote("two")
    if act == "promote again":
        rlhf("promote --rollback")
        client().set_model_version_tag(NAME, "2", "verdict.of_old", "1")
    md5 = planted.pipeline(project, "two")
    planted.cached(project / "models/policy", project / ".dvc/cache")
    moved_to = "1" if act == "rollback" else "2"
    made: list[str] = []
    real = {name: getattr(MlflowClient, name) for name in CALLS}

    def bounded(name: str, limit: float) -> Callable[..., Any]:
        def call(self: MlflowClient, *words: Any, **named: Any) -> Any:
            if len(made) == limit:
                raise Killed
            made.append(name)
            if name == "set_registered_model_alias" and words[1] == "champion" and act != "rollback":
                assert verdict_file(project / ".rlhf", md5).exists()
                version = self.get_model_version(NAME, words[2])
                assert version.tags["verdict"] == "passed", "the alias moves after the verdict is recorded"
            return real[name](self, *words, **named)

        return call

    def run_until(limit: float) -> tuple[bool, MlflowClient]:
        """Whether the command reached its end, in a copy of the store."""
        database = project / f"{limit}.db"
        shutil.copyfile(project / ".rlhf/mlflow.db", database)
        planted.params(project, {"tracking.uri": f"sqlite:///{database}"})
        made.clear()
        store = MlflowClient(f"sqlite:///{database}")
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(MlflowClient, name, bounded(name, limit))
            try:
                return run_act(act) == 0, store
            except Killed:
                return False, store

    ended, store = run_until(math.inf)
    assert ended
    whole, requests = registry_state(store), list(made)
    assert str(whole["aliases"]["champion"]) == moved_to
    assert requests[-1] == "set_registered_model_alias", "the alias moves last"
    assert ("delete_model_version_tag" in requests) == (act == "promote again")
    for limit in range(len(requests)):
        ended, store = run_until(limit)
        assert not ended
        assert str(store.get_registered_model(NAME).aliases["champion"]) != moved_to
        assert run_act(act) == 0
        assert registry_state(store) == whole, f"killed before request {limit}, {requests[limit]}"


def test_a_promotion_killed_while_the_verdict_is_written_succeeds_when_repeated(
    promote: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, tree: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_json", killed)
        with pytest.raises(Killed):
            promote("one")
    assert sorted(client().get_registered_model(NAME).aliases) == ["challenger"]
    promote("one")


# ------------------------------------------------------------------------------------- the stage


def verdict_of_stage() -> dict[str, float]:
    return stage.run(config.VerdictView.of(config.load()), Paths(), NullTracker("verdict"))


def test_the_stage_applies_all_criteria_but_the_champion(project: Path) -> None:
    metrics = verdict_of_stage()
    assert metrics["gate/passed"] == 1.0
    assert metrics["kl/margin"] == 8.5
    tree = json.loads(Path("evaluation/verdict.json").read_text(encoding="utf-8"))
    assert tree["passed"] is True
    assert not any("champion" in criterion["key"] for criterion in tree["criteria"])
    assert Verdict.of_tree(tree).passed
    planted.params(project, {"promotion": None})
    assert verdict_of_stage() == {}
    assert Path("evaluation/verdict.json").read_text(encoding="utf-8") == "{}\n", "there is no gate"


@pytest.mark.parametrize(("kl", "result"), [(planted.KL, "passed"), (11.2, "refused")])
def test_a_verdict_of_a_run_is_in_the_registry_with_its_run(project: Path, kl: float, result: str) -> None:
    md5, run = planted.pipeline(project, "one", kl=kl), new_run()
    assert runner.run("verdict", Paths()) == 0
    version = client().get_model_version(NAME, "1")
    assert (version.tags["dvc.md5"], version.tags["verdict"], version.run_id) == (md5, result, run)
    assert "`rlhf promote` compares it with one" in version.tags["verdict.against"]
    label(md5, "one")
    assert aliases() == {"challenger": "one"}, "only `rlhf promote` makes a champion"


def test_a_verdict_that_mlflow_does_not_take_fails_no_run(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Registry, "champion", lambda self: (_ for _ in ()).throw(Unreachable("refused")))
    assert runner.run("verdict", Paths()) == 0
    assert "the registry does not have this verdict (refused); `rlhf promote`" in capsys.readouterr().out


def test_a_reward_model_is_refused_before_anything_is_registered(project: Path, rlhf: Command) -> None:
    reward = project / "models/reward"
    reward.mkdir()
    message = rlhf("promote models/reward", status=2).err
    assert "models/reward is not a checkpoint's folder (it has no config.json)" in message
    (reward / "config.json").write_text("{}", encoding="utf-8")
    for kind in ("reward", "value"):
        (reward / "rlhf.json").write_text(json.dumps({"kind": kind}), encoding="utf-8")
        message = rlhf("promote models/reward", status=2).err
        assert "models/reward is a reward model or a critic; give a policy" in message
    assert client().search_registered_models() == []


def test_scorers_of_a_ppo_that_does_not_train_have_optimized_nothing(project: Path, rlhf: Command) -> None:
    judge = {"kind": "function", "name": "gold", "function": "mine:short"}
    scorers = [{"kind": "function", "weight": 1.0, "function": "mine:short"}]
    changes = {"judge.judges": [judge, planted.shipped()["judge"]["judges"][1]], "ppo.scorers": scorers}
    planted.params(project, {**changes, "dpo.train": True, "ppo.train": False})
    planted.pipeline(project, "one")
    assert "judges that are the optimized reward (gold)" not in rlhf("promote", status=0).out


def test_a_function_that_labeled_the_pairs_of_a_policy_does_not_judge_it(
    project: Path, rlhf: Command
) -> None:
    judge = {"kind": "function", "name": "gold", "function": "mine:short"}
    planted.params(project, {"judge.judges": [judge, planted.shipped()["judge"]["judges"][1]]})
    planted.pipeline(project, "one")
    planted.put(project / "models/policy/rlhf.json", {"kind": "policy", "labeled_by": "mine:short", **KNOWN})
    planted.lock(project)
    assert "judges that are the optimized reward (gold)" in rlhf("promote", status=3).out


def test_a_function_that_ppo_optimised_refuses_even_if_params_changed_since(
    project: Path, rlhf: Command
) -> None:
    judge = {"kind": "function", "name": "gold", "function": "mine:short"}
    planted.params(project, {"judge.judges": [judge, planted.shipped()["judge"]["judges"][1]]})
    planted.pipeline(project, "one")
    lock = YAML(typ="safe", pure=True).load(Path("dvc.lock").read_text(encoding="utf-8"))
    scorers = [{"kind": "function", "weight": 1.0, "function": "mine:short"}]
    lock["stages"]["ppo"]["deps"] = [planted.record(project, "ppo", {"ppo.scorers": scorers})]
    with Path("dvc.lock").open("w", encoding="utf-8") as file:
        YAML().dump(lock, file)
    assert "judges that are the optimized reward (gold)" in rlhf("promote", status=3).out
