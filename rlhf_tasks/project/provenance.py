"""`rlhf lineage MODEL_OR_RUN`: the chain from raw data to the verdict, and what brings each part back.

A thing is named by a path (models/policy), an experiment, a git revision, a run's key (`rlhf.run`), a
flow run's id, or an MLflow run's id. What is known of it stands in the dvc.lock of a commit, or in that of
the working tree where it has not been committed; who made each part, in the models/lineage/STAGE.json
that it names, which the DVC cache holds. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_tasks import config
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_cli, dvc_files, experiments, git, hashing
from rlhf_tasks.project.paths import Paths

MLFLOW_ID = re.compile(r"[0-9a-f]{32}")
FLOW_ID = re.compile(r"(prefect-)?([0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})")
VERDICTS = "metrics/judge.json"


@dataclass(frozen=True)
class Link:
    """One stage of the chain."""

    stage: str
    inputs: Mapping[str, str | None]
    """`{path: md5}` as the stage read it; None where dvc.lock does not say."""
    outs: Mapping[str, str | None]
    made: Mapping[str, Any]
    """models/lineage/STAGE.json: the run's key, its commit; empty if the cache does not have it."""


@dataclass(frozen=True)
class Chain:
    revision: str | None
    """A commit that has all of it; None where only the dvc.lock of the working tree does."""
    experiment: str | None
    path: str | None
    """What was asked for, if it was a single out."""
    links: Sequence[Link]
    metrics: Mapping[str, float]
    notes: Sequence[str]


def find(root: Path, asked: str) -> Chain:
    """The chain that ends in what is asked for; all of it for an experiment, a commit or a flow's run.

    Raises:
        UserError: if nothing is known by that name, or MLflow is to be asked and does not answer.
    """
    path = asked.rstrip("/")
    makers = {out: stage for stage, node in dvc_files.graph(root).items() for out in node.outs}
    if path in makers:
        return _of_path(root, path, makers[path])
    name = _named_by_run(root, asked) or asked
    revision = experiments.find(root, name)
    if revision is not None:
        return _of_revision(root, revision, name, None)
    if (stage := _stage_of_key(root, name)) is not None:
        return _of_key(root, name, stage)
    revision = git.commit(root, name)
    if revision is not None:
        return _of_revision(root, revision, None, None)
    raise UserError(
        f"{asked!r} is no out of dvc.yaml ({', '.join(makers)}), no experiment (`dvc exp list`), no git "
        "revision, and no run that this project knows (a key like ppo-20260101T000000-abc123, a flow run's "
        "id, an MLflow run's id)"
    )


def _of_path(root: Path, path: str, stage: str) -> Chain:
    """Of what lies in the working tree now, by its bytes."""
    if not (root / path).exists():
        raise UserError(f"{path} is not here; `dvc checkout {path}` brings back what dvc.lock has")
    md5 = hashing.dvc_md5(root / path)
    for revision, name in _revisions(root):
        if _locked(root, revision).get(path) == md5:
            return _of_revision(root, revision, name, stage, path)
    raise UserError(
        f"{path} ({md5}) is not what dvc.lock says, here, in the commit checked out or in an experiment: "
        f"`dvc commit {stage}` makes it say so, `dvc checkout --force {path}` brings back what it says now"
    )


def _of_key(root: Path, key: str, stage: str) -> Chain:
    for revision, name in _revisions(root):
        if _made(root, _locked(root, revision), stage).get("rlhf.run") == key:
            return _of_revision(root, revision, name, stage)
    raise UserError(
        f"neither dvc.lock, here or in the commit checked out, nor an experiment has the run {key}"
    )


def _of_revision(
    root: Path, revision: str | None, name: str | None, last: str | None, path: str | None = None
) -> Chain:
    lock, graph = _text(root, revision, "dvc.lock") or "{}", dvc_files.graph(root)
    read = {stage: hashes for stage, (hashes, _) in dvc_files.read_and_written(lock).items()}
    locked = dvc_files.locked_in(lock)
    made = {out: locked[out] for node in graph.values() for out in node.outs if out in locked}
    wanted = _before(graph, last) if last is not None else set(graph)
    if last is not None:
        wanted |= {stage for stage in graph if last in _before(graph, stage)}  # up to the verdict on it
    links = [
        Link(
            stage,
            {dep: read.get(stage, locked).get(dep) for dep in node.inputs},
            {out: made[out] for out in node.outs if out in made},
            _made(root, locked, stage),
        )
        for stage, node in graph.items()
        if stage in wanted
    ]
    where = "in this commit" if revision else "here"
    notes = [f"{link.stage} has not run {where}" for link in links if not link.outs]
    notes += [
        f"{link.stage} has not run again since {', '.join(changed)} changed"
        for link in links
        if (changed := _changed(link, made))
    ]
    verdicts = _verdicts(root, revision, links, made)
    if verdicts is None:
        notes.append(f"{VERDICTS} is of something else, and is not told")
    return Chain(revision, name, path, links, verdicts or {}, notes)


def _verdicts(
    root: Path, revision: str | None, links: Sequence[Link], made: Mapping[str, str]
) -> dict[str, float] | None:
    """What the judges measured; None if it was of other answers."""
    text = _text(root, revision, VERDICTS)
    if text is None:
        return {}
    is_behind = any(_changed(link, made) for link in links if VERDICTS in link.outs)
    if is_behind or hashlib.md5(text.encode()).hexdigest() != made.get(VERDICTS):
        return None
    return config.flatten(json.loads(text))


def _changed(link: Link, made: Mapping[str, str]) -> list[str]:
    """What the stage read of other stages that they have made anew."""
    return [dep for dep, md5 in link.inputs.items() if made.get(dep, md5) != md5]


