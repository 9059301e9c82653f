"""Stage ppo in small: what it refuses, which weights it keeps, what it writes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks import config
from rlhf_tasks.config.judge import Selection
from rlhf_tasks.data.batches import Ids, encode, load_tokenizer, read_table
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.evaluation.judges import making
from rlhf_tasks.modeling import contracts, models
from rlhf_tasks.modeling.scorers import RewardScorer
from rlhf_tasks.ppo import loop, watch
from rlhf_tasks.ppo.guards import GuardTripped, Trip, Watchdog
from rlhf_tasks.ppo.referee import Referee
from rlhf_tasks.ppo.rewards import ScoreScaler
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import ppo
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training import resume
from rlhf_tasks.training.state import State
from tests import small
from tests.ppo.test_trainer import Planted

SETTINGS = {
    "ppo.total_episodes": 48, "ppo.rollout_batch_size": 16, "ppo.num_mini_batches": 2,
    "ppo.response_length": 8, "ppo.num_selections": 3, "ppo.num_selection_prompts": 12,
    "ppo.num_sample_generations": 2,
}  # fmt: skip


def run(**changes: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    tracker = NullTracker("ppo")
    return ppo.run(small.view("ppo", SETTINGS | changes), Paths(), tracker), tracker.history()


@pytest.mark.parametrize("role", ["reward", "reward_heldout"])
def test_a_reward_model_of_another_sft_model_is_refused_before_training(role: str, models_here: Path) -> None:
    folder = models_here / "models" / role
    identity = (folder / contracts.IDENTITY).read_text(encoding="utf-8")
    parent = contracts.fingerprint(models_here / "models/sft")
    (folder / contracts.IDENTITY).write_text(identity.replace(parent, "0" * 16), encoding="utf-8")
    before = contracts.fingerprint(models_here / "models/policy")
    with pytest.raises(contracts.ContractError, match=f"models/{role} was made from another sft model"):
        run()
    assert contracts.fingerprint(models_here / "models/policy") == before


def test_a_reward_model_without_its_head_is_refused_before_training(models_here: Path) -> None:
    shutil.rmtree(models_here / "models/reward")
    shutil.copytree(models_here / "models/sft", models_here / "models/reward")
    with pytest.raises(contracts.ContractError, match="models/reward lacks its trained head"):
        run()


def test_the_kept_weights_are_those_the_heldout_reward_model_liked_best(models_here: Path) -> None:
    metrics, history = run(**{"ppo.learning_rate": 1e-2})
    tried = {row["episode"]: row["eval/heldout_scores"] for row in history if "eval/heldout_scores" in row}
    assert set(tried) == {0, 16, 32, 48}
    assert metrics["selected_episode"] == max(tried, key=lambda episode: tried[episode])
    assert metrics["selected_heldout_score"] == pytest.approx(max(tried.values()))


def short_answers(prompts: list[str], answers: list[str]) -> list[float]:
    return [-float(len(answer)) for answer in answers]


def torn_answers(prompts: list[str], answers: list[str]) -> list[float]:
    return [float("nan")] * len(answers)


def referee(function: str) -> dict[str, Any]:
    judge = {"kind": "function", "name": "shorter", "function": f"{__name__}:{function}"}
    return {"ppo.select_by": {"judge": judge, "max_failure_share": 0.5}}


def test_a_judge_that_chooses_keeps_the_weights_whose_answers_won_most_by_its_word(models_here: Path) -> None:
    metrics, history = run(**{"ppo.learning_rate": 1e-2} | referee("short_answers"))
    tried = {row["episode"]: row["eval/win_rate"] for row in history if "eval/win_rate" in row}
    assert set(tried) == {0, 16, 32, 48}
    assert len(set(tried.values())) > 1, "the law would hold for any choice"
    rows = pq.read_table(ppo.LOOKED_AT / "answers.parquet").to_pylist()
    for episode, rate in tried.items():
        leads = [len(r["reference"]) - len(r["response"]) for r in rows if r["episode"] == episode]
        assert rate == pytest.approx(
            sum(1.0 if lead > 0 else 0.5 * (lead == 0) for lead in leads) / len(leads)
        )
    assert metrics["selected_episode"] == max(tried, key=lambda episode: tried[episode])
    assert metrics["selected_win_rate"] == max(tried.values())
    assert "the best by the judge shorter" in (ppo.OUT / "README.md").read_text(encoding="utf-8")


def test_a_judge_that_chooses_and_fails_stops_ppo_with_its_reason(models_here: Path) -> None:
    with pytest.raises(UserError, match="judge shorter: 12 of 12 verdicts failed"):
        run(**referee("torn_answers"))


LOCAL = {"name": "own", "path": "models/sft", "revision": None, "micro_batch_tokens": 64}
LLM = {
    "base_url": "http://127.0.0.1:9/v1", "model": "m", "key_variable": None, "logprobs": False,
    "max_reply_tokens": 1, "concurrency": 1, "timeout_seconds": 1.0, "max_retries": 0, "budget": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("judge", "said"),
    [
        ({"kind": "function", "name": "own", "function": "nowhere:f"}, "nowhere:f cannot be imported"),
        ({"kind": "local", "prompt": "none.txt", **LOCAL}, "the prompt 'none.txt' cannot be read"),
        ({"kind": "pair_rm", "prompt": "none.txt", **LOCAL}, "the prompt 'none.txt' cannot be read"),
        ({"kind": "llm", "name": "own", "prompt": "none.txt", **LLM}, "the prompt 'none.txt' cannot be read"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_what_is_wrong_with_a_judge_that_chooses_is_told_by_its_own_key(
    models_here: Path, judge: dict[str, Any], said: str
) -> None:
    """And of the same judge in the list, by the list's."""
    settings = Selection.model_validate({"judge": judge, "max_failure_share": 0.5})
    with pytest.raises(UserError) as told:
        Referee(small.runtime(), settings)
    assert str(told.value).startswith(f"ppo.select_by.judge: {said}")
    with pytest.raises(UserError, match=rf"^judge\.judges: {re.escape(said)}"):
        making.single(settings.judge, torch.device("cpu"), 0.5)


