"""Several processes train the same weights as one, and only the first writes.

Workers are started as a user starts them, by `rlhf STAGE` with a `launch` section; on the CPU they
talk by gloo.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from rlhf_tasks.config import Stage
from rlhf_tasks.modeling.load import load_causal
from rlhf_tasks.tracking import NullTracker
from tests import toy
from tests.ppo.toy import without_critic
from tests.training.stages import curve, metrics, rlhf, weights

pytestmark = pytest.mark.e2e

TWO = {"num_processes": 2}


def assert_same_norms(expected: NullTracker) -> None:
    """Of the gradients of SFT's steps: Adam hides a wrong scale."""
    norms = [row["train/grad_norm"] for row in expected.history()]
    assert [float(row["train/grad_norm"]) for row in curve("sft")] == pytest.approx(norms, rel=1e-4)


def test_two_processes_train_the_same_sft_weights_as_one(toy_project: Path) -> None:
    """Every row is a micro-batch; in the last batch of an epoch one process has one row less."""
    changes = {"batch_size": 26, "num_epochs": 2, "micro_batch_tokens": 8}
    alone = NullTracker("sft")
    expected = toy.run("sft", toy.write_params(sft=changes), alone)
    one = weights("models/sft")
    shutil.rmtree("models/sft")
    toy.write_params(sft=changes, launch=TWO)
    done = rlhf("sft")
    two = weights("models/sft")
    before = weights("models/base")
    assert any(not torch.equal(one[key], before[key]) for key in one)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-4, atol=1e-6)
    assert_same_norms(alone)
    assert metrics("sft")["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics("sft")["steps_trained"] == expected["steps_trained"]
    assert done.stdout.count("sft: done in") == 1, "the first rank alone speaks"


def test_ppo_on_two_processes_is_finite_and_written_once(toy_project: Path) -> None:
    toy.write_params(launch=TWO)
    done = rlhf("ppo")
    found = metrics("ppo")
    assert found["episode"] == 32
    assert found["objective/rlhf_reward"] == pytest.approx(
        found["objective/scores"] + found["objective/non_score_reward"]
    )
    assert 0.5 < found["val/ratio"] < 2
    samples = pq.read_table("evaluation/ppo/samples.parquet").to_pylist()
    assert len(samples) == 2 * 4, "before and after, four prompts, one process"
    answers = pq.read_table("evaluation/ppo/answers.parquet").to_pylist()
    prompts = pq.read_table("data/prompts/validation.parquet").column("prompt").to_pylist()[:8]
    assert [(row["episode"], row["prompt"]) for row in answers] == [
        (at, p) for at in (0, 32) for p in prompts
    ]
    assert curve("ppo")[0]["eval/kl"] == "0.0", "before training the policy is the reference"
    assert float(curve("ppo")[-1]["eval/kl"]) != 0
    assert {"selected_kl", "selected_kl_standard_error"} <= found.keys()
    load_causal("models/policy")
    assert done.stdout.count("ppo: done in") == 1
    assert not list(Path().rglob("*.partial-*"))


def test_zero2_takes_the_same_steps_as_adamw(toy_project: Path) -> None:
    """Steps of several micro-batches with different rates; gradients are clipped to about Adam's eps."""
    changes = {"batch_size": 28, "num_epochs": 2, "max_grad_norm": 1e-4}
    plain = NullTracker("sft")
    toy.run("sft", toy.write_params(sft=changes), plain)
    expected = weights("models/sft")
    shutil.rmtree("models/sft")
    toy.write_params(sft=changes, launch=TWO | {"parallelism": "zero2"})
    rlhf("sft")
    for key, value in weights("models/sft").items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6)
    assert_same_norms(plain)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_zero3_saves_whole_weights(toy_project: Path, stage: Stage) -> None:
    """Every weight is partitioned between uses, as in a large model."""
    settings = Path("infra/deepspeed/zero3.json")
    tree = json.loads(settings.read_text(encoding="utf-8"))
    names = (
        "param_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "prefetch_bucket_size",
    )
    tree["zero_optimization"] |= {f"stage3_{name}": 0 for name in names}
    settings.write_text(json.dumps(tree), encoding="utf-8")
    toy.run(stage, toy.write_params())
    expected = weights(f"models/{stage}")
    shutil.rmtree(f"models/{stage}")
    toy.write_params(launch=TWO | {"parallelism": "zero3"})
    rlhf(stage)
    for key, value in weights(f"models/{stage}").items():
        torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=2e-5)


