"""The one layout of all stages, and how rows are cut into batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from rlhf_tasks.data.batches import (
    PASS_TOKENS,
    SHARED_TOKENS,
    collate,
    collate_groups,
    epoch_batches,
    group_rows,
    group_sizes,
    micro_batches,
    read_table,
)
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.tokenizer import encode, encode_rows, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.project.paths import Paths
from tests import small

DRAWN = random.Random(3)
ROWS = [DRAWN.randint(1, 30) for _ in range(57)]


def padded(rows: Sequence[int]) -> int:
    """Tokens of these rows as `collate` pads them."""
    queries = [[5] * DRAWN.randint(0, ROWS[i]) for i in rows]
    responses = [[6] * (ROWS[i] - len(query)) for i, query in zip(rows, queries, strict=True)]
    return collate(queries, responses, pad=0).query_response.numel()


def test_all_rows_end_at_the_last_column() -> None:
    batch = collate([[5], [6, 7, 8]], [[9, 1], [4]], pad=0)
    assert batch.query_response.tolist() == [[0, 5, 9, 1], [6, 7, 8, 4]]
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert batch.response_mask.tolist() == [[True, True], [False, True]]
    assert batch.responses[batch.response_mask].tolist() == [9, 1, 4]


def test_a_row_takes_no_column_beyond_its_tokens() -> None:
    assert collate([[5] * 9, [5]], [[6], [6] * 9], pad=0).query_response.shape == (2, 10)


def test_positions_count_from_the_first_real_token() -> None:
    batch = collate([[5], [6, 7, 8]], [[9, 1], [4]], pad=0)
    positions = batch.position_ids
    assert positions[0, 1:].tolist() == [0, 1, 2]
    assert positions[1, :4].tolist() == [0, 1, 2, 3]
    assert positions.min() >= 0


def test_masks_come_from_lengths_not_from_token_values() -> None:
    queries, responses = [[1, 5], [6]], [[1, 1], [1]]  # EOS everywhere, and pad is EOS
    apart, same = collate(queries, responses, pad=0), collate(queries, responses, pad=1)
    assert torch.equal(apart.attention_mask, same.attention_mask)
    assert torch.equal(apart.response_mask, same.response_mask)
    assert same.attention_mask.sum(1).tolist() == [4, 2]


def test_responses_that_share_their_query_see_it_and_themselves_alone() -> None:
    queries, responses = [[5, 6], [7], [5, 6]], [[8, 9], [1], [4]]
    batch = collate_groups(queries, responses, [[0, 2], [1]], pad=0)
    assert batch.query_response.tolist() == [[5, 6, 8, 9, 4], [7, 1, 0, 0, 0]]
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 2]
    assert batch.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]
    assert batch.attention_mask.any(-1).all(), "padding sees itself: a softmax over nothing is NaN"
    assert batch.is_real.sum(1).tolist() == [5, 2]
    order = [0, 2, 1]
    plain = collate([queries[i] for i in order], [responses[i] for i in order], pad=0)
    assert torch.equal(batch.response_mask, plain.response_mask)
    # ids in place of hidden states: before each response token, after it, and the last one
    for one in (batch, plain):
        ids = one.query_response
        assert one.responses[one.response_mask].tolist() == [8, 9, 4, 1]
        assert one.predicting(ids).tolist() == [6, 8, 6, 7]
        assert one.states(ids)[:, 1:][one.response_mask].tolist() == [8, 9, 4, 1]
        assert one.ends(ids).tolist() == [9, 4, 1]


def test_a_query_without_tokens_has_no_state_of_another_row() -> None:
    batch = collate_groups([[5], [5], [], []], [[6], [7], [8], [9]], [[0, 1], [2, 3]], pad=0)
    assert batch.states(batch.query_response).tolist() == [[5, 6], [5, 7], [8, 8], [8, 9]]


def test_responses_to_one_query_are_grouped_up_to_the_bounds() -> None:
    queries, responses = [[1], [2], [1], [1], [2]], [[3] * (SHARED_TOKENS // 2 - 1)] * 5
    assert group_rows(queries, responses, range(5), 10**6, shares=False) == [[0], [1], [2], [3], [4]]
    groups = group_rows(queries, responses, range(5), 10**6, shares=True)
    assert groups == [[0, 2], [1, 4], [3]]
    assert group_sizes(queries, responses, groups) == [
        SHARED_TOKENS - 1,
        SHARED_TOKENS - 1,
        SHARED_TOKENS // 2,
    ]
    assert len(group_rows(queries, responses, range(5), SHARED_TOKENS - 2, shares=True)) == 5
    # above the bound where attention sees fewer pairs of tokens: 712² against 4 · 553²
    assert group_rows([[1] * 500] * 4, [[3] * 53] * 4, range(4), 10**6, shares=True) == [[0, 1, 2, 3]]
    assert len(group_rows([[1] * 53] * 4, [[3] * 500] * 4, range(4), 10**6, shares=True)) == 4


def test_rows_with_queries_of_their_own_are_padded_as_ever() -> None:
    queries, responses = [[1], [2, 2]], [[3], [4]]
    plain, shared = collate(queries, responses, 0), collate_groups(queries, responses, [[0], [1]], 0)
    assert type(plain) is type(shared)
    assert all(torch.equal(vars(plain)[name], x) for name, x in vars(shared).items())
    assert collate_groups(queries, responses, [], 9).query_response.tolist() == [[9, 9]]


@pytest.mark.parametrize("max_tokens", [1, 30, 64, 200, 10_000])
def test_micro_batches_hold_every_row_once_within_the_budget(max_tokens: int) -> None:
    groups = micro_batches(ROWS, max_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(ROWS)))
    for group in groups:
        assert len(group) == 1 or padded(group) <= max_tokens


def test_micro_batches_are_as_few_as_the_budget_allows_where_nothing_is_padded() -> None:
    assert sorted(map(len, micro_batches([4] * 5, 8))) == [1, 2, 2]
    assert micro_batches([4] * 5, 20) == [[0, 1, 2, 3, 4]]
    assert micro_batches([], 20) == []


def test_padding_is_worth_a_pass_only_up_to_what_a_pass_costs() -> None:
    assert micro_batches([100, 100 + PASS_TOKENS - 1], 10_000) == [[0, 1]]
    assert micro_batches([100, 100 + PASS_TOKENS + 1], 10_000) == [[0], [1]]


@pytest.mark.parametrize("count", [1, 20, 57, 60])
def test_a_given_number_of_micro_batches_holds_every_row_once(count: int) -> None:
    alone = micro_batches(ROWS, 64)
    groups = micro_batches(ROWS, 64, count=count)
    assert len(groups) == max(count, len(alone))
    assert sorted(row for group in groups for row in group) == list(range(len(ROWS)))
    assert all(padded(group) <= 64 for group in groups if len(group) > 1)


def test_a_group_that_is_out_of_memory_is_cut_smaller_and_no_other_is_repeated() -> None:
    budget, seen = TokenBudget(400), list[int]()

    def compute(group: list[int]) -> None:
        if padded(group) > 150:
            raise torch.OutOfMemoryError("planted")
        seen.extend(group)

    budget.each(ROWS, compute)
    assert sorted(seen) == list(range(len(ROWS)))
    assert budget.max_tokens <= 200
    assert budget.is_lowered
    with pytest.raises(UserError, match="one row at a time"):
        budget.each([200, 3], lambda group: compute([]) if group == [1] else compute(list(range(57))))


def test_a_table_that_no_stage_has_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no data/prompts/test.parquet; `dvc repro` makes it"):
        read_table(Paths(tmp_path), "prompts", "test")


def test_an_epoch_is_a_permutation_in_batches() -> None:
    batches = list(epoch_batches(ROWS, 8, torch.Generator().manual_seed(1)))
    assert sorted(row for batch in batches for row in batch) == list(range(57))
    assert sorted(map(len, batches)) == [1, 8, 8, 8, 8, 8, 8, 8]


def test_an_epoch_is_seeded_and_the_next_one_differs() -> None:
    def two_epochs(seed: int) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(seed)
        return [list(epoch_batches(ROWS, 8, generator)) for _ in range(2)]

    assert two_epochs(1) == two_epochs(1)
    assert two_epochs(1) != two_epochs(2)
    assert two_epochs(1)[0] != two_epochs(1)[1]


def test_rows_of_similar_length_share_a_batch() -> None:
    def padding(batches: Iterable[list[int]]) -> int:
        return sum(padded(batch) for batch in batches) - sum(ROWS)

    seeded = torch.Generator().manual_seed(1)
    shuffled = [rows.tolist() for rows in torch.randperm(57, generator=seeded).split(8)]
    assert padding(epoch_batches(ROWS, 8, seeded)) < padding(shuffled)


def test_answers_end_with_eos_and_prompts_get_no_special_token() -> None:
    words = small.tokenizer()
    ids = [words.get_vocab()[word] for word in ("w3", "w1")]
    assert encode(words, ["w3 w1", "w1"]) == [ids, ids[1:]]
    assert encode_rows(words, ["w1", "w1"], [" w3 w1", ""]) == (
        [ids[1:]] * 2,
        [[*ids, small.EOS], [small.EOS]],
    )
    assert encode(words, []) == []


def test_a_tokenizer_without_eos_is_refused_and_without_pad_pads_with_eos(tmp_path: Path) -> None:
    words = small.tokenizer()
    words.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"pad_token": "<pad>"', '"pad_token": null'), encoding="utf-8")
    assert load_tokenizer(tmp_path).pad_token_id == small.EOS
    config.write_text(text.replace('"eos_token": "<eos>"', '"eos_token": null'), encoding="utf-8")
    with pytest.raises(UserError, match="no EOS token"):
        load_tokenizer(tmp_path)


def test_mapped_rows_of_token_ids_are_what_was_added() -> None:
    rows = [[DRAWN.randint(0, 2**31 - 1) for _ in range(length)] for length in (3, 0, 1, 0)]
    mapped = Ragged(rows[:2])
    mapped.extend(rows[2:])
    assert [*mapped] == rows
    assert (len(mapped), mapped[-2], mapped[1:3]) == (4, rows[2], rows[1:3])
    with pytest.raises(IndexError):
        mapped[4]
    assert [*Ragged()] == []
