"""Stage judge in small: its results document, its metrics and its tables."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks import console
from rlhf_tasks.data.batches import collate, read_table
from rlhf_tasks.data.synthetic import gold
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import responses, summary
from rlhf_tasks.judging.judges.build import ScoringJudge
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_causal, save_checkpoint
from rlhf_tasks.models.sampling import sample_responses
from rlhf_tasks.models.stop_tokens import close_responses, ends_of, has_ended
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.stages import judge as stage
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.judging import endpoint
from tests.loopback import serving

SETTINGS = {"judge.num_examples": 10, "judge.judges": [small.GOLD, small.HELDOUT]}


class Recorder(NullTracker):
    """Keeps what a tracker is told beside the metrics."""

    def __init__(self) -> None:
        super().__init__("judge")
        self.events: list[str] = []
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def event(self, name: str, text: str, *, step: int) -> None:
        self.events.append(name)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.tables[name] = [dict(row) for row in rows]


def run(tracker: NullTracker | None = None, root: Path | None = None, **changes: Any) -> dict[str, float]:
    """The stage's metrics; `changes` are of the section `judge`."""
    settings = SETTINGS | {f"judge.{key}": value for key, value in changes.items()}
    return stage.run(small.view("judge", settings), Paths(root or Path()), tracker or NullTracker("judge"))


