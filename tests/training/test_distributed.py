"""What a stage's process sets for all that it computes, and how ranks share the work of a step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_tasks import console
from rlhf_tasks.data.batches import collate
from rlhf_tasks.models.logprobs import token_stats
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.ppo.sampler import LocalSampler
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.scoring.reward_model import RewardModel
from rlhf_tasks.training.distributed import Distributed, join_gpus, show_build_locks
from tests import small

BATCH = collate(*small.rows(6, longest=7), small.PAD)


# ------------------------------------------------------------------------------ the rows of each rank


@pytest.mark.parametrize("most", [1, 30, 10**6])
def test_ranks_make_equally_many_passes_and_every_row_counts_once(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 rows rank 1 has two, whose micro-batches are fewer: its last passes count for nothing."""
    sizes, ranks = [9, 20, 3, 25, 14], [small.distributed(), small.distributed()]
    own = [[0, 2, 4], [1, 3]]
    counts = [len(TokenBudget(most).cut([sizes[i] for i in rows])) for rows in own]
    found = []
    for rank, dist in enumerate(ranks):
        monkeypatch.setattr(dist, "max", lambda number: max(counts))
        dist.rank, dist.world_size = rank, 2
        assert dist.shard_rows(range(5)) == own[rank]
        found.append(dist.split([sizes[i] for i in own[rank]], [[i] for i in own[rank]], TokenBudget(most)))
    assert len(found[0]) == len(found[1]) == max(counts)
    counted = [row for parts in found for part in parts if part.scale for row in part.rows]
    assert sorted(counted) == [0, 1, 2, 3, 4]
    assert all(part.rows for parts in found for part in parts), "a pass without rows is none"


def test_a_second_training_keeps_nothing_of_the_first() -> None:
    """Stage reward trains two models one after the other."""
    dist = small.distributed()

    def train() -> weakref.ref[nn.Module]:
        model = small.causal()
        dist.prepare(model, torch.optim.AdamW(model.parameters()), 1.0)
        return weakref.ref(model)

    first = train()
    train()
    assert first() is None


@pytest.mark.parametrize(("family", "has_towers"), [("gemma3", True), ("gemma3_text", False)])
def test_ddp_does_not_wait_for_a_tower_that_texts_do_not_reach(family: str, has_towers: bool) -> None:
    dist, size = small.distributed(), {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = size | {"vocab_size": 32, "intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8}
    parts = {"text_config": text, "vision_config": size | {"intermediate_size": 16, "image_size": 28}}
    config = AutoConfig.for_model(family, **(parts if has_towers else text))
    model = AutoModelForCausalLM.from_config(config)
    dist.prepare(model, torch.optim.AdamW(model.parameters()), 1.0)
    handler = dist.accelerator.ddp_handler
    assert handler is not None
    assert handler.find_unused_parameters == has_towers


def test_objects_of_workers_on_gpus_travel_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a rank which waits for them does not keep its GPU busy; tensors travel by NCCL."""
    calls = list[tuple[Any, ...]]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append((device,)))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)

    def meet(backend: str, **_: Any) -> None:
        calls.append((backend,))

    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    join_gpus()
    assert not calls, "a stage in one process meets nobody"
    monkeypatch.setenv("LOCAL_RANK", "1")
    join_gpus()
    assert calls == [(1,), ("cpu:gloo,cuda:nccl",)]


# -------------------------------------------------------------------------------------------- bf16


@pytest.fixture
def bf16() -> Iterator[Distributed]:
    """A process in bf16; accelerate lets a process have one precision."""
    AcceleratorState._reset_state()
    yield small.distributed("bf16")
    AcceleratorState._reset_state()


def test_in_bf16_weights_gradients_and_log_probs_are_float32_and_layers_are_rounded(
    bf16: Distributed,
) -> None:
    found = []
    for context in (nullcontext(), bf16.autocast()):
        model = small.causal()
        with context:
            stats = token_stats(model, BATCH, 0.7)
        stats.logprobs.sum().backward()
        assert stats.logprobs.dtype == torch.float32
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        found.append(stats.logprobs.detach())
    assert not torch.equal(*found)
    torch.testing.assert_close(found[1], found[0], atol=0.05, rtol=0)


def test_the_head_of_a_reward_model_keeps_float32_in_bf16(bf16: Distributed) -> None:
    scores, hidden = small.scores("gpt_neox"), torch.randn(4, 3, small.HIDDEN)
    exact = scores._score(hidden)
    bf16.freeze(scores)
    with bf16.autocast():
        assert torch.equal(scores._score(hidden), exact)


def test_a_scorers_reward_model_computes_in_the_precision_of_the_stage(bf16: Distributed) -> None:
    model, words = small.scores(), small.tokenizer()
    rows = Responses.of_ids(["w1 w2"] * 2, [[3, 4]] * 2, [[5, 6, small.EOS], [7]], words, {})
    exact, rounded = (RewardModel(model, words, placement=where)(rows) for where in (None, bf16))
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0)


class RoundedWeights(TorchDispatchMode):
    """Counts how often one of these weights is copied to 16 bits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.count = {weight.data_ptr() for weight in model.parameters()}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") == torch.bfloat16
        self.count += is_copy and args[0].data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


def test_a_sampler_rounds_a_frozen_weight_once_and_not_for_every_token(bf16: Distributed) -> None:
    """Autocast keeps the copies of weights that train; with adapters hardly any does."""
    found = list[tuple[int, Any]]()
    for learns in (True, False):
        model: nn.Module = small.causal()
        model.requires_grad_(learns)
        sampler = LocalSampler(
            bf16,
            cast(PreTrainedModel, model),
            torch.Generator().manual_seed(1),
            num_samples=1,
            batch_size=None,
            max_new_tokens=12,
            temperature=1.0,
            ends=(small.VOCAB + 1,),
            pad=small.PAD,
        )
        flags = [weight.requires_grad for weight in model.parameters()]
        with RoundedWeights(model) as rounded:
            samples = sampler.sample([[3, 4]], 0)
        found.append((rounded.count, samples.responses))
        assert [weight.requires_grad for weight in model.parameters()] == flags
    assert found[0] == found[1]
    assert 0 < found[0][0] <= len(flags)


def test_a_lock_that_a_killed_build_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed would wait for it for ever, without a word."""
    lock = tmp_path / "py311_cpu/deepspeed_shm_comm/lock"
    lock.parent.mkdir(parents=True)
    console.set_quiet(False)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    show_build_locks()
    assert capsys.readouterr().out == ""
    lock.touch()
    show_build_locks()
    assert str(lock) in capsys.readouterr().out
