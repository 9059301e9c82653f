"""The GPUs of a machine, as a stand-in for `nvidia-smi` shows them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest

from flows import devices
from flows.slots import limit_of
from rlhf_tasks.errors import UserError
from tests.flows.conftest import ShowGpus

FIRST, SECOND, THIRD = (f"GPU-{letter * 8}-1111-2222-3333-444455556666" for letter in "abc")
PART, OTHER_PART = (f"MIG-{letter * 8}-1111-2222-3333-444455556666" for letter in "de")
OLD_PART = "MIG-GPU-ffffffff-1111-2222-3333-444455556666/7/0"  # as older drivers name one
LISTING = f"""\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: {FIRST})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {SECOND})
  MIG 3g.20gb     Device  0: (UUID: {PART})
  MIG 1g.5gb      Device  1: (UUID: {OTHER_PART})
GPU 2: NVIDIA A100-SXM4-40GB (UUID: {THIRD})
"""


def test_a_machine_has_its_gpus_and_the_instances_of_those_in_mig_mode(show_gpus: ShowGpus) -> None:
    show_gpus(LISTING)
    assert devices.visible() == [FIRST, PART, OTHER_PART, THIRD]
    show_gpus(f"GPU 0: NVIDIA A100 (UUID: {FIRST})\n  MIG 3g.20gb Device 0: (UUID: {OLD_PART})\n")
    assert devices.visible({}) == [OLD_PART]
    assert limit_of(OLD_PART) == "gpu MIG-GPU-ffffffff-1111-2222-3333-444455556666-7-0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("2,0", [THIRD, FIRST]),
        (" 2 , 2", [THIRD]),
        (SECOND, [PART]),  # CUDA takes the first instance of a GPU in MIG mode
        ("1", [PART]),
        ("GPU-cccc", [THIRD]),
        (f"{OTHER_PART},GPU-aaaa", [OTHER_PART, FIRST]),
        ("0,-1,2", [FIRST]),  # CUDA ignores an unknown entry, and what follows
        ("7", []),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_a_worker_gives_no_other_devices_than_it_was_given(
    show_gpus: ShowGpus, given: str, expected: Sequence[str]
) -> None:
    show_gpus(LISTING)
    assert devices.visible({devices.VISIBLE: given}) == expected


def test_a_machine_without_gpus_has_none(show_gpus: ShowGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    show_gpus("No devices were found\n")
    assert devices.visible() == []
    show_gpus("NVIDIA-SMI has failed because it could not communicate with the driver\n", "exit 9")
    assert devices.visible() == []
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert devices.visible({devices.VISIBLE: "0"}) == []


@pytest.mark.parametrize(
    ("act", "problem"), [("exec sleep 60", "does not answer"), ("exit 1", "fails with status 1")]
)
def test_a_broken_driver_is_one_message(
    show_gpus: ShowGpus, monkeypatch: pytest.MonkeyPatch, act: str, problem: str
) -> None:
    show_gpus(LISTING, act)
    monkeypatch.setattr(devices, "ANSWER_SECONDS", 0.5)
    with pytest.raises(UserError, match=rf"(?s)`nvidia-smi -L` {problem}.* CUDA_VISIBLE_DEVICES"):
        devices.visible({})
    assert devices.visible({devices.VISIBLE: ""}) == []
