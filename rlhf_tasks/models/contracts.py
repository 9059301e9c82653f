"""The identity of a checkpoint, and the checks on checkpoints that work together.

`rlhf.json` in a checkpoint's folder holds its kind and the hashes of the weights it was made from. A foreign
checkpoint has none: its lineage is unknown, and all else is checked. Reading an identity loads no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rlhf_tasks import console
from rlhf_tasks.config import is_hub_id
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import packaged, ready_models

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IDENTITY = "rlhf.json"
RESTORE = "restore the folder from its source; `dvc checkout` restores one of the pipeline's"
TYPES = {"F": "float", "BF": "bfloat", "C": "complex", "I": "int", "U": "uint"}
FLOAT8 = {"E4M3": "e4m3fn", "E8M0": "e8m0fnu"}
"""Types in safetensors, without their bits, and torch's names for them where these are not the same."""
CHUNK = 1 << 24  # bytes read at a time


class ContractError(UserError):
    """A checkpoint that does not fit the stage that reads it."""


def identity(kind: str, parents: Mapping[str, str]) -> dict[str, Any]:
    """The content of rlhf.json: kind and parents by role; without parents the lineage is unknown."""
    return {"kind": kind, "parents": dict(parents)} | ({} if parents else {"lineage": "unknown"})


