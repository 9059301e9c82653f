"""A run that DVC keeps as an experiment, as if the command were given where it ran. No torch here.

The user's working tree is not touched: the experiment's files, and what the DVC cache has of its outs, are
in a worktree of their own while it is judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_tasks import console, presets
from rlhf_tasks.config import Config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, experiments, git, workspaces
from rlhf_tasks.promotion import files
from rlhf_tasks.promotion.evidence import POLICY

LINEAGE = "models/lineage/ppo.json"
OF_HERE = ("judge", "promotion", "tracking")
"""Sections of params.yaml that hold as they are now, not as it ran."""


def find(name: str) -> str | None:
    """The commit of an experiment; None if there is none of this name, or no git."""
    return experiments.find(Path.cwd(), name) if git.revision(Path.cwd()) else None


@contextlib.contextmanager
def entered(settings: Config, name: str, revision: str) -> Iterator[Config]:
    """The working folder is the experiment's while the block lasts; its parameters, but for OF_HERE.

    So its metrics count if they were measured as they would be now, and else it is judged anew, with its own
    data, SFT and reward models, by the judges of here, whose files are those of here too.

    Raises:
        UserError: if it has no policy, or some of what is judged, or judged with, is nowhere.
    """
    root, given = Path.cwd(), settings.model_dump(mode="json", by_alias=True)
    text, own = presets.replaced(
        git.show(root, revision, "params.yaml"),
        {section: given[section] for section in OF_HERE},
        f"params.yaml of {name} with the sections {', '.join(OF_HERE)} of here",
    )
    place = workspaces.visited(root, f"promote-{name}", text, revision)
    with place as folder, contextlib.chdir(folder):
        _complete(name)
        yield files.taken_from(
            root, own, [out for node in dvc_files.graph(Path()).values() for out in node.outs]
        )


def _complete(name: str) -> None:
    """Pull what the cache lacks of the policy, of what stage judge reads and, if it can be had, LINEAGE."""
    locked, graph = dvc_files.locked(Path()), dvc_files.graph(Path())
    if POLICY not in locked:
        raise UserError(f"the experiment {name} has no {POLICY}: its stage ppo has not run")
    made = {out for node in graph.values() for out in node.outs if not out.startswith(dvc_files.KEPT_BY_GIT)}
    read = [path for path in graph["judge"].inputs if path in made] if "judge" in graph else []
    wanted = dict.fromkeys([POLICY, *read])
    lost = [path for path in wanted if _is_lost(path, locked)]
    try:
        if lost:
            dvc_cli.run(Path.cwd(), "pull", "--quiet", *lost)
    except UserError as error:
        said = str(error).splitlines()[-1].removeprefix("ERROR: ")
        parts = ", ".join(f"{path} ({locked[path]})" for path in lost)
        raise UserError(
            f"the DVC cache here lacks of the experiment {name}: {parts}; and `dvc pull` failed: {said}. "
            f"Push it from where it ran (`dvc exp push GIT_REMOTE {name}`, with a DVC remote that is set up "
            f"here too) and give the command again, or make it anew: `dvc exp apply {name} && dvc repro`"
        ) from None
    if _is_lost(LINEAGE, locked):
        try:
            dvc_cli.run(Path.cwd(), "pull", "--quiet", LINEAGE)
        except UserError:
            console.say(f"{LINEAGE} of {name} is nowhere: the version does not tell its run in MLflow")


def _is_lost(path: str, locked: Mapping[str, str]) -> bool:
    return path in locked and not Path(path).exists()
