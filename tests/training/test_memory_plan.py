"""`rlhf plan`: counts against published ones, memory against the ZeRO paper and against measured peaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from benchmarks import workloads
from benchmarks.shapes import Shape
from rlhf_tasks.models import logprobs
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import load_causal, recompute_activations
from rlhf_tasks.scoring.reward_model import RewardModel
from rlhf_tasks.training import memory_plan
from rlhf_tasks.training.memory_plan import BUCKET, Parallelism, Run, Sizes, memory
from tests import small
from tests.conftest import Command
from tests.ppo.toy import VLLM_SAMPLER, without_critic

GB = 1e9
TOY = Sizes(
    trunk=600_000,
    head=100_000,
    layer=50_000,
    vocab=1000,
    hidden=100,
    layers=10,
    widest=100,
    activations=10_000,
    cache=1000,
)


def run(policy: Sizes = TOY, **changes: Any) -> Run:
    """No reward model, prompts of 24 tokens and responses of 8, in bf16."""
    given = {"num_gpus": 1, "parallelism": "ddp", "offload": False, "longest": 24, "is_bf16": True}
    fields = {name: changes.pop(name, value) for name, value in given.items()}
    sizes: dict[str, Any] = {"rollout_batch_size": 16, "num_mini_batches": 2, "micro_batch_tokens": 64}
    sizes |= {} if "advantages" in changes else {"advantages__critic__init": "sft"}
    ppo = small.ppo(**{"scorers": [{"kind": "dummy"}]} | sizes | changes)
    return Run(policy=policy, ppo=ppo, has_reward_model=False, **fields)


# ------------------------------------------------------------------------------------------- counts


def published(name: str) -> Sizes:
    """Pythia-1B (arXiv 2304.01373, table 1), and Llama 3's 8B and 70B (arXiv 2407.21783, table 3)."""
    family, vocab, hidden, layers, heads, mlp = {
        "1B": ("gpt_neox", 50304, 2048, 16, 8, 8192),
        "8B": ("llama", 128256, 4096, 32, 32, 14336),
        "70B": ("llama", 128256, 8192, 80, 64, 28672),
    }[name]
    given: dict[str, Any] = {"num_key_value_heads": 8} if family == "llama" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp,
        tie_word_embeddings=False,
        **given,
    )
    return memory_plan.sizes_of_config(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("1B", 805_736_448 + 2 * 50_304 * 2048),  # without embeddings, by the paper's table
        # 32 layers of 2 · 4096² + 2 · 4096 · 1024 + 3 · 4096 · 14336 + 2 · 4096, two embeddings, a norm
        ("8B", 32 * 218_112_000 + 2 * 128_256 * 4096 + 4096),
        ("70B", 80 * 855_654_400 + 2 * 128_256 * 8192 + 8192),
    ],
)
def test_published_models_have_their_published_parameters(name: str, expected: int) -> None:
    assert published(name).parameters == expected


@pytest.mark.parametrize("family", small.FAMILIES)
def test_counts_of_a_config_are_those_of_the_model_that_is_made(family: small.Family) -> None:
    model, scores = small.causal(family), small.scores(family)
    found = memory_plan.sizes_of_config(model.config)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.trunk + found.hidden == sum(p.numel() for p in scores.parameters())


def test_a_tied_head_is_counted_once_and_grouped_heads_shrink_the_cache() -> None:
    shape = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    own, tied = (
        memory_plan.sizes_of_config(AutoConfig.for_model("llama", **shape, tie_word_embeddings=tie))
        for tie in (False, True)
    )
    assert own.parameters - tied.parameters == 50 * 16
    assert tied.head == 0
    assert own.cache == 2 * 3 * 2 * 4  # keys and values, layers, heads, width


def test_lora_trains_adapters_and_keeps_no_reference() -> None:
    """50 matrices of 100 × 100 with rank 4: 40,000 numbers."""
    adapters = {"r": 4, "alpha": 8.0}
    lora = run(lora=adapters, is_bf16=False)
    assert lora.trained == 40_000 + 600_100
    assert memory(lora)["weights"] == 4 * (740_000 + 600_100)
    assert run(lora=adapters, advantages__critic__lora=adapters).trained == 2 * 40_000 + 100


def test_ppo_from_a_dpo_policy_holds_the_sft_model_too() -> None:
    plain = run(is_bf16=False)
    from_dpo = replace(plain, starts_from_dpo=True)
    assert memory(from_dpo)["weights"] - memory(plain)["weights"] == 4 * plain.policy.parameters


