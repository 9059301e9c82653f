"""Rows that the model has no positions for are known at the end of prepare, before anything is trained."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.data import positions
from tests import families, small
from tests.conftest import Command
from tests.data.conftest import jsonl

WORDS = " ".join(small.WORDS[:9])
COMPUTED = "bloom falcon gemma gpt_neox jamba llama mamba mixtral nemotron_h olmo persimmon phi qwen2 xglm"


@pytest.fixture(autouse=True)
def _data(project: Path) -> None:
    """Prompts of 11 tokens, with completions of 9 and EOS."""
    shutil.copy(small.ROOT / "dvc.yaml", project)
    prompts = (f"{WORDS} {a} {b}" for a in small.WORDS for b in ("w1", "w2"))
    jsonl(project / "rows/train.jsonl", *({"prompt": p, "completion": f" {WORDS}"} for p in prompts))


def set_params(model: dict[str, Any], response_length: int, completion_tokens: int | None = None) -> None:
    small.write_params(
        Path(),
        {
            "data.source": "files",
            "data.path": "rows",
            "data.max_completion_tokens": completion_tokens or max(response_length, 10),
            "ppo.response_length": response_length,
            "judge.judges": [small.HELDOUT],
            "tracking.enabled": False,
            **model,
        },
    )


def base(family: str, **changes: Any) -> dict[str, Any]:
    """Parameters whose base model is a ready one of this family; its weights are not read by prepare."""
    small.tokenizer().save_pretrained("ready")
    families.config(family, vocab_size=small.VOCAB, **changes).save_pretrained("ready")
    return {"model.base": "ready", "model.scratch": None}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
LONGEST = "the longest row, or prompt with data.max_completion_tokens and EOS,"
HAS_24 = f"model.base=ready ({{}}) has 24 positions, and {LONGEST}"
DEPENDS = "exceeds 24 tokens, and prompt plus response reach 25"


@pytest.mark.parametrize(
    ("family", "changes", "texts"),
    [
        *(
            (
                family,
                {name: 24},
                [HAS_24.format(family), "reach 26 tokens: it has no row for a later position"],
            )
            for family, name in [
                ("gpt2", "n_positions"),
                ("opt", "max_position_embeddings"),
                ("mpt", "max_seq_len"),
            ]
        ),
        # rows whose numbers would depend on their batch
        ("deepseek_v32", {"index_topk": 24}, ["sparse index", DEPENDS]),
        ("minimax_m3_vl_text", {"index_block_size": 24}, ["other blocks", DEPENDS]),
        ("llama4_text", {"floor_scale": 24}, ["padding included", DEPENDS]),
        (
            "llama",
            {"max_position_embeddings": 24, "rope_parameters": DYNAMIC},
            ["rescales its rotary positions", DEPENDS],
        ),
    ],
)
def test_rows_that_a_model_cannot_read_are_refused(
    family: str, changes: dict[str, Any], texts: list[str], rlhf: Command
) -> None:
    model = base(family, **changes)
    set_params(model, response_length=12)
    rlhf("prepare")
    set_params(model, response_length=14)
    said = rlhf("prepare", status=2).err
    assert [text for text in texts if text not in said] == []


def test_rows_of_the_data_are_checked_too_and_nothing_is_written(rlhf: Command) -> None:
    set_params(base("gpt2", n_positions=20), response_length=4)
    said = rlhf("prepare", status=2).err
    assert f"has 20 positions, and {LONGEST} reach 22 tokens" in said
    assert "lower data.max_prompt_tokens, data.max_completion_tokens or ppo.response_length" in said
    assert not Path("data/prompts").exists()


def test_what_preferences_and_judge_sample_is_checked_too(rlhf: Command) -> None:
    """With EOS, which an unfinished sample gets before a reward model reads it: 11 + 13 + 1."""
    set_params(base("gpt2", n_positions=24), response_length=12, completion_tokens=13)
    said = rlhf("prepare", status=2).err
    assert (
        "has 24 positions, and the longest row, or prompt with data.max_completion_tokens and EOS, reach 25"
        in said
    )


def test_where_a_model_computes_its_positions_there_is_a_warning(rlhf: Command) -> None:
    model = base("llama", max_position_embeddings=24)
    set_params(model, response_length=12)
    assert "positions" not in "".join(rlhf("prepare"))
    set_params(model, response_length=14)
    assert "".join(rlhf("prepare")).count(f"Warning: {HAS_24.format('llama')}") == 1


def test_a_model_from_scratch_is_checked_by_the_positions_that_it_will_have(rlhf: Command) -> None:
    scratch = {"model.base": "scratch", "model.scratch.family": "gpt2"}
    set_params(scratch, response_length=52)  # 4 times 11, rounded up to 64, and EOS
    rlhf("prepare")
    set_params(scratch, response_length=54)
    assert "model.scratch (gpt2) has 64 positions" in rlhf("prepare", status=2).err


@pytest.mark.slow
@pytest.mark.parametrize("family", [*positions.TABLES, *COMPUTED.split()])
def test_the_families_with_a_table_of_positions_are_those_that_fail_beyond_it(family: str) -> None:
    model = families.causal(family)
    model(input_ids=torch.full((1, 128), 5), use_cache=False)
    fails = pytest.raises((IndexError, RuntimeError)) if family in positions.TABLES else nullcontext()
    with fails:
        model(input_ids=torch.full((1, 129), 5), use_cache=False)
