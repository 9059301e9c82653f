"""`rlhf plan`: counts against published ones, memory against the ZeRO paper, speed worked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_tasks.benchmark import architecture, forecast, measurement, speed
from rlhf_tasks.benchmark.architecture import Architecture, Matrix
from rlhf_tasks.benchmark.footprint import (
    BUCKET,
    LIVE,
    SLICE,
    Footprint,
    Layout,
    Networks,
    footprint,
)
from rlhf_tasks.benchmark.gpus import GB, GPUS, Assumptions, Gpu
from rlhf_tasks.benchmark.speed import Machine
from rlhf_tasks.cli import main
from rlhf_tasks.data.batches import collate
from rlhf_tasks.modeling import models, vocabulary
from rlhf_tasks.modeling.head import token_stats
from tests import small
from tests.ppo.toy import ENGINE, without_critic

TOY = Architecture(
    family="toy", vocab=1000, hidden=100, layers=10, kv_heads=5, head_width=10,
    matrices=(Matrix(100, 100),) * 50, trunk=600_000, head=100_000,
)  # fmt: skip
EXACT = Assumptions(matrix_share=1.0, bandwidth_share=1.0, layer_seconds=1e-12, usable_memory=1.0)
CHIP = Gpu(name="chip", memory=1e9, bf16=2e12, fp32=1e12, bandwidth=1e9, link=1e6, source="a sheet")


def networks(policy: Architecture = TOY, **changes: Any) -> Networks:
    """No reward model, prompts of 24 tokens and responses of 8, in bf16."""
    sizes = {"rollout_batch_size": 16, "num_mini_batches": 2, "num_ppo_epochs": 2, "micro_batch_tokens": 64}
    given = {"policy": policy, "has_reward_model": False, "is_bf16": True, "longest": 24}
    fields = {name: changes.pop(name) for name in list(changes) if name in (*given, "offload")}
    settings = small.ppo(**{"scorers": [{"kind": "dummy"}]} | sizes | changes)
    return Networks(settings=settings, **given | fields)  # type: ignore[arg-type]


def machine(num_gpus: int = 1, gpu: Gpu = CHIP, **changes: Any) -> Machine:
    return Machine(gpu=gpu, num_gpus=num_gpus, assumed=replace(EXACT, **changes))


# ------------------------------------------------------------------------------------------- counts


def test_published_models_have_their_published_parameters() -> None:
    """Pythia-1B: 805,736,448 without its two embeddings of 50,304 × 2,048 (arXiv 2304.01373, table 1).

    Llama 3 8B: 32 layers of 2 · 4096² + 2 · 4096 · 1024 + 3 · 4096 · 14336 + 2 · 4096 = 218,112,000, two
    embeddings of 128,256 × 4,096, and a norm. 70B: 80 layers of 855,654,400, two of 128,256 × 8,192.
    """
    counts = {name: architecture.published(name).parameters for name in architecture.PUBLISHED}
    assert counts == {
        "1B": 805_736_448 + 2 * 50_304 * 2048,
        "8B": 32 * 218_112_000 + 2 * 128_256 * 4096 + 4096,
        "70B": 80 * 855_654_400 + 2 * 128_256 * 8192 + 8192,
    }
    assert counts == {"1B": 1_011_781_632, "8B": 8_030_261_248, "70B": 70_553_706_496}


@pytest.mark.parametrize("family", small.FAMILIES)
def test_counts_of_a_config_are_those_of_the_model_that_is_made(family: small.Family) -> None:
    model, scorer = small.causal(family), small.scores(family)
    found = architecture.of(model.config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.score_parameters == sum(p.numel() for p in scorer.parameters())
    for logits in (False, True):
        assert found.forward_flops(5, 4, logits=logits) == measurement.forward_flops(
            model, 5, 4, logits=logits
        )


def test_a_tied_head_is_counted_once_and_grouped_heads_shrink_the_cache() -> None:
    shape = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    own, tied = (
        architecture.of(AutoConfig.for_model("llama", **shape, tie_word_embeddings=tie))
        for tie in (False, True)
    )
    assert own.parameters - tied.parameters == 50 * 16
    assert tied.head == 0
    assert own.cache_per_token(2) == 2 * 3 * 2 * 4 * 2  # keys and values, layers, heads, width, bytes


@pytest.mark.parametrize("family", ["gpt_neox", "llama", "qwen2"])
def test_activations_are_what_autograd_keeps_within_15_percent(family: str) -> None:
    config = AutoConfig.for_model(
        family, vocab_size=100, hidden_size=128, intermediate_size=344, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    batch = collate([[5] * 32] * 16, [[7] * 32] * 16, 0)  # enough that copies of weights weigh little
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = token_stats(model, batch, loss=lambda logprobs, *_: logprobs.sum()).loss
    found = sum(size for pointer, size in kept.items() if pointer not in weights) / 4
    assert loss.requires_grad
    assert architecture.of(config).activations * 16 * 64 == pytest.approx(found, rel=0.15)


# ------------------------------------------------------------------------------------------- memory


def without_buckets(layout: Layout) -> float:
    """Weights, gradients and optimiser of a policy of 7.5 billion on 64 GPUs, without its reference."""
    policy = replace(TOY, trunk=7_500_000_000, head=0)
    many = networks(policy, **without_critic("rloo"), rollout_batch_size=128, total_episodes=128)
    found = footprint(many, layout, 64)
    reference = {"zero2": 2 * 7.5e9, "zero3": 2 * 7.5e9 / 64, "fsdp2": 4 * 7.5e9 / 64}[layout]
    buckets = 0 if layout == "fsdp2" else 2 * 2 * BUCKET
    return found.weights - reference + found.gradients - buckets + found.optimiser


def test_zero_needs_what_its_paper_says() -> None:
    """arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 GPUs: 16.6 GB with stage 2, 1.9 with stage 3."""
    assert without_buckets("zero2") / GB == pytest.approx(16.6, abs=0.05)
    assert without_buckets("zero3") / GB == pytest.approx(1.9, abs=0.05)


def test_fsdp2_divides_weights_gradients_and_two_moments_in_float32() -> None:
    """16 bytes a parameter, as many as ZeRO-3: 7.5 billion on 64 GPUs."""
    assert without_buckets("fsdp2") == pytest.approx(16 * 7.5e9 / 64)


def test_fsdp2_gathers_the_policy_to_sample_and_some_layers_in_a_pass() -> None:
    """Embeddings and head of 100,000 each, ten layers of 50,000: 2 bytes to compute, 4 more to share out."""
    found = footprint(networks(), "fsdp2", 2)
    assert found.gathered == 2 * 700_000
    assert found.start == 0, "a model without room is checked on the CPU"
    passes = 2 * (2 * 100_000 + 2 * 50_000) + 6 * 100_000
    training = found.gradients + found.activations + found.logits + passes
    assert found.peak == found.weights + found.optimiser + training


def test_with_an_engine_no_gpu_of_the_training_samples() -> None:
    """The policy of 700,000 is selected and gathered in the machine's memory, 4 bytes a parameter."""
    plain, engine = footprint(networks(), "fsdp2", 2), footprint(networks(sampler=ENGINE), "fsdp2", 2)
    assert (engine.cache, engine.prompts) == (0, 0)
    assert engine.gathered == 2 * (2 * 100_000 + 2 * 50_000) + 6 * 100_000, "of a pass, not the policy"
    assert engine.weights == plain.weights
    assert engine.machine == plain.machine == 2 * 4 * 700_000
    assert footprint(networks(sampler=ENGINE), "zero3", 2).machine == 2 * 2 * 700_000
    assert footprint(networks(sampler=ENGINE), "ddp", 2).machine == 4 * 700_000, "the selected weights"