def test_a_judge_without_a_revision_is_told_by_its_own_key() -> None:
    judge = {"kind": "local", "prompt": "hhh", **LOCAL, "path": "some/one"}
    with pytest.raises(ConfigError) as told:
        config.validate(small.params({"ppo.select_by": {"judge": judge, "max_failure_share": 0.5}}), "test")
    assert "ppo.select_by.judge.local: path of judge own='some/one' is not a local folder" in str(told.value)
    assert "judge.judges" not in str(told.value)


def test_the_optimised_reward_under_another_name_does_not_choose(models_here: Path) -> None:
    shutil.copytree(models_here / "models/reward", models_here / "models/other")
    judge = {"kind": "reward_model", "name": "other", "path": "models/other"}
    with pytest.raises(UserError, match=r"models/other has the weights of models/reward"):
        run(**{"ppo.select_by": {"judge": judge, "max_failure_share": 0.05}})


def test_a_policy_names_the_reward_it_was_trained_to_please_and_no_other(models_here: Path) -> None:
    run()
    assert "reward" in contracts.parents_of(ppo.OUT)
    run(**{"ppo.scorers": [{"kind": "dummy"}]})
    assert "reward" not in contracts.parents_of(ppo.OUT), "the critic alone started from it"


def test_weights_are_kept_from_before_training_where_all_of_it_made_them_worse(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    falling = iter([4.0, 3.0, 2.0, 1.0])
    original = watch.Watch._answered

    def worse(self: watch.Watch, prompts: list[str]) -> Any:
        answers, scores, _, parts = original(self, prompts)
        found = next(falling) if len(prompts) > watch.NUM_SAMPLE_PROMPTS else 0.0
        return answers, scores, torch.full((len(prompts),), found), parts

    monkeypatch.setattr(watch.Watch, "_answered", worse)
    metrics, _ = run()
    assert metrics["selected_episode"] == 0
    assert contracts.fingerprint(models_here / "models/policy") == contracts.fingerprint(
        models_here / "models/sft"
    )


def test_metrics_have_the_names_of_the_field_and_samples_their_columns(models_here: Path) -> None:
    metrics, history = run()
    names = {
        "eps", "objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward",
        "objective/scores", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg",
        "loss/policy_avg", "loss/value_avg", "val/clipfrac_avg", "val/ratio", "val/ratio_var",
        "val/num_eos_tokens", "lr", "episode",
    }  # fmt: skip
    assert names <= set(metrics)
    assert [row["episode"] for row in history] == [0, 16, 32, 48]
    assert metrics["objective/rlhf_reward"] == pytest.approx(
        metrics["objective/scores"] + metrics["objective/non_score_reward"]
    )
    rows = pq.read_table(ppo.LOOKED_AT / "samples.parquet").to_pylist()
    assert {row["episode"] for row in rows} == {0, 48}, "twice: before training, and at its end"
    assert list(rows[0]) == ["episode", "prompt", "response", "score", "reward_heldout"]
    answers = pq.read_table(ppo.LOOKED_AT / "answers.parquet").to_pylist()
    given = {row["prompt"]: row["reference"] for row in read_table(Paths(), "prompts", "validation")}
    asked = SETTINGS["ppo.num_selection_prompts"]
    assert [row["episode"] for row in answers] == [at for at in (0, 16, 32, 48) for _ in range(asked)]
    assert all(given[row["prompt"]] == row["reference"] for row in answers)
    assert list(answers[0]) == ["episode", "prompt", "reference", "response"]
    assert models.load_causal(ppo.OUT) is not None
    assert contracts.identity_of(ppo.OUT)["parents"]["sft"] == contracts.fingerprint(Path("models/sft"))


def test_the_same_seed_writes_the_same_bytes(models_here: Path) -> None:
    def written() -> dict[str, bytes]:
        run()
        files = [*ppo.OUT.iterdir(), *ppo.LOOKED_AT.iterdir()]
        return {file.name: file.read_bytes() for file in sorted(files)}

    assert written() == written()


# ------------------------------------------------------------------------ guards, and going on


def plain(series: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "eps" and not k.startswith("time/")} for row in series]


