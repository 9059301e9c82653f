"""The report as a document: complete, escaped, self-contained, equal for equal inputs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.results import (
    Cost,
    EvaluationResults,
    HumanAgreement,
    HumanLabels,
    JudgeKappa,
    RetentionResult,
    TaskChange,
    TaskScore,
)
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import document, page
from rlhf_tasks.stages import report
from tests import small
from tests.report import workspace

HOSTILE = "</p><script>alert('x')</script><img src=x onerror=alert(1)> {{ 7 * 7 }} & \"quoted\""
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


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

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
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


VIEW = small.view("report")


def written(root: Path) -> str:
    return document.render("page.html", context(root))


def context(root: Path) -> dict[str, Any]:
    return page.context(Paths(root), VIEW)


def test_the_page_begins_with_the_story(whole: Path) -> None:
    """The verdict, the task, what was done, and the numbers in words stand before the samples."""
    put_verdict(whole)
    prepared = {"rows/sft/train": 600, "rows/prompts/train": 2000}
    workspace.put_text(whole / "metrics/prepare.json", json.dumps(prepared))
    workspace.put_text(whole / "metrics/ppo.json", json.dumps(KEPT | {"episode": 8192}))
    text = Document(written(whole)).text.partition("Responses to test prompts")[0]
    for expected in (
        "The gate refused the policy: do not use it yet",
        "name the facts of a made-up post",
        "Fine-tuning on 600 demonstrations made the SFT model",
        "for 8,192 episodes, each one response to one of 2,000 prompts",
        "On 3 of 4 test prompts the gold judge prefers the policy’s response to the SFT model’s; "
        "on 0 it is worse, on 1 neither.",
        "77% win rate",
        "95% interval 75% to 80%",
        "71% win rate",
        "3.5 nats",
        "± 0.2. 0 is no change. Of the checkpoint of episode 768",
        "The policy moved too far from the SFT model. Raise ppo.kl_coef",
    ):
        assert expected in text


def test_only_responses_of_the_data_are_called_references(whole: Path) -> None:
    """The model that PPO starts from, and from which the KL is measured, is the SFT model."""
    put_verdict(whole)
    text = Document(written(whole)).text
    assert "called references" in text
    assert "reference model" not in text
    assert "from the reference" not in text


def test_the_time_is_that_from_the_first_stage_to_the_verdict(whole: Path) -> None:
    for stage, minute in {"prepare": 0, "ppo": 7, "verdict": 25}.items():
        lineage = {"rlhf.run": f"{stage}-20260102T03{minute:02}00-aa"}
        workspace.put_text(whole / f"models/lineage/{stage}.json", json.dumps(lineage))
    assert "25 minutes from the start of the first stage to the verdict" in written(whole)
    workspace.put_text(whole / "models/lineage/prepare.json", '{"rlhf.run": "prepare-20260103T030000-aa"}')
    workspace.put_text(whole / "plots/ppo.csv", "episode,time/train_seconds\n1,100\n2,80\n")
    assert "Some stages are older runs" in written(whole), "the data is newer than the policy"
    assert "updates took 3 minutes" in written(whole)


def test_every_win_rate_appears_and_an_interval_around_one_half_names_no_winner(whole: Path) -> None:
    text = Document(written(whole)).text
    for pair in (
        "Policy against SFT model 77% (75% to 80%) 3 / 1 / 0 0 p = 0.03 Policy better",
        "SFT model against References 36% (33% to 39%) 1 / 1 / 2 0 p = 0.03 References better",
        "By the reward model Policy against References 50% (47% to 53%) 2 / 1 / 1 0 p = 0.03 no clear winner",
    ):
        assert pair in text


def test_measured_values_are_by_model_and_the_reward_model_has_its_facts(whole: Path) -> None:
    audit = {"empty": {"score": 0.25, "beats_reference": 0.75}}
    workspace.put_text(whole / "evaluation/ppo/audit.json", json.dumps(audit))
    assert context(whole)["measured"]["Facts named, by the gold judge"] == {"policy": "0.843", "sft": "0.622"}
    text = Document(written(whole)).text
    for fact in ("empty 0.250, beats 75.0%", "Accuracy on test pairs 0.812", "0.765", "given pairs 0.125"):
        assert fact in text


def test_samples_show_the_greatest_leads_and_lags_side_by_side(whole: Path) -> None:
    text = Document(written(whole)).text
    won, middle, lost, more = re.split(
        "Where the policy won most|In the middle|Where the policy lost most", text
    )[1:]
    assert "Prompt 2" in won
    assert "ahead by 0.750" in won
    assert "Prompt 1" in middle
    for shown in (
        "Prompt 3",
        "post number 3",
        "reference 3",
        "demonstrated 3",
        "optimised 3",
        "behind by 0.500",
    ):
        assert shown in lost
    assert "Prompt 0" in more
    assert "ahead by 0.250" in more


def test_hostile_text_stays_text(whole: Path) -> None:
    rows = [
        row | dict.fromkeys(("prompt", "reference", "sft", "policy"), HOSTILE)
        for row in workspace.responses()
    ]
    workspace.put_rows(whole / "evaluation/judge/answers.parquet", rows)
    sample = {"episode": 1, "prompt": HOSTILE, "response": HOSTILE, "score": 0.0}
    workspace.put_rows(whole / "evaluation/ppo/samples.parquet", [sample])
    workspace.put_text(whole / "models/lineage/sft.json", '{"run": "<script>alert(2)</script>"}')
    hostile_curve = 'step,"x""><script>alert(3)</script>/loss"\n1,2\n2,1\n'
    workspace.put_text(whole / "plots/sft.csv", hostile_curve)
    document = Document(written(whole))
    assert len(document.of("script")) == 1, "the page's own, the only one that the policy allows"
    assert document.of("img") == []
    assert " ".join(HOSTILE.split()) in document.text
    assert "49" not in re.findall(r"\d+", document.text)
    assert not [key for _, attributes in document.tags for key in attributes if key.startswith("on")]


def test_nothing_is_loaded_from_anywhere(whole: Path) -> None:
    html = written(whole)
    document = Document(html)
    sources = [a[key] for _, a in document.tags for key in ("src", "href", "srcset", "data") if key in a]
    assert sources
    assert [s for s in sources if not (s or "").startswith(("#", "data:"))] == []
    assert re.findall(r"https?://|@import|url\(", html) == []
    policy = next(a for a in document.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in (policy["content"] or "")


def test_the_same_inputs_give_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    workspace.put_all(other)
    assert written(whole) == written(other)


def test_missing_files_are_named(tmp_path: Path) -> None:
    workspace.put_results(tmp_path)
    text = Document(written(tmp_path)).text
    for name in (
        "metrics/ppo.json",
        "plots/ppo.csv",
        "evaluation/judge/answers.parquet",
        "models/lineage/sft.json",
    ):
        assert name in text.replace("/ ", "/").replace(". ", ".")
    for part in ("No curves of PPO", "No samples from training", "metrics/reward.json is missing"):
        assert part in text
    assert "metrics/ppo.json has no KL" in text
    assert "71% (68% to 74%)" in text


def test_a_pair_that_was_not_judged_is_marked(tmp_path: Path) -> None:
    workspace.put_results(tmp_path, EvaluationResults())
    text = Document(written(tmp_path)).text
    assert text.count("not judged in this run.") == 2
    assert "results.json has no win rate" in text


def test_a_judge_that_ppo_optimised_does_not_lead_and_is_marked(tmp_path: Path) -> None:
    rates = {"optimised": workspace.interval(0.9), "other": workspace.interval(0.4)}
    comparisons = tuple(workspace.comparison(name, "policy", "sft", rate) for name, rate in rates.items())
    results = EvaluationResults(comparisons=comparisons, optimised_judges={"optimised": "models/reward"})
    workspace.put_results(tmp_path, results)
    assert context(tmp_path)["judge"] == "other"
    text = Document(written(tmp_path)).text
    assert "By optimised (the reward that PPO optimized: its win rate is no evidence" in text


def test_without_results_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation/judge/results\.json cannot be read.*rlhf judge"):
        context(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metrics/ppo.json", "{", "is not an object of JSON.* run `rlhf ppo` again"),
        ("metrics/ppo.json", "[1]", "is not an object of JSON.* run `rlhf ppo` again"),
        ("plots/ppo.csv", "episode,objective/kl\n1,high\n", "not a table of numbers"),
        ("plots/ppo.csv", "episode,objective/kl\n1\n", "not a table of numbers"),
        (
            "evaluation/judge/comparisons.parquet",
            "half a table",
            "is not a Parquet table.* run `rlhf judge` again",
        ),
        ("evaluation/judge/results.json", "{", "is not a results document"),
    ],
)
def test_a_broken_file_is_named(whole: Path, name: str, content: str, problem: str) -> None:
    workspace.put_text(whole / name, content)
    with pytest.raises(UserError, match=problem) as caught:
        context(whole)
    assert name in str(caught.value)


KEPT = {"objective/kl": 14.5, "selected_episode": 768, "selected_kl": 3.5, "selected_kl_standard_error": 0.25}


def put_verdict(root: Path, num_criteria: int = 3) -> None:
    criteria = [
        {"key": "kl", "title": "KL", "value": 11.2, "relation": "<=", "bound": 10.0, "lacking": "",
         "standard_error": 0.25, "margin": -1.2, "passed": False},
        {"key": "examples", "title": "judged examples", "value": 990.0, "relation": ">=", "bound": 200.0,
         "lacking": "", "standard_error": None, "margin": 790.0, "passed": True},
        {"key": "choice", "title": "right choices <lost>", "value": None, "relation": "<=", "bound": 0.05,
         "lacking": "choice/sft was not measured", "standard_error": None, "margin": None, "passed": False},
    ]  # fmt: skip
    criteria = [criteria[i % 3] for i in range(num_criteria)]
    verdict = {"passed": False, "summary": "KL 11.2 > 10", "criteria": criteria}
    workspace.put_text(root / "evaluation/verdict.json", json.dumps(verdict))


def test_every_criterion_is_shown_with_its_value_and_reason(whole: Path) -> None:
    put_verdict(whole)
    text = Document(written(whole)).text
    for expected in (
        "May it be used? No: KL 11.2 > 10.",
        "KL 11.2 ± 0.2 ≤ 10 −1.20 failed",
        "Judged examples 990 ≥ 200 790 passed",
        "Right choices <lost> not known ≤ 0.0500 – failed : choice/sft was not measured",
    ):
        assert expected in text


def test_a_gate_that_is_off_differs_from_a_missing_verdict(whole: Path) -> None:
    assert "No verdict: evaluation/verdict.json is missing" in written(whole)
    workspace.put_text(whole / "evaluation/verdict.json", "{}")
    assert "there is no gate to pass" in written(whole)


def test_headings_descend_by_one_and_ids_are_unique(whole: Path) -> None:
    document = Document(written(whole))
    levels = [int(tag[1]) for tag, _ in document.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [a["id"] for _, a in document.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {a["href"] for a in document.of("a")} | {
        f"#{s['aria-labelledby']}" for s in document.of("section") if "aria-labelledby" in s
    }
    assert targets <= {f"#{i}" for i in ids}


def test_figures_have_a_text_and_scrolling_boxes_take_the_keyboard(whole: Path) -> None:
    document = Document(written(whole))
    drawings = [a for a in document.of("svg") if a.get("aria-hidden") != "true"]
    assert len(drawings) > 6
    assert all(a.get("role") == "img" and a.get("aria-label") for a in drawings)
    labels = " ".join(a["aria-label"] or "" for a in drawings)
    assert "KL of the rollouts from 0.500 to 4.32" in labels
    bars = [a["aria-label"] for a in document.of("div") if a.get("role") == "img"]
    assert "the gold judge, Policy against SFT model: 77% (75% to 80%)" in bars
    boxes = [a for a in document.of("div") if a.get("class") == "scroll"]
    assert boxes
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)
    assert document.of("html")[0]["lang"] == "en"
    assert "width=device-width" in (document.of("meta")[1]["content"] or "")


class ArtifactTracker:
    """A tracker that keeps only its artifacts."""

    def __init__(self) -> None:
        self.artifacts: list[Path] = []

    def artifact(self, path: Path, folder: str | None = None) -> None:
        assert path.is_file()
        self.artifacts.append(path)


def test_the_stage_writes_one_file_and_logs_it(whole: Path) -> None:
    tracker = ArtifactTracker()
    assert report.run(small.view("report", {"seed": 7}), Paths(whole), tracker) == {}  # type: ignore[arg-type]
    assert [path.name for path in (whole / "reports").iterdir()] == ["index.html"]
    assert tracker.artifacts == [whole / "reports/index.html"]
    text = Document((whole / "reports/index.html").read_text(encoding="utf-8")).text
    assert "Seed 7" in text


def put_only(root: Path, judge: str) -> None:
    """A results document with a single judge."""
    rate = workspace.interval(0.6)
    comparison = workspace.comparison(judge, "policy", "reference", rate)
    workspace.put_results(root, EvaluationResults(comparisons=(comparison,)))


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (
            [(0.9, 0.8), (0.9, 0.2), (0.6, 0.7), (0.2, 0.1)],
            [(0, "ahead with 85.0%"), (2, "ahead with 65.0%"), (1, "level"), (3, "behind with 85.0%")],
        ),
        ([None, None, None, None], [(0, "ahead"), (2, "ahead"), (1, "level"), (3, "behind")]),
    ],
)
def test_samples_of_a_judge_without_scores_are_its_most_confident_ones(
    whole: Path, orders: list[tuple[float, float] | None], expected: list[tuple[int, str]]
) -> None:
    """By the probability that the policy's response is better, over both orders; else by the outcome."""
    rows = [
        {"judge": "gpt", "a": "policy", "b": "reference", "index": i, "outcome": (1.0, 0.5, 1.0, 0.0)[i],
         "score_a": None, "score_b": None, "a_shown_first": both and both[0],
         "a_shown_second": both and both[1]}
        for i, both in enumerate(orders)
    ]  # fmt: skip
    workspace.put_rows(whole / "evaluation/judge/comparisons.parquet", rows)
    put_only(whole, "gpt")
    groups = context(whole)["samples"].values()
    found = {one["index"]: one["lead_text"] for group in groups for one in group}
    assert list(found.items()) == expected


