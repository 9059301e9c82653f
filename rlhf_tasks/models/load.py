"""Creates, loads, adapts and saves the models of the pipeline.

A checkpoint is a Hugging Face folder (safetensors, config, tokenizer, model card) with the rlhf.json of
contracts.py. A ready model is a reference to its weights (project/ready_models.py), which loading follows.
The bytes do not change from run to run. Weights that would be newly initialized at load are an error: PPO
would train on the noise of a new reward head.

Every model is in eval mode, and trains in it: PPO's ratio must be 1 before the first step. So dropout, layer
drop and the router's noise are off in every family, whatever its config calls them.

B batch · R response · V vocabulary · H hidden.
"""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext, redirect_stderr
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_tasks import console
from rlhf_tasks.config import Ready, Scratch, is_hub_id
from rlhf_tasks.data import chat
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.classifiers import build_classifier, classifier_class, find_trunk, is_classifier
from rlhf_tasks.models.contracts import IDENTITY, ContractError, fingerprint
from rlhf_tasks.models.fast_cpu import accelerate
from rlhf_tasks.models.foreign import SCORE_HEADS, Head, check_kind, find_head, put_head
from rlhf_tasks.models.heads import TokenScores, score_head
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.project import atomic, disk, packaged, ready_models

M = TypeVar("M", bound=nn.Module)

ANY_WEIGHTS = "RLHF_PICKLED_WEIGHTS"
"""Set to 1, the environment variable that allows weights in other formats than safetensors."""
NO_HUB = "a hub id needs network access or a filled cache"
transformers.utils.logging.disable_progress_bar()  # of milliseconds, among our own


# ------------------------------------------------------------------------------------ creating


def scratch_config(shape: Scratch, vocab_size: int, max_positions: int, **ids: Any) -> PretrainedConfig:
    """The config of a causal LM of one of the known families; `ids` are those of its special tokens."""
    hidden = shape.hidden_size
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": max_positions,
        # 1/√fan-in: the families' 0.02 suits widths of thousands; with it a narrow model starts on a plateau
        "initializer_range": hidden**-0.5,
        **ids,
    }
    if shape.family == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    elif shape.family == "gpt_neox":
        sizes["intermediate_size"] = 4 * hidden
    else:
        # SwiGLU has three matrices: 8/3 · hidden keeps the parameters of a 4 · hidden MLP
        sizes |= {"intermediate_size": 8 * round(hidden / 3), "num_key_value_heads": shape.num_heads}
    return AutoConfig.for_model(shape.family, **sizes)


def from_scratch(shape: Scratch, tokenizer: PreTrainedTokenizerBase, max_positions: int) -> PreTrainedModel:
    """A randomly initialized causal LM of one of the known families; weights from torch's global RNG."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = scratch_config(shape, len(tokenizer), max_positions, **ids)
    return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())


def place(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model on a device. The type annotations of transformers do not allow `model.to(device)`."""
    nn.Module.to(model, device)
    if device.type == "cpu":
        accelerate(model)
    return model


def round_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep only the 16 bits of the layers' linear weights that autocast would make of them in every pass."""
    layers = (layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer))
    for module in chain.from_iterable(layer.modules() for layer in layers):
        if isinstance(module, nn.Linear):
            module.to(dtype)


def copy_to(module: M, device: torch.device) -> M:
    """A copy with its weights on a device, such as `meta`, and frozen; the models' configs are shared."""
    memo: dict[int, Any] = {
        id(weight): nn.Parameter(weight.detach().to(device), requires_grad=False)
        for weight in module.parameters()
    }
    for one in module.modules():
        memo |= {id(part): part for part in (getattr(one, "config", 0), getattr(one, "generation_config", 0))}
    return copy.deepcopy(module, memo)


# ------------------------------------------------------------------------------------- loading


