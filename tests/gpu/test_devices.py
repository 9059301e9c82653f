"""PPO and supervised training on a pretended GPU: the weights of the CPU, and faults that would stop CUDA."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, chdir, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks import first_gpu
from benchmarks.shapes import SHAPES
from rlhf_tasks.config import Dpo, Lora, Stage
from rlhf_tasks.data.batches import Batch
from rlhf_tasks.models import logprobs
from rlhf_tasks.models.heads import ActorCritic
from rlhf_tasks.models.load import recompute_activations
from rlhf_tasks.models.lora import add_lora
from rlhf_tasks.ppo import state
from rlhf_tasks.ppo.sampler import LocalSampler
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import base, judge, preferences
from rlhf_tasks.stages import dpo as dpo_stage
from rlhf_tasks.stages import ppo as ppo_stage
from rlhf_tasks.stages import reward as reward_stage
from rlhf_tasks.stages import sft as sft_stage
from rlhf_tasks.stages import value as value_stage
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.dpo import LabeledResponses, PolicyPairs, sigmoid
from rlhf_tasks.training.supervised import train
from rlhf_tasks.training.tasks import LanguageModeling, PreferencePairs, RewardLearner, Task, ValueTargets
from tests import small
from tests.gpu.conftest import Child
from tests.gpu.pretend import Gpu
from tests.ppo import toy

Changes = dict[str, Any]
TOLERANCE = 1e-5
"""Of a weight, and of a metric relative to numbers above 1: ten times what they differ by."""


def lora() -> Changes:
    actor_critic, reference = toy.with_lora()
    critic = small.scores(seed=3)
    critic.model = add_lora(critic.model, Lora(r=4, alpha=8.0), seed=2)
    return {"actor_critic": ActorCritic(actor_critic.policy, critic), "reference": reference}


def checkpointing() -> Changes:
    policy, critic = small.causal(), small.scores(seed=3)
    recompute_activations(policy)
    recompute_activations(critic.model)
    return {"actor_critic": ActorCritic(policy, critic), "gradient_checkpointing": True}


OWN_OPTIMIZER = {
    "steps": 2,
    "learning_rate": 1e-2,
    "schedule": "constant",
    "adam_eps": 1e-8,
    "max_grad_norm": 1.0,
}
UPDATES: Mapping[str, Callable[[], Changes]] = {
    "separate critic": dict,
    "shared critic": lambda: {"actor_critic": toy.shared(), "advantages__critic": {"kind": "shared"}},
    "no critic": lambda: toy.without_critic("rloo"),
    "lora": lora,
    "checkpointing": checkpointing,
    "ptx": lambda: {"text": toy.DEMONSTRATIONS, "ptx": {"coef": 0.1, "text": None}},
    "kl in the loss": lambda: {"kl": {"kind": "in_loss", "estimator": "k3"}, "entropy_coef": 0.01},
    "kl penalty": lambda: {"kl_penalty": {"beta": 1.0, "target": 1e-4}, "target_kl": 0.1},
    "reference sync": lambda: {"reference_sync": {"every": 1, "alpha": 0.5}, "total_episodes": 32},
    "the critic's own steps": lambda: {"advantages__critic": {"kind": "separate"} | OWN_OPTIMIZER},
    "fallback": lambda: {"advantages": {"kind": "gae", "fallback": "group", "samples_per_prompt": 2}},
}
"""Changes of the toy."""


def updated(changes: Changes) -> tuple[Tensor, list[dict[str, float]]]:
    """All weights after an update, and its metrics."""
    settings: Changes = {"total_episodes": 16}
    one = toy.toy(dist=small.distributed(), **settings | changes)
    metrics = list(one.updates)
    return one.weights.cpu(), toy.untimed(metrics)


QUERIES, RESPONSES = small.rows(12, seed=4, longest=6)
OTHERS = small.rows(12, seed=7, longest=6)[1]


def sft() -> tuple[nn.Module, Task]:
    return small.causal(), LanguageModeling(QUERIES, RESPONSES, small.PAD)


def reward() -> tuple[nn.Module, Task]:
    learner = RewardLearner(small.scores(seed=3), small.causal())
    return learner, PreferencePairs(QUERIES, RESPONSES, OTHERS, small.PAD, lm_coef=0.1)


def reward_of_shared_rows() -> tuple[nn.Module, Task]:
    pairs = PreferencePairs(QUERIES, RESPONSES, OTHERS, small.PAD, shares_prefix=True)
    return RewardLearner(small.scores(seed=3)), pairs


def value() -> tuple[nn.Module, Task]:
    outcomes = torch.linspace(-1, 1, len(QUERIES))
    return small.scores(seed=3), ValueTargets(QUERIES, RESPONSES, outcomes, 0.9, small.PAD, by_position=True)


def dpo() -> tuple[nn.Module, Task]:
    known = torch.linspace(-30, -20, 2 * len(QUERIES)).view(-1, 2)
    settings = Dpo(train=True, beta=0.3)
    return small.causal(), PolicyPairs(QUERIES, RESPONSES, OTHERS, known, small.PAD, settings, sigmoid)


def kto() -> tuple[nn.Module, Task]:
    known = torch.linspace(-30, -20, 2 * len(QUERIES)).view(-1, 2)
    is_good, settings = torch.arange(len(QUERIES)) % 2 == 0, Dpo(train=True, loss="kto")
    return small.causal(), LabeledResponses(QUERIES, RESPONSES, OTHERS, is_good, known, small.PAD, settings)


SUPERVISED = (sft, reward, reward_of_shared_rows, dpo, kto, value)


def trained(make: Callable[[], tuple[nn.Module, Task]]) -> tuple[Tensor, list[dict[str, float]]]:
    """All weights after two epochs, the best of which are kept, and the metrics of each step."""
    model, task = make()
    tracker, settings = NullTracker("sft"), small.optimization(num_epochs=2.0, learning_rate=1e-3)
    how: dict[str, Any] = {"validation": copy.deepcopy(task), "num_evaluations": 2, "patience": 3}
    how |= {"seed": 1, "name": "test", "tracker": tracker, "snapshots": Snapshots()}
    train(small.distributed(), model, task, settings, **how)
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), tracker.history()


def measure() -> dict[str, Any]:
    return {"differences": differences(), "errors": errors()}


def differences() -> dict[str, list[float]]:
    """The largest difference of a weight, and of a metric, between the CPU and the pretended GPU."""
    found = dict[str, list[float]]()
    runs: dict[str, Callable[[], tuple[Tensor, list[dict[str, float]]]]] = {
        **{name: partial(lambda make: updated(make()), make) for name, make in UPDATES.items()},
        **{make.__name__: partial(trained, make) for make in SUPERVISED},
    }
    for name, run in runs.items():
        weights, metrics = run()
        with Gpu().present():
            other_weights, other_metrics = run()
        of_metrics = [
            abs(value - other[key]) / max(1.0, abs(value))
            for row, other in zip(metrics, other_metrics, strict=True)
            for key, value in row.items()
        ]
        found[name] = [float((weights - other_weights).abs().max()), max(of_metrics)]
    return found


@pytest.mark.parametrize("name", [*UPDATES, *(make.__name__ for make in SUPERVISED)])
def test_training_gives_the_weights_of_the_cpu(name: str, child: Child) -> None:
    weights, metrics = child(measure)["differences"][name]
    assert weights < TOLERANCE
    assert metrics < TOLERANCE


EPOCH = {"num_epochs": 1.0, "batch_size": 8, "micro_batch_tokens": 4096}
PPO = {
    "total_episodes": 32,
    "rollout_batch_size": 16,
    "num_mini_batches": 2,
    "micro_batch_tokens": 4096,
    "response_length": 8,
    "num_selections": 2,
    "num_selection_prompts": 12,
    "num_sample_generations": 2,
}
STAGES: Mapping[Stage, tuple[Any, Changes]] = {
    "base": (base, {"base": EPOCH, "model.scratch": {"hidden_size": 16, "num_layers": 2, "num_heads": 2}}),
    "sft": (sft_stage, {"sft": EPOCH}),
    "preferences": (preferences, {"preferences": {"num_prompts": 12}}),
    "reward": (reward_stage, {"reward": EPOCH | {"lm_coef": 0.1, "lora": {"r": 4, "alpha": 8.0}}}),
    "dpo": (dpo_stage, {"dpo": EPOCH | {"train": True, "num_selection_prompts": 8}}),
    "value": (
        value_stage,
        {
            "value": EPOCH | {"num_prompts": 24},
            "ppo.advantages.critic": {"kind": "separate", "init": "value"},
        },
    ),
    "ppo": (ppo_stage, {"ppo": PPO | {"gradient_checkpointing": True}}),
    "judge": (judge, {"judge": {"num_examples": 10, "judges": [small.GOLD, small.HELDOUT]}}),
}


def stages() -> dict[str, float]:
    """The largest difference of a weight that a stage has written, or of a metric."""
    with TemporaryDirectory() as made:
        folders = {name: small.workspace(Path(made) / name) for name in ("cpu", "gpu")}
        found = dict[str, float]()
        for stage, (module, changes) in STAGES.items():
            written = list[dict[str, Tensor]]()
            for name, folder in folders.items():
                with chdir(folder), Gpu().present() if name == "gpu" else nullcontext():
                    metrics = module.run(small.view(stage, changes), Paths(folder), NullTracker(stage))
                files = sorted((folder / "models").glob("*/model.safetensors"))
                weights = {f"{f.parent.name}/{key}": x for f in files for key, x in load_file(f).items()}
                times = ("time/", "eps")
                known = {k: torch.tensor(v) for k, v in metrics.items() if not k.startswith(times)}
                written.append(weights | known)
            assert written[0].keys() == written[1].keys()
            found[stage] = max(float((x - written[1][key]).abs().max()) for key, x in written[0].items())
    return found


@pytest.mark.slow
def test_all_stages_write_the_weights_of_the_cpu(child: Child) -> None:
    found = child(stages)
    assert found.keys() == STAGES.keys()
    assert max(found.values()) < TOLERANCE, found


PARTS = ("cpu", "waits", "head", "casts", "reward", "memory", "rows", "shape_d")


def first_gpu_parts() -> dict[str, list[str]]:
    """What the script for the first GPU measures, by part, of a small shape."""
    sizes: Changes = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 256, "precision": "bf16"}
    tiny = replace(SHAPES["A"], batch=16, query=16, query_min=8, response=8, **sizes)
    with (
        Gpu().present(),
        mock.patch.object(first_gpu, "SHAPES", dict.fromkeys(SHAPES, tiny)),
        mock.patch.object(first_gpu, "shape_of", lambda name, **changes: replace(tiny, **changes)),
    ):
        return {part: list(getattr(first_gpu, f"measure_{part}")()) for part in PARTS}


@pytest.mark.slow
def test_the_script_for_the_first_gpu_runs_on_one(child: Child) -> None:
    assert all(child(first_gpu_parts).values())


# ------------------------------------------------------------------------------------- planted faults


def _position_ids(batch: Batch) -> Tensor:
    return (batch.attention_mask.cumsum(1) - 1).clamp_min(0).cpu()


def _mask(batch: Batch) -> Tensor:
    return torch.arange(batch.num_response_columns) < batch.response_mask.sum(1, keepdim=True)


def _sampler_of_the_cpu(dist: Any, policy: Any, generator: Any, **how: Any) -> LocalSampler:
    return LocalSampler(dist, policy, torch.Generator(), **how)


def after_a_pass(act: Callable[[Tensor, Batch], object]) -> AbstractContextManager[Any]:
    """Acts on the statistics of a micro-batch, (N, 3), and on the batch."""
    own = logprobs._left_aligned

    def left_aligned(stats: Tensor, batch: Batch, states: Tensor) -> logprobs.TokenStats:
        act(stats, batch)
        return own(stats, batch, states)

    return mock.patch.object(logprobs, "_left_aligned", left_aligned)


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "position ids on the CPU": lambda: mock.patch.object(Batch, "position_ids", property(_position_ids)),
    "a mask on the CPU": lambda: mock.patch.object(Batch, "mask", property(_mask)),
    "a generator of the CPU": lambda: mock.patch.object(state, "LocalSampler", _sampler_of_the_cpu),
    "a sum with a tensor of the CPU": lambda: after_a_pass(lambda x, _: x + torch.zeros(x.shape)),
    "an index of the GPU": lambda: after_a_pass(lambda _, b: torch.ones(b.mask.shape)[b.mask]),
    "numbers for NumPy": lambda: after_a_pass(lambda x, _: x.detach().numpy()),
}
"""What CUDA refuses, planted in the toy's update."""


def errors() -> dict[str, str]:
    """What each fault causes."""
    found = dict[str, str]()
    for name, plant in FAULTS.items():
        with Gpu().present(), plant():
            try:
                updated({})
            except (RuntimeError, TypeError) as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cuda_refuses_is_an_error(fault: str, child: Child) -> None:
    message = child(measure)["errors"][fault]
    assert ("numpy" if "NumPy" in fault else "same device") in message
