"""Ready checkpoints that are referenced, not copied: what reference.json holds, and where the weights lie.

    models/base/reference.json
      params        the key of params.yaml that names the source: model.base, sft.from or reward.from
      hub           id and revision of a hub model; null for any other source
      fingerprint   of the weights: see `models.contracts.fingerprint`
      files         sha256 of each file of weights, by name

The folder holds everything of a checkpoint but its weights. The file has no path: params.yaml says where the
source is, so that machines may keep it in different places. A hash is computed once, and again after the
size, time of change or inode of its file has changed (.rlhf/sha256.json). What a GGUF file was converted to
is kept in .rlhf/models/FINGERPRINT, since reading one takes long. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.config import Ready, is_hub_id
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import hashing, packaged
from rlhf_tasks.project.paths import Paths

FILE = "reference.json"
KEYS = ("model.base", "sft.from", "reward.from")
"""The parameters that name a ready model."""
OF_NO_MODEL = {
    "*.gguf": "GGUF files; name one of them as `model.base: FOLDER/FILE.gguf`",
    "*.distcp": "a distributed checkpoint of PyTorch (torch.distributed.checkpoint)",
    "zero_to_fp32.py": "a training state of DeepSpeed, whose zero_to_fp32.py writes the weights",
    "global_step*": "a training state of DeepSpeed",
    "consolidated.*": "weights in the form of their authors, which transformers has a script to convert",
    "checkpoint-*": "the output folder of a trainer; give one of its folders checkpoint-STEP",
    "*.safetensors": "weights without their config.json",
}
"""What a folder without config.json is, by a file in it."""


def read(folder: str | Path) -> dict[str, Any] | None:
    """The content of a folder's reference.json; None for a folder with weights, and for a hub id."""
    file = Path(folder) / FILE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def check_place(source: str | Path) -> None:
    """Check that a source is no file but GGUF, no adapter alone, and no folder without a config."""
    folder = Path(source)
    if (adapter := folder / "adapter_config.json").is_file():
        try:
            settings = dict(json.loads(adapter.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{source}: {adapter.name} cannot be read: {error}") from None
        kind = "SequenceClassification" if settings.get("task_type") == "SEQ_CLS" else "CausalLM"
        base = settings.get("base_model_name_or_path")
        raise UserError(
            f"{source} holds an adapter alone, for the model {base}; merge them and give the merged folder: "
            f"`peft.AutoPeftModelFor{kind}.from_pretrained({str(source)!r}).merge_and_unload()"
            ".save_pretrained(FOLDER)`, with the tokenizer beside it"
        )
    if folder.is_file() and folder.suffix != ".gguf":
        raise UserError(f"{source} is a file; give the folder that holds config.json and the weights")
    if folder.is_dir() and not (folder / "config.json").exists():
        contents = (what for pattern, what in OF_NO_MODEL.items() if any(folder.glob(pattern)))
        raise UserError(
            f"{source} is no checkpoint folder: it has no config.json; it holds "
            f"{next(contents, 'nothing' if not any(folder.iterdir()) else 'no weights of a model')}"
        )


def weights(place: Path) -> list[Path]:
    """The files of weights of a source: a GGUF file, or those in a folder, with their index."""
    if place.is_file():
        return [place]
    shards = sorted(place.glob("*.safetensors")) or sorted(place.glob("pytorch_model*.bin"))
    return [*shards, *sorted(place.glob("*.index.json"))]


def describe(folder: Path, place: Path, source: Ready, fingerprint: str | None) -> dict[str, Any]:
    """The content of reference.json for `folder`, given where the weights lie now.

    Without a `fingerprint` of its tensors, the source's is that of its files.

    Raises:
        UserError: if the source is a reference itself.
    """
    if read(place) is not None:
        raise UserError(
            f"{source.key}={source.name} holds no weights: it refers to another model; name that model"
        )
    root = _project(folder)
    files = {file.name: hashing.file_digest(file, "sha256", root and _known(root)) for file in weights(place)}
    hub = {"id": source.name, "revision": source.revision} if source.revision else None
    own = fingerprint or hashing.json_sha256(files)[:16]
    return {"params": source.key, "hub": hub, "fingerprint": own, "files": files}


def locate(source: str | Path) -> str | Path:
    """Where the weights of a checkpoint lie: the source itself, or the folder or GGUF file it refers to.

    Raises:
        UserError: if what a folder refers to is not at hand, or has other bytes.
    """
    if (known := read(source)) is None:
        return source
    if (folder := converted(Path(source), known["fingerprint"])) is not None and folder.is_dir():
        return folder
    key, hub, root = known["params"], known["hub"], _project(Path(source))
    value, problem = None, "no params.yaml lies above this folder"
    if root is not None:
        file = root / "params.yaml"
        value = config.flatten(config.parse(config.read_text(file), str(file))).get(key)
        problem = "params.yaml does not set it"
    if root is not None and value is not None:
        is_of_hub = hub is not None and is_hub_id(value)
        try:
            return _snapshot(known, root) if is_of_hub else _local(known, root, value)
        except UserError as error:
            problem = str(error)
    wanted = [f"{hub['id']} at revision {hub['revision']}"] if hub else []
    wanted += [f"{name} (sha256 {digest})" for name, digest in known["files"].items()]
    raise UserError(
        f"{source} has no weights of its own; it refers to {key} of params.yaml (given: {value}): {problem}. "
        f"Expected: {', '.join(wanted)}. Put these files there, or name in {key} where this machine has "
        "them; if they were changed on purpose, run `dvc repro`. `model.keep: copy` puts weights into DVC"
    )


def converted(folder: Path, fingerprint: str) -> Path | None:
    """Where what a GGUF file was converted to is kept for references; None outside of a project."""
    root = _project(folder)
    return root and Paths(root).home / "models" / fingerprint


def _local(known: Mapping[str, Any], root: Path, value: str) -> Path:
    """The folder or file that params.yaml names; UserError if it is not that of the reference."""
    # an isolated run works in a worktree, which lacks what git and DVC do not hold
    places = [at / packaged.locate(value) for at in (root, Paths(root).home.parent)]
    return _check_files(next(filter(Path.exists, places), places[0]), known, root)


def _snapshot(known: Mapping[str, Any], root: Path) -> Path:
    """The hub's snapshot in its cache, fetched if it lacks a file; UserError if that fails."""
    from huggingface_hub import snapshot_download

    fetch = partial(
        snapshot_download,
        known["hub"]["id"],
        revision=known["hub"]["revision"],
        allow_patterns=[*known["files"]],
    )
    with suppress(OSError, ValueError, UserError):
        return _check_files(Path(fetch(local_files_only=True)), known, root)
    try:
        folder = Path(fetch())
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"the hub's cache lacks it, and it cannot be fetched ({why})") from None
    return _check_files(folder, known, root)


def _check_files(place: Path, known: Mapping[str, Any], root: Path) -> Path:
    """The place, where its files are those of a reference; else UserError."""
    for name, digest in known["files"].items():
        file = place if place.is_file() else place / name
        if not file.is_file():
            raise UserError(f"{name} is not there")
        if (other := hashing.file_digest(file, "sha256", _known(root))) != digest:
            raise UserError(f"{name} has other bytes (sha256 {other})")
    return place


def _project(folder: Path) -> Path | None:
    """The project that a folder belongs to."""
    return next((at for at in folder.absolute().parents if (at / "params.yaml").is_file()), None)


def _known(root: Path) -> Path:
    return Paths(root).home / "sha256.json"