def test_offload_moves_a_process_s_part_into_the_machines_memory() -> None:
    """Two of four GPUs are in a machine: half of 16 bytes for each of 1,300,100 trained numbers, and of the
    reference's 4. ZeRO-2 keeps its weights and buckets on the GPU."""
    found = footprint(networks(offload=True), "fsdp2", 4, per_machine=2)
    assert (found.weights, found.gradients, found.optimiser) == (0, 0, 0)
    assert found.machine == 2 / 4 * (16 * 1_300_100 + 4 * 700_000) + 2 * 4 * 700_000
    plain, moved = (footprint(networks(offload=offload), "zero2", 4) for offload in (False, True))
    assert moved.weights == plain.weights
    assert moved.gradients == 2 * 2 * 1_300_100, "the buckets"
    assert moved.optimiser == 0
    assert moved.machine - plain.machine == (12 + 2) * 1_300_100
    assert footprint(networks(offload=True), "ddp", 4) == footprint(networks(), "ddp", 4)


def test_one_process_holds_four_models_and_adam_in_float32() -> None:
    """Policy and reference of 700,000, critic of 600,100: 4 bytes each, and for bf16 the policy's copy."""
    whole = footprint(networks(is_bf16=False), "single", 1)
    assert whole.weights == 4 * (2 * 700_000 + 600_100)
    assert whole.gradients == 4 * 1_300_100
    assert whole.optimiser == 8 * 1_300_100
    halves = footprint(networks(), "single", 1)
    assert halves.weights == whole.weights + 2 * 700_000
    two = footprint(networks(), "ddp", 2)
    assert two.weights == whole.weights + 2 * 1_300_100, "one pass over policy and critic"
    assert two.gradients == 2 * whole.gradients, "the buckets that processes exchange"