EVERYTHING = {
    "ppo.adaptive_kl": {"target": 0.5, "horizon": 100, "clip": 0.2}, "ppo.ptx": {"coef": 0.1, "text": None},
    "ppo.score_scaling": {"subtract_mean": True, "clip": 2.0},
    "ppo.critic_warmup": {"max_updates": 2, "settled": 0.9},
    "ppo.reference_sync": {"every": 1, "alpha": 0.5}, "resume.every_seconds": 1e-6,
}  # fmt: skip


class Killed(BaseException):
    pass


Fault = Callable[[pytest.MonkeyPatch], None]
BAD = (3, 5)
"""Which rollouts a fault is planted in; those tried again count on."""


def no_fault(patch: pytest.MonkeyPatch) -> None:
    pass


def scores_that_are_none(patch: pytest.MonkeyPatch) -> None:
    original, calls = ScoreScaler.__call__, []

    def scaled(self: ScoreScaler, *given: Any) -> torch.Tensor:
        calls.append(1)
        return original(self, *given) * (torch.nan if len(calls) in BAD else 1)

    patch.setattr(ScoreScaler, "__call__", scaled)


def kl_too_high(patch: pytest.MonkeyPatch) -> None:
    original, calls = Watchdog.look, []

    def look(self: Watchdog, metrics: Mapping[str, float]) -> list[Trip]:
        calls.append(1)
        return original(self, {**metrics, "objective/kl_k1": 99.0 if len(calls) in BAD else 0.1})

    patch.setattr(Watchdog, "look", look)


def assert_a_kill_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, after: int, changes: Mapping[str, Any], fault: Fault = no_fault
) -> None:
    """Killed after so many rollouts and gone on with: the bytes and curves of the uninterrupted run."""
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(small.ROOT / name, Path())
    changes = {"resume.every_seconds": 1e-6, **changes}
    with monkeypatch.context() as patch:
        fault(patch)
        patch.setenv("RLHF_STATE_DIR", "uninterrupted")
        metrics, series = run(**changes)
    weights, samples = contracts.fingerprint(ppo.OUT), pq.read_table(ppo.LOOKED_AT / "samples.parquet")
    save = resume.Snapshots.save

    def saved(self: resume.Snapshots, step: int, state: State) -> None:
        save(self, step, state)
        if step == after:
            raise Killed

    with monkeypatch.context() as patch:
        fault(patch)
        patch.setenv("RLHF_STATE_DIR", "killed")
        with patch.context() as inner:
            inner.setattr(resume.Snapshots, "save", saved)
            with pytest.raises(Killed):
                run(**changes)
        again, series_again = run(**changes)
    assert plain([again]) == plain([metrics])
    assert plain(series_again) == plain(series)
    assert contracts.fingerprint(ppo.OUT) == weights
    assert pq.read_table(ppo.LOOKED_AT / "samples.parquet") == samples


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EVERYTHING,
        {"ppo.lora": {"r": 4, "alpha": 8.0, "value": True}},
        {"ppo.value_model": "shared", "ppo.critic_init": "sft"},
    ],
    ids=["default", "everything", "lora", "shared"],
)
@pytest.mark.parametrize("rollouts", [1, 2])
def test_a_killed_run_goes_on_to_the_same_bytes_and_curves(
    models_here: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], rollouts: int
) -> None:
    assert_a_kill_changes_nothing(monkeypatch, rollouts, changes)


