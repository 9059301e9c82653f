from __future__ import annotations

import pytest

from rlhf_tasks.config import Split
from rlhf_tasks.data.rows import (
    CONVERSATION,
    SPLITS,
    Corpus,
    Problems,
    Role,
    Row,
    check_leaks,
    without_held_turns,
)
from rlhf_tasks.data.splits import cap_train, complete, fill_splits, pairs_of, shuffle_heldout
from rlhf_tasks.errors import UserError
from tests.data.conftest import store

SIZES: dict[Split, int] = {"validation": 5, "test": 10}


def demos(names: range, per_prompt: int = 1) -> list[Row]:
    return [
        {"prompt": f"q {i}", "completion": f" a {i} {k}", "source": f"sft:{i}"}
        for i in names
        for k in range(per_prompt)
    ]


def pairs(names: range) -> list[Row]:
    return [
        {"prompt": f"q {i}", "chosen": " a", "rejected": " b", "source": f"preferences:{i}"} for i in names
    ]


def fill(given: dict[Role, dict[Split, list[Row]]], seed: int = 1) -> Corpus:
    return fill_splits(store(given), seed=seed, sizes=SIZES)


def prompts_of(corpus: Corpus, role: str, split: Split) -> set[str]:
    return {row["prompt"] for row in corpus[role][split]}  # type: ignore[index]


def test_all_rows_of_a_prompt_go_to_one_split_and_none_is_lost() -> None:
    corpus = fill({"sft": {"train": demos(range(100), per_prompt=3)}})
    held = {split: prompts_of(corpus, "sft", split) for split in SPLITS}
    assert (len(held["train"]), len(held["validation"]), len(held["test"])) == (85, 5, 10)
    assert sum(len(rows) for rows in corpus["sft"].values()) == 300


def test_split_depends_on_prompts_and_seed_not_on_the_order_of_rows() -> None:
    rows = demos(range(100))
    forward = fill({"sft": {"train": rows}})
    backward = fill({"sft": {"train": rows[::-1]}})
    other = fill({"sft": {"train": rows}}, seed=2)
    assert prompts_of(forward, "sft", "test") == prompts_of(backward, "sft", "test")
    assert prompts_of(forward, "sft", "test") != prompts_of(other, "sft", "test")


def test_a_held_out_split_takes_at_most_a_quarter_of_the_prompts() -> None:
    corpus = fill({"sft": {"train": demos(range(9))}})
    assert [len(corpus["sft"][split]) for split in SPLITS] == [5, 2, 2]


def test_roles_hold_out_the_same_prompts() -> None:
    corpus = fill({"preferences": {"train": pairs(range(100))}, "sft": {"train": demos(range(100))}})
    for split in SPLITS:
        assert prompts_of(corpus, "sft", split) == prompts_of(corpus, "preferences", split)


def test_given_splits_stay_and_missing_ones_are_filled_without_a_leak() -> None:
    given: dict[Role, dict[Split, list[Row]]] = {
        "sft": {"train": demos(range(60)), "validation": demos(range(60, 70))},
        "preferences": {"train": pairs(range(0, 80, 2)), "test": pairs(range(1, 20, 2))},
    }
    corpus = fill(given)
    assert prompts_of(corpus, "sft", "validation") == {f"q {i}" for i in range(60, 70)}
    assert prompts_of(corpus, "preferences", "test") == {f"q {i}" for i in range(1, 20, 2)}
    assert len(corpus["sft"]["test"]) == 10
    judged = prompts_of(corpus, "sft", "test")
    assert not judged & prompts_of(corpus, "preferences", "train")
    assert not judged & prompts_of(corpus, "sft", "train")
    problems = Problems()
    check_leaks(corpus, problems)
    where_sft_validates = prompts_of(corpus, "sft", "validation") & prompts_of(corpus, "preferences", "train")
    assert where_sft_validates == set()
    assert not problems


def test_comparisons_of_posts_that_sft_trains_on_still_get_a_test_split() -> None:
    given: dict[Role, dict[Split, list[Row]]] = {
        "sft": {"train": demos(range(50)), "validation": demos(range(50, 60)), "test": demos(range(60, 70))},
        "preferences": {"train": pairs(range(40)), "validation": pairs(range(40, 50))},
    }
    corpus = fill(given)
    assert [len(corpus["preferences"][split]) for split in SPLITS] == [30, 10, 10]


