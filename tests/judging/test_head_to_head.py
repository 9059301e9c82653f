"""`rlhf judge MODEL`: any two contenders, and one message for each mistake of the user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_tasks import console
from rlhf_tasks.config import Data, Model
from rlhf_tasks.data import columns, tokenizer
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.synthetic import gold
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.head_to_head import compare_models
from rlhf_tasks.judging.judges.comparisons import list_required_judges
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.judging.statistics import Interval
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_causal, save_checkpoint
from rlhf_tasks.project.paths import Paths
from tests import small
from tests.conftest import Command

VIEW = {"judge.judges": [small.GOLD, small.HELDOUT], "judge.num_examples": 6}


@pytest.fixture(autouse=True)
def loud() -> None:
    console.set_quiet(False)


def run(model: str, against: str = "reference", **options: Any) -> EvaluationResults:
    return compare_models(small.view("judge", VIEW), model, against, **{"paths": Paths(), **options})


def win_rate(results: EvaluationResults, judge: str, a: str, b: str) -> Interval:
    comparison = results.comparison(judge, a, b)
    assert comparison is not None, [one.stem for one in results.comparisons]
    return comparison.win_rate


def by_gold(prompt: str, a: str, b: str) -> float:
    """The outcome of a comparison by the gold scores."""
    ours, theirs = gold(prompt, a).score, gold(prompt, b).score
    return 1.0 if ours > theirs else 0.5 if ours == theirs else 0.0


def write_responses(responses: dict[str, str]) -> str:
    text = "".join(json.dumps({"prompt": p, "completion": r}) + "\n" for p, r in responses.items())
    Path("theirs.jsonl").write_text(text, encoding="utf-8")
    return "theirs.jsonl"


def test_a_checkpoint_against_the_reference_by_every_judge(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = run("models/policy")
    for judge in ("gold", "reward_model"):
        rate = win_rate(results, judge, "models/policy", "reference")
        assert 0 <= rate.low <= rate.value <= rate.high <= 1
        assert f"{judge}/models/policy_vs_reference/win_rate" in results.metrics()
    shown = capsys.readouterr().out
    assert "win rates on 6 test prompts" in shown
    assert "gold | models/policy vs reference | " in shown


def test_swapping_the_contenders_mirrors_the_win_rate_and_the_working_folder_does_not_matter(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, mirror = run("models/policy", "models/sft"), run("models/sft", "models/policy")
    ours = win_rate(here, "reward_model", "models/policy", "models/sft").value
    theirs = win_rate(mirror, "reward_model", "models/sft", "models/policy").value
    assert theirs == pytest.approx(1 - ours)
    monkeypatch.chdir("/")
    elsewhere = run("models/policy", "models/sft", paths=Paths(models_here), out=Path("v.jsonl"))
    assert elsewhere == here
    assert (models_here / "v.jsonl").exists()


def test_responses_of_a_file_are_matched_by_prompt(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_table(Paths(), "prompts", "test")[:5]
    empty = {"  " + row["prompt"].replace("\n", "\n "): "" for row in rows[::-1]}
    results = run("reference", write_responses(empty), names=["gold"])
    assert {one.judge for one in results.comparisons} == {"gold"}
    expected = sum(by_gold(row["prompt"], row["reference"], "") for row in rows) / 5
    assert win_rate(results, "gold", "reference", "theirs.jsonl").value == pytest.approx(expected)
    assert "5 of the 12 test prompts have responses" in capsys.readouterr().out


def test_a_judge_that_ppo_optimised_for_the_policy_gives_a_warning(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, optimized = Path("models/policy"), contracts.fingerprint(Path("models/reward_heldout"))
    identity = contracts.identity("policy", {"reward": optimized})
    save_checkpoint(load_causal(policy), load_tokenizer(policy), policy, card="a card", identity=identity)
    results = run("models/policy", num_examples=3)
    assert results.optimised_judges == {"reward_model": "models/reward_heldout"}
    warning = "WARNING: judge reward_model is a reward that PPO optimized for models/policy"
    assert warning in capsys.readouterr().out
    run("models/policy", num_examples=3, names=["gold"])
    assert "WARNING" not in capsys.readouterr().out, "that judge does not take part"
    both = {"kind": "all_of", "name": "both", "judges": ["gold", "reward_model"]}
    settings = small.view("judge", VIEW | {"judge.judges": [small.GOLD, small.HELDOUT, both]}).judge
    assert list_required_judges(settings, ["both"]) == {"both", "gold", "reward_model"}


def test_each_row_of_a_repeated_prompt_has_its_own_reference(models_here: Path) -> None:
    rows = read_table(Paths(), "prompts", "test")
    twin = rows[0] | {"reference": " my stuff"}
    small.write_rows(Path(), "prompts", "test", [rows[0], twin])
    file = write_responses({rows[0]["prompt"]: rows[0]["reference"]})
    results = run("reference", file, names=["gold"])
    rate = win_rate(results, "gold", "reference", "theirs.jsonl").value
    assert rate == pytest.approx(0.25)  # a tie and a loss


def test_every_comparison_is_written_with_its_texts(models_here: Path) -> None:
    results = run("models/policy", "models/sft", num_examples=4, out=Path("new/comparisons.jsonl"))
    lines = Path("new/comparisons.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["judge"], row["index"]) for row in rows] == [
        (judge, i) for judge in ("gold", "reward_model") for i in range(4)
    ]
    golds = [row for row in rows if row["judge"] == "gold"]
    expected = [by_gold(row["prompt"], row["response_a"], row["response_b"]) for row in golds]
    assert [row["outcome"] for row in golds] == expected
    rate = sum(row["outcome"] for row in golds) / 4
    assert win_rate(results, "gold", "models/policy", "models/sft").value == pytest.approx(rate)


def test_the_outcome_of_a_failure_is_written_as_null(models_here: Path) -> None:
    Path("half.py").write_text(
        "def half(prompts, answers):\n    return [float('nan')] + [float(len(a)) for a in answers[1:]]\n",
        encoding="utf-8",
    )
    settings = VIEW | {
        "judge.judges": [{"kind": "function", "name": "half", "function": "half:half"}],
        "judge.max_failure_share": 0.5,
    }
    view = small.view("judge", settings)
    compare_models(view, "models/sft", "reference", paths=Paths(), num_examples=4, out=Path("v.jsonl"))
    first, *others = [json.loads(line) for line in Path("v.jsonl").read_text("utf-8").splitlines()]
    assert (first["outcome"], first["failure"]) == (None, "no finite score")
    assert all(row["failure"] is None and row["outcome"] in (0, 0.5, 1) for row in others)


@pytest.mark.parametrize("file", ["model.safetensors", "rlhf.json"])
def test_a_damaged_file_of_a_checkpoint_is_named(models_here: Path, file: str) -> None:
    shutil.copytree("models/policy", "torn")
    torn = Path("torn", file)
    torn.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=rf"torn/{file} cannot be read"):
        run("torn")


@pytest.mark.parametrize(
    ("model", "against", "reason"),
    [
        ("models/none/at/all", "reference", "is not a folder, a .jsonl file of responses or a hub id"),
        ("some/one", "reference", "does not exist; for a hub model give the commit too, as some/one@COMMIT"),
        ("some/one@main", "reference", "full commit hash"),
        ("models/sft", "none.jsonl", "none.jsonl cannot be read"),
        ("models/sft", "data/prompts", "data/prompts holds no tokenizer"),
    ],
)
def test_an_invalid_contender_is_named(models_here: Path, model: str, against: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        run(model, against, names=["gold"])


def test_another_suffix_of_the_output_and_missing_data_are_named(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"--out v\.csv: give a file whose name ends with \.jsonl"):
        run("models/sft", out=Path("v.csv"))
    shutil.rmtree("data/prompts")
    with pytest.raises(UserError, match="run `rlhf prepare`"):
        run("reference")


def test_invalid_lines_of_a_file_of_responses_are_named(models_here: Path) -> None:
    lines = ['{"prompt": "a"}', "", '{"prompt": "b", "completion": "c"}', '{"prompt": 1, "completion": "c"}']
    Path("bad.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        run("bad.jsonl")
    assert str(caught.value).splitlines() == [
        "bad.jsonl:1: completion: Field required",
        "bad.jsonl:4: prompt: Input should be a valid string",
        "give objects with texts `prompt` and `completion`",
    ]
    Path("bad.jsonl").write_text(f"{lines[2]}\nx\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"bad\.jsonl:2: malformed: not JSON"):
        run("bad.jsonl")
    write_responses({"a": "1", "a ": "2"})
    with pytest.raises(UserError, match=r"theirs\.jsonl:2: an earlier row has a response to this prompt"):
        run("theirs.jsonl")
    with pytest.raises(UserError, match="to none of the 12 prompts"):
        run(write_responses({"another prompt": "x"}))


def test_a_line_of_a_file_of_responses_ends_at_a_line_feed_only(models_here: Path) -> None:
    prompt, completion = read_table(Paths(), "prompts", "test")[0]["prompt"], "one\u2028two\x85three"
    line = json.dumps({"prompt": prompt, "completion": completion}, ensure_ascii=False)
    Path("theirs.jsonl").write_bytes(f"{line}\r\n".encode())
    run("theirs.jsonl", names=["gold"], out=Path("out.jsonl"))
    written = Path("out.jsonl").read_text(encoding="utf-8").split("\n")
    assert json.loads(written[0])["response_a"] == completion


def test_only_the_verifiers_that_judge_are_checked(models_here: Path) -> None:
    check = {"kind": "number", "column": "answer", "tolerance": 0.0, "weight": 1.0}
    right = {"kind": "verifier", "name": "right", "checks": [check], "format": None}
    both = {"kind": "all_of", "name": "both", "judges": ["gold", "right"]}
    rows = read_table(Paths(), "prompts", "test")
    bad = [columns.encoded(row | {"columns": {"answer": None}}) for row in rows]
    small.write_rows(models_here, "prompts", "test", bad)
    kept = {"data.columns": {**small.params()["data"]["columns"], "keep": ["answer"]}}
    view = small.view("judge", VIEW | kept | {"judge.judges": [small.GOLD, right, both]})
    results = compare_models(view, "models/sft", "reference", paths=Paths(), names=["gold"])
    assert {one.judge for one in results.comparisons} == {"gold"}
    for names in (["right"], ["both"], []):
        with pytest.raises(UserError, match=r"judge.judges: right: 6 value\(s\) cannot be used"):
            compare_models(view, "models/sft", "reference", paths=Paths(), names=names)


def test_the_command_without_a_model_runs_the_stage(project: Path, models_here: Path, rlhf: Command) -> None:
    shown = rlhf("judge models/sft --judge gold --num-examples 4").out
    assert "gold | models/sft vs reference" in shown
    for command, message in {
        "judge models/sft --judge best": "judge.judges has no judge best; it has gold, reward_model",
        "judge --against models/sft": "need a MODEL",
        "judge": "dvc.yaml declares no stage 'judge'",
    }.items():
        assert message in rlhf(command, status=2).err


def test_responses_made_elsewhere_may_have_plain_prompts(models_here: Path, chat_model: Path) -> None:
    """The test prompts are users' turns; the file has the texts of the turns."""
    shutil.rmtree("data/tokenizer")
    tokenizer.save(
        tokenizer.load_base(Model(base=str(chat_model), scratch=None), Data()), Path("data/tokenizer")
    )
    turn = "<user>hi<eos>\n<assistant>"
    small.write_rows(Path(), "prompts", "test", [{"prompt": turn, "reference": "c", "source": "s"}])
    Path("knows.py").write_text(
        f"def turns(prompts, responses):\n    return [float(p == {turn!r}) for p in prompts]\n",
        encoding="utf-8",
    )
    judge = {"kind": "function", "name": "knows", "function": "knows:turns"}
    view = small.view("judge", {"judge.judges": [judge]})
    compare_models(view, write_responses({"hi": "b"}), "reference", paths=Paths(), out=Path("out.jsonl"))
    row = json.loads(Path("out.jsonl").read_text(encoding="utf-8"))
    assert (row["prompt"], row["a"]) == (turn, "theirs.jsonl")