@pytest.mark.slow
def test_the_reward_models_train_under_zero2(toy_project: Path) -> None:
    """Two models one after another in one process."""
    expected = toy.run("reward", toy.write_params())
    plain = {name: weights(f"models/{name}") for name in ("reward", "reward_heldout")}
    toy.write_params(launch=TWO | {"parallelism": "zero2"})
    rlhf("reward")
    for name in plain:
        for key, value in weights(f"models/{name}").items():
            torch.testing.assert_close(value, plain[name][key], rtol=1e-4, atol=1e-6)
    assert metrics("reward")["score_mean"] == pytest.approx(expected["score_mean"], rel=1e-3)


@pytest.mark.parametrize("layout", ["zero2", "fsdp2"])
@pytest.mark.parametrize(
    "features",
    [
        {},
        {
            "advantages.critic.warmup": {"max_updates": 1, "settled": 0.1},
            "kl_penalty": {"beta": 1.0, "target": 1e-3},
            "ptx": {"coef": 0.1, "text": None},
        },
        without_critic("rloo"),
    ],
    ids=["", "warm-up-penalty-ptx", "without-critic"],
)
def test_ppo_takes_steps_in_bf16(toy_project: Path, features: dict[str, Any], layout: str) -> None:
    """The TL;DR preset runs so. Before the first update only rounding causes a KL."""
    launch = TWO | {"parallelism": layout, "precision": "bf16"}
    settings = {"schedule": "constant", "learning_rate": 1e-3, "num_selections": 2} | features
    toy.write_params(launch=launch, ppo=settings)
    before = weights("models/sft")
    rlhf("ppo")
    after = weights("models/policy")
    assert abs(float(curve("ppo")[1]["objective/kl"])) < 0.01
    changed = any(not torch.equal(after[key].bfloat16(), before[key].bfloat16()) for key in before)
    assert changed == (metrics("ppo")["selected_episode"] > 0), "the weights from before training may be best"
    assert float(curve("ppo")[0]["eval/kl"]) == 0
    assert float(curve("ppo")[-1]["eval/kl"]) != 0, "the steps change the policy"
    assert metrics("ppo")["lr"] == 1e-3
    assert all(torch.isfinite(value).all() for value in after.values())


def test_ppo_in_bf16_samples_and_trains_in_one_precision(toy_project: Path) -> None:
    """One process on a CPU: the first ratio is 1, the first KL is 0, and the weights stay float32."""
    settings = {"schedule": "constant", "learning_rate": 1e-3, "num_mini_batches": 1, "num_ppo_epochs": 1}
    toy.write_params(launch={"precision": "bf16"}, ppo=settings)
    rlhf("ppo")
    first = curve("ppo")[1]
    assert abs(float(first["objective/kl"])) < 0.01
    assert abs(float(first["val/ratio"]) - 1) < 1e-3
    after, before = weights("models/policy"), weights("models/sft")
    moved = [after[key] for key in before if not torch.equal(after[key], before[key])]
    assert moved
    assert any(not torch.equal(value, value.bfloat16().float()) for value in moved)


JUDGE = {"kind": "function", "name": "shorter", "function": "shorter:scores"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "features",
    [
        {"lora": {"r": 2, "alpha": 4.0}},
        {
            "lora": {"r": 2, "alpha": 4.0},
            "advantages.critic.lora": {"r": 2, "alpha": 4.0},
            "gradient_checkpointing": True,
        },
        {"advantages.critic.kind": "shared", "ptx": {"coef": 0.1, "text": None}},
        {"select_by": {"judge": JUDGE, "max_failure_share": 0.5}},
    ],
    ids=["lora", "lora-value-checkpointing", "shared-ptx", "referee"],
)
def test_ppo_features_on_two_processes_start_from_the_sft_policy(
    toy_project: Path, features: dict[str, Any]
) -> None:
    """The first rollouts come from the SFT model, so that the KL is 0; all steps are finite."""
    Path("shorter.py").write_text(
        "def scores(prompts, answers):\n    return [-float(len(a)) for a in answers]\n", encoding="utf-8"
    )
    toy.write_params(launch=TWO, ppo={"schedule": "constant", "learning_rate": 1e-2} | features)
    rlhf("ppo")
    first, last = curve("ppo")[1], metrics("ppo")
    assert abs(float(first["objective/kl"])) < 1e-4
    assert float(last["objective/kl"]) != 0, "the second update's rollouts come from a policy that moved"
    assert 0.5 < last["val/ratio"] < 2
    assert all(torch.isfinite(value).all() for value in weights("models/policy").values())
    assert weights("models/policy").keys() == weights("models/sft").keys(), "adapters are merged"
    assert ("selected_win_rate" in last) == ("select_by" in features)
