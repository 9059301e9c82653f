"""A toy pipeline in a temporary folder: small enough that every stage takes a second."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_tasks import config
from rlhf_tasks.config import Stage
from tests import small

ROOT = Path(__file__).parents[1]
WORDS = ["red", "blue", "green", "grey", "pink", "gold", "black", "white"]
THINGS = ["cat", "dog", "cup", "hat", "car", "pen", "key", "box"]
FAMILIES = ("gpt_neox", "llama", "qwen2", "gpt2")
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"

run = small.run

SMALL: Mapping[str, Any] = {
    "data": {
        "source": "files",
        "path": "given",
        "max_prompt_tokens": 12,
        "max_completion_tokens": 6,
        "num_validation": 8,
        "num_test": 8,
    },
    "model": {"base": "foreign/base", "scratch": None},
    "base": {"batch_size": 16, "num_epochs": 1},
    "sft": {
        "learning_rate": 3e-3,
        "batch_size": 16,
        "num_epochs": 1,
        "evals_per_epoch": 1,
        "micro_batch_tokens": 64,
    },
    "preferences": {"num_prompts": 8},
    "reward": {"learning_rate": 1e-3, "batch_size": 8, "num_epochs": 1, "micro_batch_tokens": 64},
    "ppo": {
        "total_episodes": 32,
        "rollout_batch_size": 16,
        "num_mini_batches": 2,
        "num_ppo_epochs": 2,
        "response_length": 6,
        "num_sample_generations": 2,
        "num_selections": 1,
        "num_selection_prompts": 8,
        "micro_batch_tokens": 64,
    },
    "judge": {"judges": [small.HELDOUT], "num_examples": 8},
    "promotion": None,
    "tracking": {"enabled": False},
}


def write_params(**changes: Mapping[str, Any]) -> config.Config:
    """params.yaml of this folder: the shipped one, SMALL, and `section={key: value}` on top."""
    tree = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    config.merge(tree, SMALL)
    for section, values in changes.items():
        config.merge(tree, small.together({f"{section}.{key}": value for key, value in values.items()}))
    YAML().dump(tree, Path("params.yaml"))
    return config.load()


def write_given() -> None:
    """The user's files: name the colour of the thing; rejected answers name another."""
    folder = Path("given")
    folder.mkdir()
    pairs = [(a, b, thing) for thing in THINGS for a in WORDS for b in WORDS if a < b]
    lines = [
        {"prompt": f"a {a} {thing} and a {b} box : the {thing} is", "answer": a, "other": b}
        for a, b, thing in pairs
        if thing != "box"
    ][:97]
    sft = [{"prompt": x["prompt"], "completion": f" {x['answer']} now"} for x in lines]
    preferences = [
        {"prompt": x["prompt"], "chosen": f" {x['answer']}", "rejected": f" {x['other']}"} for x in lines
    ]
    for name, rows in {"sft": sft, "preferences": preferences}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def tokenizer(*, pad: str | None = "<pad>", **changes: Any) -> PreTrainedTokenizerBase:
    """A word a token; without `pad`, as GPT-2's."""
    words = ["<eos>", "<unk>", "<pad>", "a", "and", "the", "is", "now", ":", *WORDS, *THINGS]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>", pad_token=pad, **changes
    )


def shape(family: str, words: PreTrainedTokenizerBase, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": len(words),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "bos_token_id": None,
    }
    return AutoConfig.for_model(family, **sizes | changes)


def foreign(
    folder: str,
    family: str,
    *,
    seed: int = 1,
    labels: int | None = None,
    dtype: torch.dtype = torch.float32,
    words: PreTrainedTokenizerBase | None = None,
    **changes: Any,
) -> Path:
    """A random checkpoint of somebody else's: a causal LM, or with `labels` a sequence classifier."""
    words = words or tokenizer()
    torch.manual_seed(seed)
    made = shape(family, words, **changes)
    if labels is None:
        model = AutoModelForCausalLM.from_config(made)
    else:
        made.num_labels = labels
        model = AutoModelForSequenceClassification.from_config(made)
    model.to(dtype).save_pretrained(folder)
    words.save_pretrained(folder)
    return Path(folder)


def run_stages(settings: config.Config, *stages: Stage) -> dict[str, float]:
    """By default all stages before PPO; the metrics of the last one."""
    default: tuple[Stage, ...] = (
        *("prepare", "base", "sft", "preferences", "reward"),
        *("dpo", "value"),
    )
    return [run(stage, settings) for stage in stages or default][-1]


def copy_project() -> None:
    """What `rlhf STAGE` needs of the repository in this folder."""
    shutil.copy(ROOT / "dvc.yaml", "dvc.yaml")
    shutil.copytree(ROOT / "infra/deepspeed", "infra/deepspeed")
