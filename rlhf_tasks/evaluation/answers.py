"""Sampled answers of a checkpoint, kept, so that another judge samples nothing anew.

The files are below .rlhf/answers: a digest of the weights, the tokenizer, the prompts, the settings, and the
code, library versions and threads that sample. Answers of a checkpoint whose weights are not safetensors
are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from rlhf_tasks.data import batches
from rlhf_tasks.data.batches import Ids, load_tokenizer, text_of
from rlhf_tasks.evaluation.judges.cache import key_of
from rlhf_tasks.modeling import contracts, generation, models
from rlhf_tasks.modeling.generation import answer, stop_of
from rlhf_tasks.project import atomic, hashing
from rlhf_tasks.project.paths import Paths

SETTLED = ("*.json", "*.txt", "*.jinja", "*.model")  # what, beside the weights, decides how a model answers
CODE = (str(generation.__file__), str(batches.__file__), str(models.__file__))


@dataclass(frozen=True)
class Answers:
    """Token ids with the stop token where it came, texts without EOS, and whether each ended."""

    ids: list[Ids]
    texts: list[str]
    ended: list[bool]


def sample(
    source: str | Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    device: torch.device,
    revision: str | None = None,
) -> Answers:
    """One answer to each prompt. Contenders that are sampled with one seed can be compared fairly.

    Raises:
        ContractError: if the checkpoint cannot be read.
    """
    folder = models.local_tokenizer(str(source), revision)
    tokenizer = load_tokenizer(folder)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    kept = _kept(folder, revision, prompts, settings, device)
    found: dict[str, Any]
    if kept is not None and kept.exists():
        found = json.loads(kept.read_text(encoding="utf-8"))
    else:
        model = models.place(models.load_causal(source, revision), device).eval()
        ids = answer(
            model, tokenizer, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )  # fmt: skip
        stop = stop_of(model, tokenizer)
        found = {"ids": ids, "ended": [row[-1] == stop for row in ids]}
        if kept is not None:
            atomic.write_text(kept, json.dumps(found))
    return Answers(found["ids"], [text_of(tokenizer, row) for row in found["ids"]], found["ended"])


def _kept(
    folder: Path, revision: str | None, prompts: Sequence[str], settings: dict[str, Any], device: torch.device
) -> Path | None:
    """Where such answers are kept; None where the weights cannot be told apart."""
    if revision is None and not any(folder.glob("*.safetensors")):
        return None
    files = sorted(file for kind in SETTLED for file in folder.glob(kind) if file.name != contracts.IDENTITY)
    content = {
        "weights": revision or contracts.fingerprint(folder),
        "files": {file.name: hashing.file_hash(file) for file in files},
        "prompts": list(prompts),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": [module.__version__ for module in (torch, transformers, tokenizers)],
        "code": [hashing.file_hash(Path(file)) for file in (__file__, *CODE)],
        **settings,
    }
    return Paths().home / "answers" / f"{key_of(content)}.json"