def test_reward_models_are_counted_by_the_scorers_that_read_them() -> None:
    another = [
        {"kind": "reward_model", "weight": 1.0},
        {"kind": "reward_model", "weight": 1.0, "path": "m"},
    ]
    plain, two = networks(is_bf16=False), networks(is_bf16=False, scorers=another, has_reward_model=True)
    more = footprint(two, "single", 1).weights - footprint(plain, "single", 1).weights
    assert more == 3 * 4 * 600_100, "models/reward, models/reward_heldout and m"
    assert two.num_scoring == 2


def test_lora_trains_its_adapters_and_keeps_no_reference() -> None:
    """50 matrices of 100 × 100 with rank 4: 40,000 numbers."""
    lora = networks(lora={"r": 4, "alpha": 8.0}, is_bf16=False)
    assert lora.trained_parameters == 40_000 + 600_100
    assert footprint(lora, "single", 1).weights == 4 * (740_000 + 600_100)
    both = networks(
        lora={"r": 4, "alpha": 8.0}, advantages__critic__lora={"r": 4, "alpha": 8.0}, is_bf16=False
    )
    assert both.trained_parameters == 2 * 40_000 + 100


def test_cache_logits_and_activations_belong_to_different_phases() -> None:
    """Sampling: 16 rows of 32 tokens, each 2 · 10 · 5 · 10 numbers. Training: 64 tokens of 50 · 200."""
    found = footprint(networks(is_bf16=False), "single", 1)
    assert found.cache == 16 * 32 * 1000 * 4
    assert found.activations == 64 * 10_000 * 4
    assert found.logits == 2 * 4 * SLICE
    training = found.gradients + found.activations + found.logits
    assert found.peak == found.weights + found.optimiser + training
    fewer = footprint(networks(is_bf16=False, sampler__batch_size=4), "single", 1)
    assert fewer.cache == found.cache / 4
    recomputed = footprint(networks(is_bf16=False, gradient_checkpointing=True), "single", 1)
    assert recomputed.activations == 64 * (10 * 100 + 1000) * 4
    in_bf16 = {
        layout: footprint(
            networks(gradient_checkpointing=True, advantages__critic__kind="shared"), layout, 2
        ).activations
        for layout in ("ddp", "fsdp2")
    }
    assert in_bf16 == {"ddp": 64 * (10 * 100 * 4 + 1000 * 2), "fsdp2": 64 * (10 * 100 + 1000) * 2}


def test_the_prompts_of_all_rows_pass_at_once() -> None:
    """16 prompts of 24 tokens: three states of 100 numbers and three outputs of 100, of 4 bytes."""
    assert footprint(networks(is_bf16=False), "single", 1).prompts == 16 * 24 * 3 * (100 + 100) * 4
    assert footprint(networks(), "single", 1).prompts == 16 * 24 * 3 * (100 * 4 + 100 * 2)
    shared = networks(sampler__batch_size=8, **without_critic("rloo", 4))
    assert footprint(shared, "single", 1).prompts == 2 * 24 * 3 * (100 * 4 + 100 * 2)
    long = networks(longest=4_000_000)
    found = footprint(long, "single", 1)
    assert found.peak == found.weights + found.optimiser + found.cache + found.prompts


def test_the_sizes_of_slices_and_buckets_are_those_in_use() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert vocabulary.GPU_LOGITS == SLICE
    defaults = DeepSpeedZeroConfig()
    assert defaults.reduce_bucket_size == BUCKET
    assert defaults.max_live_parameters == LIVE


def test_the_first_layout_that_fits_is_taken() -> None:
    """On a GPU whose memory is given: just enough for each layout in turn, and then for none."""
    made = networks(architecture.published("8B"))
    needs = {layout: footprint(made, layout, 8).peak for layout in ("ddp", "zero2", "fsdp2")}
    assert sorted(needs.values(), reverse=True) == list(needs.values())
    for layout, need in needs.items():
        gpu = replace(CHIP, memory=need)
        assert forecast.fitting(made, machine(8, gpu)) == layout
    assert forecast.fitting(made, machine(8, replace(CHIP, memory=needs["fsdp2"] * 0.9))) is None
    assert forecast.fitting(made, machine(8, CHIP)) is None