@console.part("reading the config")
def load_config(source: str | Path, revision: str | None = None) -> PretrainedConfig:
    """The config of a folder or the hub.

    Raises:
        UserError: if it cannot be read, or is no model for a stage.
    """
    ready_models.check_place(source)
    folder, file = packaged.gguf(str(source))
    try:
        with packaged.reading(source) if file else nullcontext():
            config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder, revision=revision, **file))
    except (OSError, ValueError, ImportError) as error:
        raise _cannot_load(source, error) from error
    if file and hasattr(config, "quantization_config"):
        del config.quantization_config  # its weights are read as float32
    check_kind(source, config)
    return config


def load_causal(source: str | Path, revision: str | None = None) -> PreTrainedModel:
    """A causal LM from a folder, the hub or a GGUF file, in float32 and eval mode.

    Raises:
        UserError: if it cannot be read, or weights are missing from it.
    """
    folder, file = packaged.gguf(str(ready_models.locate(source)))
    if not file:
        model = _load(AutoModelForCausalLM, source, revision)
    else:
        # transformers saves no model that it has read from GGUF: its weights go into a new one
        with console.part(f"loading {Path(file['gguf_file']).stem}"):
            config = load_config(source)
            # a bar of its own, among our lines
            with packaged.reading(source), redirect_stderr(io.StringIO()):
                read = _from_pretrained(AutoModelForCausalLM, source, folder, **file)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.load_state_dict(read.state_dict())
        model.generation_config = read.generation_config
    if (known := ready_models.read(source)) is not None:
        model.generation_config = GenerationConfig.from_pretrained(source)
        if file:
            _keep_converted(model, Path(source), known["fingerprint"])
    return cast(PreTrainedModel, model.eval())


def is_reward(source: str | Path, revision: str | None = None) -> bool:
    """Whether a checkpoint scores or classifies texts.

    Raises:
        UserError: if it cannot be read, or is no model for a stage.
    """
    config = load_config(source, revision)
    return is_classifier(config) or _head(source, revision, config) is not None


def load_reward(source: str | Path, revision: str | None = None) -> TokenScores:
    """A reward model, or a value model, with its **trained** head, also under another program's name.

    Raises:
        UserError: if it has no trained one-score head, or cannot be read.
    """
    config = load_config(source, revision)
    head = _head(source, revision, config)
    if head is None:
        model = _load(classifier_class(config, source), source, revision)
    else:
        config.num_labels = 1
        trunk = _load(AutoModel, source, revision, without_head=True)
        model = build_classifier(trunk, config).eval()
    if model.config.num_labels != 1:
        raise ContractError(
            f"{source} is not a reward model: it has {model.config.num_labels} labels, and a reward model "
            "has one score"
        )
    score_head(model)
    put_head(model, head)
    return TokenScores(model)


def add_score_head(policy_folder: Path, generator: torch.Generator) -> TokenScores:
    """The policy's trunk under a new head drawn from N(0, 1/√(H+1)) (arXiv 2403.17031).

    Raises:
        ContractError: naming a family on whose trunk no head can be put.
    """
    config = AutoConfig.from_pretrained(policy_folder, num_labels=1)
    model = build_classifier(find_trunk(load_causal(policy_folder)), config)
    std = 1 / (score_head(model).in_features + 1) ** 0.5
    with torch.no_grad():
        score_head(model).weight.normal_(0.0, std, generator=generator)
    return TokenScores(model.eval())


def _head(source: str | Path, revision: str | None, config: PretrainedConfig) -> Head | None:
    folder = _fetch(str(ready_models.locate(source)), revision, ["*.json", "*.safetensors"])
    return find_head(folder, getattr(config, "value_head_prefix", None))


def _load(
    auto: Any, source: str | Path, revision: str | None, *, without_head: bool = False
) -> PreTrainedModel:
    """A model in float32; heads that score texts beside it are refused, or left out (`without_head`)."""
    config, place = load_config(source, revision), ready_models.locate(source)
    how: dict[str, Any] = {"revision": revision}
    how |= {} if place == source else {"config": config}
    how |= {} if os.environ.get(ANY_WEIGHTS) == "1" else {"use_safetensors": True}
    heads = () if without_head else (*SCORE_HEADS, getattr(config, "value_head_prefix", None))
    try:
        with console.part(f"loading {Path(source).name}"):
            return _from_pretrained(auto, source, place, refused=heads, **how)
    except (OSError, ValueError, SafetensorError) as error:
        raise _cannot_load(source, error) from error


