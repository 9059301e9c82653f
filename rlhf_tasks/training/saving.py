"""How a training stage writes its model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.models.load import merge_adapter, save_checkpoint
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.training import sharding
from rlhf_tasks.training.distributed import Distributed


def save(
    dist: Distributed,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    identity: Mapping[str, Any],
    card: str,
) -> None:
    """Gather the weights and write them from the first process, adapters merged. Collective."""
    with sharding.to_save(model) as plain:
        if dist.is_main:
            with whole(out) as folder:
                save_checkpoint(merge_adapter(plain), tokenizer, folder, identity=identity, card=card)
    dist.barrier()
