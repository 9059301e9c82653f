"""Weights split by FSDP2 over the one process of this test, read whole again and written."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlhf_tasks.config import Launch, Lora
from rlhf_tasks.data.batches import collate
from rlhf_tasks.models import logprobs
from rlhf_tasks.models.classifiers import build_classifier, find_trunk
from rlhf_tasks.models.heads import ActorCritic, TokenScores, ValueHead
from rlhf_tasks.models.logprobs import response_logprobs
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.models.sampling import sample
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.optim import adamw
from rlhf_tasks.training.tasks import RewardLearner
from tests import small
from tests.small import EOS, PAD

CPU = torch.device("cpu")
BATCH = collate(*small.rows(6), PAD)


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are made in several chunks, and again in the backward pass."""
    monkeypatch.setattr(logprobs, "CPU_LOGITS", 4 * small.VOCAB)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    store = HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    sharding.shard(model, mesh, offload=False)
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    return model


@pytest.mark.parametrize("family", [*small.FAMILIES, "tied", *small.CHANGING, "opt", "olmoe"])
def test_a_sharded_model_gives_the_log_probs_of_the_whole_one(family: str, mesh: DeviceMesh) -> None:
    if family == "tied":
        model = small.other("gemma2")
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    else:
        model = small.causal(family) if family in small.FAMILIES else small.other(family)
    with torch.no_grad():
        expected = response_logprobs(model, BATCH, 0.8)
        sharded(model, mesh)
        assert torch.equal(response_logprobs(model, BATCH, 0.8), expected)


def test_the_weights_of_a_sharded_model_are_those_of_the_whole_one_under_the_same_names(
    mesh: DeviceMesh,
) -> None:
    for model in (small.causal(), small.other("gemma2"), small.scores().model):
        expected = sharding.weights_of(model)
        sharded(model, mesh)
        found = sharding.weights_of(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert sharding.num_parameters(model) == sum(p.numel() for p in model.parameters())


def test_the_whole_copy_samples_what_the_model_would_and_is_empty_afterwards(mesh: DeviceMesh) -> None:
    how: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.9, "ends": (EOS,), "pad": PAD}

    def responses(model: PreTrainedModel) -> list[list[int]]:
        return sample(model, [[5, 6], [7]], generator=torch.Generator().manual_seed(1), **how).responses

    policy = add_lora(small.causal(), Lora(r=2, alpha=4.0), seed=1)
    for weight in policy.parameters():
        nn.init.normal_(weight, std=0.3)
    expected = responses(policy)
    policy.requires_grad_(False)
    sharded(policy, mesh)
    with sharding.full_params(policy, CPU) as plain:
        assert not any(isinstance(weight, DTensor) for weight in plain.parameters())
        assert responses(plain) == expected
        assert id(plain.config) == id(policy.config)
    assert all(weight.device.type == "meta" for weight in plain.parameters())


def test_in_bf16_a_sharded_model_computes_what_a_bf16_copy_does_and_stays_float32(mesh: DeviceMesh) -> None:
    model, copied = small.causal(), small.causal()
    for weight in copied.parameters():  # not the buffers: the frequencies of the positions are float32
        weight.data = weight.data.to(torch.bfloat16)
    before = sharding.weights_of(model)
    sharding.shard(model, mesh, offload=False, computes_in=torch.bfloat16)
    expected, found = (response_logprobs(one, BATCH, 0.8) for one in (copied, model))
    assert torch.equal(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for mine, theirs in zip(model.parameters(), copied.parameters(), strict=True):
        assert theirs.grad is not None
        assert isinstance(mine.grad, DTensor)
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad.to_local(), theirs.grad.float())
    with sharding.full_params(model, CPU) as plain:
        for mine, theirs in zip(plain.parameters(), copied.parameters(), strict=True):
            assert mine.dtype == torch.bfloat16
            assert torch.equal(mine, theirs)
    after = sharding.weights_of(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", ["reward model", "shared critic"])
@torch.no_grad()
def test_in_bf16_a_sharded_score_head_computes_in_float32(kind: str, mesh: DeviceMesh) -> None:
    hidden = torch.randn(4, 3, small.HIDDEN).bfloat16()
    model: Any = small.scores() if kind == "reward model" else ActorCritic(small.causal(), ValueHead(16))
    head = model.model.score if kind == "reward model" else model.critic
    nn.init.normal_(head.weight)
    expected = head(hidden.float())
    sharding.shard(model, mesh, offload=False, computes_in=torch.bfloat16)
    assert torch.equal(head(hidden.float()), expected)
    if kind == "reward model":
        assert model(BATCH).dtype == torch.float32
        assert torch.equal(model._score(hidden), expected.squeeze(-1))


def test_written_weights_are_read_again_and_the_frozen_ones_stay(mesh: DeviceMesh) -> None:
    model, other = sharded(small.causal(), mesh), small.causal(seed=5)
    before, wanted = sharding.weights_of(model), sharding.weights_of(other)
    name = next(iter(wanted))
    sharding.load_weights(model, {name: wanted[name]})
    found = sharding.weights_of(model)
    assert torch.equal(found.pop(name), wanted[name])
    assert all(torch.equal(found[key], before[key]) for key in found)
    sharding.load_weights(model, wanted)
    assert all(torch.equal(value, wanted[key]) for key, value in sharding.weights_of(model).items())
    assert sharding.keep_on_first_rank(model, wanted) is wanted, "the first process keeps them"


def test_a_sharded_reference_follows_as_a_whole_one_does(mesh: DeviceMesh) -> None:
    whole, policy = small.causal(), small.causal(seed=5)
    split = sharded(copy.deepcopy(whole), mesh)
    sharding.move_toward(whole, policy, 0.25)
    sharding.move_toward(split, policy, 0.25)
    expected = whole.state_dict()
    for name, value in sharding.weights_of(split).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["separate", "shared", "learner", "learner-whole"])
