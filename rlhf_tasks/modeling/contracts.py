"""The identity of a checkpoint, and the checks on checkpoints that work together.

`rlhf.json` in a checkpoint's folder holds its kind and the hashes of the weights it was made from. A foreign
checkpoint has none: its lineage is unknown, and all else is checked. torch is loaded only to compare models
or tokenizers, so that reading an identity is fast.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

IDENTITY = "rlhf.json"
AGAIN = "restore the folder from its source; `dvc checkout` restores one of the pipeline's"
TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32",
    "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""The names that torch gives the types in a safetensors file."""
CHUNK = 1 << 24  # bytes read at a time


class ContractError(UserError):
    """A checkpoint that does not fit the stage that reads it."""


def identity(kind: str, parents: Mapping[str, str]) -> dict[str, Any]:
    """The content of rlhf.json: kind and parents by role; without parents the lineage is unknown."""
    return {"kind": kind, "parents": dict(parents)} | ({} if parents else {"lineage": "unknown"})


def identity_of(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's rlhf.json; empty for a foreign one, whose lineage is unknown.

    Raises:
        ContractError: for a damaged file.
    """
    file = folder / IDENTITY
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    except (ValueError, TypeError) as error:
        raise ContractError(f"{file} cannot be read ({error}); {AGAIN}") from None


def parents_of(folder: Path) -> dict[str, str]:
    """The fingerprints, by role, of the checkpoints that one was made from."""
    return dict(identity_of(folder).get("parents", {}))


def rewards_of(policy: Path) -> set[str]:
    """The fingerprints of the reward models that PPO optimised for a policy; empty if it names none.

    Their roles are `reward` for models/reward, and `reward/NAME` for a scorer's own folder.
    """
    return {digest for role, digest in parents_of(policy).items() if role.partition("/")[0] == "reward"}


def is_made(folder: Path) -> bool:
    """False for the empty folder of a reward model that is not needed (`reward.train: false`)."""
    return (folder / "config.json").exists()


def fingerprint(folder: Path) -> str:
    """sha256 over the names, shapes and bytes of a checkpoint's tensors, first 16 hex digits.

    Raises:
        ContractError: for damaged weights, or weights in another format than safetensors.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files and any(folder.glob("*.bin")):
        raise ContractError(
            f"{folder} has its weights in *.bin files; save the model again by `save_pretrained` of "
            "transformers, which writes safetensors"
        )
    for file in files:
        try:
            for part in _tensors(file):
                digest.update(part)
        except SafetensorError as error:
            raise ContractError(f"{file} cannot be read ({error}); {AGAIN}") from None
    return digest.hexdigest()[:16]


def _tensors(file: Path) -> Iterator[bytes]:
    """For each tensor, sorted by name: name, shape and torch's type, then its bytes in parts.

    A file holds the length of its header (8 bytes), the header (JSON), and the bytes of the tensors.

    Raises:
        SafetensorError: for a damaged file.
    """
    with safe_open(file, framework="numpy"):
        pass  # this checks header and sizes
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        entries: dict[str, Any] = json.loads(raw.read(length))
        for key in sorted(entries.keys() - {"__metadata__"}):
            entry = entries[key]
            kind = TYPES.get(entry["dtype"], entry["dtype"])
            yield f"{key}{tuple(entry['shape'])}torch.{kind}".encode()
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            raw.seek(start)
            for place in range(start, end, CHUNK):
                yield raw.read(min(CHUNK, end - place))


def model_card(
    title: str, *, task: str, parameters: Mapping[str, Any], inputs: Mapping[str, str], how: str
) -> str:
    """A model card: input hashes and parameters, but no dates, run ids or speeds."""
    table = "\n".join(f"| `{key}` | {value} |" for key, value in parameters.items())
    sources = "\n".join(f"| {name} | `{digest}` |" for name, digest in inputs.items())
    return (
        f"---\nlibrary_name: transformers\ntags: [rlhf, {task}]\n---\n# {title}\n\n{how}\n\n"
        f"## Inputs\n| input | sha256 |\n|---|---|\n{sources}\n\n"
        f"## Parameters\n| key | value |\n|---|---|\n{table}\n"
    )


def check_parent(child: Path, role: str, parent: Path) -> None:
    """If `child` records its parent in this `role`, it must be `parent`. A foreign checkpoint records none.

    Raises:
        ContractError: naming both.
    """
    claimed = parents_of(child).get(role)
    if claimed is not None and claimed != fingerprint(parent):
        raise ContractError(
            f"{child} was made from another {role} model ({claimed}) than {parent} ({fingerprint(parent)}); "
            "rebuild it with `dvc repro`"
        )


def check_same_tokenizer(first: Path, second: Path) -> None:
    """Two checkpoints must have the same tokens and the same chat template.

    A token that is only used for padding may differ: masks come from lengths, so that no model sees it.

    Raises:
        ContractError: naming both folders and the difference.
    """
    from rlhf_tasks.data.batches import encode, load_tokenizer

    a, b = load_tokenizer(first), load_tokenizer(second)
    words = {token for x in (a, b) for token in x.get_vocab() if token not in _only_pads(a, b)}
    differ = sorted(w for w in words if a.get_vocab().get(w) != b.get_vocab().get(w))
    if differ:
        raise ContractError(
            f"{second} has another tokenizer than {first}: {len(a)} and {len(b)} tokens, "
            f"e.g. {differ[:3]} differ; train or fetch them with one tokenizer"
        )
    if a.eos_token_id != b.eos_token_id:
        raise ContractError(
            f"{second} ends responses with {b.eos_token!r}, but {first} with {a.eos_token!r}; "
            "use one tokenizer"
        )
    probe = "Ab, 3 x\n\n(é)"
    if encode(a, [probe]) != encode(b, [probe]):
        raise ContractError(
            f"{second} splits text differently from {first}, with the same vocabulary: {probe!r} "
            "differs; use one tokenizer"
        )
    if a.chat_template != b.chat_template:
        raise ContractError(
            f"{second} has another chat template than {first}: models would see text of another "
            "form; use one template"
        )


def _only_pads(*tokenizers: PreTrainedTokenizerBase) -> set[str]:
    """The pad tokens that have no other use."""
    others = {t for x in tokenizers for t in (x.eos_token, x.bos_token, x.unk_token) if t is not None}
    return {str(x.pad_token) for x in tokenizers} - others


def check_same_shape(model: PreTrainedModel, where: str, parent: Path) -> None:
    """A model must have the architecture and sizes of its `parent`.

    Raises:
        ContractError: naming the differences.
    """
    from transformers import AutoConfig

    other = AutoConfig.from_pretrained(parent)
    names = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads")
    differ = [
        f"{name} {getattr(model.config, name, None)} and {getattr(other, name, None)}"
        for name in names
        if getattr(model.config, name, None) != getattr(other, name, None)
    ]
    if differ:
        raise ContractError(
            f"{where} was not made from {parent}: {', '.join(differ)}; set model.base to its base"
        )


def check_fits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """The embedding must have a row for every token.

    Raises:
        ContractError: if the tokenizer has more tokens than the model.
    """
    from torch import nn

    embeddings = model.get_input_embeddings()
    assert isinstance(embeddings, nn.Embedding)
    rows = embeddings.num_embeddings
    if rows < len(tokenizer):
        raise ContractError(
            f"{where}: the tokenizer has {len(tokenizer)} tokens, but the model has {rows} embeddings; "
            "use the tokenizer of this model"
        )
