"""What `auto` stands for: by the shape of the model, the memory and the GPUs, and recorded."""

from __future__ import annotations

import ctypes
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_tasks import config
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.errors import ConfigError
from rlhf_tasks.project import inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.training import auto
from tests.conftest import Command
from tests.flows import toy

ROOT = Path(__file__).parents[2]
GB = 10**9
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536}


@pytest.mark.parametrize(
    ("shape", "memory", "gpu", "number_format", "tokens"),
    [
        # 32 · (9 · 4096 + 3 · 14336) · 2 = 5.1 MB a token; an eighth of 80 GB holds 1,956 of them
        (LLAMA_8B, 80 * GB, True, "bf16", 1024),
        (LLAMA_8B, 16 * GB, False, "fp32", 256),  # never fewer
        # 30 · (9 · 576 + 3 · 1536) · 4 = 1.2 MB; an eighth of 24 GB holds 2,553
        (SMOLLM2, 24 * GB, False, "fp32", 2048),
        (SMOLLM2, 24 * GB, False, "bf16", 4096),
        ({"n_embd": 64, "n_layer": 2}, 8 * GB, False, "fp32", 4096),  # GPT-2's names; never more on a CPU
        ({"n_embd": 64, "n_layer": 2}, 8 * GB, True, "fp32", 65_536),
        ({"text_config": SMOLLM2}, 24 * GB, False, "fp32", 2048),
        ({"hidden_size": "wide", "num_hidden_layers": 2}, 80 * GB, True, "bf16", 1024),  # not readable
        (None, 80 * GB, True, "bf16", 1024),  # a hub id counts as a model of 8B
    ],
)
def test_an_eighth_of_the_memory_holds_the_activations(
    shape: Any, memory: int, gpu: bool, number_format: Any, tokens: int, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "given").mkdir()
    if shape is not None:
        (tmp_path / "given/config.json").write_text(json.dumps(shape), encoding="utf-8")
    gpus = [SimpleNamespace(total_memory=size) for size in (2 * memory, memory)] if gpu else []
    monkeypatch.setattr(auto, "gpus", lambda: gpus)
    monkeypatch.setattr(auto, "machine_memory", lambda: memory)
    settings = config.Config.model_validate({"model": {"base": "given"}})
    assert auto.choose_tokens(settings, tmp_path, number_format) == tokens