def test_retention_of_base_sft_and_policy_is_shown_with_intervals(whole: Path) -> None:
    accuracy = workspace.interval(0.5, 0.4, 0.6)
    base = RetentionResult(perplexity={"general": 12.0}, multiple_choice=accuracy)
    arc = {"acc": TaskScore(value=0.625, standard_error=0.05, examples=96)}
    policy = RetentionResult(perplexity={}, multiple_choice=accuracy, tasks={"arc": arc})
    retention = {"base": base, "policy": policy}
    changes = {"arc": TaskChange(metric="acc", drop=0.03, standard_error=0.01)}
    update = {"retention": retention, "task_changes": changes}
    workspace.put_results(whole, workspace.RESULTS.model_copy(update=update))
    measured = context(whole)["measured"]
    expected = {
        "Multiple-choice accuracy": {"base": "0.50 (0.40 to 0.60)", "policy": "0.50 (0.40 to 0.60)"},
        "Perplexity on general text": {"base": "12"},
        "Task arc, acc": {"policy": "0.62 ± 0.05"},
        "Drop on task arc from SFT to the policy": {"policy": "0.030 ± 0.010"},
    }
    assert {name: measured[name] for name in expected} == expected


def test_calibration_and_length_are_drawn_by_model_origin_and_contender(whole: Path) -> None:
    document = Document(written(whole))
    labels = " ".join(a["aria-label"] or "" for a in document.of("svg") if a.get("role") == "img")
    assert "Calibration: the reward model that PPO optimises, by confidence: given pairs from 0.5" in labels
    assert "Score by length: the gold judge, by length: policy from 0.2" in labels
    assert len(re.findall('<polygon class="ribbon', written(whole))) == 2