def read_identity(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's rlhf.json; empty for a foreign one, whose lineage is unknown.

    Raises:
        ContractError: for a damaged file.
    """
    file = folder / IDENTITY
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    except (ValueError, TypeError) as error:
        raise ContractError(f"{file} cannot be read ({error}); {RESTORE}") from None


def read_parents(folder: Path) -> dict[str, str]:
    """The fingerprints, by role, of the checkpoints that one was made from."""
    return dict(read_identity(folder).get("parents", {}))


def optimized_rewards(policy: Path) -> set[str]:
    """The fingerprints of the reward models that PPO optimized for a policy; empty if it names none.

    Their roles are `reward` for models/reward, and `reward/NAME` for a scorer's own folder.
    """
    return {digest for role, digest in read_parents(policy).items() if role.partition("/")[0] == "reward"}


def optimized_chat_models(policy: Path) -> set[str]:
    """The names of the language models behind endpoints that PPO optimized for a policy."""
    return set(read_identity(policy).get("optimized_chat_models", []))


def has_model(folder: Path) -> bool:
    """False for the empty folder of a reward model that is not needed (`reward.train: false`)."""
    return (folder / "config.json").exists()


def fingerprint(folder: Path) -> str:
    """sha256 over the names, shapes and bytes of a checkpoint's tensors, first 16 hex digits.

    It is computed once in a process, as long as the files stay as they are; a reference holds it.

    Raises:
        ContractError: for damaged weights, or weights in another format than safetensors.
    """
    if (known := ready_models.read(folder)) is not None:
        return str(known["fingerprint"])
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise ContractError(
            f"{folder} has its weights in *.bin files; save the model again by `save_pretrained` of "
            "transformers, which writes safetensors"
        )
    stats = [file.stat() for file in files]
    return _hash_tensors(tuple(files), tuple((s.st_size, s.st_ino, s.st_mtime_ns) for s in stats))


@functools.cache
def _hash_tensors(files: tuple[Path, ...], versions: tuple[tuple[int, ...], ...]) -> str:
    """sha256 over each tensor, sorted by name: name, shape and torch's type, then its bytes.

    A file holds the length of its header (8 bytes), the header (JSON), and the bytes of the tensors.
    `versions` are the size, inode and time of each file: one that has changed is read again.
    """
    digest = hashlib.sha256()
    for file, (size, *_) in zip(files, versions, strict=True):
        try:
            with safe_open(file, framework="numpy"):
                pass  # this checks header and sizes
        except SafetensorError as error:
            raise ContractError(f"{file} cannot be read ({error}); {RESTORE}") from None
        what = f"hashing {file.parent.name}/{file.name}"
        with file.open("rb") as raw, console.part(what, round(size / 1e6), "MB") as meter:
            length = int.from_bytes(raw.read(8), "little")
            entries: dict[str, Any] = json.loads(raw.read(length))
            for key in sorted(entries.keys() - {"__metadata__"}):
                entry = entries[key]
                digest.update(f"{key}{tuple(entry['shape'])}torch.{_torch_type(entry['dtype'])}".encode())
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                raw.seek(start)
                for position in range(start, end, CHUNK):
                    digest.update(raw.read(min(CHUNK, end - position)))
                    meter.advance(min(CHUNK, end - position) / 1e6)
    return digest.hexdigest()[:16]


def _torch_type(name: str) -> str:
    """F32 → float32, F8_E4M3 → float8_e4m3fn, BOOL → bool."""
    if name.startswith("F8_"):
        return f"float8_{FLOAT8.get(name[3:], name[3:].lower())}"
    letters = name.rstrip("0123456789")
    return TYPES.get(letters, letters.lower()) + name[len(letters) :]


def model_card(
    title: str, *, task: str, parameters: Mapping[str, Any], inputs: Mapping[str, str], how: str
) -> str:
    """A model card: input hashes and parameters, but no dates, run ids, speeds, or places on a machine."""
    rows = (f"| `{key}` | {value} |" for key, value in parameters.items() if not _is_place(key, value))
    table = "\n".join(rows)
    sources = "\n".join(f"| {name} | `{digest}` |" for name, digest in inputs.items())
    return (
        f"---\nlibrary_name: transformers\ntags: [rlhf, {task}]\n---\n# {title}\n\n{how}\n\n"
        f"## Inputs\n| input | sha256 |\n|---|---|\n{sources}\n\n"
        f"## Parameters\n| key | value |\n|---|---|\n{table}\n"
    )


def _is_place(key: str, value: Any) -> bool:
    """Whether it says where on a machine a ready model is."""
    named = key in ready_models.KEYS and value not in (None, "scratch")
    return named and not value.startswith(packaged.PREFIX) and not is_hub_id(value)


def check_parent(child: Path, role: str, parent: Path) -> None:
    """Check that `child` was made from `parent`, where it records a parent in this `role`.

    Raises:
        ContractError: naming both.
    """
    claimed = read_parents(child).get(role)
    if claimed is not None and claimed != fingerprint(parent):
        raise ContractError(
            f"{child} was made from another {role} model ({claimed}) than {parent} ({fingerprint(parent)}); "
            "rebuild it with `dvc repro`"
        )


def check_same_tokenizer(first: Path, second: Path) -> None:
    """Check that two checkpoints have the same tokens and the same chat template.

    A token that is only used for padding may differ: masks come from lengths, so that no model sees it.

    Raises:
        ContractError: naming both folders and the difference.
    """
    from rlhf_tasks.data.tokenizer import load_tokenizer

    with console.part("checking the tokenizers"):
        difference = _compare_tokenizers(load_tokenizer(first), load_tokenizer(second))
    if difference is not None:
        raise ContractError(
            f"{second} has another tokenizer than {first}: {difference}; use one tokenizer for both"
        )


def _compare_tokenizers(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """How two tokenizers differ, in words; None where they do not."""
    from rlhf_tasks.data.chat import template_source
    from rlhf_tasks.data.tokenizer import encode

    special = {t for x in (a, b) for t in (x.eos_token, x.bos_token, x.unk_token) if t is not None}
    only_pads = {str(x.pad_token) for x in (a, b)} - special
    # both vocabularies once: every call of get_vocab builds the whole dictionary
    entries = a.get_vocab().items() ^ b.get_vocab().items()
    if tokens := sorted({token for token, _ in entries} - only_pads):
        return f"{len(a)} and {len(b)} tokens, e.g. {tokens[:3]} differ"
    if a.eos_token_id != b.eos_token_id:
        return f"responses end with {a.eos_token!r} and {b.eos_token!r}"
    probe = "Ab, 3 x\n\n(é)"
    if encode(a, [probe]) != encode(b, [probe]):
        return f"with the same vocabulary, {probe!r} is split differently"
    one, other = (template_source(x) if x.chat_template else None for x in (a, b))
    return None if one == other else "their chat templates differ"


def check_same_shape(model: PreTrainedModel, name: str, parent: Path) -> None:
    """Check that a model has the architecture and sizes of its `parent`.

    Raises:
        ContractError: naming the differences.
    """
    from transformers import AutoConfig

    other = AutoConfig.from_pretrained(parent)
    keys = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
    pairs = [(key, getattr(model.config, key, None), getattr(other, key, None)) for key in keys]
    if differing := [f"{key} {own} and {parents}" for key, own, parents in pairs if own != parents]:
        raise ContractError(
            f"{name} was not made from {parent}: {', '.join(differing)}; set model.base to its base"
        )


def check_fits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that the model's embedding has a row for every token.

    Raises:
        ContractError: if the tokenizer has an id beyond the embedding, however many tokens it has.
    """
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.num_embeddings  # the weight may be sharded
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__)
    if rows <= vocabulary[last]:
        raise ContractError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, but the model has {rows} embeddings, "
            f"and none for id {vocabulary[last]} ({last!r}); use the tokenizer of this model"
        )
