"""The report as a document: whole, escaped, self-contained, the same for the same inputs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import inputs, page
from rlhf_tasks.stages import report
from tests.report import workspace

HOSTILE = "</p><script>alert('x')</script><img src=x onerror=alert(1)> {{ 7 * 7 }} & \"quoted\""
VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


class Document(HTMLParser):
    """Start tags in order, with their attributes, and the text; complains of tags that do not nest."""

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
    return page.render(inputs.read(root))


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


def test_a_kl_beyond_the_band_is_said_to_be_outside(whole: Path) -> None:
    workspace.put_text(whole / "metrics/ppo.json", '{"objective/kl": 14.5}')
    assert "outside the band from 0 to 10" in Document(written(whole)).text


def test_counts_come_from_the_verdicts(whole: Path) -> None:
    assert "2 / 1 / 1" in Document(written(whole)).text


def test_samples_show_the_greatest_leads_and_lags_side_by_side(whole: Path) -> None:
    text = Document(written(whole)).text
    won, lost = text.split("Where the policy won most")[1].split("Where the policy lost most")
    assert won.index("ahead by 0.75") < won.index("ahead by 0.25")
    assert won.index("Prompt 2") < won.index("Prompt 0")
    assert "behind by 0.5" in lost
    for answer in ("post number 3", "reference 3", "demonstrated 3", "optimised 3"):
        assert answer in lost
    assert "Prompt 1" not in won + lost.split("Training curves")[0]


def test_hostile_text_stays_text(whole: Path) -> None:
    rows = [
        row | dict.fromkeys(("prompt", "reference", "sft", "policy"), HOSTILE) for row in workspace.answers()
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


def test_missing_parts_are_said(tmp_path: Path) -> None:
    workspace.put_judge(tmp_path)
    text = Document(written(tmp_path)).text
    for name in (
        "metrics/ppo.json",
        "plots/ppo.csv",
        "evaluation/judge/answers.parquet",
        "models/lineage/sft.json",
    ):
        assert name in text
    for said in (
        "No curves: plots/ppo.csv",
        "No samples of training",
        "metrics/reward.json is missing",
        "no verdicts file",
    ):
        assert said in text
    assert "metrics/ppo.json has no objective/kl" in text
    assert "71.2%" in text


def test_a_pair_that_was_not_judged_is_said(tmp_path: Path) -> None:
    workspace.put_text(tmp_path / "metrics/judge.json", '{"rouge_l/policy": 0.3}')
    text = Document(written(tmp_path)).text
    assert text.count("Not judged in this run.") == 2
    assert "holds no win rate" in text


def test_a_judge_that_ppo_optimised_does_not_lead_and_is_marked(tmp_path: Path) -> None:
    rates = {
        f"{judge}/policy_vs_sft/{key}": value
        for judge, value in {"optimised": 0.9, "other": 0.4}.items()
        for key in ("win_rate", "low", "high")
    }
    marked = rates | {"optimised/is_optimised_reward": 1.0}
    workspace.put_text(tmp_path / "metrics/judge.json", json.dumps(marked))
    found = page.context(inputs.read(tmp_path))
    assert found["judge_name"] == "other"
    assert list(found["rates"]) == [f"optimised ({page.OPTIMISED})", "other"]


def test_without_the_judges_metrics_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics/judge\.json is missing.*rlhf judge"):
        inputs.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("metrics/ppo.json", "{", "not readable as JSON.* run `rlhf ppo` again"),
        ("metrics/ppo.json", "[1]", "must hold an object, but holds list; run `rlhf ppo` again"),
        ("metrics/judge.json", "[]", "must hold an object, but holds list; run `rlhf judge` again"),
        ("metrics/sft.json", '{"loss": null, "a": 1}', "holds no number at loss; run `rlhf sft` again"),
        ("metrics/sft.json", json.dumps(dict.fromkeys("abcdefg")), "at a, b, c, d, e and 2 more; run"),
        ("evaluation/ppo/guards.json", "{}", "lacks trips; run `rlhf ppo` again"),
        ("plots/ppo.csv", "episode,objective/kl\n1,high\n", "no table of numbers"),
        ("plots/ppo.csv", "episode,objective/kl\n1\n", "no table of numbers"),
        ("evaluation/judge/verdicts.parquet", "half a table", "is no table.* run `rlhf judge` again"),
    ],
)
def test_a_broken_file_is_named(whole: Path, name: str, content: str, problem: str) -> None:
    workspace.put_text(whole / name, content)
    with pytest.raises(UserError, match=problem) as caught:
        inputs.read(whole)
    assert name in str(caught.value)


CRITERION = {
    "title": "KL", "value": 1.0, "relation": "<=", "bound": 10.0, "lacking": "", "margin": 9.0, "passed": True
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tree", "lost", "stage_of_it"),
    [
        ("metrics/judge.json", workspace.JUDGE_METRICS, "gold/policy_vs_sft/low", "judge"),
        ("metrics/judge.json", {"kappa/a_and_b": 0.5}, "kappa/a_and_b/low", "judge"),
        ("metrics/judge.json", {"gpt/a_vs_b/position_bias": 0.5}, "gpt/a_vs_b/first_share", "judge"),
        (
            "metrics/judge.json",
            {"human/a/kappa": 0.5, "human/a/kappa/low": 0.4},
            "human/a/kappa/high",
            "judge",
        ),
        ("evaluation/verdict.json", {"passed": True}, "criteria", "verdict"),
        ("evaluation/verdict.json", {"criteria": [CRITERION], "passed": True}, "summary", "verdict"),
        ("evaluation/ppo/guards.json", {"trips": [{"episode": 5}]}, "message", "ppo"),
    ],
)
def test_what_a_file_lacks_is_told_with_the_stage_that_writes_it(
    whole: Path, name: str, tree: dict[str, Any], lost: str, stage_of_it: str
) -> None:
    kept = {key: value for key, value in tree.items() if key != lost}
    workspace.put_text(whole / name, json.dumps(kept))
    with pytest.raises(UserError, match=f"{name} lacks {lost}; run `rlhf {stage_of_it}` again"):
        written(whole)


def test_a_criterion_that_lacks_its_margin_is_told(whole: Path) -> None:
    del (lacking := dict(CRITERION))["margin"]
    told = {"criteria": [lacking], "passed": True, "summary": "all criteria are met"}
    workspace.put_text(whole / "evaluation/verdict.json", json.dumps(told))
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


def test_figures_speak_and_boxes_that_scroll_take_the_keyboard(whole: Path) -> None:
    document = Document(written(whole))
    drawings = [a for a in document.of("svg") if a.get("aria-hidden") != "true"]
    assert len(drawings) > 8
    assert all(a.get("role") == "img" and a.get("aria-label") for a in drawings)
    spoken = " ".join(a["aria-label"] or "" for a in drawings)
    assert "objective/kl from 0.5 to 4.321" in spoken
    assert "Gold judge, Policy against SFT: 77.3%, 95% interval 74.8% to 79.8%" in spoken
    boxes = [a for a in document.of("div") if a.get("class") == "scroll"]
    assert boxes
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in boxes)
    assert document.of("html")[0]["lang"] == "en"
    assert "width=device-width" in (document.of("meta")[1]["content"] or "")


class Listener:
    """A tracker that only remembers its artifacts."""

    def __init__(self) -> None:
        self.artifacts: list[Path] = []

    def artifact(self, path: Path, folder: str | None = None) -> None:
        assert path.is_file()
        self.artifacts.append(path)


def test_the_stage_writes_one_file_and_hands_it_to_the_tracker(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole)
    tracker = Listener()
    assert report.run(None, Paths(), tracker) == {}  # type: ignore[arg-type]
    assert [path.name for path in Path("reports").iterdir()] == ["index.html"]
    assert tracker.artifacts == [Path("reports/index.html")]
    assert Path("reports/index.html").read_text(encoding="utf-8") == written(whole)


def test_samples_of_a_judge_that_compares_are_those_it_was_surest_of(whole: Path) -> None:
    """Probability that the policy's answer is better, in both orders; a verdict that turned is a tie."""
    orders = {0: (0.9, 0.8), 1: (0.9, 0.2), 2: (0.6, 0.7), 3: (0.2, 0.1)}
    rows = [
        {"judge": "gpt", "a": "policy", "b": "reference", "index": i, "score_a": None, "score_b": None,
         "verdict": 1.0 if min(p, q) > 0.5 else 0.0 if max(p, q) < 0.5 else 0.5,
         "a_shown_first": p, "a_shown_second": q}
        for i, (p, q) in orders.items()
    ]  # fmt: skip
    workspace.put_rows(whole / "evaluation/judge/verdicts.parquet", rows)
    only = {f"gpt/policy_vs_reference/{key}": 0.6 for key in ("win_rate", "low", "high")}
    workspace.put_text(whole / "metrics/judge.json", json.dumps(only))
    won, lost = page.context(inputs.read(whole))["sample_groups"]
    assert [(s.index, s.words) for s in won[1]] == [(0, "ahead with 85.0%"), (2, "ahead with 65.0%")]
    assert [(s.index, s.words) for s in lost[1]] == [(3, "behind with 85.0%")]


