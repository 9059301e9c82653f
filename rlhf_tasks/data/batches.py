"""Rows of token ids → padded batches, and batches → micro-batches of a bounded number of tokens.

One layout serves every stage: query and response side by side, and padding before them.

    [pad pad q q | r r r EOS]          B batch · R longest response · T longest query + response
    [q q q q q q q | r EOS  ]

A row takes no more columns than it has tokens, whatever the lengths of its two parts. The tokens of all
responses are in the last R columns, and their logits in the R columns from the last R + 1. Masks come from
lengths, never from token values (pad may equal EOS).

Where several responses follow one query, and the model allows it, they share a row (`SharedPrefixBatch`):

    [q q q | r r r EOS | r EOS | r r pad]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import Split
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.rows import SET, Role, Rows
from rlhf_tasks.data.rows import read as read_rows
from rlhf_tasks.data.tokenizer import Ids, encode, encode_rows
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Batch:
    """Token ids (B, T) and masks; `response_mask` (B, R) is True on real response tokens, EOS included.

    A response that is shorter than R stands at the end of its R columns.
    """

    query_response: Tensor
    attention_mask: Tensor
    response_mask: Tensor

    @property
    def num_response_columns(self) -> int:
        return self.response_mask.shape[1]

    @property
    def responses(self) -> Tensor:
        """(B, R) token ids; where `response_mask` is False, they are of the query or padding."""
        return self.query_response[:, -self.num_response_columns :]

    @property
    def mask(self) -> Tensor:
        """(B, R) bool: the real response tokens, in tensors whose rows start with the first of them."""
        columns = torch.arange(self.num_response_columns, device=self.response_mask.device)
        return columns < self.response_mask.sum(1, keepdim=True)

    @property
    def position_ids(self) -> Tensor:
        """(B, T): 0 at the first real token, so that left padding moves nothing."""
        return (self.attention_mask.cumsum(1) - 1).clamp_min(0)

    @property
    def is_real(self) -> Tensor:
        """(B, T) bool: whether a column holds a token, and not padding."""
        return self.attention_mask.bool()

    @property
    def num_last_columns(self) -> int:
        """How many of the last columns are read of a model's states; 0: all, as in `logits_to_keep`."""
        return self.num_response_columns + 1

    def predicting(self, x: Tensor) -> Tensor:
        """(B, T, …) of all tokens → (N, …) of those before each of the N response tokens, row after row.

        Here and below, x has all T columns or the last `num_last_columns`.
        """
        return x[:, -self.num_last_columns : -1][self.response_mask]

    def states(self, x: Tensor) -> Tensor:
        """(B, T, …) → (B, R + 1, …): before each of the R response columns, and after the last."""
        return x[:, -self.num_last_columns :]

    def ends(self, x: Tensor) -> Tensor:
        """(B, T, …) → (B, …): of each response's last token."""
        return x[:, -1]

    def to(self, device: torch.device) -> Self:
        return type(self)(**{name: x.to(device) for name, x in vars(self).items()})


def collate(queries: Sequence[Ids], responses: Sequence[Ids], pad: int) -> Batch:
    """Pad to the longest of these rows."""
    pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
    rows = [torch.tensor(q + r, dtype=torch.long) for q, r in zip(queries, responses, strict=True)]
    attended = pad_left([torch.ones_like(row) for row in rows])
    answered = pad_left([torch.ones(len(response), dtype=torch.bool) for response in responses])
    return Batch(pad_left(rows, padding_value=pad), attended, answered)


@dataclass(frozen=True)
class SharedPrefixBatch(Batch):
    """B responses in fewer rows: those to one query follow it in one row, and none of them sees another.

    So a model reads each query once, and every response has the positions that follow it. With P rows of T
    tokens, padded at their ends, `query_response` and `is_real` are (P, T), and `attention_mask` is
    (P, 1, T, T), True where a token sees another one. What is read of the responses has B rows, as in other
    batches.
    """

    segments: Tensor
    """(P, T): 0 in a query, 1, 2, … in the responses to it, −1 in padding."""
    positions: Tensor
    """(P, T)"""
    columns: Tensor
    """(B, R + 1): where the tokens of `states` stand in (P · T)."""

    @property
    def responses(self) -> Tensor:
        return self.query_response.flatten()[self.columns[:, 1:]]

    @property
    def position_ids(self) -> Tensor:
        return self.positions

    @property
    def is_real(self) -> Tensor:
        return self.segments >= 0

    @property
    def num_last_columns(self) -> int:
        return 0

    def predicting(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.columns[:, :-1][self.response_mask]]

    def states(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.columns]

    def ends(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.columns[:, -1]]


