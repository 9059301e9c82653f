"""The GPUs of a machine, as a stand-in for `nvidia-smi` shows them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest

from flows import devices
from rlhf_tasks.errors import UserError
from tests.flows.conftest import ShowGpus

FIRST, SECOND, THIRD = (f"GPU-{letter * 8}-1111-2222-3333-444455556666" for letter in "abc")
PART = "MIG-dddddddd-1111-2222-3333-444455556666"
LISTING = f"""\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: {FIRST})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {SECOND})
  MIG 3g.20gb     Device  0: (UUID: {PART})
GPU 2: NVIDIA A100-SXM4-40GB (UUID: {THIRD})
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, [FIRST, SECOND, THIRD]),
        ("2,0", [THIRD, FIRST]),
        (" 2 , 2", [THIRD]),
        ("GPU-cccc", [THIRD]),
        (f"{PART},GPU-aaaa", [PART, FIRST]),
        ("0,-1,2", [FIRST]),  # CUDA ignores an unknown entry, and what follows
        ("", []),
    ],
)
def test_a_run_gets_no_other_devices_than_its_worker_was_given(
    show_gpus: ShowGpus, given: str | None, expected: Sequence[str]
) -> None:
    show_gpus(LISTING)
    assert devices.visible({} if given is None else {devices.VISIBLE: given}) == expected


def test_programs_are_given_gpus_by_number_and_beside_parts_by_name(show_gpus: ShowGpus) -> None:
    whole = [line for line in LISTING.splitlines() if "MIG" not in line]
    show_gpus("\n".join([whole[0], "Unable to determine the device handle", whole[2]]))
    assert devices.variables([THIRD, FIRST])[devices.VISIBLE] == "2,0", "one that is lost keeps its number"
    assert devices.variables([SECOND])[devices.VISIBLE] == SECOND
    show_gpus(LISTING)
    assert devices.variables([THIRD, PART])[devices.VISIBLE] == f"{THIRD},{PART}"
    assert devices.variables([]) == {}, "they see what this process sees"


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
