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
from rlhf_tasks.report import inputs, page
from rlhf_tasks.report.win_rates import OPTIMISED
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


def written(root: Path) -> str:
    return page.render(inputs.read(Paths(root)), {})


def context(root: Path) -> dict[str, Any]:
    return page.context(inputs.read(Paths(root)))


def test_every_headline_number_appears(whole: Path) -> None:
    text = Document(written(whole)).text
    # 71.25% is shown with one decimal; Python rounds 71.25 half to even.
    for expected in (
        "71.2%",
        "68.4% to 74.1%",
        "77.3%",
        "74.8% to 79.8%",
        "36.2%",
        "33.3% to 39.1%",
        "50.2%",
    ):
        assert expected in text
    assert "4.32 nats" in text
    assert "inside the band from 0 to 10" in text
    assert "episode 768" in text
    for fact in ("0.8432", "0.6218", "0.3154", "0.8123", "0.0345", "0.7654"):
        assert fact in text


def test_an_interval_around_one_half_names_no_winner(whole: Path) -> None:
    text = Document(written(whole)).text
    assert "no clear winner" in text  # the reward model's, 47.1% to 53.3%
    assert "Reference better" in text  # SFT against reference, 33.3% to 39.1%


def test_a_kl_beyond_the_band_is_marked_as_outside(whole: Path) -> None:
    workspace.put_text(whole / "metrics/ppo.json", '{"objective/kl": 14.5}')
    assert "outside the band from 0 to 10" in Document(written(whole)).text


def test_wins_ties_and_losses_are_shown(whole: Path) -> None:
    assert "2 / 1 / 1" in Document(written(whole)).text


def test_the_kl_of_the_kept_checkpoint_is_shown(whole: Path) -> None:
    """The gate reads this one."""
    metrics = {"objective/kl": 14.5, "selected_episode": 768, "selected_kl": 3.5}
    metrics["selected_kl_standard_error"] = 0.25
    workspace.put_text(whole / "metrics/ppo.json", json.dumps(metrics))
    text = Document(written(whole)).text
    assert "3.50 nats of the kept checkpoint, ± 0.25" in text
    assert "inside the band from 0 to 10" in text
    assert "Checkpoint kept: episode 768. KL of the last rollout: 14.50 nats" in text


def test_samples_show_the_greatest_leads_and_lags_side_by_side(whole: Path) -> None:
    text = Document(written(whole)).text
    won, lost = text.split("Where the policy won most")[1].split("Where the policy lost most")
    assert won.index("ahead by 0.75") < won.index("ahead by 0.25")
    assert won.index("Prompt 2") < won.index("Prompt 0")
    assert "behind by 0.5" in lost
    for shown in ("post number 3", "reference 3", "demonstrated 3", "optimised 3"):
        assert shown in lost
    assert "Prompt 1" not in won + lost.split("Training curves")[0]


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
    assert document.of("script") == []
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
        assert name in text
    for part in ("No curves: plots/ppo.csv", "No samples from training", "metrics/reward.json is missing"):
        assert part in text
    assert "metrics/ppo.json has no KL" in text
    assert "71.2%" in text


def test_a_pair_that_was_not_judged_is_marked(tmp_path: Path) -> None:
    workspace.put_results(tmp_path, EvaluationResults())
    text = Document(written(tmp_path)).text
    assert text.count("Not judged in this run.") == 2
    assert "results.json has no win rate" in text


def test_a_judge_that_ppo_optimised_does_not_lead_and_is_marked(tmp_path: Path) -> None:
    rates = {"optimised": workspace.interval(0.9), "other": workspace.interval(0.4)}
    comparisons = tuple(workspace.comparison(name, "policy", "sft", rate) for name, rate in rates.items())
    results = EvaluationResults(comparisons=comparisons, optimised_judges={"optimised": "models/reward"})
    workspace.put_results(tmp_path, results)
    variables = context(tmp_path)
    assert variables["judge_name"] == "other"
    assert list(variables["rates"]) == [f"optimised ({OPTIMISED})", "other"]