@pytest.mark.parametrize(
    ("launch", "checkpointing", "tokens"),
    [
        ({}, True, 8192),  # 4 · 32 · 4096 + 0.16 MB of one layer = 0.68 MB; an eighth of 80 GB holds 14,607
        ({"parallelism": "fsdp2", "num_processes": 8}, False, 2048),
        ({"parallelism": "fsdp2", "num_processes": 16}, True, 16_384),
        ({"parallelism": "zero2", "num_processes": 8}, False, 1024),  # every GPU has all weights
    ],
)
def test_a_layout_whose_passes_exchange_weights_makes_fewer_and_larger_ones(
    launch: dict[str, Any], checkpointing: bool, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 80 GB with a model of 8B in bf16; only PPO's models recompute activations."""
    monkeypatch.setattr(auto, "gpus", lambda: [SimpleNamespace(total_memory=80 * GB)])
    ppo = {"gradient_checkpointing": checkpointing}
    settings = config.Config.model_validate(
        {"model": {"base": "org/of-the-hub", "revision": "a" * 40}} | {"launch": launch, "ppo": ppo}
    )
    assert auto.choose_tokens(settings, tmp_path, "bf16", "ppo") == tokens


HUB = {"base": "org/of-the-hub", "revision": "a" * 40}
NARROW = {"scratch": {"hidden_size": 64}}


@pytest.mark.parametrize(
    ("model", "parallelism", "amx", "majors", "expected"),
    [
        ({"base": "given"}, "ddp", True, [], "bf16"),
        ({"base": "given"}, "zero2", True, [], "fp32"),  # shards would have weights in 16 bits
        ({"base": "given"}, "ddp", False, [], "fp32"),
        ({"base": "given"}, "ddp", True, [7], "fp32"),  # the GPU computes, and lacks it
        (HUB, "ddp", True, [], "bf16"),  # counts as a model of 8B
        (NARROW, "ddp", True, [], "fp32"),  # a narrow model would lose on a CPU
        (NARROW, "zero2", False, [8, 9], "bf16"),
        (NARROW, "ddp", True, [9, 7], "fp32"),  # every GPU must have it
    ],
)
def test_auto_is_bf16_on_gpus_that_have_it_and_on_a_cpu_with_matrix_units_for_a_wide_model(
    model: Any,
    parallelism: str,
    amx: bool,
    majors: list[int],
    expected: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given/config.json").write_text(json.dumps(SMOLLM2), encoding="utf-8")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(majors))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(majors))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(major=majors[n]))
    monkeypatch.setattr(auto, "cpu_has_amx", lambda: amx)
    for wanted, chosen in (("auto", expected), ("bf16", "bf16"), ("fp32", "fp32")):
        launch = {"parallelism": parallelism, "precision": wanted}
        settings = config.Config.model_validate({"model": model, "launch": launch})
        assert auto.resolve(settings, tmp_path, needed=[PRECISION]).launch.precision == chosen


def test_a_stage_without_a_precision_names_the_tokens_that_the_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage report shows the parameters of all stages, and computes with no model."""
    monkeypatch.setattr(auto, "gpus", lambda: [SimpleNamespace(total_memory=80 * GB, major=9)])
    settings = config.Config.model_validate({"model": HUB})
    of_report, of_stages = (
        auto.resolve(settings, tmp_path, needed=needed).ppo.micro_batch_tokens
        for needed in (config.VIEWS["report"].of(settings).declared, auto.KEYS)
    )
    assert of_report == of_stages


@pytest.mark.parametrize(("flags", "expected"), [("avx512f amx_bf16 amx_tile", True), ("avx512_bf16", False)])
def test_the_flags_of_the_cpu_say_whether_it_has_amx(
    flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "CPUINFO", tmp_path / "cpuinfo")
    assert not auto.cpu_has_amx(), "another system"
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\n", encoding="utf-8")
    assert auto.cpu_has_amx() == expected


def test_a_gguf_file_that_cannot_be_read_counts_as_large(tmp_path: Path, monkeypatch: Any) -> None:
    """Also without the package gguf: the stage that loads the model names what is missing."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(auto, "machine_memory", lambda: 16 * GB)
    settings = config.Config.model_validate({"model": {"base": "model.gguf"}})
    assert auto.choose_tokens(settings, tmp_path, "fp32") == auto.LEAST_TOKENS


def test_a_container_has_the_memory_that_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("1073741824\n", encoding="ascii")
    none.write_text("max\n", encoding="ascii")
    whole = auto.machine_memory()
    monkeypatch.setattr(auto, "CGROUP_LIMITS", (str(none), str(tmp_path / "absent")))
    assert auto.machine_memory() >= whole
    monkeypatch.setattr(auto, "CGROUP_LIMITS", (str(none), str(limit)))
    assert auto.machine_memory() == 2**30


def test_the_record_holds_the_tokens_in_force_and_a_stage_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    toy.write_params(tmp_path, ppo={"micro_batch_tokens": "auto"}, sft={"micro_batch_tokens": 128})
    (tmp_path / "given").mkdir(exist_ok=True)
    rlhf("inputs")
    record = json.loads((tmp_path / "inputs/ppo.json").read_text(encoding="utf-8"))
    assert record["values"]["ppo.micro_batch_tokens"] == auto.MOST_TOKENS["cpu"]
    monkeypatch.setattr(auto, "machine_memory", lambda: 1000)  # another machine resumes the run
    paths, settings = Paths(tmp_path), config.load()
    assert auto.resolve_for(paths, "ppo", settings).ppo.micro_batch_tokens == auto.MOST_TOKENS["cpu"]
    assert auto.resolve_for(paths, "sft", settings).sft.micro_batch_tokens == 128, "what is set is kept"
    with monkeypatch.context() as patch:
        patch.delattr(auto, "gpus")  # which would load torch, where there are some
        for stage in config.VIEWS:
            auto.resolve_for(paths, stage, settings, check=False)
    (tmp_path / "inputs/ppo.json").unlink()
    assert auto.resolve_for(paths, "ppo", settings).ppo.micro_batch_tokens == auto.LEAST_TOKENS


def test_another_machine_does_not_train_anew_for_other_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rlhf: Command
) -> None:
    """A stage keeps its tokens until something else that it reads changes."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    toy.write_params(tmp_path, ppo={"micro_batch_tokens": "auto"})
    (tmp_path / "given").mkdir(exist_ok=True)
    rlhf("inputs")
    paths = Paths(tmp_path)
    last = {stage: inputs.read_record(paths, stage) or inputs.Fingerprint() for stage in config.VIEWS}
    monkeypatch.setattr(inputs, "used", lambda root, stage: last[stage])
    monkeypatch.setattr(auto, "machine_memory", lambda: 1000)
    rlhf("inputs")
    assert {stage: inputs.read_record(paths, stage) for stage in last} == last
    toy.write_params(tmp_path, ppo={"micro_batch_tokens": "auto", "kl_coef": 0.5})
    rlhf("inputs")
    record = inputs.read_record(paths, "ppo")
    assert record is not None
    assert record.values["ppo.micro_batch_tokens"] == auto.LEAST_TOKENS


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "all"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"micro_batch_tokens: must be"):
        config.validate({"ppo": {"micro_batch_tokens": value}}, "params.yaml")


def test_auto_is_written_as_auto() -> None:
    assert config.in_force(config.Config())["ppo.micro_batch_tokens"] == "auto"
