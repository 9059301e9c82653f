"""`rlhf judge MODEL`: any two contenders, and one message for what the user got wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlhf_tasks import console
from rlhf_tasks.cli import main
from rlhf_tasks.data.batches import load_tokenizer, read_table
from rlhf_tasks.data.synthetic import gold
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import head_to_head, judges
from rlhf_tasks.modeling import contracts, models
from rlhf_tasks.project.paths import Paths
from tests import small

VIEW = {"judge.judges": [small.GOLD, small.HELDOUT], "judge.num_examples": 6}


@pytest.fixture(autouse=True)
def loud() -> None:
    console.set_quiet(False)


def run(model: str, against: str = "reference", **options: object) -> dict[str, float]:
    given = {"num_examples": None, "names": [], **options}
    return head_to_head.run(small.view("judge", VIEW), model, against, **given)  # type: ignore[arg-type]


def write_answers(answers: dict[str, str]) -> str:
    text = "".join(json.dumps({"prompt": p, "completion": a}) + "\n" for p, a in answers.items())
    Path("theirs.jsonl").write_text(text, encoding="utf-8")
    return "theirs.jsonl"


def test_a_checkpoint_against_the_reference_by_every_judge(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run("models/policy")
    for judge in ("gold", "reward_model"):
        low, rate, high = (
            found[f"{judge}/models/policy_vs_reference/{k}"] for k in ("low", "win_rate", "high")
        )
        assert 0 <= low <= rate <= high <= 1
    shown = capsys.readouterr().out
    assert "win rates on 6 test prompts" in shown
    assert "gold | models/policy vs reference | " in shown


def test_contenders_are_mirrored_and_kept_answers_are_the_same(models_here: Path) -> None:
    there, back = run("models/policy", "models/sft"), run("models/sft", "models/policy")
    ours = there["reward_model/models/policy_vs_models/sft/win_rate"]
    assert back["reward_model/models/sft_vs_models/policy/win_rate"] == pytest.approx(1 - ours)


def test_answers_made_elsewhere_are_matched_by_prompt(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_table(Paths(), "prompts", "test")[:5]
    empty = {"  " + row["prompt"].replace("\n", "\n "): "" for row in rows[::-1]}
    found = run("reference", write_answers(empty), names=["gold"])
    assert set(found) == {k for k in found if k.startswith("gold/")}
    points = [gold(r["prompt"], r["reference"]).score - gold(r["prompt"], "").score for r in rows]
    expected = sum(1.0 if p > 0 else 0.5 if p == 0 else 0.0 for p in points) / 5
    assert found["gold/reference_vs_theirs.jsonl/win_rate"] == pytest.approx(expected)
    assert "5 of the 12 test prompts are answered by all" in capsys.readouterr().out


def test_fewer_examples_can_be_asked_for(models_here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("models/sft", num_examples=3, names=["gold"])
    assert "win rates on 3 test prompts" in capsys.readouterr().out


def test_a_judge_that_ppo_optimised_for_this_policy_is_told_loudly(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, optimised = Path("models/policy"), contracts.fingerprint(Path("models/reward_heldout"))
    models.save(
        models.load_causal(policy), load_tokenizer(policy), policy, card="a card",
        identity=contracts.identity("policy", {"reward": optimised}),
    )  # fmt: skip
    run("models/policy", num_examples=3)
    told = "WARNING: judge reward_model is the reward model that PPO optimised for models/policy"
    assert told in capsys.readouterr().out
    run("models/policy", num_examples=3, names=["gold"])
    assert "WARNING" not in capsys.readouterr().out, "that judge was not asked"
    both = {"kind": "all_of", "name": "both", "judges": ["gold", "reward_model"]}
    settings = small.view("judge", VIEW | {"judge.judges": [small.GOLD, small.HELDOUT, both]}).judge
    assert judges.optimised(settings, policy, ["both"]) == {"reward_model": "models/reward_heldout"}


def test_the_same_prompt_twice_has_each_its_own_reference(models_here: Path) -> None:
    rows = read_table(Paths(), "prompts", "test")
    twin = rows[0] | {"reference": " my stuff"}
    small.write_rows(Path(), "prompts", "test", [rows[0], twin])
    found = run("reference", write_answers({rows[0]["prompt"]: rows[0]["reference"]}), names=["gold"])
    assert found["gold/reference_vs_theirs.jsonl/win_rate"] == pytest.approx(0.25)  # a tie and a loss


@pytest.mark.parametrize("name", ["verdicts.jsonl", "new/verdicts.parquet"])
def test_every_verdict_is_written_with_what_was_judged(models_here: Path, name: str) -> None:
    found = run("models/policy", "models/sft", num_examples=4, out=Path(name))
    if name.endswith(".parquet"):
        rows = pq.read_table(name).to_pylist()
    else:
        rows = [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]
    assert [(row["judge"], row["index"]) for row in rows] == [
        (judge, i) for judge in ("gold", "reward_model") for i in range(4)
    ]
    golds = [row for row in rows if row["judge"] == "gold"]
    points = [gold(row["prompt"], row["answer_a"]).score - gold(row["prompt"], row["answer_b"]).score
              for row in golds]  # fmt: skip
    assert [row["verdict"] for row in golds] == [1.0 if p > 0 else 0.5 if p == 0 else 0.0 for p in points]
    rate = sum(row["verdict"] for row in golds) / 4
    assert found["gold/models/policy_vs_models/sft/win_rate"] == pytest.approx(rate)


def test_verdicts_take_the_place_of_older_ones_whole(models_here: Path) -> None:
    Path("verdicts.parquet").write_text("older", encoding="utf-8")
    Path("verdicts.parquet").chmod(0o444)
    run("models/policy", "models/sft", num_examples=2, names=["gold"], out=Path("verdicts.parquet"))
    assert pq.read_table("verdicts.parquet").num_rows == 2
    assert not list(Path().glob(".verdicts*"))


def test_a_failed_verdict_is_written_as_null(models_here: Path) -> None:
    Path("half.py").write_text(
        "def half(prompts, answers):\n    return [float('nan')] + [float(len(a)) for a in answers[1:]]\n",
        encoding="utf-8",
    )
    settings = VIEW | {
        "judge.judges": [{"kind": "function", "name": "half", "function": "half:half"}],
        "judge.max_failure_share": 0.5,
    }
    view = small.view("judge", settings)
    head_to_head.run(view, "models/sft", "reference", num_examples=4, names=[], out=Path("v.jsonl"))
    first, *others = [json.loads(line) for line in Path("v.jsonl").read_text("utf-8").splitlines()]
    assert (first["verdict"], first["failure"]) == (None, "no finite score")
    assert all(row["failure"] is None and row["verdict"] in (0, 0.5, 1) for row in others)


def test_verdicts_of_another_kind_of_file_are_refused_before_anything_runs(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"--out v\.csv: verdicts are written as \.jsonl or \.parquet"):
        run("models/sft", out=Path("v.csv"))


@pytest.mark.parametrize("file", ["model.safetensors", "rlhf.json"])
def test_a_checkpoint_that_is_torn_is_told_by_its_file(models_here: Path, file: str) -> None:
    shutil.copytree("models/policy", "torn")
    torn = Path("torn", file)
    torn.write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=rf"torn/{file} cannot be read"):
        run("torn")


@pytest.mark.parametrize(
    ("model", "against", "why"),
    [
        ("models/none/at/all", "reference", "is no folder, no .jsonl file of answers and no hub id"),
        ("some/one", "reference", "does not exist; of a hub model give the commit too, as some/one@COMMIT"),
        ("some/one@main", "reference", "full commit hash"),
        ("models/sft", "none.jsonl", "none.jsonl cannot be read"),
        ("models/sft", "data/prompts", "data/prompts holds no tokenizer"),
    ],
)
def test_a_contender_that_is_none_is_named(models_here: Path, model: str, against: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        run(model, against, names=["gold"])


def test_bad_answers_are_told_by_line(models_here: Path) -> None:
    Path("bad.jsonl").write_text(
        '{"prompt": "a"}\n\n{"prompt": "b", "completion": "c"}\nx\n', encoding="utf-8"
    )
    with pytest.raises(UserError) as told:
        run("bad.jsonl")
    assert str(told.value).count("\n") == 1
    assert "bad.jsonl:1: " in str(told.value)
    assert "bad.jsonl:4: " in str(told.value)
    write_answers({"a": "1", "a ": "2"})
    with pytest.raises(UserError, match=r"theirs\.jsonl:2: the prompt has an answer already"):
        run("theirs.jsonl")
    with pytest.raises(UserError, match="none of the 12 prompts"):
        run(write_answers({"another prompt": "x"}))


def test_without_data_the_stage_that_makes_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run `rlhf prepare`"):
        run("reference")


def test_the_command_line_tells_the_stage_from_a_contest(
    project: Path, models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["judge", "models/sft", "--judge", "gold", "--num-examples", "4"]) == 0
    assert "gold | models/sft vs reference" in capsys.readouterr().out
    assert main.main(["judge", "models/sft", "--judge", "best"]) == 2
    assert "judge.judges has no judge best; it has gold, reward_model" in capsys.readouterr().err
    assert main.main(["judge", "--against", "models/sft"]) == 2
    assert "go with a MODEL" in capsys.readouterr().err
    assert main.main(["judge"]) == 2
    assert "dvc.yaml declares no stage 'judge'" in capsys.readouterr().err
