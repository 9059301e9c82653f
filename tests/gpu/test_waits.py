"""How often an update makes the host wait for a GPU, function by function.

What waits is a number that the host reads, a shape that depends on numbers, and a copy between the two. While
the host waits, it gives the GPU nothing to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from tests.gpu import toy
from tests.gpu.conftest import Child
from tests.gpu.pretend import Gpu
from tests.gpu.test_devices import after_a_pass


class Waits(NamedTuple):
    """The waits of a function, in a phase of an update."""

    once: float = 0
    each: float = 0
    """For each token while sampling, micro-batch in scoring and training, or optimizer step."""


WAITS: Mapping[tuple[str, str], Waits] = {
    # a mask that transformers asks whether it hides anything; every eighth token, which rows have ended
    ("sample", "models/sampling.py _decode"): Waits(2, each=1 + 2 / 8),
    ("sample", "models/sampling.py _PreallocatedLayer.update"): Waits(4),  # two an attention layer
    ("sample", "models/sampling.py sample"): Waits(4),
    ("sample", "data/batches.py Batch.to"): Waits(3),
    # passes without gradients: of the policy, the reference, the critic, and once the reward model
    ("score", "data/batches.py Batch.to"): Waits(3, each=3),
    ("score", "data/batches.py Batch.predicting"): Waits(each=2),
    ("score", "models/logprobs.py token_stats"): Waits(each=8),
    ("score", "models/heads.py TokenScores.forward"): Waits(2, each=2),
    ("score", "models/passes.py read_rows"): Waits(1),
    ("score", "ppo/rollout.py Rollout.read"): Waits(each=3),
    ("score", "ppo/train.py score_rollout"): Waits(6),
    # passes of the policy and the critic
    ("train", "data/batches.py Batch.to"): Waits(each=3),
    ("train", "data/batches.py Batch.predicting"): Waits(each=1),
    ("train", "models/logprobs.py token_stats"): Waits(each=4),
    ("train", "models/heads.py TokenScores.forward"): Waits(each=2),
    ("train", "ppo/train.py ppo_losses"): Waits(each=1),
    ("train", "ppo/train.py accumulate_gradients"): Waits(2),  # once a step
    ("train", ""): Waits(each=2),  # backward passes
    ("step", "training/distributed.py Distributed.step"): Waits(each=1),
    ("", "ppo/rollout.py Rollout.to"): Waits(7),
    ("", "ppo/metrics.py token_means"): Waits(2),
}
"""By phase and function; whoever changes how often one waits, changes it here."""
RUNS: Mapping[str, Mapping[str, int]] = {
    "one micro-batch": {},
    "several micro-batches": {"micro_batch_tokens": 60},
    "longer responses": {"response_length": 16},
}


def measure() -> dict[str, Any]:
    """The units and the waits of an update in each of RUNS, and in one where a number is read."""
    found = {name: waits(**changes) for name, changes in RUNS.items()}
    with after_a_pass(lambda stats, _: stats.sum().item()):
        found["planted"] = waits()
    return found


def waits(micro_batch_tokens: int = 4096, response_length: int = 8) -> dict[str, Any]:
    gpu = Gpu()
    count = toy.update(gpu, micro_batch_tokens=micro_batch_tokens, response_length=response_length)
    lines = Counter[tuple[str, str, str]]()
    for (phase, place, why), number in gpu.waits.items():
        lines[phase, place.ours, f"line {place.line} ({why})"] += number
    return {
        "units": {"sample": response_length, "step": 2, **count},
        "lines": [[*key, number] for key, number in lines.items()],
    }


def surplus(found: Mapping[str, Any]) -> dict[tuple[str, str], str]:
    """What waits otherwise than WAITS says, with its lines: `+` for more."""
    number, lines = Counter[tuple[str, str]](), dict[tuple[str, str], list[str]]()
    for phase, function, line, count in found["lines"]:
        number[phase, function] += count
        lines.setdefault((phase, function), []).append(f"{count} of {line}")
    differences = dict[tuple[str, str], str]()
    for key in {*number, *WAITS}:
        once, each = WAITS.get(key, Waits())
        allowed = once + each * found["units"].get(key[0], 0)
        if number[key] != allowed:
            differences[key] = f"{number[key] - allowed:+}: {', '.join(lines.get(key, []))}"
    return differences


@pytest.mark.parametrize("name", ["one micro-batch", "longer responses"])
def test_the_host_waits_as_often_as_the_table_says(name: str, child: Child) -> None:
    assert surplus(child(measure)[name]) == {}


def test_further_micro_batches_wait_no_more_than_the_first(child: Child) -> None:
    """Some wait less: rows that are equally long need no mask."""
    found = child(measure)["several micro-batches"]
    assert found["units"]["train"] == 8
    assert not [text for text in surplus(found).values() if text.startswith("+")]


def test_a_number_that_is_read_is_noticed(child: Child) -> None:
    found = surplus(child(measure)["planted"])
    assert found.keys() == {(phase, "models/logprobs.py token_stats") for phase in ("score", "train")}
    assert all(text.startswith("+2") and "(_local_scalar_dense)" in text for text in found.values())
