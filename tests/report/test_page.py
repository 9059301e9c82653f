"""The report as a document: complete, escaped, self-contained, equal for equal inputs."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import BestOfN, EvaluationResults, ResponseStatistics
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, page
from rlhf_tasks.stages import report
from tests import small
from tests.report import workspace

HOSTILE = "</p><script>alert('x')</script><img src=x onerror=alert(1)> {{ 7 * 7 }} & \"quoted\""
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
VIEW = small.view("report")


class Document(HTMLParser):
    """Start tags in order, with their attributes, and the text. Tags that do not nest fail an assertion."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    workspace.put_all(tmp_path)
    return tmp_path


def written(root: Path) -> str:
    return document.render("page.html", page.context(Paths(root), VIEW))


def shown(root: Path) -> str:
    return Document(written(root)).text


def test_the_page_begins_with_the_story(whole: Path) -> None:
    """The verdict, the task, what was done, and the numbers in words stand before the samples."""
    text = shown(whole).partition("Responses to test prompts")[0]
    for expected in (
        "The gate refused the policy: do not use it yet",
        "name the facts of a made-up post",
        "Fine-tuning on 600 demonstrations made the SFT model",
        "for 8,192 episodes, each one response to one of 2,000 prompts",
        "On 3 of 4 test prompts the gold judge prefers the policy’s response to the SFT model’s; "
        "on 0 it is worse, on 1 neither.",
        "30m30s for all stages; PPO’s updates took 3m00s",
        "May it be used? No: KL 11.2 > 10.",
        "The policy moved too far from the SFT model. Raise ppo.kl_coef",
        "77% win rate",
        "95% interval 75% to 80%",
        "3.5 nats",
        "± 0.2. 0 is no change. Of the checkpoint of episode 768",
    ):
        assert expected in text


def test_the_page_of_a_policy_of_pairs_says_nothing_of_ppo(whole: Path) -> None:
    for name in ("samples.parquet", "rollouts.parquet", "audit.json"):
        (whole / "evaluation/ppo" / name).unlink()
    workspace.put_text(whole / "plots/ppo.csv", "episode\n")
    workspace.put_text(whole / "plots/judge.csv", "episode\n")
    workspace.put_text(whole / "plots/dpo.csv", "step,eval/kl\n3,1.5\n")
    workspace.put_json(whole / "metrics/ppo.json", {"selected_kl": 3.5, "selected_kl_standard_error": 0.25})
    view = small.view("report", {"dpo.train": True, "ppo.train": False})
    text = Document(document.render("page.html", page.context(Paths(whole), view))).text
    assert "PPO" not in text
    for expected in ("and the result is the policy", "Raise dpo.beta", "models/reward"):
        assert expected in text


def test_the_evidence_is_complete(whole: Path) -> None:
    text = shown(whole)
    for expected in (
        "KL 11.2 ± 0.2 ≤ 10 −1.20 failed",
        "Judged examples 990 ≥ 200 790 passed",
        "Right choices <lost> not known ≤ 0.0500 – failed : choice/sft was not measured",
        "By the gold judge Policy against references 71% (68% to 74%) 2 / 1 / 1 0 p = 0.03 Policy better",
        "SFT model against references 36% (33% to 39%) 1 / 1 / 2 0 p = 0.03 References better",
        "By the held-out reward model, which chose the checkpoint Policy against references 50% (47% to 53%)",
        "No guard tripped",
        # Judges: agreement with each other and with people, bias and cost.
        *("−0.10 (−0.20 to 0.00)", "0.61 (0.50 to 0.70)", "0.80 (0.70 to 0.90)", "0.250", "1,234"),
        # Measured values: base model, references, SFT model, policy.
        "Facts named, by the gold judge – – 0.622 0.843",
        "Multiple-choice accuracy 0.50 (0.40 to 0.60) – – –",
        "Perplexity on general text 12 – – –",
        "Task arc, acc – – – 0.62 ± 0.05",
        "Drop on task arc from SFT to the policy – – – 0.030 ± 0.010",
        # The reward model.
        "By reward model Optimized by PPO Held out Accuracy on test pairs 0.812 –",
        "pairs 2.50 1.50",
        *(
            "gold judge: policy samples 0.765 (0.765 to 0.765) –",
            "given pairs 0.125 –",
            "empty 0.250, beats 75.0%",
        ),
        "sampled at 768",
        f"{'ab' * 16} written by sft",
        "f" * 40,
    ):
        assert expected in text