def test_an_fsdp2_step_is_that_of_adamw_with_clipping(kind: str, mesh: DeviceMesh) -> None:
    """All parts that may be called on their own have gradients and are clipped together."""

    def made() -> nn.Module:
        if kind == "separate":
            return ActorCritic(small.causal(), small.scores(seed=3))
        if kind == "shared":
            return ActorCritic(small.causal(), ValueHead(small.HIDDEN))
        if kind == "learner":
            return RewardLearner(small.scores(), small.causal())
        return RewardLearner(_scores_of("gemma2"), small.other("gemma2"))

    def loss(model: nn.Module) -> Tensor:
        if isinstance(model, RewardLearner):
            scores, means = model(BATCH, 3)
            total: Tensor = scores.square().sum() + means.sum()
        else:
            stats, values = model(BATCH)
            total = stats.logprobs.sum() + (values - 1).square().sum()
        return total

    plain = made()
    split = copy.deepcopy(plain)
    settings = small.optimization()
    expected = adamw(plain, settings)
    loss(plain).backward()
    norm = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
    expected.step()
    dist = Distributed(Launch(parallelism="fsdp2", precision="fp32"), seed=1)
    model, optimizer = dist.prepare(split, adamw(split, settings), 0.5)
    dist.backward(model, loss(model))
    assert dist.step(model, optimizer, 0.5) == pytest.approx(norm, rel=1e-5)
    assert norm > 0.5
    for mine, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharding.gather(mine), theirs.detach(), rtol=1e-4, atol=1e-6)


def test_no_whole_weight_is_left_once_a_model_that_trains_is_sharded(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a whole one would stand beside the shards until the optimizer has those."""
    model, put, alive = small.causal(), Distributed.put, list[bool]()
    optimizer = adamw(model, small.optimization())
    whole = [weakref.ref(weight) for weight in model.parameters()]

    def checked(self: Distributed, model: nn.Module) -> None:
        put(self, model)
        alive.extend(weight() is not None for weight in whole)

    monkeypatch.setattr(Distributed, "put", checked)
    dist = Distributed(Launch(parallelism="fsdp2", precision="fp32"), seed=1)
    _, prepared = dist.prepare(model, optimizer, 0.5)
    assert alive == [False] * len(whole)
    trained = [weight for group in prepared.param_groups for weight in group["params"]]
    assert {*map(id, trained)} == {*map(id, model.parameters())}


def test_a_snapshot_of_shards_copies_none_and_holds_those_that_train(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    model = sharded(add_lora(small.causal(), Lora(r=2), seed=1), mesh)
    optimizer = adamw(model, small.optimization())
    weight = next(model.parameters())
    assert sharding._own(weight.detach()).data_ptr() == sharding._local(weight).data_ptr()
    sharding.save_shards(model, optimizer, tmp_path / "part-0.pt")
    held = torch.load(tmp_path / "part-0.pt", weights_only=True)["model"]
    assert held
    assert all("lora_" in name for name in held)
    before = sharding.weights_of(model)
    with torch.no_grad():
        for one in model.parameters():
            sharding._local(one).mul_(2 if one.requires_grad else 1)
    sharding.load_shards(model, optimizer, tmp_path / "part-0.pt")
    assert all(torch.equal(value, before[name]) for name, value in sharding.weights_of(model).items())


def _scores_of(family: str) -> TokenScores:
    """A reward model of a family that changes its logits after the head."""
    config = copy.deepcopy(small.other(family).config)
    config.num_labels = 1
    classifier = build_classifier(find_trunk(small.other(family)), config).eval()
    torch.manual_seed(1)
    nn.init.normal_(classifier.score.weight)
    return TokenScores(classifier)