def test_without_results_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation/judge/results\.json is missing.*rlhf judge"):
        inputs.read(Paths(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metrics/ppo.json", "{", "not readable as JSON.* run `rlhf ppo` again"),
        ("metrics/ppo.json", "[1]", "must hold an object, but holds list; run `rlhf ppo` again"),
        ("metrics/judge.json", "[]", "must hold an object, but holds list; run `rlhf judge` again"),
        (
            "metrics/sft.json",
            '{"loss": null, "a": 1}',
            "must hold numbers, but does not at loss; run `rlhf sft` again",
        ),
        ("metrics/sft.json", json.dumps(dict.fromkeys("abcdefg")), "at a, b, c, d, e and 2 more; run"),
        ("evaluation/ppo/guards.json", "{}", "lacks trips; run `rlhf ppo` again"),
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
        inputs.read(Paths(whole))
    assert name in str(caught.value)


CRITERION = {
    "title": "KL", "value": 1.0, "relation": "<=", "bound": 10.0, "lacking": "", "standard_error": None,
    "margin": 9.0, "passed": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tree", "key", "stage"),
    [
        ("evaluation/verdict.json", {"passed": True}, "criteria", "verdict"),
        ("evaluation/verdict.json", {"criteria": [CRITERION], "passed": True}, "summary", "verdict"),
        ("evaluation/ppo/guards.json", {"trips": [{"episode": 5}]}, "message", "ppo"),
    ],
)
def test_a_missing_key_is_named_with_the_stage_that_writes_the_file(
    whole: Path, name: str, tree: dict[str, Any], key: str, stage: str
) -> None:
    workspace.put_text(whole / name, json.dumps(tree))
    with pytest.raises(UserError, match=f"{name} lacks {key}; run `rlhf {stage}` again"):
        written(whole)


def test_a_criterion_without_a_margin_is_a_user_error(whole: Path) -> None:
    del (lacking := dict(CRITERION))["margin"]
    verdict = {"criteria": [lacking], "passed": True, "summary": "all criteria are met"}
    workspace.put_text(whole / "evaluation/verdict.json", json.dumps(verdict))
    with pytest.raises(UserError, match=r"evaluation/verdict\.json lacks margin; run `rlhf verdict` again"):
        written(whole)


def test_headings_descend_by_one_and_ids_are_unique(whole: Path) -> None:
    document = Document(written(whole))
    levels = [int(tag[1]) for tag, _ in document.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [a["id"] for _, a in document.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {a["href"] for a in document.of("a")} | {
        f"#{s['aria-labelledby']}" for s in document.of("section")
    }
    assert targets <= {f"#{i}" for i in ids}


def test_figures_have_a_text_and_scrolling_boxes_take_the_keyboard(whole: Path) -> None:
    document = Document(written(whole))
    drawings = [a for a in document.of("svg") if a.get("aria-hidden") != "true"]
    assert len(drawings) > 8
    assert all(a.get("role") == "img" and a.get("aria-label") for a in drawings)
    labels = " ".join(a["aria-label"] or "" for a in drawings)
    assert "KL of the rollouts from 0.5 to 4.321" in labels
    assert "Gold judge, Policy against SFT: 77.3%, 95% interval 74.8% to 79.8%" in labels
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
    assert text.index("Seed 7") < text.index("Verdict"), "the page begins with which run it is"


def put_only(root: Path, judge: str) -> None:
    """A results document with a single judge."""
    rate = workspace.interval(0.6)
    comparison = workspace.comparison(judge, "policy", "reference", rate)
    workspace.put_results(root, EvaluationResults(comparisons=(comparison,)))


def test_samples_of_a_comparing_judge_are_its_most_confident_ones(whole: Path) -> None:
    """By the probability that the policy's response is better, over both orders."""
    orders = {0: (0.9, 0.8), 1: (0.9, 0.2), 2: (0.6, 0.7), 3: (0.2, 0.1)}
    rows = [
        {"judge": "gpt", "a": "policy", "b": "reference", "index": i, "score_a": None, "score_b": None,
         "outcome": 1.0 if min(p, q) > 0.5 else 0.0 if max(p, q) < 0.5 else 0.5,
         "a_shown_first": p, "a_shown_second": q}
        for i, (p, q) in orders.items()
    ]  # fmt: skip
    workspace.put_rows(whole / "evaluation/judge/comparisons.parquet", rows)
    put_only(whole, "gpt")
    won, lost = context(whole)["sample_groups"]
    assert [(s.index, s.lead_text) for s in won[1]] == [(0, "ahead with 85.0%"), (2, "ahead with 65.0%")]
    assert [(s.index, s.lead_text) for s in lost[1]] == [(3, "behind with 85.0%")]


def test_samples_of_a_combined_judge_are_sorted_by_the_bare_outcome(whole: Path) -> None:
    rows = [
        {"judge": "both", "a": "policy", "b": "reference", "index": i, "outcome": outcome,
         "score_a": None, "score_b": None, "a_shown_first": None, "a_shown_second": None}
        for i, outcome in enumerate((1.0, 0.5, 0.0, float("nan")))
    ]  # fmt: skip
    workspace.put_rows(whole / "evaluation/judge/comparisons.parquet", rows)
    put_only(whole, "both")
    won, lost = context(whole)["sample_groups"]
    assert [(s.index, s.lead_text) for s in won[1] + lost[1]] == [(0, "ahead"), (2, "behind")]


def test_retention_of_base_sft_and_policy_is_shown_with_intervals(whole: Path) -> None:
    accuracy = workspace.interval(0.5, 0.4, 0.6)
    base = RetentionResult(perplexity={"general": 12.0}, multiple_choice=accuracy)
    arc = {"acc": TaskScore(value=0.625, standard_error=0.05, examples=96)}
    policy = RetentionResult(perplexity={}, multiple_choice=accuracy, tasks={"arc": arc})
    retention = {"base": base, "policy": policy}
    changes = {"arc": TaskChange(metric="acc", drop=0.03, standard_error=0.01)}
    update = {"retention": retention, "task_changes": changes}
    workspace.put_results(whole, workspace.RESULTS.model_copy(update=update))
    responses, retained = context(whole)["tables"]
    assert retained[2] == {
        "Multiple-choice accuracy": {"base": "0.5 (0.4 to 0.6)", "policy": "0.5 (0.4 to 0.6)"},
        "Perplexity on general text": {"base": "12"},
        "Task arc, acc": {"policy": "0.625 ± 0.05"},
        "Drop on task arc from SFT to the policy": {"policy": "0.03 ± 0.01"},
    }
    assert responses[2]["Facts named, by the gold judge"] == {"policy": "0.8432", "sft": "0.6218"}


def test_calibration_and_length_are_drawn_by_model_origin_and_contender(whole: Path) -> None:
    document = Document(written(whole))
    labels = " ".join(a["aria-label"] or "" for a in document.of("svg") if a.get("role") == "img")
    assert "Calibration of the reward model that PPO optimises, by confidence: given pairs from 0.5" in labels
    assert "Score by length: Gold judge, by characters: Policy from 0.2 to 0.8" in labels
    assert "Expected calibration error: given pairs 12.5%." in document.text
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
    links = {link.stage: link for link in context(whole)["chain"]}
    assert [(i.path, i.digest, i.maker) for i in links["ppo"].read] == [("models/sft", "abcdef0123", "sft")]
    assert [(i.path, i.digest) for i in links["sft"].written] == [("models/sft", "abcdef0123")]
    assert [(i.path, i.digest) for i in links["ppo"].written] == [("models/policy", "")]
    assert links["ppo"].run == "ppo-1"
    assert (links["ppo"].code, links["ppo"].dirty) == ("ffffffffff", True)
    assert (
        'reads <code>models/<wbr>sft</code> <code class="quiet">abcdef0123</code> of <a href="#of-sft">'
        in (written(whole))
    )


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
    assert "Gold judge and people 0.61 0.50 to 0.70 80.0% (70.0% to 90.0%)" in text
    assert "Gold judge and gpt −0.10 −0.20 to 0.00" in text
    assert "gpt: Policy against SFT 25.0% 60.0% 40 1,234" in text


def test_trips_of_guards_are_shown(whole: Path) -> None:
    assert "No guard tripped." in written(whole)
    trip = {"episode": 512, "guard": "kl_high", "message": "kl_high: objective/kl_k1 = 11.4 exceeds 10"}
    workspace.put_text(whole / "evaluation/ppo/guards.json", json.dumps({"trips": [trip]}))
    assert "At episode 512, kl_high: objective/kl_k1 = 11.4 exceeds 10." in written(whole)


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
    assert "Win rate" in {a.get("data-label") for a in document.of("td")}