def collate_groups(
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    groups: Sequence[Sequence[int]],
    pad: int,
    device: torch.device = CPU,
) -> Batch:
    """The responses of all groups, one after another; each group shares a row, after its common query.

    Where no group has several it is `collate`; for no groups it is a row of padding, for a pass whose result
    nobody reads. The mask is made on the `device`: it is larger than all else that is copied there.
    """
    rows = [i for group in groups for i in group]
    if len(rows) == len(groups):
        known, answers = [queries[i] for i in rows], [responses[i] for i in rows]
        return collate(known or [[pad]], answers or [[pad]], pad).to(device)
    width, width_r = max(group_sizes(queries, responses, groups)), max(len(responses[i]) for i in rows)
    ids = torch.full((len(groups), width), pad, dtype=torch.long)
    segments, positions = torch.full_like(ids, -1), torch.zeros_like(ids)
    answered = torch.zeros(len(rows), width_r, dtype=torch.bool)
    columns = torch.zeros(len(rows), width_r + 1, dtype=torch.long)
    number = 0  # of the response
    for row, group in enumerate(groups):
        query, start = queries[group[0]], row * width
        stop = len(query)
        ids[row, :stop], segments[row, :stop] = torch.tensor(query, dtype=torch.long), 0
        positions[row, :stop] = torch.arange(stop)
        last = start + max(stop - 1, 0)  # of the query, whose state precedes every response
        for segment, i in enumerate(group, start=1):
            here = slice(stop, stop + len(responses[i]))
            ids[row, here], segments[row, here] = torch.tensor(responses[i], dtype=torch.long), segment
            positions[row, here] = torch.arange(len(query), len(query) + len(responses[i]))
            first = width_r - len(responses[i])
            answered[number, first:], columns[number, first] = True, last
            columns[number, first + 1 :] = torch.arange(start + here.start, start + here.stop)
            stop, number = here.stop, number + 1
    ids, answered, segments, positions, columns = (
        x.to(device) for x in (ids, answered, segments, positions, columns)
    )
    a, b = segments[:, :, None], segments[:, None, :]
    sees = torch.ones(width, width, dtype=torch.bool, device=device).tril() & ((b == 0) | (a == b))
    return SharedPrefixBatch(ids, sees[:, None], answered, segments, positions, columns)


SHARED_TOKENS = 512
"""So many tokens may share a row, whatever it costs: attention computes all pairs of them, seen or not."""


def group_rows(
    queries: Sequence[Ids], responses: Sequence[Ids], rows: Sequence[int], most: int, *, shares: bool
) -> list[list[int]]:
    """Row numbers in groups that share a row of a batch; those to one query do, where it pays (`shares`).

    A group of several has at most `most` tokens, and more than SHARED_TOKENS only where attention has fewer
    pairs of tokens than in rows of their own.
    """
    if not shares:
        return [[i] for i in rows]
    groups: list[list[int]] = []
    latest: dict[tuple[int, ...], list[int]] = {}
    for i in rows:
        query = tuple(queries[i])
        group = [*latest.get(query, ()), i]
        apart = [len(query) + len(responses[j]) for j in group]
        together = sum(apart) - (len(group) - 1) * len(query)
        pays = together <= SHARED_TOKENS or together**2 <= sum(tokens**2 for tokens in apart)
        if len(group) > 1 and together <= most and pays:
            latest[query].append(i)
        else:
            latest[query] = [i]
            groups.append(latest[query])
    return groups


def group_sizes(
    queries: Sequence[Ids], responses: Sequence[Ids], groups: Sequence[Sequence[int]]
) -> list[int]:
    """The number of tokens of each group, whose query counts once."""
    return [len(queries[group[0]]) + sum(len(responses[i]) for i in group) for group in groups]


