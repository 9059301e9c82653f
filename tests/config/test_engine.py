"""The rules of `ppo.engine`: what it needs, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlhf_tasks import config
from rlhf_tasks.errors import ConfigError
from tests import small
from tests.ppo.toy import ENGINE


def checked(changes: Mapping[str, Any], **engine: Any) -> config.Config:
    return config.validate(small.params({"ppo.sampler": ENGINE | engine, **changes}), "test")


def test_an_engine_by_its_address_or_by_its_command_is_accepted() -> None:
    assert checked({}).ppo.engine is not None
    started = checked({}, url=None, command=["/opt/vllm/bin/vllm", "serve"]).ppo.engine
    assert started is not None
    assert started.command == ("/opt/vllm/bin/vllm", "serve")


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3", "fsdp2"])
def test_an_engine_goes_with_several_processes_in_every_layout(layout: str) -> None:
    assert checked({"launch.num_processes": 2, "launch.parallelism": layout}).ppo.engine is not None


@pytest.mark.parametrize(
    ("changes", "engine", "problem"),
    [
        ({}, {"url": None}, "give either `url`, of a server that runs, or `command`"),
        ({}, {"command": ["vllm", "serve"]}, "give either `url`, of a server that runs, or `command`"),
        ({}, {"command": [], "url": None}, "ppo.engine.command"),
        ({}, {"url": "http://10.0.0.7:8000"}, "PPO uses loopback only"),
        ({}, {"url": "https://127.0.0.1:8000"}, "is not the address of a server on this machine"),
        ({}, {"url": "http://127.0.0.1"}, "is not the address of a server on this machine"),
        ({}, {"url": "http://127.0.0.1:8000/v1"}, "is not the address of a server on this machine"),
        ({}, {"ahead": 2}, "ppo.engine.ahead"),
        ({}, {"importance_cap": 0.5}, "ppo.engine.importance_cap"),
        ({"ppo.sampler.batch_size": 8}, {}, "set sampling_batch_size to null"),
        ({"ppo.temperature": 0.001}, {}, "samples at a temperature of at least 0.01"),
        ({"ppo.ratio_from": "reference"}, {}, "set ratio_from to rollout"),
        ({"ppo.total_episodes": 512, "ppo.rollout_batch_size": 512}, {"ahead": 1}, "one update only"),
        ({"launch.num_processes": 2}, {"transfer": "ipc"}, "transfer=ipc needs PPO in one process"),
        ({"launch.parallelism": "zero2"}, {"transfer": "ipc"}, "transfer=ipc needs PPO in one process"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_training(
    changes: Mapping[str, Any], engine: Mapping[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        checked(changes, **engine)