def test_no_number_of_gpus_helps_where_one_cannot_hold_a_model_at_the_start() -> None:
    """Under ZeRO-3, 8 billion parameters and a critic without a head, 4 bytes each: 62 GB."""
    made = networks(architecture.published("8B"))
    start = footprint(made, "zero3", 1000).start
    assert start == 4 * (made.policy.parameters + made.critic_parameters) == pytest.approx(62.1e9, rel=1e-2)
    assert footprint(made, "zero3", 1000).peak == start
    assert footprint(made, "fsdp2", 1000).peak < 0.4 * start, "FSDP2 divides a layer after the other"


def test_70b_fits_with_an_engine_where_the_machines_hold_what_is_offloaded() -> None:
    """Whole in bf16 it has 141 GB, so that no H100 can gather it, and an engine has four of them. Offloaded
    it needs 16 · 140 + 4 · 210 GB of four machines, and 8 · 71 of the first."""
    given: dict[str, Any] = {
        "policy": architecture.published("70B"), "gradient_checkpointing": True, "rollout_batch_size": 64,
        "num_mini_batches": 1, "has_reward_model": True, "scorers": [{"kind": "reward_model", "weight": 1.0}],
    }  # fmt: skip
    h100s = {n: Machine(gpu=GPUS["h100"], num_gpus=n, assumed=Assumptions()) for n in (8, 32)}
    offloaded = networks(**given, sampler=ENGINE, offload=True)
    eight = forecast.plan(offloaded, h100s[8], 1.0)
    assert eight.layout is None
    assert str(eight.problem).startswith("fsdp2 needs 3,6")
    assert str(eight.problem).endswith(" GB of the machine's memory, which has 2,000")
    many = forecast.plan(offloaded, h100s[32], 1.0)
    assert (many.layout, many.engine_gpus) == ("fsdp2", 4)
    assert many.memory.machine == pytest.approx((16 * 140.06e9 + 4 * 209.6e9) / 4 + 8 * 70.55e9, rel=1e-3)
    for fewer in (networks(**given, offload=True), networks(**given, sampler=ENGINE)):
        problem = str(forecast.plan(fewer, h100s[32], 1.0).problem)
        assert problem.startswith("no layout fits into 72 GB on 32 GPUs: fsdp2 needs ")


def test_an_engine_has_the_gpus_of_one_machine() -> None:
    """1.4 MB of weights and 16 rows of 32 tokens of 2,000 bytes: 2.4 MB, and a quarter more."""
    small_gpu = replace(CHIP, memory=0.8e6)
    assert speed.engine_gpus(networks(), machine(2, small_gpu)) == 0
    assert speed.engine_gpus(networks(sampler=ENGINE), machine(2, small_gpu)) == 4
    made = forecast.plan(networks(sampler=ENGINE), machine(2, small_gpu, gpus_per_machine=2), 1.0)
    assert made.problem == "the engine needs 4 GPUs of one machine, which has 2"


# ------------------------------------------------------------------------------------ speed and cost


def test_scoring_and_learning_take_their_flops() -> None:
    """A trunk of 500,000 in matrices over 32 tokens, attention over 32², a head over 8 of them."""
    trunk = 2 * 500_000 * 32 + 2 * 10 * 100 * 32**2
    policy = trunk + 2 * 1000 * 100 * 8
    found = speed.update_seconds(networks(), machine(bandwidth_share=1e-9), "single")
    assert found.score == pytest.approx(16 * (2 * policy + trunk) / 2e12)
    learning = speed.update_seconds(networks(), machine(gpu=replace(CHIP, bandwidth=1e30)), "single")
    assert learning.train == pytest.approx(2 * 3 * 16 * (policy + trunk) / 2e12)


def test_sampling_reads_all_weights_and_the_cache_for_each_token() -> None:
    """600,000 weights and 16 rows of 24 + 4 tokens of 1,000 numbers, 2 bytes each, eight times."""
    found = speed.update_seconds(networks(), machine(), "single")
    step = 2 * (600_000 + 16 * 28 * 1000) / 1e9
    prefill = 16 * (2 * 500_000 * 24 + 2 * 10 * 100 * 24**2) / 2e12
    assert found.generate == pytest.approx(prefill + 8 * step)
    slow = speed.update_seconds(networks(), machine(layer_seconds=1.0), "single")
    assert slow.generate == pytest.approx(10 + 8 * 10), "no layer takes less than a second"


