"""A second process gives its result or its error, and ends with the first."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.training.beside import beside


def test_the_other_process_gives_its_result() -> None:
    with beside(divmod, 17, 5) as result:
        assert result() == (3, 2)


def mistaken(key: str) -> None:
    raise UserError(f"{key} is wrong")


def test_what_the_other_process_raises_is_raised_here() -> None:
    with pytest.raises(UserError, match="seed is wrong"), beside(mistaken, "seed") as result:
        result()


def test_a_process_that_dies_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(RuntimeError, match="_exit ended with status 3"), beside(os._exit, 3) as result:
        result()


def test_the_other_process_ends_when_the_block_fails() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), beside(time.sleep, 600):
        raise KeyboardInterrupt
    assert time.monotonic() - start < 300
    assert not multiprocessing.active_children()