def test_the_lineage_names_the_stage_that_wrote_an_input(whole: Path) -> None:
    (whole / "params.yaml").write_text("{}", encoding="utf-8")
    (whole / "dvc.yaml").write_text(
        "stages:\n"
        "  sft: {cmd: rlhf sft, deps: [data/sft], outs: [models/sft, models/lineage/sft.json]}\n"
        "  ppo: {cmd: rlhf ppo, deps: [models/sft], outs: [models/policy]}\n",
        encoding="utf-8",
    )
    for stage_name, read in {
        "sft": {"data/sft": "d" * 32},
        "ppo": {"models/sft": "abcdef0123456789"},
    }.items():
        tree = {"rlhf.run": f"{stage_name}-1", "inputs": read, "git.rev": "f" * 40, "git.dirty": True}
        workspace.put_text(whole / f"models/lineage/{stage_name}.json", json.dumps(tree))
    html = written(whole)
    assert '<td><code>abcdef0123456789</code> written by <a href="#of-sft">sft</a></td>' in html
    assert f"<code>{'f' * 40}</code>" in html


def test_agreement_of_judges_and_position_bias_are_shown(whole: Path) -> None:
    human = HumanAgreement(
        kappa=workspace.interval(0.61, 0.5, 0.7), agreement=workspace.interval(0.8, 0.7, 0.9)
    )
    kappa = JudgeKappa(first="gold", second="gpt", kappa=workspace.interval(-0.1, -0.2, 0.0))
    comparison = workspace.comparison(
        "gpt", "policy", "sft", workspace.interval(0.6), position_bias=0.25, first_share=0.6,
        cost=Cost(replies=40, tokens=1234),
    )  # fmt: skip
    changes = {
        "comparisons": (*workspace.RESULTS.comparisons, comparison),
        "human_labels": HumanLabels(labels=20, judges={"gold": human}),
        "judge_kappas": (kappa,),
    }
    workspace.put_results(whole, workspace.RESULTS.model_copy(update=changes))
    text = Document(written(whole)).text
    for fact in ("0.61 (0.50 to 0.70)", "0.80 (0.70 to 0.90)", "−0.10 (−0.20 to 0.00)", "0.250", "1,234"):
        assert fact in text.partition("Judges: agreement and bias")[2].partition("Measured values:")[0]


