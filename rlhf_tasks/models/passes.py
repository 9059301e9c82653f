"""Passes over many rows: what one may hold, smaller ones after out-of-memory, and their results by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf_tasks import console
from rlhf_tasks.data.batches import Batch, collate_groups, group_sizes, micro_batches
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import LESS_MEMORY, UserError


def attempts(shrink: Callable[[], None]) -> Iterator[AbstractContextManager[None]]:
    """`for attempt in attempts(shrink): with attempt: …` until the block has enough memory.

    After out-of-memory `shrink` makes its work smaller, or raises an error, and the block runs again.
    """
    is_done = False

    @contextmanager
    def attempt() -> Iterator[None]:
        nonlocal is_done
        try:
            yield
            is_done = True
        except torch.OutOfMemoryError:  # its traceback holds tensors, and ends here
            shrink()

    while not is_done:
        yield attempt()
        if not is_done:
            torch.cuda.empty_cache()


class TokenBudget:
    """The bound on a micro-batch's padded tokens. Out of memory lowers it, for the rest of the run."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens, self.is_lowered = max_tokens, False
        self._largest = 0  # tokens of the largest micro-batch that could be cut in two

    def cut(self, rows: Sequence[int], count: int | None = None) -> list[list[int]]:
        """`micro_batches` under the present bound."""
        groups = micro_batches(rows, self.max_tokens, count)
        for group in groups:
            self._largest = max(self._largest, splittable_tokens(rows, group))
        return groups

    def half(self) -> int:
        """Half of the tokens of the largest micro-batch that could be cut in two.

        Raises:
            UserError: if no micro-batch had more than one row.
        """
        if not self._largest:
            raise UserError(f"the GPU is out of memory with one row at a time; {LESS_MEMORY}")
        return self._largest // 2

    def lower(self) -> None:
        """Halve what the largest micro-batch may have; errors as in `half`."""
        self.max_tokens, self._largest, self.is_lowered = self.half(), 0, True
        console.say(f"out of memory: a micro-batch now has at most {self.max_tokens} tokens")

    def state_dict(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "is_lowered": self.is_lowered}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.max_tokens, self.is_lowered = state["max_tokens"], state["is_lowered"]

    def each(self, rows: Sequence[int], compute: Callable[[list[int]], None]) -> None:
        """Call `compute` with every micro-batch. One that is out of memory lowers the bound.

        It is then cut anew, with all that wait. So the bound is halved once for each failure, and not once
        more for every waiting micro-batch that is as large.

        Raises:
            UserError: if the memory does not suffice for one row.
        """
        waiting = self.cut(rows)

        def shrink() -> None:
            nonlocal waiting
            self._largest = splittable_tokens(rows, waiting[-1])
            self.lower()
            left = [i for group in waiting for i in group]
            waiting = [[left[i] for i in part] for part in self.cut([rows[i] for i in left])]

        with console.part("reading", len(rows), "rows") as meter:
            for attempt in attempts(shrink):
                with attempt:
                    while waiting:
                        compute(waiting[-1])
                        meter.advance(len(waiting.pop()))


def splittable_tokens(rows: Sequence[int], group: Sequence[int]) -> int:
    """The tokens of a group, padding included; 0 where it cannot be cut in two."""
    return len(group) * max(rows[i] for i in group) if len(group) > 1 else 0


RunBatches = Callable[[TokenBudget, Sequence[int], Callable[[list[int]], None]], None]
"""Calls a function with every micro-batch of rows, or with an empty one for a pass that other ranks need."""


@torch.no_grad()
def read_rows(
    compute: Callable[[Batch], Tensor],
    queries: Sequence[Ids],
    responses: Sequence[Ids],
    *,
    groups: Sequence[Sequence[int]] | None = None,
    pad: int,
    device: torch.device,
    budget: TokenBudget,
    run: RunBatches = TokenBudget.each,
) -> Tensor:
    """(B,) float64 on the CPU: the number that `compute` gives for each row of its batches.

    Rows of a group share a row of a batch.
    """
    groups = [[i] for i in range(len(queries))] if groups is None else groups
    result = torch.zeros(len(queries), dtype=torch.float64)

    def read(numbers: list[int]) -> None:
        read_groups = [groups[number] for number in numbers]
        values = compute(collate_groups(queries, responses, read_groups, pad, device))
        if read_groups:
            result[[row for group in read_groups for row in group]] = values.double().cpu()

    run(budget, group_sizes(queries, responses, groups), read)
    return result
