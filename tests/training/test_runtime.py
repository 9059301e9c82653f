"""What a stage's process sets for all that it computes."""

from __future__ import annotations

import platform
import resource

import pytest
import torch
from torch import Tensor

from rlhf_tasks.training.runtime import keep_freed_memory
from tests import small


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has autocast")
def test_bf16_on_a_cpu_rounds_the_factors_of_products_and_no_tensor() -> None:
    a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(1))

    def product() -> Tensor:
        with rt.autocast():
            return torch.nn.functional.linear(a, b)

    rt = small.runtime()
    exact = product()
    rt = small.runtime("bf16")
    rounded = product()
    assert rounded.dtype == torch.float32
    bound = a.abs() @ b.abs().T * 2**-7  # two factors, each rounded by 2^-8 at most
    assert ((rounded - exact).abs() <= bound).all()
    rt = small.runtime()
    assert torch.equal(product(), exact), "the next stage in this process has its own precision"
