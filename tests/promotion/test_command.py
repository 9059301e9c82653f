"""`rlhf promote` and `rlhf rollback` on planted metrics and a real MLflow store."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML
from safetensors.numpy import save_file

from rlhf_tasks import config
from rlhf_tasks.cli import main
from rlhf_tasks.modeling import contracts
from rlhf_tasks.project import atomic, git, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import command, gate, registry
from rlhf_tasks.promotion.registry import Registry
from rlhf_tasks.stages import verdict as stage
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.tracking.store import embedded_uri
from tests.promotion import planted

NAME = "rlhf-policy"
pytestmark = pytest.mark.usefixtures("contests")


def client(project: Path) -> MlflowClient:
    return MlflowClient(embedded_uri(project / ".rlhf"))


def aliases(project: Path) -> dict[str, str]:
    """Alias → the weights of its version."""
    store = client(project)
    found = store.get_registered_model(NAME).aliases
    return {alias: store.get_model_version(NAME, v).tags["weights"] for alias, v in found.items()}


def label(project: Path, md5: str, weights: str) -> None:
    """So that tests can speak of a version by what is in it."""
    store = client(project)
    for version in store.search_model_versions(f"name = '{NAME}'"):
        if version.tags["dvc.md5"] == md5:
            store.set_model_version_tag(NAME, version.version, "weights", weights)


def promote(
    project: Path,
    weights: str,
    *words: str,
    kl: float = planted.KL,
    changes: Mapping[str, float | None] | None = None,
) -> int:
    """Plant a policy, keep it in the cache, and promote it by the command line; its exit status."""
    md5 = planted.pipeline(project, weights, kl=kl, changes=changes)
    planted.cached(project / "models/policy", project / ".dvc/cache")
    status = main.main(["promote", *words])
    label(project, md5, weights)
    return status


def test_the_first_good_policy_is_champion(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert promote(project, "one") == 0
    assert aliases(project) == {"champion": "one"}
    shown = capsys.readouterr().out
    assert "KL | 1.5 | <= 10 | +8.5 | passed" in shown
    assert f"Promoted: {NAME} version 1 (models/policy) is champion now; before: no champion yet" in shown
    tags = client(project).get_model_version(NAME, "1").tags
    assert (tags["verdict"], tags["rlhf.run"], tags["git.rev"]) == ("passed", "ppo-of-one", "c" * 40)
    assert "kl: 1.5 <= 10, margin +8.5, passed" in tags["verdict.criteria"].splitlines()
    file = command.verdict_file(project / ".rlhf", hashing.dvc_md5(Path("models/policy")))
    assert json.loads(file.read_text(encoding="utf-8"))["passed"] is True


def test_a_version_shows_the_run_that_made_it_and_the_commit_that_has_it(project: Path) -> None:
    planted.pipeline(project, "one")
    for words in (["add", "dvc.lock"], ["commit", "-q", "-m", "x"]):
        subprocess.run(["git", *words], check=True)
    head = git.revision(Path())
    store = client(project)
    experiment = store.get_experiment_by_name("rlhf")
    assert experiment is not None
    run = store.create_run(experiment.experiment_id, tags={"rlhf.run": "ppo-of-one"}).info.run_id
    assert promote(project, "one") == 0
    version = store.get_model_version(NAME, "1")
    assert (version.run_id, version.tags["dvc.rev"]) == (run, head)
    assert "dvc.exp" not in version.tags


def test_a_better_one_takes_its_place_and_rollback_gives_it_back(
    project: Path, contests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    promote(project, "one")
    assert promote(project, "two") == 0
    assert contests["asked"] == [("champion", "one")]
    assert aliases(project) == {"champion": "two"}
    assert main.main(["rollback"]) == 0
    assert aliases(project) == {"champion": "one"}
    assert f"{NAME} version 1 is champion again; version 2 is not" in capsys.readouterr().out
    assert main.main(["rollback"]) == 2
    assert "is the first champion: there is none to go back to" in capsys.readouterr().err


def test_what_was_rolled_back_returns_only_when_asked(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the next nightly run would put back what a person has taken away."""
    promote(project, "one")
    promote(project, "two")
    main.main(["rollback"])
    assert promote(project, "two") == 3
    assert "rollbacks of this policy" in capsys.readouterr().out
    assert aliases(project) == {"champion": "one", "challenger": "two"}
    assert promote(project, "two", "--again") == 0
    assert aliases(project) == {"champion": "two"}