def _from_pretrained(
    auto: Any, source: str | Path, place: str | Path, *, refused: Collection[str | None] = (), **how: Any
) -> PreTrainedModel:
    """A model in float32 with all of its weights, and without heads whose names are `refused`."""
    try:
        model, info = auto.from_pretrained(place, dtype=torch.float32, output_loading_info=True, **how)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ContractError(
            f"{source}: weights have other shapes than its config says (the report above names them), such "
            "as another vocab_size, or a score head without num_labels=1; correct config.json"
        ) from error
    if heads := sorted(key for key in map(str, info["unexpected_keys"]) if key.split(".")[0] in refused):
        raise ContractError(
            f"{source} holds {', '.join(heads)}: it scores or classifies texts; give a language model"
        )
    if missing := sorted(map(str, {*info["missing_keys"], *info["mismatched_keys"]})):
        part = "its trained head" if any("score" in key for key in missing) else "weights"
        raise ContractError(
            f"{source} lacks {part}: {', '.join(missing[:5])} would be newly initialized; "
            "give a checkpoint that holds every weight"
        )
    return cast(PreTrainedModel, model.eval())


def _cannot_load(source: str | Path, error: Exception) -> ContractError:
    hint = NO_HUB if is_hub_id(str(source)) else "is it a checkpoint folder?"
    place = Path(ready_models.locate(source))
    is_of_weights = isinstance(error, SafetensorError) or "safetensors" in str(error)
    is_part = isinstance(error, SafetensorError | FileNotFoundError) or not any(place.glob("*.bin"))
    if is_of_weights and is_part and place.is_dir():
        hint = (
            "the folder is not whole; copy or download it again: it needs model.safetensors, or "
            "model.safetensors.index.json and every shard that this lists"
        )
    elif is_of_weights and os.environ.get(ANY_WEIGHTS) != "1":
        hint = (
            "weights of other formats may be pickles, which can run code: save the model as safetensors, or "
            f"set the environment variable {ANY_WEIGHTS}=1 if you trust it"
        )
    return ContractError(f"cannot load a model from {source}: {str(error).splitlines()[0]} ({hint})")


def fetch_tokenizer(source: str, revision: str | None) -> Path:
    """The folder of a source's tokenizer, config and identity: the source, or the hub's cached snapshot.

    Raises:
        ContractError: if the hub does not provide it.
    """
    return _fetch(source, revision, ["*.json", "*.txt", "*.jinja", "*.model"])


def _fetch(source: str, revision: str | None, kinds: list[str]) -> Path:
    """A folder with the files of these kinds: the source, or the hub's cached snapshot."""
    folder, file = packaged.gguf(source)
    if file:
        return Path(_tokenizer_of_gguf(folder, **file).name)
    if not is_hub_id(source):
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        with console.part(f"fetching {source}"):
            return Path(snapshot_download(source, revision=revision, allow_patterns=kinds))
    except (OSError, ValueError) as error:
        raise ContractError(f"cannot fetch {source} at {revision}: {error} ({NO_HUB})") from error


@cache
def _tokenizer_of_gguf(folder: str, gguf_file: str) -> tempfile.TemporaryDirectory[str]:
    """The tokenizer that a GGUF file holds, in a folder that this process removes at its end."""
    temporary = tempfile.TemporaryDirectory(prefix="rlhf-gguf-")
    with console.part(f"reading the tokenizer of {gguf_file}"):
        with packaged.reading(Path(folder, gguf_file)):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file)
        tokenizer.save_pretrained(temporary.name)
    return temporary


# ------------------------------------------------------------------------ gradient checkpointing


