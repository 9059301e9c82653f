"""Rows of token ids → padded batches, and batches → micro-batches of a bounded number of tokens.

One layout serves every stage: the query left-padded to Q columns, the response right-padded to R:

    [pad pad q q q | r r r EOS pad]          B batch · Q query · R response · T = Q + R

so that the response's logits are always the last R + 1 columns but one, and masks come from lengths,
never from token values (pad may equal EOS).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_tasks.config import Split
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths

Ids = list[int]
Size = tuple[int, int]
"""Tokens of a row's query and of its response."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Batch:
    """Token ids (B, T) and masks; `response_mask` (B, R) is True on real response tokens, EOS included."""

    query_response: Tensor
    attention_mask: Tensor
    response_mask: Tensor

    @property
    def num_response_columns(self) -> int:
        return self.response_mask.shape[1]

    @property
    def responses(self) -> Tensor:
        """(B, R) token ids, padding included."""
        return self.query_response[:, -self.num_response_columns :]

    @property
    def position_ids(self) -> Tensor:
        """(B, T): 0 at the first real token, so that left padding moves nothing."""
        return (self.attention_mask.cumsum(1) - 1).clamp_min(0)

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device) for t in (self.query_response, self.attention_mask, self.response_mask)))


def collate(queries: Sequence[Ids], responses: Sequence[Ids], pad: int) -> Batch:
    """Pad to the longest query and the longest response of these rows."""
    num_rows, width_q = len(queries), max(map(len, queries))
    width = width_q + max(map(len, responses))
    ids = torch.full((num_rows, width), pad, dtype=torch.long)
    mask = torch.zeros((num_rows, width), dtype=torch.bool)
    for row, (query, response) in enumerate(zip(queries, responses, strict=True)):
        start, stop = width_q - len(query), width_q + len(response)
        ids[row, start:stop] = torch.tensor(query + response, dtype=torch.long)
        mask[row, start:stop] = True
    return Batch(ids, mask.long(), mask[:, width_q:])


def sizes(queries: Sequence[Ids], responses: Sequence[Ids]) -> list[Size]:
    return [(len(q), len(r)) for q, r in zip(queries, responses, strict=True)]


def micro_batches(rows: Sequence[Size], max_tokens: int, count: int | None = None) -> list[list[int]]:
    """Row numbers in groups of similar length, each of at most `max_tokens` padded tokens where possible.

    Padded as `collate` pads: a group is as wide as its longest query and its longest response together.

    With `count`, at least that many groups are made (data-parallel ranks must agree on the number): large
    groups are halved, and empty groups follow where there are fewer rows.
    """
    groups: list[list[int]] = []
    width = (0, 0)
    for row in sorted(range(len(rows)), key=lambda i: (sum(rows[i]), i)):
        query, response = rows[row]
        width = (max(width[0], query), max(width[1], response))
        if groups and sum(width) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
            width = (query, response)
    while len(groups) < (count or 0):
        largest = max(range(len(groups)), key=lambda i: len(groups[i]), default=None)
        if largest is None or len(groups[largest]) == 1:
            groups.append([])
        else:
            half = len(groups[largest]) // 2
            groups[largest : largest + 1] = [groups[largest][:half], groups[largest][half:]]
    return groups


def epoch_batches(rows: Sequence[Size], batch_size: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Row numbers of one shuffled epoch, `batch_size` at a time; the short last batch is kept.

    Rows of similar length share a batch (shuffled pools of 8 batches are sorted by length), which saves
    padding. The order of batches stays random.
    """
    order: list[int] = torch.randperm(len(rows), generator=generator).tolist()
    pool = 8 * batch_size
    order = [
        row
        for start in range(0, len(rows), pool)
        for row in sorted(order[start : start + pool], key=lambda r: sum(rows[r]))
    ]
    batches = [order[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    for i in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[i]


# ----------------------------------------------------------------------------------------- files


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; a missing pad token is read as EOS (masks don't come from values).

    Raises:
        UserError: if the folder holds no tokenizer, or one without an EOS token, so that answers cannot end.
    """
    if not any((folder / name).exists() for name in VOCABULARIES):  # transformers would create one
        raise UserError(f"{folder} holds no tokenizer; a checkpoint folder must hold its tokenizer too")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer in {folder} cannot be read: {str(error).splitlines()[0]}") from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in {folder} has no EOS token: answers could not end; give it an eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_table(paths: Paths, role: str, split: Split) -> list[dict[str, Any]]:
    """The rows of data/ROLE/SPLIT.parquet."""
    rows: list[dict[str, Any]] = pq.read_table(paths.table(role, split)).to_pylist()
    return rows


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of texts; no special token is added, since the texts are complete."""
    if not texts:
        return []
    ids: list[Ids] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return ids


def encode_answers(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Ids]:
    """Token ids of completions, EOS appended."""
    return [[*ids, tokenizer.eos_token_id] for ids in encode(tokenizer, texts)]


def text_of(tokenizer: PreTrainedTokenizerBase, response: Ids) -> str:
    """The response as text, its EOS left out."""
    if response and response[-1] == tokenizer.eos_token_id:
        response = response[:-1]
    return str(tokenizer.decode(response, skip_special_tokens=False))