def test_gradients_cross_the_link_once_a_step() -> None:
    """4 steps; 1,300,100 gradients of 4 bytes, out and back, but for a process's own half."""
    two = speed.update_seconds(networks(), machine(2), "ddp").train
    alone = speed.update_seconds(networks(), machine(2, replace(CHIP, link=1e30)), "ddp").train
    assert two - alone == pytest.approx(4 * 2 * 4 * 1_300_100 * 0.5 / 1e6)
    assert machine(9, machine_link=7e-9).link == 7.0


def test_zero2_reduces_gradients_in_each_micro_batch() -> None:
    """2 epochs of 4 micro-batches, and 4 steps that gather what has changed; 2 bytes each."""
    found = [
        speed.update_seconds(networks(), machine(2, replace(CHIP, link=link)), "zero2").train
        for link in (1e6, 1e30)
    ]
    assert found[0] - found[1] == pytest.approx((2 * 4 + 4) * 2 * 1_300_100 * 0.5 / 1e6)


def test_sharded_weights_are_gathered_once_to_sample_and_in_each_pass() -> None:
    """Half of 1.4 MB comes over the link; 2 epochs of 4 micro-batches move weights twice, gradients once."""
    fast = replace(CHIP, link=1e30)
    sharded = [speed.update_seconds(networks(), machine(2, gpu), "zero3") for gpu in (CHIP, fast)]
    assert sharded[0].generate - sharded[1].generate == pytest.approx(2 * 700_000 * 0.5 / 1e6)
    both = 700_000 + 600_100
    expected = 2 * 4 * (2 * 2 * both + 2 * both) * 0.5 / 1e6
    assert sharded[0].train - sharded[1].train == pytest.approx(expected)
    fsdp2 = [speed.update_seconds(networks(), machine(2, gpu), "fsdp2") for gpu in (CHIP, fast)]
    more = 2 * 4 * 2 * both * 0.5 / 1e6
    assert fsdp2[0].train - fsdp2[1].train == pytest.approx(expected + more), "it shares gradients in float32"


def test_an_engine_samples_all_rows_on_its_gpus_and_has_new_weights_for_each_update() -> None:
    """A step reads 1.2 MB of weights and the cache of 16 rows. 2.8 MB are written and read at 1 GB/s."""
    found = speed.update_seconds(networks(sampler=ENGINE), machine(2, folder_rate=1.0), "ddp")
    step = 2 * (600_000 + 16 * 28 * 1000) / 1e9
    prefill = 16 * (2 * 500_000 * 24 + 2 * 10 * 100 * 24**2) / 2e12
    assert found.generate == pytest.approx(prefill + 8 * step)
    assert found.renew == pytest.approx(2 * 4 * 700_000 / 1e9)
    assert found.total == found.renew + found.generate + found.score + found.train
    sharded = speed.update_seconds(networks(sampler=ENGINE), machine(2, folder_rate=1.0), "fsdp2")
    assert sharded.renew - found.renew == pytest.approx(0.5 * 4 * 700_000 / 1e6), "half comes over the link"
    assert sharded.generate == found.generate
    ahead = speed.update_seconds(networks(sampler=ENGINE | {"ahead": 1}), machine(2, folder_rate=1.0), "ddp")
    assert ahead.total == found.renew + max(found.generate, found.score + found.train)


def test_what_is_offloaded_is_copied_and_stepped_in_the_machines_memory() -> None:
    """Two processes of a machine. Training: 8 micro-batches copy weights twice and gradients once, and 4
    steps take 28 bytes a parameter at 1 GB/s. Scoring: two passes with logits and a critic's, 4 times."""
    slow = {"host_link": 1.0, "machine_bandwidth": 1.0}
    fast = replace(CHIP, bandwidth=1e30)
    plain = speed.update_seconds(networks(), machine(2, fast, **slow), "fsdp2")
    moved = speed.update_seconds(networks(offload=True), machine(2, fast, **slow), "fsdp2")
    both = 1_300_100
    copies = 8 * (2 * 4 + 4) * both / 2 / 1e9
    assert moved.train - plain.train == pytest.approx(copies + 4 * 28 * both / 1e9)
    assert moved.score - plain.score == pytest.approx(3 * 4 * 4 * 700_000 / 2 / 1e9, rel=1e-3)
    assert moved.generate == plain.generate
    halves = [speed.update_seconds(networks(offload=o), machine(2, fast, **slow), "zero2") for o in (0, 1)]
    expected = (8 * 2 + 4 * 2) * both / 2 / 1e9 + 4 * 28 * both / 1e9
    assert halves[1].train - halves[0].train == pytest.approx(expected)


