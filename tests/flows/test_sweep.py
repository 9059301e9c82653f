"""What a sweep decides by itself; no server is started here."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Failed, Running

from flows import sweep, sweep_runs
from flows.sweep_runs import Cell, Data, Lost, Runs, SweepFailed
from rlhf_tasks import config
from rlhf_tasks.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Prefect


class FakeRuns(Runs):
    """Runs without a server: the first few reads of a state complete a run; the last of them changes data."""

    def __init__(self, root: Path, *, reads: int, end: State[Any] | None = None) -> None:
        super().__init__("any", None, "c0ffee", promote=False)
        self.root, self.reads, self.final = root, reads, end or Completed()
        self.started: list[str] = []
        self.cancelled: list[Any] = []
        self.shown: list[tuple[str, int]] = []

    def start(self, cell: Cell) -> str:
        self.started.append(cell.experiment)
        return cell.experiment

    def state(self, identity: Any) -> State[Any]:
        self.reads -= 1
        if self.reads == 0:
            (self.root / "given/rows.txt").write_text("other rows\n", encoding="utf-8")
        return self.final if self.reads >= 0 else Running()

    def doing(self, identity: Any) -> str:
        return "ppo: running"

    def cancel(self, identity: Any) -> None:
        self.cancelled.append(identity)

    def show(self, doing: Mapping[str, str], ended: int) -> None:
        self.shown.append(("; ".join(f"{name}: {what}" for name, what in doing.items()), ended))


def first_data(root: Path) -> Data:
    data = Data(root)
    data.fingerprint(config.load(root / "params.yaml"))
    return data


CELLS = [Cell("a", seed, {}, f"s-{seed}", f"seed={seed}") for seed in (1, 2, 3)]


def run_cells(runs: FakeRuns, parallel: int, data: Data) -> list[Lost]:
    return sweep_runs.run_cells(CELLS, runs, parallel, data, runs.show, poll_seconds=0.0)


def test_every_cell_runs_once_and_failed_ones_are_returned(root: Path) -> None:
    runs = FakeRuns(root, reads=9)
    assert run_cells(runs, 2, Data(root)) == []
    assert runs.started == ["s-1", "s-2", "s-3"]
    failing = FakeRuns(root, reads=9, end=Failed(message="no disk\nat all"))
    lost = run_cells(failing, 2, Data(root))
    assert [str(one) for one in lost] == [f"seed={seed}: Failed: no disk" for seed in (1, 2, 3)]


class CountedRuns(FakeRuns):
    """Every run completes at the second look at it; counts those that are alive, at each start."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, reads=0)
        self.alive = dict[str, int]()
        self.counts: list[int] = []

    def start(self, cell: Cell) -> str:
        identity = super().start(cell)
        self.alive[identity] = 0
        self.counts.append(len(self.alive))
        return identity

    def state(self, identity: Any) -> State[Any]:
        self.alive[identity] += 1
        if self.alive[identity] < 2:
            return Running()
        del self.alive[identity]
        return Completed()


@pytest.mark.parametrize(("parallel", "counts"), [(1, [1, 1, 1]), (2, [1, 2, 1]), (3, [1, 2, 3])])
def test_a_sweep_has_as_many_runs_alive_as_it_may(root: Path, parallel: int, counts: list[int]) -> None:
    """With two, both end at the same look, and the third one is then alone."""
    runs = CountedRuns(root)
    assert run_cells(runs, parallel, Data(root)) == []
    assert runs.counts == counts


def test_each_cell_has_a_line_that_says_what_it_does(root: Path) -> None:
    runs = FakeRuns(root, reads=2, end=Failed(name="Refused", message="KL 12 > 10"))
    with pytest.raises(SweepFailed):
        run_cells(runs, 2, first_data(root))
    refused = "seed=1: Refused: KL 12 > 10; seed=2: Refused: KL 12 > 10; seed=3: not started"
    assert runs.shown == [(refused, 2)]
    (root / "given/rows.txt").write_text("rows\n", encoding="utf-8")
    runs = FakeRuns(root, reads=1)
    with pytest.raises(SweepFailed):
        run_cells(runs, 2, first_data(root))
    assert runs.shown == [("seed=1: Completed; seed=2: ppo: running; seed=3: not started", 1)]


def test_a_refused_policy_is_a_result_of_the_sweep(root: Path) -> None:
    runs = FakeRuns(root, reads=9, end=Failed(name="Refused"))
    assert run_cells(runs, 3, Data(root)) == []


def test_a_setting_is_named_by_the_last_words_of_its_keys_as_far_as_they_differ_in_the_whole_sweep() -> None:
    keys = ["ppo.kl_coef", "sft.num_epochs", "reward.num_epochs", "ppo.kl_coef"]
    assert sweep_runs.short_names(keys) == {
        "ppo.kl_coef": "kl_coef",
        "sft.num_epochs": "sft.num_epochs",
        "reward.num_epochs": "reward.num_epochs",
    }


def test_two_settings_of_one_sweep_never_have_one_name(root: Path) -> None:
    settings = [{"sft.learning_rate": 1e-4}, {"ppo.learning_rate": 1e-4}]
    found, _ = sweep_runs.cells(root, "s", None, settings, [1], "HEAD", Data(root))
    assert [cell.name for cell in found] == [
        "sft.learning_rate=0.0001 seed=1",
        "ppo.learning_rate=0.0001 seed=1",
    ]


