"""Training steps with the logits of all tokens at once and in chunks, by the ranks of one launch.

`python -m tests.training.chunked_steps` in a project, as one of its ranks, writes whole.pt and chunked.pt.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from rlhf_tasks import config
from rlhf_tasks.models import logprobs
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training import sharding
from rlhf_tasks.training.checkpoint import Snapshots
from rlhf_tasks.training.distributed import Distributed
from rlhf_tasks.training.supervised import train
from rlhf_tasks.training.tasks import LanguageModeling
from tests import small

WHOLE, CHUNKED = 2**22, 4 * small.VOCAB
"""Logits of a chunk."""


def steps(dist: Distributed, chunk: int) -> dict[str, Any]:
    """The weights after four steps, and the norm of the gradient of each."""
    tracker, model = NullTracker("sft"), small.causal("gpt_neox")
    with mock.patch.object(logprobs, "CPU_LOGITS", chunk):
        train(
            dist,
            model,
            LanguageModeling(*small.rows(13), small.PAD),
            small.optimization(batch_size=7, num_epochs=2.0, micro_batch_tokens=40, learning_rate=1e-3),
            seed=1,
            name="test",
            tracker=tracker,
            snapshots=Snapshots(),
        )
    norms = [row["train/grad_norm"] for row in tracker.history()]
    return {"weights": sharding.weights_of(model), "norms": norms}


def main() -> None:
    dist = Distributed(config.load().launch, seed=1)
    for name, chunk in (("whole", WHOLE), ("chunked", CHUNKED)):
        found = steps(dist, chunk)
        if dist.is_main:
            torch.save(found, f"{name}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