def table(root: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(Paths(root).judge_results / name).to_pylist()
    return rows


@pytest.fixture(scope="module")
def project(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(trained, tmp_path_factory.mktemp("judged") / "project")


@pytest.fixture(scope="module")
def metrics(project: Path) -> dict[str, float]:
    return run(root=project)


def test_the_metrics_are_those_of_the_results_document(project: Path, metrics: dict[str, float]) -> None:
    assert EvaluationResults.read(Paths(project).evaluation_results).metrics() == metrics
    for judge in ("gold", "reward_model"):
        for pair in ("sft_vs_reference", "policy_vs_reference", "policy_vs_sft"):
            low, rate, high = (metrics[f"{judge}/{pair}/{key}"] for key in ("low", "win_rate", "high"))
            assert 0 <= low <= rate <= high <= 1


def test_the_win_rate_during_training_is_a_curve(project: Path, metrics: dict[str, float]) -> None:
    tracker = NullTracker("judge")
    run(tracker, project)
    before, after = tracker.history()
    assert (before["episode"], after["episode"]) == (0, 16)
    assert before["gold/win_rate"] < 0.2, "the first responses are almost empty"
    assert after["gold/win_rate"] == after["reward_model/win_rate"] == 0.5, "the last are the references"


def test_the_metrics_contain_every_documented_measure(metrics: dict[str, float]) -> None:
    expected = {"length/policy_over_sft"}
    for who in ("sft", "policy"):
        plain = {"rouge_l", "length", "ended", "distinct_1", "distinct_2", "repetition"}
        plain |= {"corpus_distinct_2", "sft_perplexity"}
        expected |= {f"{key}/{who}" for key in (*plain, "perplexity/sft_text", "choice")}
        expected |= {f"gold/{who}/coverage", f"gold/{who}/faithfulness"}
        expected |= {f"agreement/{reward}/{who}_samples" for reward in ("reward", "reward_heldout")}
    assert expected | {"gold/reference/coverage", "choice/base"} <= set(metrics)


def test_the_tables_hold_every_comparison_and_response(project: Path, metrics: dict[str, float]) -> None:
    comparisons, responses = table(project, "comparisons.parquet"), table(project, "answers.parquet")
    assert len(comparisons) == 2 * 4 * 10
    assert len(responses) == 10
    of_gold = [c for c in comparisons if (c["judge"], c["a"], c["b"]) == ("gold", "policy", "reference")]
    points = []
    for comparison in of_gold:
        row = responses[comparison["index"]]
        ours, theirs = gold(row["prompt"], row["policy"]).score, gold(row["prompt"], row["reference"]).score
        assert (row["gold/policy"], row["gold/reference"]) == (ours, theirs)
        assert (comparison["score_a"], comparison["score_b"]) == (ours, theirs)
        points.append(1.0 if ours > theirs else 0.5 if ours == theirs else 0.0)
        assert comparison["outcome"] == points[-1]
    assert metrics["gold/policy_vs_reference/win_rate"] == pytest.approx(sum(points) / 10)


def test_the_same_seed_gives_the_same_results(project: Path, metrics: dict[str, float]) -> None:
    paths = Paths(project)
    before = paths.evaluation_results.read_bytes()
    assert run(root=project) == metrics, "from kept responses"
    shutil.rmtree(paths.home / "responses")
    assert run(root=project) == metrics, "from new samples"
    assert paths.evaluation_results.read_bytes() == before


def preferring_a(server: endpoint.Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An llm judge that prefers what is shown first."""
    monkeypatch.setenv("JUDGE_KEY", endpoint.KEY)
    Path("prompt.txt").write_text(endpoint.PROMPT.replace("{prompt}", "{prompt}\n."), encoding="utf-8")
    server.reply = lambda body: endpoint.completion("A")
    return {
        **{"kind": "llm", "name": "gpt", "base_url": server.url, "model": endpoint.MODEL},
        **{"key_variable": "JUDGE_KEY", "prompt": "prompt.txt", "logprobs": False, "max_retries": 0},
    }


def test_a_pairwise_judge_adds_position_bias_and_cost(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(endpoint.Server()) as server:
        llm = preferring_a(server, monkeypatch)
        both = {"kind": "all_of", "name": "both", "judges": ["gpt", "gold"]}
        result = run(judges=[small.GOLD, llm, both])
        num_requests = len(server.bodies)
        assert run(judges=[small.GOLD, llm, both]) == result
        assert len(server.bodies) == num_requests, "the second run uses the kept replies"
    assert result["gpt/policy_vs_sft/win_rate"] == 0.5
    assert result["gpt/policy_vs_sft/position_bias"] == 1.0
    assert result["gpt/policy_vs_sft/cost/replies"] == 20
    assert result["gpt/policy_vs_sft/cost/tokens"] == 200
    assert result["both/policy_vs_sft/win_rate"] == 0.5
    assert "kappa/gold_and_gpt" in result
    assert "gold/policy_vs_sft/position_bias" not in result
    rows = [row for row in table(Path(), "comparisons.parquet") if row["judge"] == "gpt"]
    assert {(row["score_a"], row["a_shown_first"], row["a_shown_second"]) for row in rows} == {(None, 1, 0)}


def test_agreement_with_human_labels_is_measured_for_every_judge(models_here: Path) -> None:
    rows = read_table(Paths(), "prompts", "test")[:4]
    labels = [
        {"prompt": row["prompt"], "answer_a": row["reference"], "answer_b": " my stuff", "outcome": outcome}
        for row, outcome in zip(rows, (1, 1.0, 0, None), strict=True)
    ]
    Path("labels.jsonl").write_text("".join(json.dumps(one) + "\n" for one in labels), encoding="utf-8")
    result = run(labels="labels.jsonl")
    scores = [
        gold(row["prompt"], row["reference"]).score > gold(row["prompt"], " my stuff").score for row in rows
    ]
    assert scores[:3] == [True, True, True], "a reference is better than almost nothing"
    assert result["human/labels"] == 3, "a skipped pair is not counted"
    assert result["human/gold/agreement"] == pytest.approx(2 / 3)
    assert result["human/gold/kappa"] == 0, "a judge of one outcome agrees by chance only"
    assert "human/reward_model/kappa" in result


def test_a_judge_that_ppo_optimised_is_marked_in_metrics_events_and_output(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Path("models/policy")
    identity = contracts.identity("policy", {"reward": contracts.fingerprint(Path("models/reward"))})
    save_checkpoint(load_causal(policy), load_tokenizer(policy), policy, card="a card", identity=identity)
    console.set_quiet(False)
    optimized = small.HELDOUT | {"name": "optimized", "path": "models/reward"}
    tracker = Recorder()
    result = run(tracker, judges=[small.GOLD, optimized])
    assert result["optimized/is_optimised_reward"] == 1.0
    assert "gold/is_optimised_reward" not in result
    assert "WARNING: judge optimized (models/reward) is a reward that PPO" in capsys.readouterr().out
    assert tracker.events == ["judge_is_the_optimised_reward"]


def test_without_reward_models_there_are_no_reward_diagnostics(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for folder in (Paths(tmp_path).reward, Paths(tmp_path).reward_heldout):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "README.md").write_text("none", encoding="utf-8")
    result = run(root=tmp_path, judges=[small.GOLD], retention=None)
    assert 0 <= result["gold/policy_vs_sft/win_rate"] <= 1
    absent = ("agreement", "calibration", "reward", "perplexity", "choice")
    assert [key for key in result if key.startswith(absent)] == []


def test_the_tracker_gets_every_comparison_with_its_texts(models_here: Path) -> None:
    tracker = Recorder()
    run(tracker, judges=[small.GOLD])
    rows = tracker.tables["comparisons"]
    assert len(rows) == 4 * 10
    for row in rows:
        ours, theirs = (gold(row["prompt"], row[response]).score for response in ("response_a", "response_b"))
        assert row["outcome"] == (ours > theirs) + 0.5 * (ours == theirs)
    pairs = [row["pair"] for row in tracker.tables["win_rates"]]
    assert pairs == ["sft vs reference", "policy vs reference", "policy vs sft", "policy vs base"]
    origins = {(row["model"], row["origin"]) for row in table(Path(), "calibration.parquet")}
    assert {("reward", "given"), ("reward_heldout", "given")} <= origins


# ------------------------------------------------------------------------------------------------- Best-of-n


def count_samples(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The models that are sampled from now on, each with its number of responses."""
    counts, plain = list[tuple[str, int]](), responses.sample

    def sample(source: Path, prompts: Sequence[str], **settings: Any) -> responses.SampledResponses:
        counts.append((Path(source).name, len(prompts)))
        return plain(source, prompts, **settings)

    monkeypatch.setattr(responses, "sample", sample)
    return counts


def test_only_best_of_n_samples_more(models_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_samples(monkeypatch)
    plain = run()
    assert counts == [(who, 10) for who in ("sft", "policy", "base", "sft", "policy")]
    assert "best_of_n" not in Paths().evaluation_results.read_text(encoding="utf-8")
    counts.clear()
    metrics = run(best_of_n=4)
    assert counts == [*((who, 10) for who in ("sft", "policy", "base")), ("sft", 40), *counts[-2:]]
    of_all = {key for key in plain if not key.startswith("kappa")}  # of all comparisons, which are more now
    assert {key: metrics[key] for key in of_all} == {key: plain[key] for key in of_all}


def test_best_of_n_of_another_model(models_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = count_samples(monkeypatch)
    run(best_of_n=4, best_of_n_model="policy")
    assert ("policy", 40) in counts
    found = EvaluationResults.read(Paths().evaluation_results).best_of_n
    assert found is not None
    assert found.model == "policy"


def score_roughly(rows: Responses) -> torch.Tensor:
    return torch.tensor([float(len(text) // 8) for text in rows.texts])  # with ties


def test_best_of_n_is_the_first_response_of_the_highest_score(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "reward_model", SimpleNamespace(load=lambda *_: score_roughly))
    metrics = run(best_of_n=6, judges=[small.GOLD])
    # the same samples, chosen by a slow loop
    view, prompts = small.view("judge", SETTINGS), [row["prompt"] for row in table(Path(), "answers.parquet")]
    repeated = [prompt for prompt in prompts for _ in range(6)]
    sampled = responses.sample_alike(
        view, Paths(), repeated, torch.device("cpu"), names=["sft"], seed=view.seed + 2
    )["sft"]
    rows = table(Path(), "answers.parquet")
    for i, row in enumerate(rows):
        texts = sampled.texts[6 * i : 6 * i + 6]
        assert row["best_of_n"] == max(texts, key=lambda text: len(text) // 8)
        assert row["gold/best_of_n"] == gold(row["prompt"], row["best_of_n"]).score
    assert any(row["best_of_n"] != row["sft"] for row in rows)
    # what it cost, and how it compares
    assert metrics["best_of_n/tokens"] == sum(map(len, sampled.ids)) / 10
    assert metrics["best_of_n/seconds"] > 0
    assert 0 < metrics["best_of_n/kl"] <= metrics["best_of_n/kl_bound"] == pytest.approx(math.log(6) - 5 / 6)
    pairs = ("best_of_n_vs_reference", "best_of_n_vs_sft", "policy_vs_best_of_n")
    assert {f"gold/{pair}/win_rate" for pair in pairs} <= set(metrics)
    # times are in the metrics alone: the document is the same by kept responses
    written = Paths().evaluation_results.read_bytes()
    assert "best_of_n/seconds" not in EvaluationResults.read(Paths().evaluation_results).metrics()
    run(best_of_n=6, judges=[small.GOLD])
    assert Paths().evaluation_results.read_bytes() == written


def test_the_model_that_selects_cannot_judge_from_another_folder(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_samples(monkeypatch)
    shutil.copytree("models/reward", "copy")
    with pytest.raises(UserError, match=r"judge reward_model \(copy\) is models/reward, which selects"):
        run(best_of_n=4, judges=[small.GOLD, {**small.HELDOUT, "path": "copy"}])
    assert counts == []


# ------------------------------------------ The win rate over the course of PPO's training, computed by hand


def score_length(rows: Responses) -> torch.Tensor:
    return torch.tensor([float(len(text)) if text != "broken" else float("nan") for text in rows.texts])


def curve(root: Path, *evaluations: tuple[int, list[str]]) -> list[dict[str, float]]:
    """The curve of `(episode, responses)`; every reference is four characters long."""
    rows = [
        {"episode": episode, "prompt": f"p{i}", "reference": "four", "response": response}
        for episode, responses in evaluations
        for i, response in enumerate(responses)
    ]
    paths, tracker = Paths(root), NullTracker("judge")
    paths.ppo_samples.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), paths.ppo_responses)
    summary.log_curve(paths, [ScoringJudge("long", score_length)], tracker)
    return tracker.history()


def test_each_evaluation_is_a_point_of_the_win_rate(tmp_path: Path) -> None:
    rows = curve(
        tmp_path,
        (0, ["a", "b", "four", "longer"]),
        (256, ["longer"] * 4),
        (512, ["broken", "longer", "a", "a"]),
    )
    points = [(row["episode"], row["long/win_rate"]) for row in rows]
    assert points == [(0, 1.5 / 4), (256, 1.0), (512, pytest.approx(1 / 3))]
    assert all(row["long/low"] <= row["long/win_rate"] <= row["long/high"] for row in rows)


def test_an_evaluation_of_failures_only_has_no_point(tmp_path: Path) -> None:
    rows = curve(tmp_path, (0, ["broken"] * 3), (256, ["longer"] * 3))
    assert [row["episode"] for row in rows] == [256]


# ----------------------------------------------------------------------- Which kept responses are used again


def test_kept_responses_are_used_only_with_the_code_that_made_them() -> None:
    makers = (load_causal, collate, sample_responses, ends_of, close_responses, has_ended)
    assert {inspect.getsourcefile(one) for one in makers} == set(responses.CODE)
