"""What a sweep decides by itself; only the last test starts a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import validate

from flows import deployments, sweep
from flows.sweep import Cell
from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from rlhf_tasks.report import comparison
from tests.flows import toy

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Prefect


def make_cell(root: Path, setting: str = "any", seed: int = 2) -> Cell:
    values = config.load(root / "params.yaml")
    (made,) = sweep.cells(root, "s", None, [("any", {"ppo.kl_coef": 0.01})], [seed], "HEAD")
    return Cell(setting, seed, made.overrides, "s-1", made.data, values)


class FakeRun:
    """Replaces the run of a deployment: it may change the data, and ends in a given state."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, state: State[Any], changed: Path | None = None
    ) -> None:
        self.state, self.changed = state, changed
        self.given: list[dict[str, Any]] = []
        monkeypatch.setattr(sweep, "run_deployment", self.run)

    def run(self, deployment: str, **values: Any) -> FakeRun:
        self.given.append(values)
        if self.changed is not None:
            self.changed.write_text("other rows\n", encoding="utf-8")
        return self


def test_a_run_has_the_name_and_the_parameters_of_its_cell(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = (
        FakeRun(monkeypatch, Completed()),
        {"preset": "smoke", "revision": "c0ffee", "promote": False},
    )
    assert sweep.run_cell.fn(make_cell(root), "f/d", given).is_completed()
    (values,) = run.given
    assert values["flow_run_name"] == "any seed=2"
    own = {"seed": 2, "overrides": {"ppo.kl_coef": 0.01}, "name": "s-1"}
    assert values["parameters"] == {**given, **own}


@pytest.mark.parametrize(
    ("end", "name", "message"),
    [
        (Failed(message="no disk\nat all"), "Failed", "no disk"),
        (Completed(name="Not promoted", message="KL 12 > 10"), "Not promoted", "KL 12 > 10"),
        (Completed(name="Promoted", message="version 3"), "Promoted", "version 3"),
    ],
)
def test_a_cell_ends_as_its_run_does_and_a_refused_policy_is_a_result(
    root: Path, monkeypatch: pytest.MonkeyPatch, end: State[Any], name: str, message: str
) -> None:
    FakeRun(monkeypatch, end)
    state = sweep.run_cell.fn(make_cell(root), "f/d", {})
    assert (state.type, state.name, state.message) == (end.type, name, message)
    assert state.is_completed() == (name != "Failed")


def test_changed_data_fails_the_runs_and_names_what_may_have_seen_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, cell = root / "given/rows.txt", make_cell(root)
    run = FakeRun(monkeypatch, Completed(), changed=rows)
    state = sweep.run_cell.fn(cell, "f/d", {})
    problem = f"the data ({cell.values.data.in_words}) changed since the sweep began"
    assert (state.is_failed(), state.message) == (True, f"{problem}; remove its result: `dvc exp remove s-1`")
    state = sweep.run_cell.fn(cell, "f/d", {})
    assert (state.is_failed(), state.message) == (True, problem)
    assert len(run.given) == 1, "no run starts on other data"


def test_the_name_of_a_run_is_a_digest_of_what_decides_its_result(root: Path) -> None:
    settings = [
        ("any", {"ppo.kl_coef": a, "ppo.advantages.gamma": b}) for a in (0.1, 0.2) for b in (1.0, 0.9)
    ]
    cells = sweep.cells(root, "s", None, settings, [1, 2], "HEAD")
    names = [cell.experiment for cell in cells]
    assert len(set(names)) == 8
    other = [(name, {**overrides, "service.retries": 5}) for name, overrides in settings]
    again = sweep.cells(root, "s", None, other, [1, 2], "HEAD")
    assert [cell.experiment for cell in again] == names, "retries decide no result"
    types = [("any", {"launch.precision": precision}) for precision in ("fp32", "bf16")]
    assert len({cell.experiment for cell in sweep.cells(root, "s", None, types, [1], "HEAD")}) == 2
    gate = [(name, {**overrides, "promotion.max_kl": 1.0}) for name, overrides in settings]
    assert not {c.experiment for c in sweep.cells(root, "s", None, gate, [1, 2], "HEAD")} & set(names)
    (root / "given/rows.txt").write_text("other rows\n", encoding="utf-8")
    changed = sweep.cells(root, "s", None, settings, [1, 2], "HEAD")
    assert not {cell.experiment for cell in changed} & set(names), "other data makes other runs"


@pytest.mark.parametrize(
    ("settings", "seeds"),
    [([{}], [1, 1]), ([{"ppo.kl_coef": 0.1}] * 2, [1]), ([{}, {"service.retries": 5}], [1])],
)
def test_a_run_is_in_a_sweep_once(root: Path, settings: list[dict[str, Any]], seeds: list[int]) -> None:
    with pytest.raises(UserError, match="seed 1: the sweep has this run twice; give each once"):
        sweep.cells(root, "s", None, [("any", overrides) for overrides in settings], seeds, "HEAD")


def test_a_setting_is_a_method_with_a_combination_of_the_grid() -> None:
    assert sweep.list_settings(None, [], {}) == [("unchanged", {})]
    grid = {"ppo.kl_coef": [0.1, 0.2]}
    listed = sweep.list_settings("constraints", ["default", "dpo", "best_of_16"], grid)
    names = ["default, ppo.kl_coef=0.1", "default, ppo.kl_coef=0.2", "dpo, ppo.kl_coef=0.1"]
    assert [name for name, _ in listed] == [*names, "dpo, ppo.kl_coef=0.2"]
    best = {"judge.best_of_n": 16, "judge.best_of_n_model": "sft"}
    assert listed[0][1] == {"ppo.kl_coef": 0.1, **best}
    assert listed[2][1] == {
        **{"preset": "constraints+dpo", "ppo.kl_coef": 0.1, **best},
        **{"dpo": {"train": True}, "ppo": {"train": False}},
    }
    with pytest.raises(UserError, match="there is no preset 'sft'"):
        sweep.list_settings(None, ["ppo", "sft"], {})
    with pytest.raises(UserError, match="grid: preset, seed cannot be there"):
        sweep.list_settings(None, [], {"seed": [1, 2], "preset": ["rloo"]})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (["best_of_16"], "with a method to compare it with"),
        (["ppo", "best_of_4", "best_of_16"], "one best_of_N at most"),
        (["ppo", "dpo", "rloo", "grpo", "critic", "trl", "default"], "7 settings, and the figures"),
    ],
)
def test_methods_that_no_page_shows_are_refused_before_any_run(methods: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sweep.list_settings(None, methods, {})


def test_methods_with_other_data_or_judges_are_refused(root: Path) -> None:
    def check(*methods: str) -> None:
        listed = sweep.list_settings(None, methods, {})
        sweep.check_comparable(sweep.cells(root, "s", None, listed, [1, 2], "HEAD"))

    check("ppo", "dpo", "rloo", "grpo", "n_plus", "best_of_16")
    with pytest.raises(UserError, match="the methods differ in data, model, prepare, sft, judge"):
        check("ppo", "smoke")


def test_a_name_that_no_experiment_may_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"--name my page: String should match pattern"):
        sweep.run_methods(["ppo"], [1], "default", "my page")