def recompute_activations(model: PreTrainedModel) -> None:
    """Let the backward pass compute the activations of every layer again, so that they need no memory.

    transformers itself does so in training mode only, in which dropout is on.

    Raises:
        UserError: if the family has no layers that can be computed again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UserError(
            f"ppo.gradient_checkpointing: {type(model).__name__} does not support it; set it to false"
        )
    for layer in layers:
        layer.forward = partial(_checkpoint_layer, layer.forward)


def _checkpoint_layer(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    # the layer draws nothing in eval mode: no RNG state is worth keeping
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **named)


# -------------------------------------------------------------------------------------- saving


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    identity: Mapping[str, Any],
    card: str,
    others: Iterable[int] = (),
    source: Ready | None = None,
) -> None:
    """Write a checkpoint into `folder`: weights, config, tokenizer, README.md, rlhf.json.

    With a `source`, whose weights the model has, there is a reference to them in their place.
    The generation config holds all tokens that end its responses, and `others`.
    The same weights, tokenizer, identity and card give the same bytes.

    Raises:
        DiskFullError: if the weights do not fit on the disk.
    """
    # the source folder would change the bytes but not the model
    model.config._name_or_path = ""
    if model.can_generate():
        ends = list(ends_of(model, tokenizer, others))
        model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # many have a temperature and not this; what was changed is saved if it is valid
            model.generation_config.do_sample = True
    size = num_bytes(model)
    what = f"writing {size / 1e6:,.0f} MB of weights" if source is None else f"hashing {source.name}"
    with disk.room(folder.parent, lambda: size), console.part(what):
        if source is None:
            model.save_pretrained(folder)
        else:
            _save_reference(model, folder, source)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card + chat.in_words(tokenizer), encoding="utf-8")
        text = json.dumps(dict(identity), indent=2, sort_keys=True) + "\n"
        (folder / IDENTITY).write_text(text, encoding="utf-8")


def num_bytes(model: nn.Module) -> int:
    """The bytes of a model's weights, over all ranks; tied ones count once."""
    return sum(getattr(one, "ds_numel", one.numel()) * one.element_size() for one in model.parameters())


def moment_bytes(model: nn.Module) -> int:
    """The bytes that AdamW keeps over all ranks; for weights in 16 bits, DeepSpeed's float32 ones too."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return sum(
        getattr(one, "ds_numel", one.numel()) * (8 if one.element_size() == 4 else 12) for one in trained
    )


def _save_reference(model: PreTrainedModel, folder: Path, source: Ready) -> None:
    """The source's own config, the ends of the model's responses, and where its weights lie."""
    place = Path(packaged.locate(source.name))
    if source.revision is not None:
        place = _fetch(source.name, source.revision, ["*.json"])
    is_gguf = place.is_file()
    config = model.config if is_gguf else load_config(source.name, source.revision)
    config._name_or_path = ""
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    of_tensors = fingerprint(place) if any(place.glob("*.safetensors")) else None
    known = ready_models.describe(folder, place, source, of_tensors)
    atomic.write_json(folder / ready_models.FILE, known)
    if is_gguf:
        _keep_converted(model, folder, known["fingerprint"])


def _keep_converted(model: PreTrainedModel, folder: Path, fingerprint: str) -> None:
    """Keep what the GGUF file of a reference was converted to, for its next load."""
    converted = ready_models.converted(folder, fingerprint)
    if converted is None:
        return
    with FileLock(converted.with_suffix(".lock")):  # several ranks may have converted it
        if not converted.exists():
            with atomic.whole(converted) as unfinished:
                model.save_pretrained(unfinished)


def copy_checkpoint(folder: Path, to: Path) -> None:
    """Copy a checkpoint to a folder, with the weights where it is a reference to them.

    Raises:
        UserError: if these weights are not at hand.
    """
    place = Path(ready_models.locate(folder))
    shutil.copytree(folder, to, dirs_exist_ok=True, copy_function=shutil.copyfile)
    if place == folder:
        return
    (to / ready_models.FILE).unlink()
    files = ready_models.weights(place)
    if any(file.suffix == ".safetensors" for file in files):
        for file in files:
            shutil.copyfile(file, to / file.name)
    else:
        load_causal(folder).save_pretrained(to)
