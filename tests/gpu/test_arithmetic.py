"""In which precision a GPU multiplies in an update in bfloat16, and which weights it converts for that.

A matmul in float32 takes twelve times as long as one in bfloat16 on an H100, and by TF32 almost twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from rlhf_tasks.models import sampling
from tests.gpu import toy
from tests.gpu.conftest import Child
from tests.gpu.pretend import Gpu
from tests.gpu.test_devices import UPDATES

FLOAT32: Mapping[str, str] = {
    "models/logprobs.py _stats": "the entropy: no weights",
    "models/heads.py _in_float32": "a score or a value: one number a token, which 16 bits would round",
}
"""The functions that may multiply in float32, and the gradients of what they multiply."""
VARIANTS = ("separate critic", "shared critic", "lora")
PHASES = ("sample", "score", "train", "step", "")
IN_EACH_PASS = pytest.mark.xfail(strict=True, reason="a merge needs the float32 weights below adapters")


def measure() -> dict[str, Any]:
    """By variant the matmuls in float32, and the weights that are converted, with 8 tokens and with 16."""
    found = dict[str, Any]()
    for name in VARIANTS:
        shorter, longer = (run(response_length=tokens, **UPDATES[name]()) for tokens in (8, 16))
        found[name] = {"matmuls": matmuls(shorter), "casts": casts(shorter), "casts of 16": casts(longer)}
    with mock.patch.object(sampling, "sample_token", planted):
        gpu = run(response_length=8)
    found["planted"] = {"matmuls": matmuls(gpu), "casts": casts(gpu)}
    return found


def run(**changes: Any) -> Gpu:
    gpu = Gpu()
    toy.update(gpu, **changes)
    return gpu


def planted(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`sample_token` that converts a weight for each token, and multiplies in float32."""
    unit = nn.Parameter(torch.eye(logits.shape[1], device=logits.device), requires_grad=False)
    with torch.autocast(logits.device.type, enabled=False):
        return SAMPLE_TOKEN(logits @ unit.to(torch.bfloat16).float(), uniform)


SAMPLE_TOKEN = sampling.sample_token


def matmuls(gpu: Gpu) -> list[Any]:
    """Phase, function, library's function, and sizes; without function in a backward pass."""
    return [
        [m.phase, m.place.ours, m.place.library, sorted(m.sizes)] for m in gpu.matmuls if m.type == "float32"
    ]


def casts(gpu: Gpu) -> list[Any]:
    """Phase, function, whether the weights train, and how many numbers they have."""
    return [[phase, place.ours, trains, count] for (phase, place, trains), count in gpu.casts.items()]


def unlisted(found: Any, phase: str) -> set[str]:
    """What multiplies in float32 in a phase and is not in the table; `backward`, if only its gradient is."""
    of_phase = [row for row in found if row[0] == phase]
    forward = {
        f"{ours} {library}".strip() for _, ours, library, _ in of_phase if ours and ours not in FLOAT32
    }
    sizes = [size for _, ours, _, size in of_phase if ours]
    return forward | {"backward" for _, ours, _, size in of_phase if not ours and size not in sizes}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_table_multiplies_in_float32(variant: str, phase: str, child: Child) -> None:
    assert unlisted(child(measure)[variant]["matmuls"], phase) == set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling_converts_a_weight_once_and_not_for_each_token(variant: str, child: Child) -> None:
    found = child(measure)[variant]
    shorter, longer = ([r for r in found[key] if r[0] == "sample"] for key in ("casts", "casts of 16"))
    assert shorter == longer


@pytest.mark.parametrize(
    ("variant", "phase"),
    [
        *[(variant, "sample") for variant in VARIANTS],
        ("separate critic", "score"),
        ("shared critic", "score"),
        pytest.param("lora", "score", marks=IN_EACH_PASS),
        ("separate critic", "train"),
        ("shared critic", "train"),
        pytest.param("lora", "train", marks=IN_EACH_PASS),
    ],
)
def test_no_frozen_weight_is_converted(variant: str, phase: str, child: Child) -> None:
    found = child(measure)[variant]["casts"]
    assert not [row for row in found if row[0] == phase and not row[2]]


def test_a_conversion_and_a_matmul_in_float32_are_noticed(child: Child) -> None:
    found = child(measure)["planted"]
    assert unlisted(found["matmuls"], "sample") == {"models/sampling.py _decode"}
    assert [8 * 23**2, False] in [row[3:1:-1] for row in found["casts"]]
