"""Tokens a second and GPU, and the share of a GPU's peak rate, against numbers worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_tasks.ppo.reporting import measure_work
from rlhf_tasks.training.throughput import pass_flops, speed
from tests import small
from tests.ppo.toy import toy


def test_a_pass_takes_two_flops_of_a_parameter_and_four_more_with_gradients() -> None:
    layer, frozen = nn.Linear(10, 5), nn.Linear(10, 5).requires_grad_(False)
    assert pass_flops(layer) == 2 * 55
    assert pass_flops(layer, frozen, gradients=True) == 6 * 55 + 4 * 55, (
        "states need gradients below adapters"
    )


@pytest.mark.parametrize(
    ("name", "share"),
    [("NVIDIA H100 80GB HBM3", 0.25), ("NVIDIA H100 PCIe", 0.25 * 989 / 756), ("Another GPU", None)],
)
def test_the_share_is_of_the_peak_of_all_gpus(
    name: str, share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    dist: Any = SimpleNamespace(device=torch.device("cuda", 1), world_size=2)
    found = speed(dist, num_tokens=600, flops=989e12, seconds=2.0)
    assert found.pop("time/tokens_per_second_per_gpu") == 150
    assert found == ({} if share is None else {"time/mfu": pytest.approx(share)})


def test_an_update_of_ppo_is_counted_by_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32: sampling, the reference, the critic's values; two epochs of both."""
    counted = list[tuple[float, float]]()

    def count(dist: Any, num_tokens: float, flops: float, seconds: float) -> dict[str, float]:
        counted.append((num_tokens, flops))
        return {}

    monkeypatch.setattr("rlhf_tasks.ppo.reporting.speed", count)
    one = toy(num_ppo_epochs=2)
    next(one.updates)
    policy, critic = (
        sum(weight.numel() for weight in part.parameters())
        for part in (one.actor_critic.policy, one.actor_critic.critic)
    )
    ((num_tokens, flops),) = counted
    alike = 2 + len(one.config.scorers)  # what samples, the reference, and reward models
    assert flops == num_tokens * (2 * (alike * policy + critic) + 2 * 6 * (policy + critic))
    next(one.updates)
    assert one.state.metrics["compute/tflop"] == pytest.approx(1e-12 * sum(flops for _, flops in counted))
    served: Any = SimpleNamespace(sampler=SimpleNamespace(is_policy=False), metrics={})
    served.actor_critic = one.actor_critic
    rollout: Any = SimpleNamespace(queries=[[1, 2]], responses=[[3]])
    work = measure_work(one.setup, served, rollout, 0.0, 1.0)["compute/tflop"]
    assert work == pytest.approx(1e-12 * (counted[-1][1] + 3 * 2 * policy)), "sampling, and a pass to read it"


def test_a_cpu_has_no_peak() -> None:
    assert speed(small.distributed(), 1.0, 1.0, 1.0) == {}
