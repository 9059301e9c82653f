"""The losses of stage dpo beside TRL's own trainers, on a tiny model and one batch.

Needs `pip install -e '.[trl]'`, and is skipped without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from rlhf_tasks.config import Dpo
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.training.dpo import (
    PAIR_LOSSES,
    LabeledResponses,
    PolicyPairs,
    read_logprobs,
)
from tests import small, toy

trl = pytest.importorskip("trl", reason="needs the extra `trl`")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning"
)  # TRL gives transformers a setting's old name

BETA = 0.3
ROWS = [
    {"prompt": f"the {thing} is", "chosen": f" {a} now", "rejected": f" {b}"}
    for thing, a, b in (("cat", "red", "blue"), ("dog", "grey", "pink"), ("cup", "gold", "red"))
]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Any, Any, Any]:
    """A policy, its reference and their tokenizer, as folders of transformers give them."""
    from transformers import AutoModelForCausalLM

    words = toy.tokenizer()
    folders = [toy.foreign(str(tmp_path / str(seed)), "llama", seed=seed, words=words) for seed in (1, 2)]
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    return policy, reference, words


def settings_of(tmp_path: Path) -> dict[str, Any]:
    common = {"output_dir": str(tmp_path), "beta": BETA, "use_cpu": True, "report_to": "none"}
    return common | {"per_device_train_batch_size": len(ROWS), "disable_dropout": True}


def reference_of(model: Any, queries: list[Ids], *responses: list[Ids]) -> torch.Tensor:
    """(N, k): the log-probs of k responses to each query."""
    dist, budget = small.distributed(), TokenBudget(4096)
    return torch.stack([read_logprobs(dist, model, queries, part, 0, budget) for part in responses], 1)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_a_loss_on_pairs_is_that_of_trl(models: Any, tmp_path: Path, loss: str) -> None:
    policy, reference, words = models
    args = trl.DPOConfig(loss_type=loss, **settings_of(tmp_path))
    trainer = trl.DPOTrainer(
        policy, reference, args=args, train_dataset=Dataset.from_list(ROWS), processing_class=words
    )
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(policy, batch)
    rows = list(trainer.train_dataset)
    queries, chosen, rejected = (
        [row[f"{name}_ids"] for row in rows] for name in ("prompt", "chosen", "rejected")
    )
    known = reference_of(reference, queries, chosen, rejected)
    task = PolicyPairs(queries, chosen, rejected, known, 0, Dpo(beta=BETA, loss=loss), PAIR_LOSSES[loss])
    ours = task.sums(policy, range(len(rows)), torch.device("cpu"))["loss"] / len(rows)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)


def test_kto_is_that_of_trl(models: Any, tmp_path: Path) -> None:
    policy, reference, words = models
    rows = [
        {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}
        for row, good in zip(ROWS, (True, False, True), strict=True)
    ]
    args = trl.KTOConfig(desirable_weight=1.5, train_sampling_strategy="sequential", **settings_of(tmp_path))
    trainer = trl.KTOTrainer(
        policy, reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=words
    )
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(policy, batch)
    made = list(trainer.train_dataset)
    queries, responses, others = (
        [row[f"{name}_ids"] for row in made] for name in ("prompt", "completion", "KL_completion")
    )
    known = reference_of(reference, queries, responses, others)
    is_good = torch.tensor([row["label"] for row in made])
    settings = Dpo(beta=BETA, loss="kto", desirable_weight=1.5)
    task = LabeledResponses(queries, responses, others, is_good, known, 0, settings)
    task.prepare(small.distributed(), policy, range(len(made)), TokenBudget(4096))
    ours = task.sums(policy, range(len(made)), torch.device("cpu"))["loss"] / len(made)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)
