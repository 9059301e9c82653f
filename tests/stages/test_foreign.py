"""Checkpoints that others have made: what is taken, and what is refused by name before any training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_tasks.config import Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.models.load import load_causal, load_reward
from tests import toy

AFTER_BASE: tuple[Stage, ...] = ("sft", "preferences", "reward", "ppo", "judge")
HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder with the user's files."""
    monkeypatch.chdir(tmp_path)
    toy.write_given()


def prepared(family: str, words: Any = None, shape: dict[str, Any] | None = None, **changes: Any) -> Any:
    """data/ and models/base from a foreign base of this family, with a shape of its own; the settings."""
    toy.foreign("foreign/base", family, words=words, **(shape or {}))
    settings = toy.write_params(**changes)
    toy.run_stages(settings, "prepare", "base")
    return settings


def with_sft(source: str = "foreign/sft", **changes: Any) -> Any:
    return toy.write_params(sft={"from": source}, **changes)


def with_reward(source: str = "foreign/reward", **changes: Any) -> Any:
    return toy.write_params(reward={"from": source}, **changes)


def identity(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "rlhf.json").read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------------- what is taken


def test_a_foreign_base_goes_through_every_stage() -> None:
    """GPT-2's tokenizer has no pad: EOS pads then."""
    settings = prepared("gpt2", words=toy.tokenizer(pad=None))
    metrics = toy.run_stages(settings, *AFTER_BASE)
    assert 0 <= metrics["reward_model/policy_vs_sft/win_rate"] <= 1
    assert identity("models/sft")["parents"] == {"base": contracts.fingerprint(Path("models/base"))}
    assert load_causal("models/policy").config.model_type == "gpt2"


def test_a_family_without_a_classifier_goes_through_every_stage_that_scores() -> None:
    """With an LM loss on changed logits, a critic from the reward model, and adapters."""
    lora = {"r": 2, "alpha": 4.0}
    settings = prepared("granite", reward={"lm_coef": 0.1, "lora": lora}, shape={"logits_scaling": 3.0})
    metrics = toy.run_stages(settings, *AFTER_BASE)
    assert 0 <= metrics["reward_model/policy_vs_sft/win_rate"] <= 1
    found = load_reward("models/reward").model.config
    assert (found.architectures, found.logits_scaling) == (["GraniteForTokenScores"], 3.0)


def test_a_vocabulary_that_is_padded_goes_through_every_stage() -> None:
    """The base has twice the rows that its tokenizer has tokens, and the reward model a few more.

    Half of what this random policy samples are ids without a token.
    """
    size = len(toy.tokenizer())
    prepared("llama", shape={"vocab_size": 2 * size})
    toy.foreign("foreign/reward", "llama", seed=3, labels=1, vocab_size=2 * size + 5)
    toy.run_stages(with_reward(), *AFTER_BASE)
    assert load_causal("models/policy").get_input_embeddings().num_embeddings == 2 * size


def test_ready_sft_and_reward_models_skip_training_and_their_lineage_is_unknown() -> None:
    prepared("gpt2")
    toy.foreign("foreign/sft", "gpt2", seed=2)
    toy.foreign("foreign/reward", "gpt2", seed=3, labels=1)
    settings = toy.write_params(sft={"from": "foreign/sft"}, reward={"from": "foreign/reward"})
    metrics = toy.run("sft", settings)
    assert "steps_trained" not in metrics
    assert metrics["loss"] > 0
    toy.run_stages(settings, "preferences", "reward", "ppo")
    assert contracts.fingerprint(Path("models/sft")) == contracts.fingerprint(Path("foreign/sft"))
    assert contracts.fingerprint(Path("models/reward")) == contracts.fingerprint(Path("foreign/reward"))
    for folder in ("models/sft", "models/reward"):
        assert (identity(folder)["lineage"], identity(folder)["parents"]) == ("unknown", {})
    assert identity("models/reward_heldout")["parents"] == {"sft": contracts.fingerprint(Path("models/sft"))}


def test_weights_stored_in_bf16_are_read_as_float32() -> None:
    toy.foreign("foreign/base", "llama", dtype=torch.bfloat16)
    model = load_causal("foreign/base")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    toy.foreign("foreign/reward", "llama", dtype=torch.bfloat16, labels=1)
    assert {p.dtype for p in load_reward("foreign/reward").parameters()} == {torch.float32}


def test_a_different_pad_token_is_the_same_tokenizer() -> None:
    """The base pads with EOS, the SFT model with a token that neither has ever read."""
    prepared("gpt2", words=toy.tokenizer(pad=None))
    toy.foreign("foreign/sft", "gpt2", seed=2)
    toy.run("sft", with_sft())
    assert "lineage" in identity("models/sft")


def test_one_of_our_own_checkpoints_keeps_its_lineage() -> None:
    settings = prepared("gpt2")
    toy.run("sft", settings)
    parents = identity("models/sft")["parents"]
    Path("models/sft").rename("kept")
    toy.run("sft", with_sft("kept"))
    assert identity("models/sft") == {"kind": "policy", "parents": parents}


# ----------------------------------------------------------------------------- what is refused


def with_purple() -> Any:
    """The tokenizer with one more token."""
    words = toy.tokenizer()
    words.add_tokens(["purple"])
    return words


def refused(stage: Any, settings: Any, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        toy.run(stage, settings)


def test_an_sft_model_that_does_not_fit_is_refused() -> None:
    prepared("gpt2")
    toy.foreign("foreign/sft", "gpt2", words=with_purple())
    refused("sft", with_sft(), r"foreign/sft has another tokenizer than data/tokenizer: .*'purple'")
    words = toy.tokenizer()
    words.eos_token = "now"
    toy.foreign("foreign/eos", "gpt2", words=words)
    refused("sft", with_sft("foreign/eos"), "than .*data/tokenizer: responses end with '<eos>' and 'now'")
    toy.foreign("foreign/chat", "gpt2", words=toy.tokenizer(chat_template=toy.CHAT))
    refused("sft", with_sft("foreign/chat"), "than .*data/tokenizer: their chat templates differ")
    for file in toy.foreign("foreign/none", "gpt2").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="foreign/none holds no tokenizer"):
        toy.run("sft", with_sft("foreign/none"))
    toy.foreign("foreign/llama", "llama")
    refused("sft", with_sft("foreign/llama"), "was not made from models/base: model_type llama and gpt2")


def test_the_reward_model_is_checked_before_anything_is_trained() -> None:
    settings = prepared("gpt2")
    toy.run_stages(settings, "sft", "preferences")
    toy.foreign("foreign/reward", "gpt2", labels=1, words=with_purple())
    words = r"reward\.from: foreign/reward has another tokenizer than models/sft.*path: foreign/reward}"
    refused("reward", with_reward(), words)
    toy.foreign("foreign/headless", "gpt2")
    refused("reward", with_reward("foreign/headless"), "foreign/headless lacks its trained head")
    assert not Path("models/reward").exists()
    assert not Path("models/reward_heldout").exists()


def test_a_hub_that_cannot_be_reached_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    prepared("gpt2")
    settings = toy.write_params(sft={"from": "someone/sft", "revision": HASH})
    refused("sft", settings, f"cannot fetch someone/sft at {HASH}: no route")
