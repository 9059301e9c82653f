"""`rlhf bench`: the FLOPs it counts, what it reads, and that it leaves the project as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks.benchmark import measurement, shapes, workloads
from rlhf_tasks.benchmark.measurement import Measurement
from rlhf_tasks.benchmark.shapes import Shape
from rlhf_tasks.cli import main
from rlhf_tasks.errors import UserError
from tests import small
from tests.ppo.toy import without_critic

TINY = Shape(vocab=40, query_min=4, query=4, response=3, batch=8, micro=4, layers=2, hidden=16, heads=2)
CHANGES: Mapping[str, Any] = {
    "data.max_prompt_tokens": 6,
    "model.scratch.hidden_size": 16,
    "model.scratch.num_layers": 2,
    "model.scratch.num_heads": 2,
    "model.scratch.vocab_size": 60,
    "ppo.rollout_batch_size": 16,
    "ppo.total_episodes": 160,
    "ppo.num_mini_batches": 2,
    "ppo.response_length": 4,
    "ppo.num_selection_prompts": 8,
    "tracking.enabled": False,
}
FOUND = Measurement(
    models="", device="CPU", threads=1, precision="fp32", episodes_per_second=16.0,
    response_tokens_per_second=64.0, seconds_per_update=4.0, generate_seconds=1.0, score_seconds=0.6,
    train_seconds=2.4, peak_memory_gb=1.0, padding_share=None, model_flops_per_update=1e9,
    matrix_flops_per_second=1e10, matrix_share=0.025,
)  # fmt: skip


@pytest.fixture
def workload() -> workloads.Workload:
    return workloads.of_shape(small.distributed(), small.ppo(), TINY, num_updates=2)


def bench(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a run in a project whose files it must not change."""
    YAML().dump(small.params(CHANGES), root / "params.yaml")
    before = sorted(root.rglob("*"))
    assert main.main(["bench", "--updates", "1", "--json", *arguments]) == 0
    assert sorted(root.rglob("*")) == before
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_forward_pass_costs_two_flops_per_weight_and_token_and_those_of_attention(
    workload: workloads.Workload,
) -> None:
    """Width 16: 4·16² weights of attention and 8·16² of the MLP in each of 2 layers are 6,144."""
    policy = workload.actor_critic.policy
    trunk, attention = 2 * 6144 * 7, 2 * 2 * 16 * 7**2
    assert measurement.forward_flops(policy, 4, 3, logits=False) == trunk + attention
    assert measurement.forward_flops(policy, 4, 3, logits=True) == trunk + attention + 2 * 40 * 16 * 3


def test_a_config_that_is_nested_has_the_same_cost(
    workload: workloads.Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = workload.actor_critic.policy
    expected, text = measurement.forward_flops(policy, 4, 3, logits=True), policy.config
    nested = SimpleNamespace(get_text_config=lambda: text)  # of Gemma 3, which takes images too
    monkeypatch.setattr(policy, "config", nested)
    assert measurement.forward_flops(policy, 4, 3, logits=True) == expected


def test_an_update_passes_forward_five_times_and_trains_policy_and_critic(
    workload: workloads.Workload,
) -> None:
    """Sampling and the reference with the head; critic and reward without; 4 epochs of three passes each."""
    trunk, head = 2 * 6144 * 7 + 2 * 2 * 16 * 7**2, 2 * 40 * 16 * 3
    row = 2 * (trunk + head) + trunk + trunk + 4 * 3 * (2 * trunk + head)
    assert measurement.update_flops(workload, 4, 3) == 8 * row


def test_every_reward_model_of_an_update_is_counted(workload: workloads.Workload) -> None:
    """Two more of the same size pass forward twice more."""
    trunk = 2 * 6144 * 7 + 2 * 2 * 16 * 7**2
    one = measurement.update_flops(workload, 4, 3)
    scorers: Any = SimpleNamespace(reward_models=[*workload.scorers.reward_models] * 3)
    three = replace(workload, scorers=scorers)
    assert measurement.update_flops(three, 4, 3) - one == 8 * 2 * trunk


def test_an_update_without_a_critic_costs_no_critics_passes() -> None:
    settings = small.ppo(**without_critic("rloo"))
    workload = workloads.of_shape(small.distributed(), settings, TINY, num_updates=2)
    trunk, head = 2 * 6144 * 7 + 2 * 2 * 16 * 7**2, 2 * 40 * 16 * 3
    row = 2 * (trunk + head) + trunk + 4 * 3 * (trunk + head)
    assert measurement.update_flops(workload, 4, 3) == 8 * row
    assert measurement.measure(workload).episodes_per_second > 0
    with pytest.raises(UserError, match="samples_per_prompt=16 does not divide the 8 episodes"):
        workloads.of_shape(small.distributed(), small.ppo(**without_critic("rloo", 16)), TINY, num_updates=1)


def test_the_split_of_a_measured_update_fits_into_its_time(workload: workloads.Workload) -> None:
    found = measurement.measure(workload)
    parts = found.generate_seconds + found.score_seconds + found.train_seconds
    assert 0 < parts <= found.seconds_per_update
    assert 0 < found.matrix_share < 1
    assert found.precision == "fp32"


def test_a_metric_that_appears_after_the_first_updates_loses_no_measurement(
    workload: workloads.Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `train/micro_batch_tokens` does when memory has run out."""
    first, second = workload.updates()
    third = {**second, "train/micro_batch_tokens": 512.0}
    monkeypatch.setattr(workloads.Workload, "updates", lambda _: iter([first, second, third]))
    assert measurement.measure(workload).episodes_per_second > 0


def test_the_estimate_adds_the_evaluations_to_the_updates() -> None:
    """Ten updates of 4 s; three evaluations of 8 prompts, each of a 16th of 1.6 s per prompt."""
    settings = small.ppo(total_episodes=160, rollout_batch_size=16, num_selections=2, num_selection_prompts=8)
    expected = measurement.estimate(replace(FOUND), settings)
    assert expected["updates"] == 10
    assert expected["training_seconds"] == pytest.approx(40)
    assert expected["evaluation_seconds"] == pytest.approx(3 * 8 * 0.1)
    assert expected["total_seconds"] == pytest.approx(42.4)


def test_without_checkpoints_the_models_of_params_yaml_are_random(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(project / "data")
    found = bench(capsys, project)
    assert found["models"] == "random models/sft, models/reward, prompts of the greatest length"
    assert found["estimate"]["updates"] == 10


def test_the_projects_own_checkpoints_are_used(
    project: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data", "models"):
        shutil.rmtree(project / name, ignore_errors=True)
        shutil.copytree(trained / name, project / name)
    assert bench(capsys, project)["models"] == "models of this project"


def test_a_named_shape_has_no_estimate(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(shapes.SHAPES, "A", TINY)
    found = bench(capsys, project, "A")
    assert found["models"] == "random models of a named shape"
    assert found["estimate"] is None


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
def test_the_shape_of_a_gpu_is_refused_without_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "D"]) == 2
    assert "shape D needs a GPU" in capsys.readouterr().err