def test_samples_of_a_mixture_go_by_its_bare_verdict(whole: Path) -> None:
    rows = [
        {"judge": "both", "a": "policy", "b": "reference", "index": i, "verdict": outcome,
         "score_a": None, "score_b": None, "a_shown_first": None, "a_shown_second": None}
        for i, outcome in enumerate((1.0, 0.5, 0.0, float("nan")))
    ]  # fmt: skip
    workspace.put_rows(whole / "evaluation/judge/verdicts.parquet", rows)
    only = {f"both/policy_vs_reference/{key}": 0.5 for key in ("win_rate", "low", "high")}
    workspace.put_text(whole / "metrics/judge.json", json.dumps(only))
    won, lost = page.context(inputs.read(whole))["sample_groups"]
    assert [(s.index, s.words) for s in won[1] + lost[1]] == [(0, "ahead"), (2, "behind")]


def test_what_the_base_model_knew_stands_beside_what_is_left(whole: Path) -> None:
    """A measure that has an interval shows it; the interval has no row of its own."""
    known = {f"choice/{who}": 0.5 for who in ("base", "sft", "policy")}
    known |= {"choice/base/low": 0.4, "choice/base/high": 0.6, "perplexity/general/base": 12.0}
    workspace.put_text(whole / "metrics/judge.json", json.dumps(workspace.JUDGE_METRICS | known))
    answers, retained = page.context(inputs.read(whole))["tables"]
    assert retained[2] == {
        "choice": {"base": "0.5 (0.4 to 0.6)", "sft": "0.5", "policy": "0.5"},
        "perplexity/general": {"base": "12"},
    }
    assert answers[2]["gold/coverage"] == {"policy": "0.8432", "sft": "0.6218"}