@pytest.mark.parametrize(
    ("low", "outcome", "model", "words"),
    [(0.5, "does not beat", "sft", "SFT model"), (0.51, "beats", "policy", "policy")],
)
def test_the_page_says_whether_the_policy_beats_best_of_n(
    whole: Path, low: float, outcome: str, model: str, words: str
) -> None:
    assert "Best of n" not in shown(whole)
    rate = workspace.interval(0.55, low, 0.6)
    over = workspace.comparison("gold", "policy", "best_of_n", rate)
    response = ResponseStatistics(**dict.fromkeys(ResponseStatistics.model_fields, 12))
    changes = {
        "comparisons": (*workspace.RESULTS.comparisons, over),
        "best_of_n": BestOfN(model=model, n=16, kl=1.5, kl_bound=1.75, tokens=192),
        "responses": {"policy": response, "best_of_n": response},
    }
    workspace.RESULTS.model_copy(update=changes).write(whole / "evaluation/judge/results.json")
    text = shown(whole)
    assert f"By the gold judge the policy {outcome} it: the policy’s win rate is 55% (5" in text
    assert f"Best of n takes 16 responses of the {words}, and of them" in text
    assert "A response costs 192 tokens by best of n, and 12 by the policy." in text
    assert "Policy against best of n 55%" in text


def test_unknown_times_and_trips_of_guards_are_told(whole: Path) -> None:
    workspace.put_json(whole / "models/lineage/prepare.json", {"rlhf.run": "prepare-20260103T030000-aa"})
    trip = {"episode": 512, "guard": "kl_high", "message": "kl_high: objective/kl_k1 = 11.4 exceeds 10"}
    workspace.put_json(whole / "evaluation/ppo/guards.json", {"trips": [trip]})
    text = shown(whole)
    assert "How long Not known; PPO’s updates took 3m00s." in text
    assert "A guard tripped 1 time, first at episode 512: kl_high: objective/kl_k1 = 11.4 exceeds 10" in text


def test_samples_show_the_greatest_leads_and_lags_side_by_side(whole: Path) -> None:
    titles = "Where the policy won most|In the middle|Where the policy lost most"
    won, middle, lost, more = re.split(titles, shown(whole))[1:]
    assert re.search("Prompt 2 .*ahead by 0.750", won)
    assert re.search("Prompt 1 .*level", middle)
    assert re.search("Prompt 3 .*reference number 3.*sft number 3.*behind by 0.500.*policy number 3", lost)
    assert re.search("Prompt 0 .*ahead by 0.250", more)


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (
            [(0.9, 0.8), (0.9, 0.2), (0.6, 0.7), (0.2, 0.1)],
            [(0, "ahead with 85.0%"), (2, "ahead with 65.0%"), (1, "level"), (3, "behind with 85.0%")],
        ),
        ([(None, None)] * 4, [(0, "ahead"), (2, "ahead"), (1, "level"), (3, "behind")]),
    ],
)
def test_samples_of_a_judge_without_scores_are_its_most_confident_ones(
    whole: Path, orders: list[tuple[float | None, float | None]], expected: list[tuple[int, str]]
) -> None:
    """By the probability that the policy's response is better, over both orders; else by the outcome."""
    outcomes = (1.0, 0.5, 1.0, 0.0)
    rows = [
        ("gpt", "policy", "reference", i, outcomes[i], None, None, *both) for i, both in enumerate(orders)
    ]
    columns = "judge a b index outcome score_a score_b a_shown_first a_shown_second"
    workspace.put_rows(whole / "evaluation/judge/comparisons.parquet", columns, *rows)
    rate = workspace.comparison("gpt", "policy", "reference", workspace.interval(0.6))
    EvaluationResults(comparisons=(rate,)).write(whole / "evaluation/judge/results.json")
    groups = page.context(Paths(whole), VIEW)["samples"].values()
    assert [(one["index"], one["lead_text"]) for group in groups for one in group] == expected


