"""A run that DVC keeps as an experiment, checked out in a worktree of its own while it is judged.

The user's working tree is not touched. No torch here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_tasks import console, presets
from rlhf_tasks.config import Config
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.project import dvc_cli, dvc_files, git, workspaces
from rlhf_tasks.project.paths import Paths

LOCAL_SECTIONS = ("judge", "promotion", "tracking")
"""Sections of params.yaml that are taken from the user's working tree, not from the experiment."""


@contextlib.contextmanager
def check_out(root: Path, settings: Config, name: str, revision: str) -> Iterator[tuple[Config, Paths]]:
    """The experiment's config, with the LOCAL_SECTIONS of `settings`, and its files in a worktree.

    The experiment's own metrics count if today's judges would measure the same. Otherwise it is judged again
    with its own data, SFT model and reward models.

    Raises:
        UserError: if it has no policy, or a file that judging needs cannot be found.
    """
    local = settings.model_dump(mode="json", by_alias=True)
    given = git.show(root, revision, "params.yaml")
    origin = f"params.yaml of {name} with the local sections {', '.join(LOCAL_SECTIONS)}"
    try:
        text, merged = presets.replaced(
            given, {section: local[section] for section in LOCAL_SECTIONS}, origin
        )
    except ConfigError as error:
        raise UserError(
            f"{error}\nSet the sections judge and promotion of params.yaml to those of {name}, which `git "
            f"show {revision[:10]}:params.yaml` prints (`rlhf preset` sets those of a preset); then repeat "
            "the command"
        ) from None
    with workspaces.visited(root, f"promote-{name}", text, revision) as folder:
        paths = Paths(folder)
        _pull(paths, name)
        yield merged, paths


def _pull(paths: Paths, name: str) -> None:
    """Pull what the cache lacks: the policy, what stage judge reads, and if possible lineage and results."""
    root, locked, graph = paths.root, dvc_files.locked(paths.root), dvc_files.graph(paths.root)
    policy = paths.relative(paths.policy)
    if policy not in locked:
        raise UserError(f"the experiment {name} has no {policy}: its stage ppo has not run")
    cached = {
        out for node in graph.values() for out in node.outs if not out.startswith(dvc_files.KEPT_BY_GIT)
    }
    read = [path for path in graph["judge"].inputs if path in cached] if "judge" in graph else []
    missing = _missing(paths, [policy, *read], locked)
    try:
        if missing:
            dvc_cli.run(root, "pull", "--quiet", *missing)
    except dvc_cli.DvcError as error:
        parts = ", ".join(f"{path} ({locked[path]})" for path in missing)
        raise UserError(
            f"the DVC cache lacks files of the experiment {name}: {parts}; and `dvc pull` failed: "
            f"{error.reason}. Push them from where it ran (`dvc exp push GIT_REMOTE {name}`, with a DVC "
            "remote that is set up here too) and repeat the command, or run it again: "
            f"`dvc exp apply {name} && dvc repro`"
        ) from None
    for path, consequence in {
        paths.relative(paths.lineage("ppo")): "the version will not name its run in MLflow",
        paths.relative(paths.judge_results): "the policy will be judged again",
    }.items():
        try:
            if _missing(paths, [path], locked):
                dvc_cli.run(root, "pull", "--quiet", path)
        except UserError:
            console.say(f"{path} of {name} cannot be found: {consequence}")


def _missing(paths: Paths, needed: list[str], locked: Mapping[str, str]) -> list[str]:
    """The paths that dvc.lock has and the folder has not."""
    return [path for path in dict.fromkeys(needed) if path in locked and not (paths.root / path).exists()]
