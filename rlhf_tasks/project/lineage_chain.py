"""`rlhf lineage MODEL_OR_COMMIT`: the chain from raw data to the win rates, and the commands that restore it.

What each stage read and wrote is in the dvc.lock of a commit, or in that of the working tree if it is not
committed. Which run wrote it is in models/lineage/STAGE.json, which the DVC cache has. No torch here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, git, hashing
from rlhf_tasks.project.dvc_files import INPUTS, KEPT_BY_GIT

JUDGE_METRICS = "metrics/judge.json"


@dataclass(frozen=True)
class Link:
    """One stage of the chain."""

    stage: str
    inputs: Mapping[str, str | None]
    """`{path: md5}` as the stage read it; None where dvc.lock has no hash. With what params.yaml names."""
    outs: Mapping[str, str | None]
    lineage: Mapping[str, Any]
    """models/lineage/STAGE.json: the run's key and its commit; empty if the cache does not have it."""


@dataclass(frozen=True)
class Chain:
    """The stages from raw data to the win rates, in the order of dvc.yaml."""

    revision: str | None
    """A commit that has all of it; None if only the working tree has."""
    experiment: str | None
    path: str | None
    """The out that was given, if a single one was."""
    data: Mapping[str, Any]
    """The parameters `data.*` in force; those of params.yaml if the cache lacks what stage prepare read."""
    links: Sequence[Link]
    metrics: Mapping[str, float]
    """Those of stage judge; empty if they are of other responses."""
    notes: Sequence[str]
    prefix: str = ""
    """The project's folder in its repository, such as `part/`."""


def find(root: Path, name: str) -> Chain:
    """The chain that leads to `name`; of an experiment or a commit the whole chain.

    Raises:
        UserError: if nothing has this name.
    """
    path = name.rstrip("/")
    makers = {out: stage for stage, node in dvc_files.graph(root).items() for out in node.outs}
    if makers.get(path, INPUTS) != INPUTS:
        return _of_path(root, path, makers[path])
    if (revision := git.find_experiment(root, name)) is not None:
        return _of_revision(root, revision, name)
    if (revision := git.commit(root, name)) is not None:
        return _of_revision(root, revision, None)
    raise UserError(
        f"{name!r} is not known: give an out of dvc.yaml, such as models/policy, an experiment (`dvc exp "
        "list`), or a git revision. The page of a run in MLflow (tags `dvc.exp` and `git.rev`) or in Prefect "
        "names its experiment or commit"
    )


def _of_path(root: Path, path: str, stage: str) -> Chain:
    """The chain of the bytes that the working tree has at a path."""
    if not (root / path).exists():
        raise UserError(f"{path} does not exist here; `dvc checkout {path}` restores it from dvc.lock")
    md5 = hashing.dvc_md5(root / path)
    if found := revision_with(root, path, md5):
        return _of_revision(root, *found, path)
    raise UserError(
        f"{path} ({md5}) differs from dvc.lock here, in the commit checked out and in all experiments: `dvc "
        f"commit {stage}` records it, `dvc checkout --force {path}` restores the recorded one"
    )


def revision_with(root: Path, path: str, md5: str) -> tuple[str | None, str | None] | None:
    """The first of `_revisions` whose dvc.lock has these bytes at the path, with its name."""
    return next((found for found in _revisions(root) if read_lock(root, found[0]).get(path) == md5), None)


def _revisions(root: Path) -> Iterator[tuple[str | None, str | None]]:
    """The commit checked out, the experiments with their names, newest first, and None: the working tree."""
    if (head := git.commit(root)) is not None:
        known = git.experiments(root)
        yield head, dict(known).get(head)
        yield from known
    yield None, None


def _text(root: Path, revision: str | None, path: str) -> str | None:
    """The text of a file in a commit or in the working tree; None if it does not exist there."""
    if revision is not None:
        return git.show(root, revision, path) if git.files(root, revision, path) else None
    return (root / path).read_text(encoding="utf-8") if (root / path).exists() else None


def read_lock(root: Path, revision: str | None) -> dict[str, str]:
    """The md5 of every out in the dvc.lock of a commit, or of the working tree; empty without one."""
    return dvc_files.locked_in(_text(root, revision, "dvc.lock") or "{}")


