"""`rlhf export NAME --to FOLDER`: a policy as a plain Hugging Face folder, with a card of its origin.

NAME is `champion`, an experiment, or a checkpoint's folder. No torch here until the copy is loaded.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_tasks import config, console
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import git, hashing, lineage_chain
from rlhf_tasks.project.atomic import whole
from rlhf_tasks.project.lineage_chain import Chain
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import weights
from rlhf_tasks.promotion.command import POLICY, check, read_criteria, verdict_file
from rlhf_tasks.promotion.registry import CHAMPION, Registry, Unreachable
from rlhf_tasks.promotion.verdict import Verdict, make_table

CARD = "README.md"


@dataclass(frozen=True)
class Source:
    """A policy that was found."""

    label: str
    """Its name in messages and on the card."""
    folder: Path
    md5: str
    chain: Chain | None
    """None if the project does not know where it comes from."""


def export(paths: Paths, name: str, to: Path) -> Source:
    """Copy a policy with its card to a new folder, after the copy has been loaded.

    Raises:
        UserError: if the folder is not empty, there is no such policy, or it cannot be loaded.
    """
    from rlhf_tasks.data.tokenizer import load_tokenizer
    from rlhf_tasks.models import contracts
    from rlhf_tasks.models.load import copy_checkpoint, load_causal

    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: this exists and is not an empty folder; give another name, or remove it")
    source = find(paths, name)
    if to.resolve().is_relative_to(source.folder.resolve()):
        raise UserError(f"--to {to}: this lies in the exported folder {source.folder}; give another name")
    check(source.folder, source.label)
    with whole(to.resolve()) as folder:  # to may be a link to a folder
        copy_checkpoint(source.folder, folder)
        (folder / CARD).write_text(card(source, paths.home), encoding="utf-8")
        contracts.check_fits(load_causal(folder), load_tokenizer(folder), str(folder))
    console.say(
        f"exported {source.label} ({source.md5}) to {to}; AutoModelForCausalLM loads it, and `hf upload "
        f"OWNER/NAME {to}` uploads it"
    )
    return source


def find(paths: Paths, name: str) -> Source:
    """The policy of this name, restored where it is not a folder.

    Raises:
        UserError: if there is none, or MLflow does not answer.
    """
    root = paths.root
    if (root / name / "config.json").is_file():
        return Source(name, root / name, hashing.dvc_md5(root / name), _chain(root, Path(name).as_posix()))
    if name == CHAMPION:
        return _champion(paths)
    revision = git.find_experiment(root, name)
    if revision is None:
        raise UserError(
            f"{name!r} is neither `{CHAMPION}`, nor a checkpoint's folder, nor an experiment; "
            "`dvc exp list -A` shows the experiments"
        )
    md5 = lineage_chain.read_lock(root, revision).get(POLICY)
    if md5 is None:
        raise UserError(
            f"the experiment {name} has no {POLICY}: its stage ppo has not run; run it, or export another "
            "experiment"
        )
    folder = weights.restore(root, paths.home, md5, {weights.PATH: POLICY, weights.REVISION: revision})
    return Source(f"{POLICY} of {name}", folder, md5, _chain(root, name))


def _champion(paths: Paths) -> Source:
    settings = config.load(paths.params)
    model = read_criteria(settings).model
    try:
        version = Registry.open(settings.tracking, paths.home, model).champion()
    except Unreachable as error:
        raise UserError(f"MLflow does not answer ({error}); repeat the command later") from None
    if version is None:
        raise UserError(f"{model} has no champion; `rlhf promote` makes one")
    folder = weights.restore(paths.root, paths.home, version.md5, version.tags)
    origin = version.tags.get(weights.EXPERIMENT) or version.tags.get(weights.REVISION)
    label = f"{model} version {version.number}"
    return Source(label, folder, version.md5, _chain(paths.root, origin) if origin else None)


def _chain(root: Path, name: str) -> Chain | None:
    try:
        return lineage_chain.find(root, name)
    except UserError as error:
        console.say(f"the card will have no lineage: {error}")
        return None


def card(source: Source, home: Path) -> str:
    """The checkpoint's own card (inputs and parameters), then data, verdict and lineage."""
    own = source.folder / CARD
    parts = [own.read_text(encoding="utf-8").rstrip() if own.exists() else f"# {source.label}"]
    if source.chain is not None and source.chain.data:
        rows = [{"key": f"`{key}`", "value": value} for key, value in source.chain.data.items()]
        parts.append(f"## Data\n\n{make_table(rows)}")
    file = verdict_file(home, source.md5)
    if file.exists():
        tree = json.loads(file.read_text(encoding="utf-8"))
        result = "Passed" if tree["passed"] else "Refused"
        where = f"{tree['time']}, against {tree['against']}"
        parts.append(f"## Verdict\n\n{result} by the gate: {tree['summary']} ({where}).")
        parts.append(make_table(Verdict.of_tree(tree).rows()))
    else:
        parts.append("## Verdict\n\nThe gate has not judged this policy.")
    parts.append(f"## Lineage\n\nmd5 of the original folder: `{source.md5}`")
    if source.chain is not None:
        text = "\n".join(itertools.takewhile(bool, lineage_chain.lines(source.chain)))
        parts.append(f"```\n{text}\n```")
    return "\n\n".join(parts) + "\n"