FAR = {"ppo.learning_rate": 3e-3, "ppo.kl_coef": 1e-4, "ppo.total_episodes": 96}


def guards(**changes: Any) -> dict[str, Any]:
    shipped: dict[str, Any] = small.params()["ppo"]["guards"]
    return shipped | {"patience": 1, "kl_max": 1.0, "checkpoint_every": 1} | changes


class Events(NullTracker):
    def __init__(self) -> None:
        super().__init__("ppo")
        self.events: list[tuple[str, str]] = []

    def event(self, name: str, text: str, *, step: int) -> None:
        self.events.append((name, text))


def run_guarded(**changes: Any) -> tuple[Events, dict[str, float]]:
    tracker = Events()
    view = small.view("ppo", SETTINGS | FAR | {"ppo.guards": guards(**changes)})
    return tracker, ppo.run(view, Paths(), tracker)


def test_a_tripped_guard_stops_the_stage_and_says_why(models_here: Path) -> None:
    before = contracts.fingerprint(ppo.OUT)
    with pytest.raises(GuardTripped, match=r"objective/kl_k1 = .* exceeds 1; likely cause: .*kl_coef"):
        run_guarded(action="stop")
    assert contracts.fingerprint(ppo.OUT) == before, "nothing half-done is kept"


def test_a_warning_goes_on(models_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker, metrics = run_guarded(action="warn")
    assert metrics["episode"] == 96
    assert {name for name, _ in tracker.events} == {"guard.kl_high"}
    assert "guard kl_high: objective/kl_k1" in capsys.readouterr().out
    assert metrics["guards/trips"] == len(tracker.events)
    told = json.loads((ppo.LOOKED_AT / "guards.json").read_text(encoding="utf-8"))["trips"]
    assert [(f"guard.{trip['guard']}", trip["said"]) for trip in told] == tracker.events
    assert all(trip["episode"] % 16 == 0 for trip in told)


def test_a_roll_back_goes_to_when_all_was_well_and_raises_kl_coef(
    models_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Update 4's rollout is bad: the weights it sampled from, those after update 3, are not gone back to."""
    looks: list[float] = []
    look = Watchdog.look

    def once(self: Watchdog, metrics: Mapping[str, float]) -> list[Trip]:
        looks.append(metrics["episode"] / 16)
        bad = {"objective/kl_k1": 99.0} if len(looks) == 4 else {"objective/kl_k1": 0.1}
        return look(self, {**metrics, **bad})

    monkeypatch.setattr(Watchdog, "look", once)
    tracker, metrics = run_guarded(action="roll_back", kl_coef_factor=10.0)
    assert looks == [1, 2, 3, 4, 3, 4, 5, 6]
    assert [name for name, _ in tracker.events] == ["guard.kl_high"]
    rows = tracker.history()
    assert [row["episode"] for row in rows] == list(range(0, 129, 16)), "no point is overwritten"
    assert rows[4]["objective/kl_coef"] == pytest.approx(1e-4)
    assert metrics["episode"] == 128
    assert metrics["objective/kl_coef"] == pytest.approx(1e-3)
    assert metrics["guards/trips"] == 1, "what was told is not rolled back"
    assert "Back from update 4 to 2, kl_coef is now 0.001" in capsys.readouterr().out


def roll_back() -> dict[str, Any]:
    """Guards that nothing trips but a planted fault."""
    calm = {
        "kl_min": -99.0,
        "perplexity_min": 1e-9,
        "ratio_min": 1e-9,
        "ratio_max": 1e9,
        "eos_share_min": 0.0,
    }
    planted = guards(action="roll_back", kl_max=50.0, kl_coef_factor=10.0, **calm)
    return {"ppo.truncation": "none", "ppo.guards": planted}


@pytest.mark.parametrize(
    ("fault", "name", "tries", "num_rows"),
    [(scores_that_are_none, "non_finite", [2, 3, 4], 6), (kl_too_high, "kl_high", [2, 4, 6], 8)],
    ids=["no-numbers", "kl"],
)
def test_after_each_roll_back_the_second_update_is_tried_again(
    fault: Fault,
    name: str,
    tries: list[int],
    num_rows: int,
    models_here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the same weights and random numbers, hence on the same answers; dearer is their KL alone."""
    fault(monkeypatch)
    _, history = run(**roll_back())
    told = json.loads((ppo.LOOKED_AT / "guards.json").read_text(encoding="utf-8"))["trips"]
    assert [trip["guard"] for trip in told] == [name, name]
    assert [row["episode"] for row in history] == [16 * n for n in range(num_rows)]
    kept = ("objective/raw_scores", "objective/entropy", "objective/ref_perplexity", "val/response_length")
    first, *again = ([history[row][key] for key in kept] for row in tries)
    assert again == [first, first]
    assert len({history[row]["objective/entropy"] for row in (1, 2, -1)}) == 3, "other updates, other answers"
    coefs = [history[row]["objective/kl_coef"] for row in tries]
    assert coefs == pytest.approx([0.03, 0.3, 3.0])
    weights = models.load_causal(ppo.OUT).state_dict().values()
    assert all(bool(value.isfinite().all()) for value in weights)


@pytest.mark.parametrize("fault", [scores_that_are_none, kl_too_high])
def test_a_run_killed_after_a_roll_back_goes_on_to_the_same_bytes_and_curves(
    fault: Fault, models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_a_kill_changes_nothing(monkeypatch, 3, roll_back(), fault)


def test_roll_backs_come_to_an_end(models_here: Path) -> None:
    with pytest.raises(GuardTripped, match="after 2 roll backs"):
        run_guarded(action="roll_back", kl_coef_factor=1.001, max_roll_backs=2)


def test_a_batch_that_is_no_number_is_written_out(models_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, scores: torch.Tensor, reduce: Any) -> torch.Tensor:
        return scores * torch.nan

    monkeypatch.setattr("rlhf_tasks.ppo.rewards.ScoreScaler.__call__", broken)
    with pytest.raises(GuardTripped, match=r"non_finite: .*after update 0; see (.*\.pt)") as caught:
        run(**{"ppo.truncation": "none"})
    file = str(caught.value).split("see ")[1].split(")")[0]
    assert len(torch.load(file, weights_only=False)["responses"]) == 16


def test_a_policy_that_fell_apart_trips_the_guard(models_here: Path) -> None:
    wild = {"ppo.learning_rate": 1e30, "ppo.num_mini_batches": 1, "ppo.num_ppo_epochs": 1}
    with pytest.raises(GuardTripped, match=r"non_finite: the model's logits are NaN"):
        run(**wild)


def test_a_score_that_is_no_number_trips_the_guard(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "seen = []",
        "def score(prompts, responses):",
        "    seen.append(0)",
        "    return [float('nan') if len(seen) > 2 else 0.0] * len(prompts)",
    ]
    (models_here / "broken.py").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.syspath_prepend(str(models_here))
    function = {"kind": "function", "weight": 1.0, "function": "broken:score"}
    with pytest.raises(GuardTripped, match="non_finite: function broken:score gave nan"):
        run(**{"ppo.scorers": [function], "ppo.num_sample_generations": 0})


@pytest.mark.parametrize("look", [1, 2, 4], ids=["before training", "at a selection", "at the end"])
def test_a_look_that_finds_no_numbers_trips_the_guard_and_keeps_the_curve(
    look: int, models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at episode 0, and one after each update; the held-out model's word is checked as any other."""
    scored, looks = RewardScorer.__call__, []

    def torn(self: RewardScorer, queries: Any, responses: Any) -> torch.Tensor:
        found = scored(self, queries, responses)
        if len(queries) == 12:  # the selection prompts; by the optimised model, then by the held-out one
            looks.append(0)
        return found * torch.nan if len(looks) == 2 * look else found

    monkeypatch.setattr(RewardScorer, "__call__", torn)
    tracker = Events()
    with pytest.raises(GuardTripped, match="non_finite: models/reward_heldout gave NaN") as caught:
        ppo.run(small.view("ppo", SETTINGS | {"ppo.num_sample_generations": 0}), Paths(), tracker)
    assert [name for name, _ in tracker.events] == ["guard.non_finite"]
    file = str(caught.value).split("see ")[1].split(")")[0]
    assert len(torch.load(file, weights_only=False)["responses"]) == 12
    updates = [row["episode"] for row in tracker.history() if "objective/kl" in row]
    assert updates == [16.0 * n for n in range(1, look)], "what was learned before is told"


STOP = 140
"""A token that some answers of a random model draw."""


@pytest.mark.parametrize(
    ("truncation", "unfinished"), [("eos_trick_replace", [-1.5, -1.5]), ("bootstrap", [32.0, 16.0])]
)
def test_a_selection_scores_its_answers_under_the_truncation_rule(
    truncation: str, unfinished: list[float], models_here: Path
) -> None:
    """The optimised score is an answer's length, the held-out one half of it; those cut are of 32 tokens."""
    seen: list[list[Ids]] = []

    def halves(queries: Sequence[Ids], responses: Sequence[Ids]) -> torch.Tensor:
        seen.append(list(responses))
        return torch.tensor([len(response) / 2 for response in responses])

    def lengths(queries: Sequence[Ids], responses: Sequence[Ids]) -> torch.Tensor:
        return 2 * halves(queries, responses)

    settings = small.ppo(
        truncation=truncation, missing_eos_score=-1.5, response_length=32, stop_token=STOP,
        num_selection_prompts=12,
    )  # fmt: skip
    looking = watch.Watch(
        small.runtime(), settings, models.load_causal(ppo.SFT), load_tokenizer(ppo.SFT),
        Planted(lengths), cast(RewardScorer, halves), None, 1,
    )  # fmt: skip
    found, answers = looking.select(16), seen[0]
    ended = [len(answer) for answer in answers if answer[-1] == STOP]
    num_cut = len(answers) - len(ended)
    assert 0 < num_cut < 12, "some of both"
    expected = [
        (share * sum(ended) + num_cut * score) / len(answers)
        for share, score in zip((1, 0.5), unfinished, strict=True)
    ]
    assert found["eval/scores"] == pytest.approx(expected[0])
    assert found["eval/heldout_scores"] == pytest.approx(expected[1])
    assert found["eval/reward_gap"] == pytest.approx(expected[0] - expected[1])
    assert found["eval/response_length"] == pytest.approx((sum(ended) + 32 * num_cut) / len(answers))


def test_samples_are_shown_as_often_as_asked_first_and_last_included() -> None:
    assert [sorted(loop._shown(n, 8)) for n in (0, 1, 2, 3, 9)] == [
        [], [8], [0, 8], [0, 4, 8], list(range(9)),
    ]  # fmt: skip


def test_ptx_learns_the_documents_of_a_file(tmp_path: Path) -> None:
    """Cut where the model ends; nothing is learned across two of them."""
    tokenizer, policy, file = small.tokenizer(), small.causal(), tmp_path / "text.txt"
    documents = [" ".join(small.WORDS * 10), "w7 w8\nw9", "w6 w5"]
    file.write_text(f"\n{documents[0]}\n\n \n{documents[1]}\n\n{documents[2]}\n", encoding="utf-8")
    rows = ppo._ptx_text(small.ppo(ptx={"coef": 0.1, "text": str(file)}), tokenizer, policy)
    assert rows is not None
    assert {len(query) for query in rows.queries} == {1}
    pieces = [query + response for query, response in zip(rows.queries, rows.responses, strict=True)]
    most = policy.config.max_position_embeddings
    first, *others = encode(tokenizer, documents)
    assert pieces == [*[first[n : n + most] for n in range(0, len(first), most)], *others]
    assert len(first) > most


@pytest.mark.parametrize("content", [None, " \n\n"])
def test_ptx_without_a_text_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"ppo\.ptx\.text: .*(cannot be read|holds no text)"):
        ppo._ptx_text(small.ppo(ptx={"coef": 0.1, "text": str(file)}), small.tokenizer(), small.causal())


def test_a_token_that_is_none_cannot_stop_answers(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"ppo\.stop_token=99999 is no token"):
        run(**{"ppo.stop_token": 99999})


def test_without_a_reward_model_the_last_policy_is_kept(models_here: Path) -> None:
    metrics, history = run(**small.WITHOUT_REWARD)
    assert metrics["selected_episode"] == 48
    assert "eval/heldout_scores" not in history[0]
    assert set(contracts.identity_of(ppo.OUT)["parents"]) == {"sft"}


def test_a_policy_says_which_token_ends_its_answers(models_here: Path) -> None:
    run(**{"ppo.stop_token": 7})
    assert models.load_causal(ppo.OUT).generation_config.eos_token_id == 7