def test_the_runs_of_a_sweep_have_the_names_of_its_cells_and_promote_only_if_asked(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def run_deployment(deployment: str, **values: Any) -> FlowRun:
        given.update(values)
        return FlowRun(flow_id=uuid.uuid4())

    monkeypatch.setattr(sweep_runs, "run_deployment", run_deployment)
    cell = Cell("any", 2, {"ppo.kl_coef": 0.01}, "s-1", "kl_coef=0.01 seed=2")
    for promote in (False, True):
        Runs("f/d", "smoke", "c0ffee", promote).start(cell)
        assert given["flow_run_name"] == "kl_coef=0.01 seed=2"
        assert given["parameters"] == {
            "preset": "smoke", "seed": 2, "overrides": {"ppo.kl_coef": 0.01}, "name": "s-1",
            "revision": "c0ffee", "promote": promote,
        }  # fmt: skip


def test_changed_data_fails_the_sweep_and_names_the_doubtful_runs(root: Path) -> None:
    runs = FakeRuns(root, reads=2)
    with pytest.raises(SweepFailed, match=r"the data at given changed .*`dvc exp remove s-2`"):
        run_cells(runs, 1, first_data(root))
    assert runs.started == ["s-1", "s-2"]


def test_a_sweep_starts_no_run_on_other_data(root: Path) -> None:
    runs, data = FakeRuns(root, reads=9), first_data(root)
    (root / "given/rows.txt").write_text("other rows\n", encoding="utf-8")
    with pytest.raises(SweepFailed, match=r"Start the sweep again to run all of it on the new data$"):
        run_cells(runs, 2, data)
    assert runs.started == []


def test_a_sweep_that_ends_early_cancels_its_runs(root: Path) -> None:
    runs = FakeRuns(root, reads=1)
    with pytest.raises(SweepFailed, match="`dvc exp remove s-1`"):
        run_cells(runs, 2, first_data(root))
    assert runs.cancelled == ["s-2"]


def test_each_sweep_has_its_own_variable_whatever_its_seeds() -> None:
    first = sweep.variable("rlhf", "sweep", None, [{"ppo.kl_coef": 0.1}])
    assert first == sweep.variable("rlhf", "sweep", None, [{"ppo.kl_coef": 0.1}])
    others = [
        sweep.variable("rlhf", "sweep", None, [{"ppo.kl_coef": 0.2}]),
        sweep.variable("rlhf", "sweep", "smoke", [{"ppo.kl_coef": 0.1}]),
        sweep.variable("rlhf", "other", None, [{"ppo.kl_coef": 0.1}]),
        sweep.variable("another-project", "sweep", None, [{"ppo.kl_coef": 0.1}]),
    ]
    assert len({first, *others}) == 5


def test_a_grid_has_every_combination() -> None:
    assert sweep.combinations({"ppo.kl_coef": [0.1, 0.2], "ppo.advantages.gamma": [1.0, 0.9]}, []) == [
        {"ppo.kl_coef": a, "ppo.advantages.gamma": b} for a in (0.1, 0.2) for b in (1.0, 0.9)
    ]
    with pytest.raises(UserError, match="either grid"):
        sweep.combinations({}, [])


def test_the_name_of_a_run_is_a_digest_of_what_decides_its_result(root: Path) -> None:
    settings = [{"ppo.kl_coef": a, "ppo.advantages.gamma": b} for a in (0.1, 0.2) for b in (1.0, 0.9)]
    cells, _ = sweep_runs.cells(root, "s", None, settings, [1, 2], "HEAD", Data(root))
    assert len({cell.experiment for cell in cells}) == 8
    assert cells == sweep_runs.cells(root, "s", None, settings, [1, 2], "HEAD", Data(root))[0]
    other = [{**overrides, "service.retries": 5} for overrides in settings]
    again, _ = sweep_runs.cells(root, "s", None, other, [1, 2], "HEAD", Data(root))
    assert [c.experiment for c in again] == [c.experiment for c in cells], "retries decide no result"


@pytest.mark.parametrize(
    ("settings", "seeds"),
    [([{}], [1, 1]), ([{"ppo.kl_coef": 0.1}] * 2, [1]), ([{}, {"service.retries": 5}], [1])],
)
def test_a_run_is_in_a_sweep_once(root: Path, settings: list[dict[str, Any]], seeds: list[int]) -> None:
    with pytest.raises(UserError, match="seed 1: the sweep has this run twice; give each once"):
        sweep_runs.cells(root, "s", None, settings, seeds, "HEAD", Data(root))


def test_the_problems_of_all_settings_are_in_one_message(root: Path) -> None:
    settings = [{"ppo.kl_coef": -1}, {"nothing": 1}]
    with pytest.raises(UserError, match=r"(?s)ppo.kl_coef=-1.*nothing=1"):
        sweep_runs.cells(root, "s", None, settings, [1], "HEAD", Data(root))


def test_the_table_names_missing_runs_and_why() -> None:
    lost = [
        Lost(Cell("a=1", 2, {}, "x", "a=1 seed=2"), "Failed: no disk"),
        *(Lost(Cell("a=2", seed, {}, "x", f"a=2 seed={seed}"), "Failed: no disk") for seed in (1, 2)),
    ]
    rows = [{"setting": "a=1", "seeds": 1, "ppo/objective/kl": "1 ± 0"}]
    assert sweep.with_lost(rows, lost) == [
        {"setting": "a=1", "seeds": 1, "ppo/objective/kl": "1 ± 0", "missing": "seed 2: Failed: no disk"},
        {"setting": "a=2", "seeds": 0, "ppo/objective/kl": "–",
         "missing": "seed 1: Failed: no disk; seed 2: Failed: no disk"},
    ]  # fmt: skip
