"""`rlhf promote [MODEL]` and `--rollback`. MODEL is a folder, or an experiment that has a policy.

A promotion has these steps, so that after a kill at any point the same command can be repeated:
register the policy and make it challenger; judge it against the champion; write the verdict as a file and as
tags of the version; move the alias `champion`. No torch here: what measures a policy imports it when needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from rlhf_tasks import config, console
from rlhf_tasks.config import Config, Promotion
from rlhf_tasks.config.schema import with_parts
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import experiments
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import candidate as candidates
from rlhf_tasks.promotion import experiment, gate, measurement, origin, record, weights
from rlhf_tasks.promotion.candidate import POLICY, Candidate
from rlhf_tasks.promotion.gate import Verdict
from rlhf_tasks.promotion.record import Record
from rlhf_tasks.promotion.registry import CHAMPION, ROLLED_BACK, Registry, Unreachable, Version

DONE, REFUSED, DEFERRED, UNDECIDED = 0, 3, 4, 5
"""Exit status: promoted, or champion already; refused by the gate; MLflow does not answer; not judged yet."""
RETRY_HINT = "; repeat the command later"


@dataclass(frozen=True)
class _Job:
    """One promotion: the candidate, and what decides about it."""

    settings: Config
    criteria: Promotion
    candidate: Candidate
    local: Paths
    """The user's project, whose judges' files are used."""
    again: bool
    unless_judging: bool


def promote(local: Paths, model: str, *, again: bool = False, unless_judging: bool = False) -> int:
    """Let the gate decide about a policy, and make it champion if it passes. Returns the exit status.

    Args:
        local: The user's project.
        model: A checkpoint's folder, or the name of an experiment.
        again: Also promote a policy that was rolled back.
        unless_judging: Do nothing if the verdict needs anything judged.

    Raises:
        UserError: if there is no gate, no such policy, or no way to judge it.
    """
    settings, root = config.load(local.params), local.root
    criteria = _criteria(settings)
    is_checkpoint = (root / model / "config.json").is_file()
    revision = None if is_checkpoint else experiments.find(root, model)
    if revision is None:
        candidates.check(root / model, model)
    try:
        with _locked(local):
            if revision is None:
                candidate = Candidate.of(local, Path(model).as_posix())
                return _promote(_Job(settings, criteria, candidate, local, again, unless_judging))
            with experiment.checked_out(root, settings, model, revision) as (merged, paths):
                candidate = Candidate.of(paths, POLICY, f"{POLICY} of {model}")
                return _promote(_Job(merged, criteria, candidate, local, again, unless_judging))
    except Unreachable as error:
        console.say(f"Deferred: MLflow does not answer ({error}){RETRY_HINT}")
        return DEFERRED


def rollback(paths: Paths) -> int:
    """Make the former champion champion again. Returns the exit status.

    Raises:
        UserError: if there is no gate, no champion, or no former one.
    """
    settings = config.load(paths.params)
    criteria = _criteria(settings)
    try:
        with _locked(paths):
            registry = Registry.open(settings.tracking, paths.home, criteria.model)
            left, now = registry.rollback(record.now())
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


def _promote(job: _Job) -> int:
    registry = Registry.open(job.settings.tracking, job.local.home, job.criteria.model)
    champion = registry.champion()
    if champion is not None and champion.md5 == job.candidate.md5:
        console.say(f"Promoted: {_name(job, champion)} is {CHAMPION} already")
        return DONE
    opponent = champion if job.criteria.over_champion is not None else None
    stale = measurement.stale_reason(job.candidate, job.local)
    if job.unless_judging and (stale or opponent):
        console.say(f"Undecided: {job.candidate.label} must be judged first")
        return UNDECIDED
    tags, run = origin.describe(job.candidate, job.local.home, registry, job.settings.tracking)
    version = registry.register(job.candidate.md5, job.candidate.model, tags, run)
    registry.challenge(version)
    verdict = _verdict(job, stale, champion, opponent)
    if not job.again and ROLLED_BACK in version.tags:
        time = version.tags[ROLLED_BACK]
        verdict = verdict.withheld(f"rollbacks of this policy (at {time}; --again permits it)")
    return _conclude(job, registry, version, champion, verdict)


def _verdict(job: _Job, stale: str | None, champion: Version | None, opponent: Version | None) -> Verdict:
    measurer = measurement.Measurer(job.settings, job.criteria, job.candidate, job.local)
    evidence = measurer.collect(stale)
    if opponent is not None:
        evidence = measurer.with_champion(evidence, _weights(job, opponent))
    elif job.criteria.over_bar is not None:
        evidence = measurer.with_bar(evidence)
    judges = job.settings.judge.judges
    suspects = {part for name in job.criteria.named for part in with_parts(judges, name)}
    return gate.decide(
        job.criteria,
        evidence,
        suspects=suspects,
        champion=champion is not None,
        bar=job.settings.judge.bar,
    )


def _weights(job: _Job, champion: Version) -> Path:
    if not champion.md5:
        raise UserError(
            f"version {champion.number} of {job.criteria.model} is {CHAMPION} and has no tag dvc.md5: `rlhf "
            "promote` did not register it, so its weights are not known; move the alias, or remove it"
        )
    return weights.restore(job.local.root, job.local.home, champion.md5, champion.tags)


def _conclude(
    job: _Job, registry: Registry, version: Version, champion: Version | None, verdict: Verdict
) -> int:
    """Keep the verdict, show it, and promote the version if it passed."""
    against = f"version {champion.number}" if champion else "no champion yet"
    kept = Record(verdict, job.candidate.label, against, record.now())
    kept.write(record.verdict_file(job.local.home, job.candidate.md5), job.criteria.model, version)
    kept.publish(registry, version)
    gate.show(verdict)
    name = _name(job, version)
    if not verdict.passed:
        console.say(f"Refused: {name}: {verdict.summary}")
        return REFUSED
    registry.promote(version, champion)
    console.say(f"Promoted: {name} is {CHAMPION} now; before: {against}")
    return DONE


def _name(job: _Job, version: Version) -> str:
    return f"{job.criteria.model} version {version.number} ({job.candidate.label})"


def _criteria(settings: Config) -> Promotion:
    if settings.promotion is None:
        raise UserError(
            "params.yaml has promotion: null, so there is no gate and no champion; give the section a value "
            "(docs/explanation/promotion.md)"
        )
    return settings.promotion


@contextmanager
def _locked(paths: Paths) -> Iterator[None]:
    """Keep other processes of the project from promoting and rolling back."""
    paths.home.mkdir(parents=True, exist_ok=True)
    with FileLock(paths.home / "promotion.lock"):
        yield