def test_the_server_takes_best_of_n_as_a_method() -> None:
    schema = parameter_schema(sweep.sweep).model_dump_for_openapi()
    assert validate({"methods": ["ppo", "best_of_16"]}, schema) == []


def test_the_problems_of_all_settings_are_in_one_message(root: Path) -> None:
    settings = [("ppo.kl_coef=-1", {"ppo.kl_coef": -1}), ("nothing=1", {"nothing": 1})]
    with pytest.raises(UserError, match=r"(?s)ppo.kl_coef=-1.*nothing=1") as refusal:
        sweep.cells(root, "s", None, settings, [1, 2], "HEAD")
    assert str(refusal.value).count("kl_coef=-1") == 1, "the same problem of two seeds"


@pytest.mark.e2e
def test_a_failed_sweep_says_how_only_the_lost_runs_are_repeated(
    server: None, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployments.apply(root, None)
    commit = toy.git(root, "rev-parse", "HEAD").strip()
    monkeypatch.setattr(comparison, "find", lambda paths, name: comparison.Result("", 1, name, {}, {}))

    def run(seeds: list[int]) -> str:
        state: Any = sweep.sweep(grid={"ppo.kl_coef": [0.9]}, seeds=seeds, return_state=True)
        return f"{state.type.value}: {state.message}"

    FakeRun(monkeypatch, Failed(message="no disk"))
    lost = "; ".join(f"ppo.kl_coef=0.9 seed={seed}: Failed: no disk" for seed in (1, 2))
    again = f"Start the sweep again with `revision: {commit}` to run only these"
    assert run([1, 2]) == f"FAILED: 2 of 2 runs failed ({lost}). {again}"
    done = FakeRun(monkeypatch, Completed())
    assert run([1, 2]) == "COMPLETED: 1 setting(s), 2 runs, 0 of them done before"
    assert [values["parameters"]["revision"] for values in done.given] == [commit] * 2
