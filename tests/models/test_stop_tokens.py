"""What ends a response, and that the same weights tie whatever ends them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from rlhf_tasks.config import Model
from rlhf_tasks.data import tokenizer
from rlhf_tasks.judging.responses import sample, share_ends
from rlhf_tasks.models.load import load_causal, save_checkpoint
from rlhf_tasks.models.stop_tokens import close_responses, ends_of, has_ended
from rlhf_tasks.project.paths import Paths
from tests import small

EOS = small.EOS


def template(end: str) -> str:
    return "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + end + "\n{% endfor %}"


def test_all_that_ends_a_response_is_in_one_list() -> None:
    words = copy.deepcopy(small.tokenizer())
    assert ends_of(None, words) == (EOS,)
    assert ends_of(GenerationConfig(eos_token_id=7), words) == (EOS, 7)
    assert ends_of(GenerationConfig(eos_token_id=[9, EOS, 7]), words, [5, 9]) == (EOS, 9, 7, 5)
    words.add_special_tokens({"additional_special_tokens": ["<end>"]})
    words.chat_template = template("<end>")
    end = words.convert_tokens_to_ids("<end>")
    assert ends_of(None, words) == (EOS, end)
    words.chat_template = template(".")
    assert ends_of(None, words) == (EOS,)


def test_a_response_is_closed_as_demonstrations_are() -> None:
    words = copy.deepcopy(small.tokenizer())
    words.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end = int(str(words.convert_tokens_to_ids("<end>")))
    given: list[list[int]] = [[5, 6, EOS], [5, end], [5, 6], [5, 7]]  # 7 is a word
    assert close_responses(words, given, (EOS, end, 7)) == [[5, 6, EOS], [5, EOS], [5, 6], [5, 7, EOS]]
    assert [has_ended(response, (EOS, end, 7)) for response in given] == [True, True, False, True]


def test_the_end_of_a_turn_ends_demonstrations_and_the_models_own_end_is_kept(
    chat_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(chat_model, folder)
    words = AutoTokenizer.from_pretrained(folder)
    words.add_special_tokens({"additional_special_tokens": ["<end>"]})
    words.chat_template = template("<end>")
    words.save_pretrained(folder)
    own, end = words.eos_token_id, words.convert_tokens_to_ids("<end>")
    ready = tokenizer.load_base(Model(base=str(folder), scratch=None))
    assert ready.eos_token_id == end
    assert tokenizer.ready_rendering(ready, "it").eos == "<end>"
    assert ends_of(GenerationConfig(eos_token_id=own), ready) == (end, own)


def test_saving_keeps_the_list(tmp_path: Path) -> None:
    model, words = small.causal(), small.tokenizer()
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [EOS, 7]
    save_checkpoint(model, words, tmp_path / "one", identity={}, card="")
    again = load_causal(tmp_path / "one")
    save_checkpoint(again, words, tmp_path / "two", identity={}, card="", others=[9])
    found = json.loads((tmp_path / "two/generation_config.json").read_text(encoding="utf-8"))
    assert found["eos_token_id"] == [EOS, 7, 9]


def test_a_published_temperature_without_sampling_hinders_no_save(tmp_path: Path) -> None:
    model, words = small.causal(), small.tokenizer()
    assert model.generation_config is not None
    model.save_pretrained(tmp_path / "published")
    words.save_pretrained(tmp_path / "published")
    file = tmp_path / "published/generation_config.json"
    published = json.loads(file.read_text(encoding="utf-8")) | {"temperature": 0.9, "top_p": 0.6}
    file.write_text(json.dumps(published), encoding="utf-8")
    again = load_causal(tmp_path / "published")
    save_checkpoint(again, words, tmp_path / "ours", identity={}, card="", others=[5])
    found = json.loads((tmp_path / "ours/generation_config.json").read_text(encoding="utf-8"))
    assert (found["eos_token_id"], found["temperature"], found["top_p"]) == ([EOS, 5], 0.9, 0.6)


@pytest.mark.parametrize("ends", [(EOS, [EOS, 7]), ([EOS, 5, 6], EOS), (7, [EOS, 9])])
def test_the_same_weights_give_the_same_responses_whatever_ends_them(
    ends: tuple[Any, Any], tmp_path: Path
) -> None:
    model, words, found = small.causal(seed=3), small.tokenizer(), []
    folders = [tmp_path / name for name in ("a", "b")]
    for folder, own in zip(folders, ends, strict=True):
        save_checkpoint(model, words, folder, identity={"kind": "policy", "parents": {}}, card="")
        file = folder / "generation_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(config | {"eos_token_id": own}), encoding="utf-8")
    both = share_ends([(folder, None) for folder in folders])
    for folder, own in zip(folders, both, strict=True):
        settings: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
        prompts = [f"w{i} w{i + 1}" for i in range(3, 19)]
        found.append(
            sample(folder, prompts, paths=Paths(tmp_path), device=torch.device("cpu"), ends=own, **settings)
        )
    assert found[0] == found[1]
    assert any(found[0].ended)


def test_the_ends_of_a_model_with_another_tokenizer_are_shared_by_their_texts(tmp_path: Path) -> None:
    """The id of the first one's EOS is a word of the second one, and ends none of its responses."""
    words, folders = small.tokenizer(), [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        save_checkpoint(small.causal(), words, folder, identity={"kind": "policy", "parents": {}}, card="")
    file = folders[1] / "tokenizer.json"
    swapped = {"<eos>": words.convert_ids_to_tokens(9), words.convert_ids_to_tokens(9): "<eos>"}
    text = file.read_text(encoding="utf-8")
    state = json.loads(text)
    state["model"]["vocab"] = {swapped.get(t, t): number for t, number in state["model"]["vocab"].items()}
    for added in state["added_tokens"]:
        added["id"] = 9 if added["content"] == "<eos>" else added["id"]
    file.write_text(json.dumps(state), encoding="utf-8")
    generation = folders[1] / "generation_config.json"
    config = json.loads(generation.read_text(encoding="utf-8"))
    generation.write_text(json.dumps(config | {"eos_token_id": 9}), encoding="utf-8")
    assert share_ends([(folder, None) for folder in folders]) == [(EOS,), (9,)]
