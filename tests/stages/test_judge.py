"""Stage judge in small: the keys it promises, and that a verdict has no sides."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks import console
from rlhf_tasks.data.batches import load_tokenizer, read_table
from rlhf_tasks.data.synthetic import gold
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import labels, summary, trust
from rlhf_tasks.evaluation.judges import making
from rlhf_tasks.evaluation.judges.scoring import Scoring
from rlhf_tasks.evaluation.labels import Label, Pair
from rlhf_tasks.modeling import contracts, models
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import judge as stage
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.evaluation import endpoint

SETTINGS = {
    "judge.num_examples": 10,
    "judge.judges": [small.GOLD, small.HELDOUT],
    "judge.num_samples_shown": 3,
}


@pytest.fixture(scope="module")
def project(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(trained, tmp_path_factory.mktemp("judged") / "project")


@pytest.fixture(scope="module")
def metrics(project: Path) -> dict[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        return stage.run(small.view("judge", SETTINGS), Paths(), NullTracker())


def test_every_judge_and_pair_has_a_win_rate_with_its_interval(metrics: dict[str, float]) -> None:
    for judge in ("gold", "reward_model"):
        for pair in ("sft_vs_reference", "policy_vs_reference", "policy_vs_sft"):
            low, rate, high = (metrics[f"{judge}/{pair}/{key}"] for key in ("low", "win_rate", "high"))
            assert 0 <= low <= rate <= high <= 1


def test_the_win_rate_while_ppo_trained_is_a_curve(
    project: Path, metrics: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    tracker = NullTracker("judge")
    stage.run(small.view("judge", SETTINGS), Paths(), tracker)
    before, after = tracker.history()
    assert (before["episode"], after["episode"]) == (0, 16)
    assert before["gold/win_rate"] < 0.2, "it said next to nothing"
    assert after["gold/win_rate"] == after["reward_model/win_rate"] == 0.5, "it said what the references say"


def test_what_else_the_stage_promises_is_there(metrics: dict[str, float]) -> None:
    wanted = {
        f"gold/{who}/{f}" for who in ("reference", "sft", "policy") for f in ("coverage", "faithfulness")
    }
    plain = ("rouge_l", "length", "ended", "distinct_1", "distinct_2", "repetition")
    wanted |= {f"{key}/{who}" for key in plain for who in ("sft", "policy")}
    wanted |= {
        f"{key}/{who}" for key in ("perplexity/sft_text", "choice") for who in ("base", "sft", "policy")
    }
    wanted |= {"length/policy_over_sft"}
    wanted |= {
        f"agreement/{r}/{who}_samples" for r in ("reward", "reward_heldout") for who in ("sft", "policy")
    }
    wanted |= {"reward_model/policy_vs_sft/matched_length_gain"}
    assert wanted <= set(metrics)


def test_verdicts_and_answers_are_written_as_they_were_judged(
    project: Path, metrics: dict[str, float]
) -> None:
    verdicts = pq.read_table(project / stage.OUT / "verdicts.parquet").to_pylist()
    answers = pq.read_table(project / stage.OUT / "answers.parquet").to_pylist()
    assert len(verdicts) == 2 * 3 * 10
    assert len(answers) == 10
    by_judge = [v for v in verdicts if (v["judge"], v["a"], v["b"]) == ("gold", "policy", "reference")]
    points = []
    for verdict in by_judge:
        row = answers[verdict["index"]]
        ours, theirs = gold(row["prompt"], row["policy"]).score, gold(row["prompt"], row["reference"]).score
        assert (
            (verdict["score_a"], verdict["score_b"])
            == (ours, theirs)
            == (row["gold/policy"], row["gold/reference"])
        )
        points.append(1.0 if ours > theirs else 0.5 if ours == theirs else 0.0)
        assert verdict["verdict"] == points[-1]
    assert metrics["gold/policy_vs_reference/win_rate"] == pytest.approx(sum(points) / 10)


class Given:
    """Scores by the letter that an answer begins with."""

    def __init__(self, scores: dict[str, list[float]]) -> None:
        self._scores = scores

    def scores(self, prompts: Sequence[str], answers: Sequence[str]) -> list[float]:
        return self._scores[answers[0][0]]

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        return {}


def test_swapping_the_contenders_mirrors_the_verdict() -> None:
    scores = {"policy": [1.0, 0.5, 0.2, 0.9, 0.3], "sft": [0.4, 0.5, 0.6, 0.1, 0.0]}
    texts = ["one", "two", "three", "four", "five"]
    judge = Scoring("gold", Given({"p": scores["policy"], "s": scores["sft"]}))
    policy, sft = (["p" * (i + 1) for i in range(5)], ["s" * (5 - i) for i in range(5)])
    ours, theirs = judge.compare(texts, policy, sft), judge.compare(texts, sft, policy)
    there = summary.metrics(("gold", "policy", "sft"), ours, policy, sft)
    back = summary.metrics(("gold", "sft", "policy"), theirs, sft, policy)
    assert there["gold/policy_vs_sft/win_rate"] == pytest.approx(0.7)  # three wins, a tie, a loss
    assert back["gold/sft_vs_policy/win_rate"] == pytest.approx(0.3)
    assert there["gold/policy_vs_sft/low"] == pytest.approx(1 - back["gold/sft_vs_policy/high"])
    assert there["gold/policy_vs_sft/high"] == pytest.approx(1 - back["gold/sft_vs_policy/low"])
    for key, mirrored in (("length_controlled", 1), ("decisive", 1)):
        a, b = f"gold/policy_vs_sft/{key}", f"gold/sft_vs_policy/{key}"
        assert there[a] == pytest.approx(mirrored - back[b])
        assert there[f"{a}/low"] == pytest.approx(mirrored - back[f"{b}/high"])
    assert there["gold/policy_vs_sft/p_value"] == back["gold/sft_vs_policy/p_value"]
    assert ours.outcomes.tolist() == (1 - theirs.outcomes).tolist()


def test_the_same_seed_judges_the_same(project: Path, metrics: dict[str, float]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert stage.run(small.view("judge", SETTINGS), Paths(), NullTracker()) == metrics, (
            "from kept answers"
        )
        shutil.rmtree(project / ".rlhf/answers")
        assert stage.run(small.view("judge", SETTINGS), Paths(), NullTracker()) == metrics, "sampled again"


def test_the_gold_judge_is_refused_for_data_it_does_not_know() -> None:
    with pytest.raises(UserError, match="gold knows the synthetic task only"):
        making.build(small.view("judge").judge, "files", torch.device("cpu"))


def test_a_judge_that_compares_adds_what_only_it_can_say(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", endpoint.KEY)
    Path("prompt.txt").write_text(endpoint.PROMPT.replace("{prompt}", "{prompt}\n."), encoding="utf-8")
    with endpoint.serving() as server:
        server.reply = lambda body: endpoint.completion("A")
        llm = {
            "kind": "llm", "name": "gpt", "base_url": server.url, "model": endpoint.MODEL,
            "key_variable": "JUDGE_KEY", "prompt": "prompt.txt", "logprobs": False, "max_reply_tokens": 1,
            "concurrency": 4, "timeout_seconds": 10.0, "max_retries": 0, "budget": None,
        }  # fmt: skip
        both = {"kind": "all_of", "name": "both", "judges": ["gpt", "gold"]}
        given = SETTINGS | {"judge.judges": [small.GOLD, llm, both]}
        found = stage.run(small.view("judge", given), Paths(), NullTracker())
        asked = len(server.bodies)
        assert stage.run(small.view("judge", given), Paths(), NullTracker()) == found
        assert len(server.bodies) == asked
    assert found["gpt/policy_vs_sft/win_rate"] == 0.5
    assert found["gpt/policy_vs_sft/position_bias"] == 1.0
    assert found["gpt/policy_vs_sft/cost/replies"] == 20
    assert found["gpt/policy_vs_sft/cost/tokens"] == 200
    assert found["both/policy_vs_sft/win_rate"] == 0.5
    assert "kappa/gold_and_gpt" in found
    assert "gold/policy_vs_sft/position_bias" not in found
    rows = [r for r in pq.read_table(stage.OUT / "verdicts.parquet").to_pylist() if r["judge"] == "gpt"]
    assert {(r["score_a"], r["a_shown_first"], r["a_shown_second"]) for r in rows} == {(None, 1.0, 0.0)}


def test_judges_are_compared_with_what_people_said(models_here: Path) -> None:
    rows = read_table(Paths(), "prompts", "test")[:4]
    pairs = [Pair(row["prompt"], "policy", "sft", row["reference"], " my stuff") for row in rows]
    for pair, outcome in zip(pairs, (1.0, 1.0, 0.0, None), strict=True):
        labels.add(Path("labels.jsonl"), Label(pair, outcome))
    found = stage.run(
        small.view("judge", SETTINGS | {"judge.labels": "labels.jsonl"}), Paths(), NullTracker()
    )
    scores = [
        gold(pair.prompt, pair.answer_a).score > gold(pair.prompt, pair.answer_b).score for pair in pairs
    ]
    assert scores[:3] == [True, True, True], "a reference is better than next to nothing"
    assert found["human/labels"] == 3, "what was passed over is no label"
    assert found["human/gold/agreement"] == pytest.approx(2 / 3)
    assert found["human/gold/kappa"] == 0, "who always says the same agrees by chance"
    assert "human/reward_model/kappa" in found


class Listener(NullTracker):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def event(self, name: str, text: str, *, step: int) -> None:
        self.events.append(name)


def test_a_judge_that_ppo_optimised_is_told_in_every_place(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Path("models/policy")
    models.save(
        models.load_causal(policy), load_tokenizer(policy), policy, card="a card",
        identity=contracts.identity("policy", {"reward": contracts.fingerprint(Path("models/reward"))}),
    )  # fmt: skip
    console.set_quiet(False)
    optimised = small.HELDOUT | {"name": "optimised", "path": "models/reward"}
    tracker = Listener()
    found = stage.run(
        small.view("judge", SETTINGS | {"judge.judges": [small.GOLD, optimised]}), Paths(), tracker
    )
    assert found["optimised/is_optimised_reward"] == 1.0
    assert "gold/is_optimised_reward" not in found
    by_reward = found["optimised/policy_vs_sft/win_rate"]
    assert found["reward_gap/win_rate_by_reward"] == by_reward
    assert found["reward_gap/optimised"] == 0
    assert found["reward_gap/gold"] == pytest.approx(by_reward - found["gold/policy_vs_sft/win_rate"])
    assert "WARNING: judge optimised (models/reward) is the reward model" in capsys.readouterr().out
    assert tracker.events == ["judge_is_the_optimised_reward"]


def test_without_reward_models_the_gold_judge_judges_alone(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for folder in trust.REWARDS.values():
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "README.md").write_text("none", encoding="utf-8")
    found = stage.run(
        small.view("judge", SETTINGS | {"judge.judges": [small.GOLD], "judge.retention": None}),
        Paths(),
        NullTracker(),
    )
    assert 0 <= found["gold/policy_vs_sft/win_rate"] <= 1
    unwanted = ("agreement", "reward", "perplexity", "choice")
    assert [key for key in found if any(word in key for word in unwanted)] == []


class Tables(NullTracker):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.tables[name] = [dict(row) for row in rows]


def test_every_verdict_is_a_row_of_a_table_with_what_was_judged(models_here: Path) -> None:
    tracker = Tables()
    stage.run(small.view("judge", SETTINGS | {"judge.judges": [small.GOLD]}), Paths(), tracker)
    rows = tracker.tables["verdicts"]
    assert len(rows) == 3 * 10
    for row in rows:
        ours, theirs = (gold(row["prompt"], row[answer]).score for answer in ("answer_a", "answer_b"))
        assert row["verdict"] == (ours > theirs) + 0.5 * (ours == theirs)
    assert [row["pair"] for row in tracker.tables["win_rates"]] == [
        "sft vs reference", "policy vs reference", "policy vs sft"
    ]  # fmt: skip
    bins = pq.read_table(stage.OUT / "calibration.parquet").to_pylist()
    origins = {(row["model"], row["origin"]) for row in bins}
    assert {(m, "given") for m in trust.REWARDS} <= origins
    lengths = pq.read_table(stage.OUT / "lengths.parquet").to_pylist()
    assert {(row["judge"], row["who"]) for row in lengths} == {
        ("gold", who) for who in ("reference", "sft", "policy")
    }
