"""What a stage's process sets for all that it computes."""

from __future__ import annotations

import platform
import resource
from typing import Any

import pytest
import torch
from rlhf_tasks.modeling.products import unrounded_products
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf_tasks.training import runtime
from rlhf_tasks.training.runtime import Runtime, keep_freed_memory
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
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_bf16_on_a_cpu_rounds_the_factors_of_products_and_no_tensor(kind: type[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(1)
    layer: Any = kind(256, 256)
    nn.init.normal_(layer.weight, generator=generator)
    x, g = torch.randn(2, 4, 64, 256, generator=generator)

    def products() -> list[Tensor]:
        layer.zero_grad()
        given = x.clone().requires_grad_()
        y = layer(given)
        y.backward(g)
        return [y.detach(), given.grad, layer.weight.grad]

    exact = products()
    small.runtime("bf16").freeze(layer)
    layer.requires_grad_(True)
    weight = layer.weight if kind is nn.Linear else layer.weight.t()
    absolute = [x.abs() @ weight.abs().t(), g.abs() @ weight.abs()]
    rounded = products()
    for ours, plain, size in zip(rounded, exact, absolute, strict=False):
        assert ours.dtype == torch.float32
        assert ((ours - plain).abs() <= size * 2**-7).all()  # two factors, each rounded by 2^-8 at most
    torch.testing.assert_close(rounded[2], exact[2], atol=0.5, rtol=0)
    with unrounded_products():
        torch.testing.assert_close(layer(x), exact[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(layer(x[:, :1]), exact[0][:, :1], atol=1e-3, rtol=0)  # the sampler's


def test_rounding_does_not_depend_on_the_cut_into_micro_batches() -> None:
    layer = nn.Linear(256, 64)
    small.runtime("bf16").freeze(layer)
    x = torch.randn(8, 16, 256, generator=torch.Generator().manual_seed(1))
    parts = torch.cat([layer(rows) for rows in x.split(1)])
    torch.testing.assert_close(parts, layer(x), atol=1e-5, rtol=0)


def test_the_head_of_a_reward_model_keeps_float32_in_bf16() -> None:
    scores, hidden = small.scores("gpt_neox"), torch.randn(4, 3, small.HIDDEN)
    exact = scores.scored(hidden)
    small.runtime("bf16").freeze(scores)
    assert torch.equal(scores.scored(hidden), exact)


# ------------------------------------------------------------------------ models before they are sharded


def sharding(rank: int, device: str = "cpu") -> Runtime:
    """A process that will share the weights of its models."""
    rt = small.runtime()
    rt.shards, rt.rank, rt.device = True, rank, torch.device(device)
    return rt


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_without_room_on_the_gpu_is_checked_by_the_first_process_on_the_cpu(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small.causal()
    num_bytes = 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(runtime, "free_memory", lambda device: 1.1 * num_bytes)
    with sharding(rank, "meta").on_device(model) as is_used:
        assert is_used == (rank == 0)
        assert model.device.type == "cpu"


def test_after_its_check_a_model_has_the_very_weights_that_were_read() -> None:
    """A copy would be in the memory of every process; `meta` stands for the GPU."""
    model = small.causal()
    before = {name: value.data_ptr() for name, value in model.state_dict(keep_vars=True).items()}
    with sharding(1, "meta").on_device(model) as is_used:
        assert is_used
        assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {"meta"}
    assert {name: value.data_ptr() for name, value in model.state_dict(keep_vars=True).items()} == before
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