def test_a_worse_one_is_refused_and_says_by_what(
    project: Path, contests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    promote(project, "one")
    contests["champion"] = planted.over_champion(low=0.44)
    assert promote(project, "worse") == 3
    assert aliases(project) == {"champion": "one", "challenger": "worse"}
    said = "version 2 (models/policy): win rate over the champion by gold (95% low) 0.44 ≤ 0.5"
    assert f"Refused: {NAME} {said}" in capsys.readouterr().out
    tags = client(project).get_model_version(NAME, "2").tags
    assert (tags["verdict"], tags["verdict.against"]) == ("refused", "version 1")
    assert "over_champion/gold: 0.44 > 0.5, margin -0.06, failed" in tags["verdict.criteria"].splitlines()


def test_an_over_optimised_one_is_refused(project: Path) -> None:
    worse = {"gold/policy_vs_sft/low": 0.3, "gold/policy_vs_sft/win_rate": 0.33}
    assert promote(project, "hacked", kl=37.0, changes=worse) == 3
    assert aliases(project) == {"challenger": "hacked"}


def test_judges_that_disagree_and_metrics_that_are_missing_refuse(project: Path) -> None:
    assert promote(project, "one", changes={"reward_model/policy_vs_sft/low": 0.4}) == 3
    assert promote(project, "two", changes={"choice/policy": None}) == 3
    assert aliases(project) == {"challenger": "two"}


def test_the_champion_itself_is_not_judged_again(project: Path, contests: dict[str, Any]) -> None:
    promote(project, "one")
    assert promote(project, "one") == 0
    assert contests["asked"] == []
    assert len(client(project).search_model_versions(f"name = '{NAME}'")) == 1


def test_without_judging_it_is_decided_or_nothing_is_done(
    project: Path, contests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--unless-judging"]
    assert promote(project, "one", *words) == 0, "the metrics tell, and there is no champion"
    assert promote(project, "one", *words) == 0, "champion already"
    assert promote(project, "two", *words) == command.UNDECIDED, "there is a champion to judge it against"
    assert "Undecided: models/policy is to be judged first" in capsys.readouterr().out
    shutil.copytree("models/policy", "elsewhere")
    (project / "elsewhere/weights").write_text("foreign", encoding="utf-8")
    assert main.main(["promote", "elsewhere", *words]) == command.UNDECIDED, "the metrics do not tell of it"
    assert contests["asked"] == []
    assert len(client(project).search_model_versions(f"name = '{NAME}'")) == 1, "nothing is registered"
    assert promote(project, "two") == 0


def test_a_policy_of_which_the_metrics_do_not_tell_is_judged_now(
    project: Path, contests: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Against models/sft, its KL and retention too; refused for what cannot be measured of it."""
    shutil.copytree("models/policy", "elsewhere")
    (project / "elsewhere/weights").write_text("foreign", encoding="utf-8")
    wins = {key: value for key, value in planted.BETTER.items() if "_vs_sft" in key}
    contests["sft"] = wins
    assert main.main(["promote", "elsewhere"]) == 3
    assert contests["asked"] == [("sft", "models/sft")]
    shown = capsys.readouterr().out
    assert "KL is not known: kl was not measured of this policy" in shown
    assert "is not in the DVC cache" in shown
    lost = {key: value for key, value in planted.BETTER.items() if key not in wins}
    contests["cost"] = lost | {"kl": 11.0}
    assert main.main(["promote", "elsewhere"]) == 3
    assert "KL 11 > 10" in capsys.readouterr().out
    contests["cost"] = lost | {"kl": 9.0}
    assert main.main(["promote", "elsewhere/"]) == 0


def test_what_the_gate_does_not_ask_for_is_not_measured(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*given: Any) -> dict[str, float]:
        raise AssertionError("nobody asked for KL or retention")

    monkeypatch.setattr("rlhf_tasks.promotion.cost.measured", never)
    off = ("promotion.max_kl", "promotion.max_perplexity_growth", "promotion.max_choice_drop")
    planted.params(project, dict.fromkeys(off))
    (project / "models/policy/weights").write_text("foreign", encoding="utf-8")
    assert main.main(["promote"]) == 0


def test_a_judge_that_ppo_optimised_for_this_policy_promotes_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its weights, whatever its folder is called."""
    optimised = {"reward_model": "models/reward_heldout"}
    monkeypatch.setattr("rlhf_tasks.evaluation.judges.optimised", lambda settings, policy: optimised)
    assert promote(project, "one") == 3
    verdict = client(project).get_model_version(NAME, "1").tags["verdict.summary"]
    assert verdict == "judges that are the optimised reward (reward_model) 1 > 0"


@pytest.mark.e2e
def test_where_the_metrics_tell_all_nothing_that_runs_models_is_loaded(project: Path) -> None:
    """Not even to see that a judge is what PPO optimised, which the gate refuses."""
    heldout = project / "models/reward_heldout"
    heldout.mkdir()
    (heldout / "config.json").write_text("{}", encoding="utf-8")
    save_file({"w": np.arange(3.0)}, heldout / "model.safetensors")
    planted.pipeline(project, "one")
    parents = {"reward": contracts.fingerprint(heldout)}
    planted.put(project / "models/policy/rlhf.json", contracts.identity("policy", parents))
    planted.lock(project)
    code = (
        "import sys\nfrom rlhf_tasks.cli import main\nstatus = main.main(['promote'])\n"
        "heavy = {'torch', 'transformers', 'openai'} & sys.modules.keys()\n"
        "sys.exit(f'{heavy} loaded' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "judges that are the optimised reward (reward_model) 1 > 0" in done.stdout
    assert "it is judged" not in done.stdout


def test_a_champion_whose_weights_are_gone_is_a_mistake_to_mend(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    promote(project, "one")
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project / ".rlhf/policies", ignore_errors=True)
    assert promote(project, "two") == 2
    assert "cannot be had: the DVC cache does not hold all of it" in capsys.readouterr().err
    assert aliases(project)["champion"] == "one"


def test_mistakes_are_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["promote", "models/none"]) == 2
    assert "models/none is no checkpoint" in capsys.readouterr().err
    assert main.main(["rollback"]) == 2
    assert "has no champion" in capsys.readouterr().err
    planted.params(project, {"promotion": None})
    for word in ("promote", "rollback"):
        assert main.main([word]) == 2
        assert "promotion: null" in capsys.readouterr().err


def test_mlflow_that_is_away_puts_it_off(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    planted.params(project, {"tracking.uri": "http://127.0.0.1:9"})
    assert main.main(["promote"]) == 4
    assert "Deferred: MLflow does not answer" in capsys.readouterr().out
    assert main.main(["rollback"]) == 4


# ----------------------------------------------------------------------------- killed, and again


class Killed(BaseException):
    """As SIGKILL: nothing after it runs."""


STEPS = ("register", "challenge", "record", "crown")
CALLS = (
    "create_registered_model", "create_model_version", "set_registered_model_alias", "set_model_version_tag",
    "update_model_version", "delete_registered_model_alias", "delete_model_version_tag",
)  # fmt: skip


ACTS = ("promote", "promote again")


def test_these_are_all_the_requests_that_change_the_registry() -> None:
    """By the registry's own code: whoever adds one there must be killed at it too."""
    text = Path(str(registry.__file__)).read_text(encoding="utf-8")
    asked = set(re.findall(r"self\.client\.(\w+)\(", text))
    reading = {"get_registered_model", "get_model_version", "search_model_versions", "search_runs",
               "get_experiment_by_name"}  # fmt: skip
    assert asked - reading == set(CALLS)


def stands(store: MlflowClient) -> dict[str, Any]:
    """All that the registry tells, but for the time of day and of what was challenged by the way."""
    timed = ("champion.rolled_back", "verdict.time")
    versions = store.search_model_versions(f"name = '{NAME}'")
    found = {v.version: {k: "then" if k in timed else value for k, value in v.tags.items()} for v in versions}
    return {"aliases": dict(store.get_registered_model(NAME).aliases), "versions": found}


@pytest.mark.parametrize("act", [*(pytest.param(a, marks=pytest.mark.slow) for a in ACTS), "rollback"])
def test_killed_before_any_request_the_same_command_ends_alike(
    project: Path, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request that changes the registry is once the one that is not made any more.

    "again": a champion that was rolled back has a tag to lose, and an older verdict another one.
    """
    promote(project, "one")
    if act != "promote":
        promote(project, "two")
    if act == "promote again":
        main.main(["rollback"])
        client(project).set_model_version_tag(NAME, "2", "verdict.of_old", "1")
    md5 = planted.pipeline(project, "two")
    planted.cached(project / "models/policy", project / ".dvc/cache")
    moved_to = "1" if act == "rollback" else "2"

    def command_of() -> int:
        again = act == "promote again"
        return command.rollback() if act == "rollback" else command.promote("models/policy", again=again)

    made: list[str] = []
    real = {name: getattr(MlflowClient, name) for name in CALLS}

    def bounded(name: str, limit: float) -> Callable[..., Any]:
        def call(self: MlflowClient, *words: Any, **named: Any) -> Any:
            if len(made) == limit:
                raise Killed
            made.append(name)
            if name == "set_registered_model_alias" and words[1] == "champion" and act != "rollback":
                assert command.verdict_file(project / ".rlhf", md5).exists()
                version = self.get_model_version(NAME, words[2])
                assert version.tags["verdict"] == "passed", "the alias moves after the verdict is told"
            return real[name](self, *words, **named)

        return call

    def run_until(limit: float) -> tuple[bool, MlflowClient]:
        """Whether it came to its end, in a copy of the store."""
        database = project / f"{limit}.db"
        shutil.copyfile(project / ".rlhf/mlflow.db", database)
        planted.params(project, {"tracking.uri": f"sqlite:///{database}"})
        made.clear()
        for name in CALLS:
            monkeypatch.setattr(MlflowClient, name, bounded(name, limit))
        try:
            return command_of() == 0, MlflowClient(f"sqlite:///{database}")
        except Killed:
            return False, MlflowClient(f"sqlite:///{database}")
        finally:
            for name in CALLS:
                monkeypatch.setattr(MlflowClient, name, real[name])

    ended, store = run_until(math.inf)
    assert ended
    whole, asked = stands(store), list(made)
    assert str(whole["aliases"]["champion"]) == moved_to
    assert asked[-1] == "set_registered_model_alias", "the alias is the last"
    assert ("delete_model_version_tag" in asked) == (act == "promote again")
    for limit in range(len(asked)):
        ended, store = run_until(limit)
        assert not ended
        assert str(store.get_registered_model(NAME).aliases["champion"]) != moved_to
        assert command_of() == 0
        assert stands(store) == whole, f"killed before request {limit}, {asked[limit]}"


@pytest.mark.parametrize("step", STEPS)
def test_killed_between_the_steps(project: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    promote(project, "one")

    def killed(self: Registry, *words: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Registry, step, killed)
        with pytest.raises(Killed):
            promote(project, "two")
    assert promote(project, "two") == 0
    assert aliases(project) == {"champion": "two"}


def test_killed_while_the_verdict_is_written(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, tree: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_json", killed)
        with pytest.raises(Killed):
            promote(project, "one")
    assert aliases_of(project) == ["challenger"]
    assert promote(project, "one") == 0


def aliases_of(project: Path) -> list[str]:
    return sorted(client(project).get_registered_model(NAME).aliases)


# ------------------------------------------------------------------------------------- the stage


def verdict_of_stage() -> dict[str, float]:
    return stage.run(config.VerdictView.of(config.load()), Paths(), NullTracker("verdict"))


def test_the_stage_tells_all_but_the_champion(project: Path) -> None:
    found = verdict_of_stage()
    assert found["gate/passed"] == 1.0
    assert found["kl/margin"] == 8.5
    tree = json.loads(Path("evaluation/verdict.json").read_text(encoding="utf-8"))
    assert tree["passed"] is True
    assert not any("champion" in criterion["key"] for criterion in tree["criteria"])
    assert gate.Criterion(**{k: v for k, v in tree["criteria"][0].items() if k not in ("margin", "passed")})


def test_the_stage_without_a_gate_writes_that(project: Path) -> None:
    planted.params(project, {"promotion": None})
    assert verdict_of_stage() == {}
    assert Path("evaluation/verdict.json").read_text(encoding="utf-8") == "{}\n"


def test_what_is_no_policy_is_refused_before_anything_is_registered(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.pipeline(project, "one")
    reward = project / "models/reward"
    reward.mkdir()
    assert main.main(["promote", "models/reward"]) == 2
    assert "models/reward is no checkpoint (it has no config.json)" in capsys.readouterr().err
    (reward / "config.json").write_text("{}", encoding="utf-8")
    (reward / "rlhf.json").write_text('{"kind": "reward"}', encoding="utf-8")
    assert main.main(["promote", "models/reward"]) == 2
    assert "models/reward is a reward model" in capsys.readouterr().err
    assert client(project).search_registered_models() == []


def test_a_champion_of_someone_else_s_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = client(project)
    store.create_registered_model(NAME)
    store.create_model_version(NAME, "somewhere", await_creation_for=0)
    store.set_registered_model_alias(NAME, "champion", "1")
    planted.pipeline(project, "one")
    assert main.main(["promote"]) == 2
    assert "is champion and has no tag dvc.md5" in capsys.readouterr().err


def test_a_judge_that_the_policy_was_trained_to_please_does_not_count_though_params_say_otherwise_now(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = {"kind": "function", "name": "gold", "function": "mine:short"}
    planted.params(project, {"judge.judges": [judge, planted.shipped()["judge"]["judges"][1]]})
    planted.pipeline(project, "one")
    lock = YAML(typ="safe", pure=True).load(Path("dvc.lock").read_text(encoding="utf-8"))
    scorers = [{"kind": "function", "weight": 1.0, "function": "mine:short"}]
    lock["stages"]["ppo"]["params"] = {"params.yaml": {"ppo": {"scorers": scorers}}}
    with Path("dvc.lock").open("w", encoding="utf-8") as file:
        YAML().dump(lock, file)
    assert main.main(["promote"]) == 3
    assert "judges that are the optimised reward (gold)" in capsys.readouterr().out