def test_trips_of_guards_are_shown(whole: Path) -> None:
    assert "No guard tripped" in written(whole)
    trip = {"episode": 512, "guard": "kl_high", "message": "kl_high: objective/kl_k1 = 11.4 exceeds 10"}
    workspace.put_text(whole / "evaluation/ppo/guards.json", json.dumps({"trips": [trip]}))
    assert "A guard tripped 1 time: kl_high: objective/kl_k1 = 11.4 exceeds 10 at episode 512" in written(
        whole
    )


def test_labels_are_words_and_break_between_them_only(whole: Path) -> None:
    html = written(whole)
    for label in ("KL of the rollouts", "Accuracy on test pairs", "Facts named, by the gold judge"):
        assert label in html
    raw = re.findall(r'<(?:th|dt|span class="key)[^>]*>\s*(?:<code>)?[a-z_]+/[a-z_]+', html)
    assert raw == []
    assert "overflow-wrap: anywhere" not in html
    assert "<code>objective/<wbr>kl</code>" in html, "the list of a stage's metrics has the names too"


def test_a_phone_shows_each_cell_under_its_title(whole: Path) -> None:
    """Tables of many columns become lists there, so that nothing is cut."""
    document = Document(written(whole))
    stacked = [a for a in document.of("table") if "stack" in (a.get("class") or "")]
    wide = [a for a in document.of("table") if "stack" not in (a.get("class") or "")]
    assert len(stacked) >= 5
    assert len(wide) == 7, "the metrics of the stages, which have two columns"
    assert "Won / tied / lost" in {a.get("data-label") for a in document.of("td")}
