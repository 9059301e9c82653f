"""`rlhf promote [MODEL]` and `--rollback`. MODEL is a checkpoint's folder.

A promotion has these steps, so that after a kill at any point the same command can be repeated:
register the policy and make it challenger; judge it against the champion; write the verdict as a file and as
tags of the version; move the alias `champion`. No torch here: what measures a policy imports it when needed.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from rlhf_tasks import config, console
from rlhf_tasks.config import Config, Promotion
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.project import atomic, dvc_files, hashing, lineage_chain, ready_models
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import measurement, weights
from rlhf_tasks.promotion.measurement import Candidate
from rlhf_tasks.promotion.registry import CHAMPION, ROLLED_BACK, Registry, Unreachable, Version
from rlhf_tasks.promotion.verdict import Verdict, decide, make_table, show
from rlhf_tasks.tracking.context import run_name
from rlhf_tasks.tracking.sync import sync

POLICY = "models/policy"
DONE, REFUSED, DEFERRED, UNDECIDED = 0, 3, 4, 5
"""Exit status: promoted, or champion already; refused by the gate; MLflow does not answer; not judged yet."""
RETRY_HINT = "; repeat the command later"


def promote(paths: Paths, model: str, *, again: bool = False, unless_judging: bool = False) -> int:
    """Let the gate decide about a policy, and make it champion if it passes. Returns the exit status.

    Args:
        paths: The user's project.
        model: A checkpoint's folder.
        again: Also promote a policy that was rolled back.
        unless_judging: Do nothing if the verdict needs anything judged.

    Raises:
        UserError: if there is no gate, no such policy, or no way to judge it.
    """
    settings = config.load(paths.params)
    criteria = read_criteria(settings)
    check(paths.root / model, model)
    try:
        with _lock(paths):
            label, folder = Path(model).as_posix(), _copy_reference(paths, model)
            return _promote(Candidate(paths, folder, label, settings, criteria), again, unless_judging)
    except Unreachable as error:
        console.say(f"Deferred: MLflow does not answer ({error}){RETRY_HINT}")
        return DEFERRED


def _copy_reference(paths: Paths, model: str) -> str:
    """The path of a checkpoint that holds its weights: for a reference, of a copy in .rlhf/policies."""
    known = ready_models.read(paths.root / model)
    if known is None:
        return Path(model).as_posix()
    from rlhf_tasks.models.load import copy_checkpoint

    target = paths.home / "policies" / known["fingerprint"]
    with atomic.whole(target) as copy:
        copy_checkpoint(paths.root / model, copy)
    return os.path.relpath(target, paths.root)


def _promote(candidate: Candidate, again: bool, unless_judging: bool) -> int:
    settings, paths, md5 = candidate.settings, candidate.paths, candidate.md5
    criteria, bar = candidate.criteria, settings.judge.bar
    registry = Registry.open(settings.tracking, paths.home, criteria.model)
    champion = registry.champion()
    if champion is not None and champion.md5 == md5:
        console.say(f"Promoted: {_name(candidate, champion)} is {CHAMPION} already")
        return DONE
    opponent = champion if criteria.over_champion is not None else None
    stale = measurement.find_stale_reason(candidate)
    if unless_judging and (stale or opponent):
        console.say(f"Undecided: {candidate.label} must be judged first")
        return UNDECIDED

    # 1. The version, with what restores it and the run that trained it.
    version = _register(candidate, registry)

    # 2. The verdict.
    results, kl = measurement.collect(candidate, stale)
    compared = {one.b for one in results.comparisons if one.a == "policy"}
    if opponent is not None:
        restored = weights.restore(paths.root, paths.home, opponent.md5, opponent.tags)
        results = measurement.compare_with(candidate, results, "champion", restored)
    elif bar not in compared:
        folder = paths.base if bar == "base" else None
        results = measurement.compare_with(candidate, results, bar, folder)
    judges = settings.judge.judges
    verdict = decide(criteria, results, kl, judges=judges, champion=champion is not None, bar=bar)
    if not again and ROLLED_BACK in version.tags:
        at = version.tags[ROLLED_BACK]
        verdict = verdict.withhold(f"it was rolled back (at {at}; --again permits it)")

    # 3. The record: a file, and tags and text of the version. The alias moves last.
    against = f"version {champion.number}" if champion else "no champion yet"
    known = {"model": criteria.model, "version": version.number, "against": against, "time": _now()}
    atomic.write_json(verdict_file(paths.home, md5), verdict.tree() | known)
    _record(registry, version, verdict, candidate.label, against)
    show(verdict)
    if not verdict.passed:
        console.say(f"Not promoted: {verdict.summary}; it is {_name(candidate, version)}")
        return REFUSED
    registry.promote(version, champion)
    name = _name(candidate, version)
    console.say(f"Promoted: {verdict.summary}; {name} is {CHAMPION} now; before: {against}")
    return DONE


def record_verdict(paths: Paths, settings: Config) -> None:
    """Register the policy of a run with the verdict of stage verdict. Only `rlhf promote` makes a champion.

    Nothing happens without a gate, without tracking, and to a policy that is champion already.
    """
    outs = {out for node in dvc_files.graph(paths.root).values() for out in node.outs}
    if settings.promotion is None or not settings.tracking.enabled or POLICY not in outs:
        return
    candidate = Candidate(paths, POLICY, POLICY, settings, settings.promotion)
    verdict = Verdict.of_tree(json.loads(paths.verdict.read_text(encoding="utf-8")))
    try:
        with _lock(paths):
            registry = Registry.open(settings.tracking, paths.home, settings.promotion.model)
            champion = registry.champion()
            if champion is not None and champion.md5 == candidate.md5:
                return
            version = _register(candidate, registry)
            against = "no champion (`rlhf promote` compares it with one)"
            _record(registry, version, verdict, POLICY, against)
    except (Unreachable, UserError) as error:
        console.say(f"the registry does not have this verdict ({error}); `rlhf promote` writes it later")


def rollback(paths: Paths) -> int:
    """Make the former champion champion again. Returns the exit status.

    Raises:
        UserError: if there is no gate, no champion, or no former one.
    """
    settings = config.load(paths.params)
    criteria = read_criteria(settings)
    try:
        with _lock(paths):
            registry = Registry.open(settings.tracking, paths.home, criteria.model)
            left, now = registry.rollback(_now())
    except Unreachable as error:
        console.say(
            f"Deferred: MLflow does not answer ({error}). The rollback may have happened: check which "
            f"version is {CHAMPION} before you repeat the command, which would roll back once more"
        )
        return DEFERRED
    console.say(
        f"Rolled back: {criteria.model} version {now.number} is {CHAMPION} again instead of version "
        f"{left.number}, which only `rlhf promote --again` can promote again"
    )
    return DONE


def check(folder: Path, name: str) -> None:
    """Refuse a folder that is not a policy.

    Raises:
        UserError: if it is not a checkpoint, or is a reward model or a critic.
    """
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{name} is not a checkpoint's folder (it has no config.json); give one such as {POLICY}. For "
            "the policy of an experiment run `dvc exp apply EXPERIMENT`, then `rlhf promote`"
        )
    if contracts.read_identity(folder).get("kind") in ("reward", "value"):
        raise UserError(f"{name} is a reward model or a critic; give a policy such as {POLICY}")


def verdict_file(home: Path, md5: str) -> Path:
    """The file of the last verdict on the policy with these bytes."""
    return home / "verdicts" / f"{md5}.json"


def _register(candidate: Candidate, registry: Registry) -> Version:
    """The version of a policy, with what restores it and the run that trained it; it is challenger now."""
    tags, run = _trace(candidate, registry)
    version = registry.register(candidate.md5, candidate.model, tags, run)
    registry.challenge(version)
    return version


def _record(registry: Registry, version: Version, verdict: Verdict, label: str, against: str) -> None:
    result, now, summary = "passed" if verdict.passed else "refused", _now(), verdict.summary
    tags = {"": result, ".summary": summary, ".against": against, ".time": now}
    page = f"{result}: {summary}\n\n`{label}` against {against}, {now}\n\n{make_table(verdict.rows())}\n"
    registry.record(version, {f"verdict{key}": value for key, value in tags.items()}, page)


def _trace(candidate: Candidate, registry: Registry) -> tuple[dict[str, str], str | None]:
    """Tags that say how to restore the policy, and the id of its MLflow run if that is known."""
    root, model, md5 = candidate.paths.root, candidate.model, candidate.md5
    tags = {weights.PATH: model}
    if not weights.is_cached(root, md5):
        tags[weights.FOLDER] = str(candidate.folder.resolve())
        console.say(f"{model} is not in the DVC cache: this folder is the only place to restore it from")
    revision, experiment = lineage_chain.revision_with(root, model, md5) or (None, None)
    tags |= {weights.REVISION: revision} if revision else {}
    tags |= {weights.EXPERIMENT: experiment} if experiment else {}
    tags |= {"rlhf.name": name} if (name := run_name()) else {}
    sampler = contracts.read_identity(candidate.folder).get("sampler")
    tags |= {"rlhf.sampler": sampler} if sampler else {}

    # The lineage of the stage that wrote the policy, unless it describes another one.
    stage = next((name for name, node in dvc_files.graph(root).items() if model in node.outs), "none")
    path, locked = f"models/lineage/{stage}.json", dvc_files.locked_by(root, stage)
    file = root / path
    if locked.get(model) != md5 or not file.exists() or locked.get(path) != hashing.dvc_md5(file):
        return tags, None
    lineage: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    tags |= {"rlhf.run": lineage["rlhf.run"], "git.rev": lineage.get("git.rev") or "none"}
    name = candidate.settings.tracking.experiment
    run = registry.find_run(lineage["rlhf.run"], name)
    if run is None:
        sync(candidate.paths.home)  # the run may still be in the outbox
        run = registry.find_run(lineage["rlhf.run"], name)
    return tags, run


def _name(candidate: Candidate, version: Version) -> str:
    return f"{candidate.criteria.model} version {version.number} ({candidate.label})"


def read_criteria(settings: Config) -> Promotion:
    """The gate's criteria. Raises UserError without a gate."""
    if settings.promotion is None:
        raise UserError(
            "params.yaml has promotion: null, so there is no gate and no champion; give the section a value "
            "(docs/explanation/promotion.md)"
        )
    return settings.promotion


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def _lock(paths: Paths) -> FileLock:
    """Keeps other processes of the project from promoting and rolling back."""
    return FileLock(paths.home / "promotion.lock")
