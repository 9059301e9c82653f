"""What a stage's process sets for all that it computes."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from rlhf_tasks.training.runtime import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_a_freed_tensors_pages_are_kept_for_the_next_tensor() -> None:
    def page_faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    keep_freed_memory()
    for _ in range(3):  # until the heap has grown
        torch.ones(2**24)
    before = page_faults()
    for _ in range(5):
        torch.ones(2**24)  # 64 MiB, 16,384 pages
    assert page_faults() - before < 3 * 16384  # the heap may grow once more