def sizes(queries: Sequence[Ids], responses: Sequence[Ids]) -> list[int]:
    """The number of tokens of each row."""
    return [len(q) + len(r) for q, r in zip(queries, responses, strict=True)]


PASS_TOKENS = 128
"""What a forward and backward pass costs beside its tokens, as a number of tokens.

Measured on one CPU thread: 124 tokens at a width of 96 and 4 layers, 64 at 128 and 4, 45 at 128 and 6 layers
with 50,304 words. A multiple of it changes little, since the passes of large batches are few either way.
"""

EVENNESS = 1e-12
"""Decides between cuts that cost the same, by the squares of their groups' tokens."""


def micro_batches(rows: Sequence[int], max_tokens: int, count: int | None = None) -> list[list[int]]:
    """Row numbers in groups of similar size, each of at most `max_tokens` padded tokens where possible.

    `rows` are the tokens of each row; a group is padded to its longest. Of all cuts of the sorted rows under
    the bound this is the cheapest, where a group costs its padded tokens and PASS_TOKENS; of equally cheap
    cuts it is the even one, which needs the least memory.

    With `count`, at least that many groups are made (data-parallel ranks must agree on the number): large
    groups are halved, and empty groups follow where there are fewer rows.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    costs, starts = [0.0], [0]  # of the cheapest cut of the first n rows, and where its last group starts
    for stop, last in enumerate(order, start=1):
        fewest = max(0, stop - max(1, max_tokens // max(1, rows[last])))
        padded = [(stop - start) * rows[last] for start in range(fewest, stop)]
        cuts = [cost + x + EVENNESS * x**2 for cost, x in zip(costs[fewest:], padded, strict=True)]
        cheapest = min(cuts)
        costs.append(cheapest + PASS_TOKENS)
        starts.append(fewest + cuts.index(cheapest))
    groups: list[list[int]] = []
    stop = len(rows)
    while stop:
        groups.insert(0, order[starts[stop] : stop])
        stop = starts[stop]
    while len(groups) < (count or 0):
        largest = max(range(len(groups)), key=lambda i: len(groups[i]), default=None)
        if largest is None or len(groups[largest]) == 1:
            groups.append([])
        else:
            half = len(groups[largest]) // 2
            groups[largest : largest + 1] = [groups[largest][:half], groups[largest][half:]]
    return groups


def epoch_batches(rows: Sequence[int], batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Row numbers of one shuffled epoch, `batch_size` at a time; the short last batch is kept.

    Rows of similar length share a batch (shuffled pools of 8 batches are sorted by length), which saves
    padding. The order of batches stays random.
    """
    order: list[int] = torch.randperm(len(rows), generator=generator).tolist()
    pool = 8 * batch_size
    pools = [sorted(order[i : i + pool], key=rows.__getitem__) for i in range(0, len(rows), pool)]
    order = [row for rows_of_pool in pools for row in rows_of_pool]
    batches = [order[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    for i in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[i]


# ----------------------------------------------------------------------------------------- files


def sets_of(*tables: Rows) -> list[str]:
    """The name of each row's set; empty unless there are several."""
    sets = [name for rows in tables if SET in rows.table.column_names for name in rows.texts(SET)]
    return sets if len({*sets}) > 1 else []


def read_table(paths: Paths, role: str, split: Split) -> Rows:
    """The rows of data/ROLE/SPLIT.parquet; `columns` holds the kept columns, where there are any.

    Raises:
        UserError: if there is no such file.
    """
    known = "preferences" if role == "comparisons" else cast(Role, role)
    if not (file := paths.table(role, split)).exists():
        raise UserError(f"there is no {paths.relative(file)}; `dvc repro` makes it")
    return read_rows(file, known, split)


def token_ids(tokenizer: PreTrainedTokenizerBase, rows: Rows, *answers: str) -> list[Ragged]:
    """The ids of the prompts, and of each of these columns as responses that continue them, with EOS."""
    queries, *responses = (Ragged() for _ in range(1 + len(answers)))
    for batch in rows.batches():
        prompts = batch.column("prompt")
        asked = [] if answers else encode(tokenizer, prompts)
        for name, known in zip(answers, responses, strict=True):
            asked, ids = encode_rows(tokenizer, prompts, batch.column(name))
            known.extend(ids)
        queries.extend(asked)
    return [queries, *responses]