def test_the_cost_is_the_price_of_all_gpus_for_the_time() -> None:
    made = forecast.plan(networks(), machine(2), price=3.0)
    assert made.layout == "ddp"
    assert made.seconds is not None
    assert made.episodes_per_second == pytest.approx(16 / made.seconds.total)
    hours = made.seconds.total / 16 * 1e6 / 3600
    assert made.cost_per_million_episodes == pytest.approx(2 * 3.0 * hours)
    engine = forecast.plan(networks(sampler=ENGINE), machine(2), price=3.0)
    assert engine.engine_gpus == 1
    assert engine.seconds is not None
    hours = engine.seconds.total / 16 * 1e6 / 3600
    assert engine.cost_per_million_episodes == pytest.approx(3 * 3.0 * hours)


def test_what_does_not_fit_says_why_and_what_would() -> None:
    """A step has 8 rows, which 3 GPUs do not divide."""
    assert (
        forecast.plan(networks(), machine(3), 1.0).problem
        == "8 rows of an optimiser step are not divisible by 3 GPUs"
    )
    groups = networks(**without_critic("rloo", 8))
    made = forecast.plan(groups, machine(4), 1.0)
    assert made.problem == "2 prompts of a rollout are not divisible by 4 GPUs"
    tight = machine(1, replace(CHIP, memory=2**30 / 2))
    made = forecast.plan(networks(), tight, 1.0)
    assert made.problem == "no layout fits into 1 GB on 1 GPU: single needs 1"
    assert made.least_gpus is None
    assert made.cost_per_million_episodes is None
    assert isinstance(made.memory, Footprint)


# ------------------------------------------------------------------------------------------ command


def test_the_command_prints_plans_of_params_yaml_and_of_three_sizes(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "--gpus", "1", "16", "--gpu", "h200", "--price", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [list(one) for one in found["plans"]] == [["params.yaml", "1B", "8B", "70B"]] * 2
    own = found["plans"][0]["params.yaml"]
    assert own["layout"] == "single"
    assert own["cost_per_million_episodes"] == pytest.approx(4 * 1e6 / own["episodes_per_second"] / 3600)
    assert found["gpu"]["memory"] == GPUS["h200"].memory
    assert any("4 per hour" in note for note in found["assumed"])


def test_given_figures_take_the_place_of_published_ones(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main.main(["plan", "--gpus", "1", "--matrix-rate", "100", "--bandwidth", "10", "--memory", "5"]) == 0
    )
    out = capsys.readouterr().out
    assert "5 GB at 10 GB/s; 100 TFLOPS in bf16" in out
    assert "no layout fits into 4 GB on 1 GPU" in out
    with pytest.raises(SystemExit):
        main.main(["plan", "--matrix-share", "1.5"])
    assert "must be above 0 and at most 1 (given: 1.5)" in capsys.readouterr().err


def test_the_models_own_config_is_read_where_there_is_one(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    YAML().dump(small.params(), models_here / "params.yaml")
    assert main.main(["plan", "--gpus", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]["params.yaml"]
    model = models.load_causal(Path("models/sft"))
    assert found["parameters"] == sum(p.numel() for p in model.parameters())


def test_an_engine_and_offload_of_params_yaml_are_planned(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ("seconds to renew the engine's weights", "further GPUs, of the engine")
    assert main.main(["plan", "--gpus", "1"]) == 0
    assert not any(row in capsys.readouterr().out for row in rows)
    changes = {"launch.parallelism": "zero3", "launch.offload": True, "ppo.sampler": ENGINE}
    YAML().dump(small.params(changes), project / "params.yaml")
    assert main.main(["plan", "--gpus", "1", "--host-link", "12"]) == 0
    out = capsys.readouterr().out
    assert all(row in out for row in rows)
    assert "GB/s between a GPU and its machine, for launch.offload: 12" in out.replace("\n  ", " ")
    assert main.main(["plan", "--gpus", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["plans"][0]["params.yaml"]
    assert (found["layout"], found["engine_gpus"]) == ("zero2", 1)
    assert found["memory"]["optimiser"] == 0