def _before(graph: Mapping[str, dvc_files.Node], stage: str) -> set[str]:
    """The stage, and all whose outs it depends on, directly or not."""
    makers = {out: name for name, node in graph.items() for out in node.outs}
    found, todo = set[str](), [stage]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [makers[dep] for dep in graph[name].inputs if dep in makers]
    return found


def _revisions(root: Path) -> Iterator[tuple[str | None, str | None]]:
    """The commit checked out, the experiments, newest first, each with its name, and the working tree."""
    head = git.commit(root, "HEAD")
    if head is not None:
        yield head, None
    yield from experiments.listing(root)
    yield None, None


def _locked(root: Path, revision: str | None) -> dict[str, str]:
    text = _text(root, revision, "dvc.lock")
    return dvc_files.locked_in(text) if text is not None else {}


def _text(root: Path, revision: str | None, path: str) -> str | None:
    """Of a file in a commit, or in the working tree; None if it is not there."""
    if revision is not None:
        return git.show(root, revision, path) if git.files(root, revision, path) else None
    return (root / path).read_text(encoding="utf-8") if (root / path).exists() else None


def _made(root: Path, locked: Mapping[str, str], stage: str) -> dict[str, Any]:
    md5 = locked.get(f"models/lineage/{stage}.json")
    if md5 is None:
        return {}
    try:
        blob = dvc_cli.cached_file(dvc_cli.cache(root), md5)
        found: dict[str, Any] = json.loads(blob.read_text(encoding="utf-8"))
    except OSError:
        return {}
    return found


def _stage_of_key(root: Path, name: str) -> str | None:
    stage, _, rest = name.partition("-")
    return stage if stage in dvc_files.graph(root) and re.fullmatch(r"\d{8}T\d{6}-[0-9a-f]+", rest) else None


def _named_by_run(root: Path, asked: str) -> str | None:
    """What a flow run's spool or an MLflow run's tags name: a key, an experiment that there is, a commit."""
    if flow := FLOW_ID.fullmatch(asked):
        spool = Paths(root).home / "spool"
        tags = dict[str, str]()
        for file in [*spool.glob(f"flow-{flow[2]}*.jsonl"), *spool.glob(f"delivered/flow-{flow[2]}*.jsonl")]:
            for line in file.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                tags |= record["values"] if record["kind"] == "tags" else {}
        return _experiment_or_commit(root, tags)
    if MLFLOW_ID.fullmatch(asked):
        from rlhf_tasks.tracking import context, records

        uri = context.uri(config.load(root / "params.yaml").tracking)
        tags = records.tags(uri, Paths(root).home, asked)
        return tags.get("rlhf.run") or _experiment_or_commit(root, tags)
    return None


def _experiment_or_commit(root: Path, tags: Mapping[str, str]) -> str | None:
    """The commit where nothing differed from it, so that nothing was saved."""
    name = tags.get("dvc.exp")
    return name if name and experiments.find(root, name) else tags.get("git.rev")


def lines(chain: Chain) -> Iterator[str]:
    """The chain as text: data first, verdict last, then the commands."""
    where = chain.revision or "the working tree; the commit checked out does not have it"
    if chain.experiment:
        where = f"experiment {chain.experiment} ({chain.revision})"
    yield f"{chain.path} in {where}" if chain.path else where
    made = {out for link in chain.links for out in link.outs}
    raw = {dep: md5 for link in chain.links for dep, md5 in link.inputs.items() if dep not in made}
    for path, md5 in raw.items():
        if not path.startswith(("metrics/", "plots/")):
            yield f"data         {path}  {md5 or 'not in dvc.lock'}"
    for link in chain.links:
        run = link.made.get("rlhf.run")
        by = f"  run {run}, code of {link.made.get('git.rev')}" if run else ""
        yield f"{link.stage:12} {by.strip()}"
        for path, md5 in link.outs.items():
            yield f"{'':12} {path}  {md5}"
    for key, rate in chain.metrics.items():
        if key.endswith("/win_rate"):
            base = key.removesuffix("/win_rate")
            low, high = chain.metrics[f"{base}/low"], chain.metrics[f"{base}/high"]
            yield f"verdict      {base.replace('_vs_', ' vs ')}  {rate:.1%} ({low:.1%}–{high:.1%})"
    yield from (f"note         {note}" for note in chain.notes)
    aim = "to bring it back" if chain.revision else "to keep it, so that it can be brought back"
    yield from ("", f"{aim}:", *(f"  {command}" for command in commands(chain)))


def commands(chain: Chain) -> list[str]:
    """What restores all of it, here or beside, and each out alone; what commits it, if no commit has it."""
    all_outs = [out for link in chain.links for out in link.outs if not out.startswith("models/lineage/")]
    keys = [link.made["rlhf.run"] for link in chain.links if link.made]
    told = [f"rlhf mlflow  # then search the runs for tags.`rlhf.run` = '{key}'" for key in keys[-1:]]
    if chain.revision is None:
        held = sorted({f"{out.split('/')[0]}/" for out in all_outs if out.startswith(dvc_files.KEPT_BY_GIT)})
        return [f"git add {' '.join(['dvc.lock', *held])} && git commit --all", *told]
    here = (
        f"dvc exp apply {chain.experiment}"
        if chain.experiment
        else f"git checkout {chain.revision} && dvc checkout"
    )
    outs = [chain.path] if chain.path else all_outs
    held = [out for out in outs if not out.startswith(dvc_files.KEPT_BY_GIT)]
    return [
        f"{here}  # all of it, in this folder",
        *(f"dvc get . {out} --rev {chain.revision[:12]} -o {out.replace('/', '-')}" for out in held),
        *(f"git show {chain.revision[:12]}:{out}" for out in outs if out not in held),
        *told,
    ]