# ------------------------------------------------------------------------------------------- memory


def measured_peak(call: Callable[[], object]) -> int:
    """The most bytes that all tensors have which were made during the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        call()
    total = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


LONG = Shape(vocab=60, query_min=40, query=40, response=24, batch=16, micro=4, layers=4, hidden=128, heads=4)
LOGITS = Shape(vocab=8000, query_min=8, query=8, response=16, batch=64, micro=4, layers=1, hidden=32, heads=4)
STATES = Shape(vocab=60, query_min=4, query=4, response=4, batch=16, micro=4, layers=4, hidden=256, heads=4)


@pytest.mark.parametrize(
    ("shape", "chunk", "changes"),
    [
        (LONG, 2**18, {}),
        pytest.param(LONG, 2**18, {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(LOGITS, 2**22, {}, marks=pytest.mark.slow),
        pytest.param(STATES, 2**18, {}, marks=pytest.mark.slow),
    ],
    ids=["activations", "checkpointing", "logits", "optimizer"],
)
def test_the_peak_is_that_of_a_measured_update_within_15_percent(
    shape: Shape, chunk: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CPU_LOGITS", chunk)
    work = workloads.of_shape(
        small.distributed(), small.ppo(micro_batch_tokens=1024, **changes), shape, num_updates=1
    )
    work = replace(work, settings=work.settings.model_copy(update={"num_ppo_epochs": 2}))
    actor_critic, scorer = work.actor_critic, work.scorers._rewards[0].scorer
    assert isinstance(scorer, RewardModel)
    reference, critic = work.reference, actor_critic.critic
    assert isinstance(critic, TokenScores)
    if work.settings.gradient_checkpointing:
        for model in (actor_critic.policy, critic.model):
            recompute_activations(model)
    whole = [actor_critic, reference.model, scorer.model]
    before = sum(p.nbytes for module in whole for p in module.parameters())
    measured = before + measured_peak(lambda: list(work.updates()))
    policy = memory_plan.sizes_of(actor_critic.policy)
    planned = Run(
        policy=policy,
        ppo=work.settings,
        longest=shape.query,
        num_gpus=1,
        is_bf16=False,
        has_reward_model=True,
        chunk=chunk,
    )
    no_heldout = 4 * (policy.trunk + policy.hidden)
    assert memory(planned)["peak"] - no_heldout == pytest.approx(measured, rel=0.15)


def states(parallelism: Parallelism) -> float:
    """Weights, gradients and optimizer of a policy of 7.5 billion on 64 GPUs, without its reference."""
    policy = TOY._replace(trunk=7_500_000_000, head=0)
    batch = {"rollout_batch_size": 128, "total_episodes": 128}
    found = memory(run(policy, num_gpus=64, parallelism=parallelism, **batch, **without_critic("rloo")))
    reference = {"zero2": 2 * 7.5e9, "zero3": 2 * 7.5e9 / 64, "fsdp2": 4 * 7.5e9 / 64}[parallelism]
    buckets = 0 if parallelism == "fsdp2" else 2 * 2 * BUCKET
    return found["weights"] - reference + found["gradients"] - buckets + found["optimizer"]


def test_sharded_states_need_what_the_papers_say() -> None:
    """arXiv 1910.02054, figure 1: 7.5 billion parameters, 64 GPUs: 16.6 GB with stage 2, 1.9 with stage 3.

    Its gradients have 16 bits, and here 32. FSDP2 divides 16 bytes a parameter: weights, gradients and two
    moments in float32.
    """
    wider = 2 * 7.5 / 64
    assert states("zero2") / GB == pytest.approx(16.6 + wider, abs=0.05)
    assert states("zero3") / GB == pytest.approx(1.9 + wider, abs=0.05)
    assert states("fsdp2") == pytest.approx(16 * 7.5e9 / 64)


def test_offload_moves_a_ranks_part_into_the_machines_memory() -> None:
    """Half of 16 bytes for each of 1,300,100 trained numbers, and of the reference's 4. ZeRO-2 keeps its
    weights and buckets on the GPU."""
    found = memory(run(num_gpus=2, parallelism="fsdp2", offload=True))
    assert (found["weights"], found["gradients"], found["optimizer"]) == (0, 0, 0)
    assert found["machine"] == 16 * 1_300_100 + 4 * 700_000 + 2 * 4 * 700_000
    plain, moved = (memory(run(num_gpus=4, parallelism="zero2", offload=on)) for on in (False, True))
    assert moved["weights"] == plain["weights"]
    assert moved["gradients"] == 2 * 2 * 1_300_100, "the buckets"
    assert plain["machine"] == 4 * 2 * 700_000, "each process has the selected weights, in bf16"


# ---------------------------------------------------------------------------------------- settings


def test_the_first_settings_that_fit_are_taken() -> None:
    """On a GPU whose memory is given: just enough for each, from the fastest to the smallest."""
    made = run(published("8B"), num_gpus=8)
    peaks = {}
    for each in memory_plan.candidates(made):
        peaks[each.parallelism, each.ppo.gradient_checkpointing, each.offload] = memory(each)["peak"]
    least = float("inf")
    for settings, peak in peaks.items():
        if peak < least:
            found, problem = memory_plan.fit(made, peak / memory_plan.USABLE, 1e15)
            assert found is not None, problem
            assert (found.parallelism, found.ppo.gradient_checkpointing, found.offload) == settings
            least = peak
    assert memory_plan.fit(made, 0.9 * least / memory_plan.USABLE, 1e15)[0] is None


def test_70b_fits_with_an_engine_where_the_machines_hold_what_is_offloaded() -> None:
    """Whole in bf16 it has 141 GB, so that no GPU of 80 GB can gather it to sample."""
    given: dict[str, Any] = {"rollout_batch_size": 64, "num_mini_batches": 1}
    policy = published("70B")
    alone, problem = memory_plan.fit(run(policy, num_gpus=32, **given), 80 * GB, 2000 * GB)
    assert alone is None
    assert problem.endswith(" GB of 72 on each GPU")
    found, _ = memory_plan.fit(run(policy, num_gpus=32, sampler=VLLM_SAMPLER, **given), 80 * GB, 2000 * GB)
    assert found is not None
    assert (found.parallelism, found.offload) == ("fsdp2", True)
    _, problem = memory_plan.fit(run(policy, num_gpus=8, sampler=VLLM_SAMPLER, **given), 80 * GB, 2000 * GB)
    assert problem.startswith("fsdp2 needs 3,")
    assert problem.endswith(" GB of 2,000 on its machine")


def test_what_does_not_divide_the_batch_says_so() -> None:
    """A step has 8 rows, and with 8 responses to each prompt a rollout has 2 prompts."""
    problem = memory_plan.fit(run(num_gpus=3), GB, GB)[1]
    assert problem == "8 rows of an optimizer step are not divisible by 3 GPUs"
    groups = replace(run(**without_critic("rloo", 8)), num_gpus=4)
    assert memory_plan.fit(groups, GB, GB)[1] == "2 prompts of a rollout are not divisible by 4 GPUs"


# ------------------------------------------------------------------------------------------ command


def test_the_command_plans_for_each_number_of_gpus(project: Path, rlhf: Command) -> None:
    found = json.loads(rlhf("plan --gpus 1,16 --gpu h200 --json").out)
    assert list(found["plans"]) == ["1", "16"]
    own = found["plans"]["1"]
    assert (own["fits"], own["launch.parallelism"], found["memory_gb"]) == (True, "ddp", 141)
    out = rlhf("plan --gpus 1 --memory 0.05").out.replace("\n", " ")
    assert "on GPUs of 0.05 GB" in out
    assert "on each GPU" in out
    assert "stage dpo" not in out


def test_the_command_plans_no_dpo_and_says_so(project: Path, rlhf: Command) -> None:
    small.write_params(project, {"dpo.train": True})
    assert "stage dpo, which has no critic, is not planned" in rlhf("plan --gpus 1").out.replace("\n", " ")
    small.write_params(project, {"dpo.train": True, "ppo.train": False})
    assert "ppo.train is false, and `rlhf plan` calculates the memory of PPO" in rlhf("plan", status=2).err


def test_the_config_of_models_sft_or_of_a_given_model_is_read(models_here: Path, rlhf: Command) -> None:
    small.write_params(models_here)
    small.causal("llama").save_pretrained("other")
    for option, model in (("", "models/sft"), ("--model other", "other")):
        found = json.loads(rlhf(f"plan --gpus 1 --json {option}").out)
        assert found["parameters"] == sum(p.numel() for p in load_causal(Path(model)).parameters())
    message = rlhf("plan --model nowhere/at/all", status=2).err
    assert "cannot load a model from nowhere/at/all" in message