def test_demonstrations_come_from_chosen_answers_and_prompts_from_demonstrations() -> None:
    twice = [*pairs(range(8)), *pairs(range(8))]
    full = complete(fill({"preferences": {"train": twice}}))
    assert [len(full["preferences"][split]) for split in SPLITS] == [8, 4, 4]
    assert [len(full["sft"][split]) for split in SPLITS] == [4, 2, 2]
    first = full["sft"]["test"][0]
    assert first["completion"] == " a"
    assert full["prompts"]["test"][0] == {
        "prompt": first["prompt"],
        "reference": " a",
        "source": first["source"],
    }


def test_bad_responses_make_no_demonstration_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = ([row | {side: None} for row in pairs(range(40))] for side in ("rejected", "chosen"))
    full = complete(fill({"preferences": {"train": good[10:] + bad[:25]}}))
    for role in ("sft", "prompts"):
        assert set().union(*(prompts_of(full, role, s) for s in SPLITS)) == {f"q {i}" for i in range(10, 40)}
    assert "25 bad response(s) make no demonstration" in capsys.readouterr().out
    with pytest.raises(UserError, match="40 bad responses make no demonstration; give good ones too"):
        complete(fill({"preferences": {"train": bad}}))


def test_a_split_without_rows_is_an_error_that_names_it() -> None:
    with pytest.raises(UserError, match="sft/validation, sft/test, prompts/validation, prompts/test"):
        complete(fill({"sft": {"train": demos(range(3))}}))


def test_the_first_held_out_rows_are_a_sample_of_all_files() -> None:
    corpus = complete(fill({"sft": {"train": demos(range(100)), "test": demos(range(100, 300))}}))
    shuffled = shuffle_heldout(corpus, seed=1)
    for role in ("sft", "prompts"):
        before, after = ([row["prompt"] for row in found[role]["test"]] for found in (corpus, shuffled))
        assert sorted(after) == sorted(before)
        assert 30 < len({*after[:100]} & {*before[:100]}) < 70
    assert [*shuffled["sft"]["train"]] == [*corpus["sft"]["train"]]
    assert [row["prompt"] for row in shuffled["sft"]["test"]] == [
        row["prompt"] for row in shuffled["prompts"]["test"]
    ]


def test_max_rows_caps_train_rows_only_and_keeps_their_order() -> None:
    corpus = complete(fill({"sft": {"train": demos(range(100))}}))
    capped = cap_train(corpus, 20, seed=1)
    kept = [row["source"] for row in capped["sft"]["train"]]
    assert len(kept) == 20
    assert kept == [row["source"] for row in corpus["sft"]["train"] if row["source"] in set(kept)]
    assert [row["prompt"] for row in capped["prompts"]["train"]] == [
        r["prompt"] for r in capped["sft"]["train"]
    ]
    assert list(capped["sft"]["test"]) == list(corpus["sft"]["test"])


def test_an_earlier_turn_whose_prompt_is_held_out_is_no_row() -> None:
    """With `sft.train_on: all` a longer conversation may begin as a held-out one does."""
    short = demos(range(40))
    long = [{**row, CONVERSATION: f"{row['prompt']} a r"} for row in short]
    ends = [{**row, "prompt": row[CONVERSATION], CONVERSATION: None} for row in long]
    corpus = without_held_turns(fill({"sft": {"train": [*short, *long, *ends]}}))
    check_leaks(corpus, problems := Problems())
    assert not problems
    assert sum(map(len, corpus["sft"].values())) < 120
    plain = store({"sft": {"train": short}})
    assert without_held_turns(plain) is plain


def test_prompts_that_differ_in_white_space_are_in_one_half_of_the_pairs() -> None:
    rows = [row for one in pairs(range(50)) for row in (one, {**one, "prompt": f" {one['prompt']}\n"})]
    whole = store({"preferences": {"train": rows}})["preferences"]["train"]
    halves = [
        {row["prompt"].strip() for row in pairs_of(whole, name)} for name in ("reward", "reward_heldout")
    ]
    assert not halves[0] & halves[1]
    assert all(halves)