def test_calibration_and_length_are_drawn_by_model_origin_and_contender(whole: Path) -> None:
    document = Document(written(whole))
    spoken = " ".join(a["aria-label"] or "" for a in document.of("svg") if a.get("role") == "img")
    assert "Calibration of the reward model that PPO optimises, by confidence: given pairs from 0.5" in spoken
    assert "Score by length: Gold judge, by characters: Policy from 0.2 to 0.8" in spoken
    assert "Expected calibration error: given pairs 12.5%." in document.text
    assert len(re.findall('<polygon class="ribbon', written(whole))) == 2


def test_the_chain_names_who_made_what_a_stage_read(whole: Path) -> None:
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
    links = {link.stage: link for link in page.context(inputs.read(whole))["chain"]}
    assert [(i.path, i.digest, i.maker) for i in links["ppo"].read] == [("models/sft", "abcdef0123", "sft")]
    assert [(i.path, i.digest) for i in links["sft"].made] == [("models/sft", "abcdef0123")]
    assert [(i.path, i.digest) for i in links["ppo"].made] == [("models/policy", "")]
    assert links["ppo"].run == "ppo-1"
    assert (links["ppo"].code, links["ppo"].dirty) == ("ffffffffff", True)
    assert 'reads <code>models/sft</code> <code class="quiet">abcdef0123</code> of <a href="#of-sft">' in (
        written(whole)
    )


def test_judges_agreement_with_people_and_each_other_is_told(whole: Path) -> None:
    told = {
        "human/gold/kappa": 0.61, "human/gold/kappa/low": 0.5, "human/gold/kappa/high": 0.7,
        "human/gold/agreement": 0.8, "human/gold/agreement/low": 0.7, "human/gold/agreement/high": 0.9,
        "kappa/gold_and_gpt": -0.1, "kappa/gold_and_gpt/low": -0.2, "kappa/gold_and_gpt/high": 0.0,
        "gpt/policy_vs_sft/position_bias": 0.25, "gpt/policy_vs_sft/first_share": 0.6,
        "gpt/policy_vs_sft/cost/replies": 40, "gpt/policy_vs_sft/cost/tokens": 1234,
    }  # fmt: skip
    workspace.put_text(whole / "metrics/judge.json", json.dumps(workspace.JUDGE_METRICS | told))
    text = Document(written(whole)).text
    assert "Gold judge and people 0.61 0.50 to 0.70 80.0% (70.0% to 90.0%)" in text
    assert "Gold judge and gpt −0.10 −0.20 to 0.00" in text
    assert "gpt: Policy against SFT 25.0% 60.0% 40 1,234" in text


def test_what_the_guards_said_is_told(whole: Path) -> None:
    assert "No guard tripped." in page.render(inputs.read(whole))
    trip = {"episode": 512, "guard": "kl_high", "message": "kl_high: objective/kl_k1 = 11.4 exceeds 10"}
    workspace.put_text(whole / "evaluation/ppo/guards.json", json.dumps({"trips": [trip]}))
    assert "At episode 512, kl_high: objective/kl_k1 = 11.4 exceeds 10." in page.render(inputs.read(whole))