def _of_revision(root: Path, revision: str | None, name: str | None, path: str | None = None) -> Chain:
    """The chain in a commit, or in the working tree; with `path`, the stages before and after that out."""
    lock, params = (_text(root, revision, file) or "{}" for file in ("dvc.lock", "params.yaml"))
    graph = dvc_files.graph_in(_text(root, revision, "dvc.yaml") or "stages: {}", params)
    last = next((stage for stage, node in graph.items() if path in node.outs), None)
    read = {stage: hashes for stage, (hashes, _) in dvc_files.read_and_written(lock).items()}
    locked = dvc_files.locked_in(lock)
    written = {out: locked[out] for node in graph.values() for out in node.outs if out in locked}
    records = {
        stage: dvc_cli.cached_json(root, read.get(stage, {}).get(f"{INPUTS}/{stage}.json")) for stage in graph
    }
    links = []
    for stage, node in graph.items():
        if stage == INPUTS or not (
            last is None or stage in _before(graph, last) or last in _before(graph, stage)
        ):
            continue
        deps = {dep: read.get(stage, locked).get(dep) for dep in node.inputs}
        outs = {out: written[out] for out in node.outs if out in written}
        lineage = dvc_cli.cached_json(root, locked.get(f"models/lineage/{stage}.json"))
        links.append(Link(stage, deps | records[stage].get("files", {}), outs, lineage))

    # Inputs that other stages have written again since.
    changed = {
        link.stage: [dep for dep, md5 in link.inputs.items() if md5 and written.get(dep, md5) != md5]
        for link in links
    }
    where = "in this commit" if revision else "here"
    notes = [f"{link.stage} has not run {where}" for link in links if not link.outs]
    notes += [
        f"{stage} has not run again since {', '.join(deps)} changed"
        for stage, deps in changed.items()
        if deps
    ]
    # The metrics, not the document: git has those of every commit, and the cache may lack the document.
    metrics, text = {}, _text(root, revision, JUDGE_METRICS)
    if text is not None:
        is_behind = any(changed[link.stage] for link in links if JUDGE_METRICS in link.outs)
        if is_behind or hashlib.md5(text.encode()).hexdigest() != written.get(JUDGE_METRICS):
            notes.append(f"{JUDGE_METRICS} describes other responses, so its win rates are not shown")
        else:
            metrics = config.flatten(json.loads(text))
    given = config.flatten(config.parse(params, "params.yaml"))
    values = records.get("prepare", {}).get("values", given)
    data = {key: value for key, value in values.items() if key.startswith("data.")}
    return Chain(revision, name, path, data, links, metrics, notes, git.prefix(root))


def _before(graph: Mapping[str, dvc_files.Node], stage: str) -> set[str]:
    """The stage, and all stages that it depends on, directly or not."""
    makers = {out: name for name, node in graph.items() for out in node.outs}
    found = {stage}
    for dep in graph[stage].inputs:
        found |= _before(graph, makers[dep]) if dep in makers else set()
    return found


def lines(chain: Chain) -> Iterator[str]:
    """The chain as text: data first, win rates last, then the commands."""
    where = chain.revision or "the working tree; the commit checked out does not have it"
    if chain.experiment:
        where = f"experiment {chain.experiment} ({chain.revision})"
    yield f"{chain.path} in {where}" if chain.path else where
    written = {out for link in chain.links for out in link.outs}
    raw = {dep: md5 for link in chain.links for dep, md5 in link.inputs.items() if dep not in written}
    for path, md5 in raw.items():
        if not path.startswith((*KEPT_BY_GIT, f"{INPUTS}/")):
            yield f"data         {path}  {md5 or 'not in dvc.lock'}"
    if (source := chain.data.get("data.source", "files")) != "files":
        yield f"data         source {source}"
    if "data.chat" in chain.data:
        yield f"data         chat {chain.data['data.chat']}"
    for link in chain.links:
        run = link.lineage.get("rlhf.run")
        text = f"run {run}, code of {link.lineage.get('git.rev')}" if run else ""
        yield f"{link.stage:12} {text}"
        yield from (f"{'':12} {path}  {md5}" for path, md5 in link.outs.items())
    for key, rate in chain.metrics.items():
        stem = key.removesuffix("/win_rate")
        if stem != key:
            judge, _, pair = stem.partition("/")
            low, high = (chain.metrics[f"{stem}/{end}"] for end in ("low", "high"))
            yield f"win rate     {judge}: {pair.replace('_vs_', ' vs ')}  {rate:.1%} ({low:.1%}–{high:.1%})"
    yield from (f"note         {note}" for note in chain.notes)
    purpose = "to restore it" if chain.revision else "to commit it, so that it can be restored"
    yield from ("", f"{purpose}:", *(f"  {command}" for command in commands(chain)))


def commands(chain: Chain) -> list[str]:
    """What restores the chain, and each out alone. For a chain that is not committed: what commits it."""
    outs = [out for link in chain.links for out in link.outs if not out.startswith("models/lineage/")]
    keys = [link.lineage["rlhf.run"] for link in chain.links if link.lineage]
    search = [f"rlhf mlflow  # then search the runs for tags.`rlhf.run` = '{key}'" for key in keys[-1:]]
    if chain.revision is None:
        kept = sorted({f"{out.split('/')[0]}/" for out in outs if out.startswith(KEPT_BY_GIT)})
        return [f"git add {' '.join(['dvc.lock', *kept])} && git commit --all", *search]
    short, checkout = chain.revision[:12], f"git checkout {chain.revision} && dvc checkout"
    if chain.experiment:
        checkout = f"dvc exp apply {chain.experiment}"
    found = [f"{checkout}  # all of it, in this folder"]
    for out in [chain.path] if chain.path else outs:
        at = f"{chain.prefix}{out}"  # git and DVC take it from the repository's top
        by_dvc = f"dvc get . {at} --rev {short} -o {out.replace('/', '-')}"
        found.append(f"git show {short}:{at}" if out.startswith(KEPT_BY_GIT) else by_dvc)
    return [*found, *search]