def test_hostile_text_stays_text_and_nothing_is_loaded_from_anywhere(whole: Path) -> None:
    workspace.put_responses(whole, HOSTILE)
    workspace.put_training_samples(whole, HOSTILE)
    workspace.put_text(whole / "models/lineage/sft.json", '{"run": "<script>alert(2)</script>"}')
    workspace.put_text(whole / "plots/sft.csv", 'step,"x""><script>alert(3)</script>/loss"\n1,2\n2,1\n')
    html = written(whole)
    found = Document(html)
    assert len(found.of("script")) == 1, "the page's own, the only one that the policy allows"
    assert found.of("img") == []
    assert " ".join(HOSTILE.split()) in found.text
    assert "49" not in re.findall(r"\d+", found.text)
    assert not [key for _, attributes in found.tags for key in attributes if key.startswith("on")]
    sources = [a[key] for _, a in found.tags for key in ("src", "href", "srcset", "data") if key in a]
    assert [s for s in sources if not (s or "").startswith(("#", "data:", "x"))] == ["rollouts.html"]
    assert re.findall(r"https?://|@import|url\((?!#)", html) == []
    policy = next(a for a in found.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")


def test_the_same_inputs_give_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    workspace.put_all(tmp_path / "elsewhere")
    assert written(whole) == written(tmp_path / "elsewhere")


def test_missing_files_and_values_are_named(tmp_path: Path) -> None:
    EvaluationResults().write(tmp_path / "evaluation/judge/results.json")
    text = shown(tmp_path)
    for name in ("metrics/ppo.json", "plots/ppo.csv", "answers.parquet", "models/lineage/sft.json"):
        assert name in text.replace("/ ", "/").replace(". ", ".")
    for part in (
        *("No verdict: evaluation/verdict.json is missing", "metrics/ppo.json has no KL"),
        *("No curves of the policy’s training", "No samples from training", "metrics/reward.json is missing"),
        "Policy against SFT model: not judged in this run.",
        "results.json has no win rate",
    ):
        assert part in text
    workspace.put_text(tmp_path / "evaluation/verdict.json", "{}")
    assert "there is no gate to pass" in shown(tmp_path)


def test_the_first_judge_that_ppo_has_not_optimised_leads(whole: Path) -> None:
    rates = {
        name: workspace.interval(rate) for name, rate in (("optimized", 0.9), ("other", 0.4), ("a", 0.5))
    }
    comparisons = tuple(workspace.comparison(name, "policy", "sft", rate) for name, rate in rates.items())
    results = EvaluationResults(comparisons=comparisons, optimised_judges={"optimized": "models/reward"})
    results.write(whole / "evaluation/judge/results.json")
    assert page.context(Paths(whole), VIEW)["judge"] == "other"
    assert "By optimized (the reward that PPO optimized: its win rate is no evidence" in shown(whole)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metrics/ppo.json", "{", "is not an object of JSON.* run `rlhf ppo` again"),
        ("metrics/ppo.json", "[1]", "is not an object of JSON.* run `rlhf ppo` again"),
        ("plots/ppo.csv", "episode,objective/kl\n1,high\n", "is not a table of numbers"),
        ("plots/ppo.csv", "episode,objective/kl\n1\n", "is not a table of numbers"),
        ("evaluation/judge/calibration.parquet", "half", "is not a Parquet table.* run `rlhf judge` again"),
        ("evaluation/judge/results.json", "{", "is not a results document"),
        ("evaluation/judge/results.json", None, "cannot be read.*run `rlhf judge`"),
    ],
)
def test_a_broken_file_is_named(whole: Path, name: str, content: str | None, problem: str) -> None:
    (whole / name).unlink()
    if content is not None:
        workspace.put_text(whole / name, content)
    with pytest.raises(UserError, match=f"{name}.*{problem}"):
        written(whole)


def test_headings_links_figures_and_boxes_are_accessible(whole: Path) -> None:
    found = Document(written(whole))
    levels = [int(tag[1]) for tag, _ in found.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [a["id"] for _, a in found.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"] for a in found.of("a")} <= {f"#{i}" for i in ids} | {"rollouts.html"}
    labels = " ".join(a["aria-label"] or "" for a in found.of("svg") if a.get("role") == "img")
    assert labels.count(", by ") == len(found.of("svg")) > 5
    assert "KL of the rollouts from 0.500 to 4.32" in labels
    assert "Calibration: the reward model that PPO optimizes, by confidence: given pairs from 0.5" in labels
    bars = [a["aria-label"] for a in found.of("div") if a.get("role") == "img"]
    assert "the gold judge, Policy against SFT model: 77% (75% to 80%)" in bars
    boxes = [a for a in found.of("div") if a.get("class") == "scroll"]
    assert boxes
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)
    assert found.of("html")[0]["lang"] == "en"


@pytest.mark.parametrize("has_rollouts", [True, False])
def test_the_stage_writes_its_pages_and_logs_them(whole: Path, has_rollouts: bool) -> None:
    if not has_rollouts:
        (whole / "evaluation/ppo/rollouts.parquet").unlink()
    tracker, names = Mock(), ["index.html", "rollouts.html"][: 1 + has_rollouts]
    assert report.run(small.view("report", {"seed": 7}), Paths(whole), tracker) == {}
    assert sorted(path.name for path in (whole / "reports").iterdir()) == names
    assert tracker.artifact.call_args_list == [call(whole / "reports" / name) for name in names]
    assert ("rollouts.html" in (whole / "reports/index.html").read_text(encoding="utf-8")) == has_rollouts
    assert "Seed 7" in Document((whole / "reports/index.html").read_text(encoding="utf-8")).text
