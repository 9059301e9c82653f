"""`rlhf promote [MODEL]` and `rlhf rollback`. MODEL is a folder, or an experiment that holds a policy.

Promoting goes in this order, so that a kill anywhere leaves a state from which the same command goes on:
register the policy and call it challenger; judge it against the champion; write the verdict as a file, and
as tags of the version; move the alias `champion`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock

from rlhf_tasks import config, console
from rlhf_tasks.config import Config, JudgeView, Promotion
from rlhf_tasks.config.promotion import parts
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation import judges
from rlhf_tasks.project import atomic, dvc_files, experiments, git, hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import evidence, experiment, files, gate, weights
from rlhf_tasks.promotion.evidence import POLICY
from rlhf_tasks.promotion.registry import CHAMPION, LEFT, Registry, Unreachable
from rlhf_tasks.tracking.courier import sync

DONE, REFUSED, DEFERRED, UNDECIDED = 0, 3, 4, 5
"""Exit status: promoted (or champion already); the gate refused; MLflow does not answer; to be judged."""
GOES_ON = "; the same command goes on later"
SFT = "models/sft"


def promote(asked: str, *, again: bool = False, unless_judging: bool = False) -> int:
    """Put a policy to the gate, and make it champion if it passes; the exit status comes back.

    `asked` is a checkpoint's folder, or else an experiment's name. `again`: also one that was rolled back.
    `unless_judging`: nothing is done, registered or loaded where anything would have to be judged.

    Raises:
        UserError: if there is no gate, no such policy, or no way to judge.
    """
    settings = config.load()
    criteria = _criteria(settings)
    revision = None if (Path(asked) / "config.json").is_file() else experiment.find(asked)
    if revision is None:
        _check_policy(Path(asked))
    home, here = Paths().home, Path.cwd()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "promotion.lock"):
            if revision is None:
                model = Path(asked).as_posix()
                return _promote(settings, criteria, model, home, here, again, unless_judging)
            with experiment.entered(settings, asked, revision) as own:
                called = f"{POLICY} of {asked}"
                return _promote(own, criteria, POLICY, home, here, again, unless_judging, called)
    except Unreachable as error:
        console.say(f"Deferred: MLflow does not answer ({error}){GOES_ON}")
        return DEFERRED


def _promote(
    settings: Config,
    criteria: Promotion,
    model: str,
    home: Path,
    here: Path,
    again: bool,
    unless_judging: bool,
    called: str | None = None,
) -> int:
    """Of the policy in a folder below the working folder, whose metrics those there may be.

    `here` is the user's folder, of which the judges' files are.
    """
    root, md5, called = Path.cwd(), hashing.dvc_md5(Path(model)), called or model
    registry = Registry.open(settings.tracking, home, criteria.model)
    champion = registry.champion()
    if champion is not None and champion.md5 == md5:
        console.say(f"Promoted: {criteria.model} version {champion.number} ({called}) is {CHAMPION} already")
        return DONE
    against = champion if criteria.over_champion is not None else None
    untold = _untold(model, md5, here)
    if unless_judging and (untold or against):
        console.say(f"Undecided: {called} is to be judged first")
        return UNDECIDED
    version = registry.register(md5, model, *_origin(root, home, model, md5, registry, settings))
    registry.challenge(version)
    measured = _measured(settings, criteria, model, md5, untold)
    if against is not None:
        if not against.md5:
            raise UserError(
                f"version {against.number} of {criteria.model} is {CHAMPION} and has no tag dvc.md5: `rlhf "
                "promote` did not register it, and nobody knows its weights; move the alias, or remove it"
            )
        theirs = weights.bring(root, home, against.md5, against.tags)
        measured |= _contest(settings, criteria, model, os.path.relpath(theirs), "champion")
    suspects = {one for name in criteria.named for one in parts(settings.judge.judges, name)}
    verdict = gate.decide(criteria, measured, suspects=suspects, champion=champion is not None)
    if not again and LEFT in version.tags:
        verdict = verdict.withheld(f"rollbacks of this policy (at {version.tags[LEFT]}; --again lifts this)")
    told = {
        "": "passed" if verdict.passed else "refused",
        "summary": verdict.summary,
        "against": f"version {champion.number}" if champion else "no champion yet",
        "time": _now(),
    }
    known = {"model": criteria.model, "version": version.number, "against": told["against"]}
    atomic.write_json(verdict_file(home, md5), verdict.tree() | known | {"time": told["time"]})
    registry.record(version, told | {"criteria": _criteria_tag(verdict)}, _page(called, told, verdict))
    gate.show(verdict)
    name = f"{criteria.model} version {version.number} ({called})"
    if not verdict.passed:
        console.say(f"Refused: {name}: {verdict.summary}")
        return REFUSED
    registry.crown(version, champion)
    console.say(f"Promoted: {name} is {CHAMPION} now; before: {told['against']}")
    return DONE


def _check_policy(folder: Path) -> None:
    """Before anything is registered; no torch, so that only what the files say is looked at."""
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} is no checkpoint (it has no config.json), and no experiment; give a folder such as "
            f"{POLICY}, or a name that `dvc exp list -A` shows"
        )
    identity = folder / "rlhf.json"
    try:
        kind = json.loads(identity.read_text(encoding="utf-8")).get("kind") if identity.exists() else None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{identity} cannot be read ({error}); bring the folder back") from None
    if kind in ("reward", "reward_heldout"):
        raise UserError(f"{folder} is a reward model; give a policy such as {POLICY}")


def rollback() -> int:
    """Give `champion` back to the version that had it before; the exit status comes back.

    Raises:
        UserError: if there is no gate, no champion, or none before it.
    """
    settings, home = config.load(), Paths().home
    criteria = _criteria(settings)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "promotion.lock"):
            left, now = Registry.open(settings.tracking, home, criteria.model).give_back(_now())
    except Unreachable as error:
        console.say(
            f"Deferred: MLflow does not answer ({error}). It may have been done all the same: look at who is "
            f"{CHAMPION} before you give the command again, which goes back by one more"
        )
        return DEFERRED
    console.say(
        f"Rolled back: {criteria.model} version {now.number} is {CHAMPION} again; version {left.number} is "
        "not, and is promoted again only by `rlhf promote --again`"
    )
    return DONE


def verdict_file(home: Path, md5: str) -> Path:
    """Where the last verdict on a policy with these bytes is."""
    return home / "verdicts" / f"{md5}.json"


def _criteria(settings: Config) -> Promotion:
    if settings.promotion is None:
        raise UserError(
            "params.yaml has promotion: null, so there is no gate to pass, and no champion; give the section "
            "(README: Promotion)"
        )
    return settings.promotion


# ------------------------------------------------------------------------------------- evidence


def _untold(model: str, md5: str, here: Path) -> str | None:
    """Why the metrics here do not tell of this policy by today's judges; None if they do."""
    if not evidence.is_of(Path(), md5):
        return f"are not of {model}"
    others = files.changed(Path(), here)
    return f"were measured with another {', '.join(others)}" if others else None


def _measured(
    settings: Config, criteria: Promotion, model: str, md5: str, untold: str | None
) -> dict[str, float]:
    """By the names of metrics/judge.json: what the pipeline measured; of another policy, what can be now."""
    if untold is None:
        found = evidence.read(Path())
    else:
        console.say(f"the metrics here {untold}: it is judged, and measured, against {SFT} now")
        found = _contest(settings, criteria, model, SFT, "sft") | _cost(settings, criteria, model)
        found |= evidence.kl(Path()) if evidence.is_trained(Path(), md5) else {}
    suspects = set(judges.optimised(settings.judge, Path(model)))
    if evidence.is_trained(Path(), md5):
        functions = evidence.rewards(Path())
        suspects |= {
            j.name for j in settings.judge.judges if j.kind == "function" and j.function in functions
        }
    return found | {f"{name}/is_optimised_reward": 1.0 for name in suspects}


def _contest(settings: Config, criteria: Promotion, model: str, against: str, name: str) -> dict[str, float]:
    """As `rlhf judge MODEL --against …` measures it, by the names `JUDGE/policy_vs_NAME/…`."""
    from rlhf_tasks.evaluation import head_to_head

    view = JudgeView.of(settings)
    found = head_to_head.run(view, model, against, num_examples=None, names=criteria.named)
    return {
        key.replace(f"/{model}_vs_{against}/", f"/policy_vs_{name}/"): value for key, value in found.items()
    }


def _cost(settings: Config, criteria: Promotion, model: str) -> dict[str, float]:
    """`kl` and retention, where the gate asks for any of them."""
    if (criteria.max_kl, criteria.max_perplexity_growth, criteria.max_choice_drop) == (None, None, None):
        return {}
    from rlhf_tasks.promotion import cost

    return cost.measured(settings, Path(model), Path(SFT))


# --------------------------------------------------------------------------------------- origin


def _origin(
    root: Path, home: Path, model: str, md5: str, registry: Registry, settings: Config
) -> tuple[dict[str, str], str | None]:
    """Tags that say where a policy comes from and how to bring it back, and the MLflow run that made it."""
    tags = {weights.PATH: model}
    if not weights.is_kept(root, md5):
        tags[weights.FOLDER] = str(Path(model).resolve())
        console.say(f"{model} is not in the DVC cache: as champion it could be found in this folder only")
    if (found := _revision(root, model, md5)) is not None:
        tags |= {weights.REVISION: found[0]} | ({weights.EXPERIMENT: found[1]} if found[1] else {})
    made = _made(model, md5)
    if not made:
        return tags, None
    tags |= {"rlhf.run": made["rlhf.run"], "git.rev": made.get("git.rev") or "none"}
    run = registry.run_of(made["rlhf.run"], settings.tracking.experiment)
    if run is None:
        sync(home)  # it may not be delivered yet
        run = registry.run_of(made["rlhf.run"], settings.tracking.experiment)
    return tags, run


def _made(model: str, md5: str) -> dict[str, Any]:
    """models/lineage/STAGE.json of the stage whose out it is; empty if that tells of another, or of none."""
    stage = next((name for name, node in dvc_files.graph(Path()).items() if model in node.outs), "none")
    path, locked = Path("models/lineage") / f"{stage}.json", dvc_files.locked_by(Path(), stage)
    if locked.get(model) != md5 or not path.exists() or locked.get(path.as_posix()) != hashing.dvc_md5(path):
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _revision(root: Path, model: str, md5: str) -> tuple[str, str | None] | None:
    """The commit checked out, else an experiment's, whose dvc.lock has it; with its name if it is one's."""
    head = git.commit(root, "HEAD")
    if head is None:
        return None
    known = experiments.listing(root)
    for revision, name in [(head, dict(known).get(head)), *known]:
        if not git.files(root, revision, "dvc.lock"):
            continue
        if dvc_files.locked_in(git.show(root, revision, "dvc.lock")).get(model) == md5:
            return revision, name
    return None


# -------------------------------------------------------------------------------------- verdict


def _criteria_tag(verdict: gate.Verdict) -> str:
    """A line a criterion. Tags of their own would crowd the list of versions in MLflow."""
    lines = []
    for criterion, row in zip(verdict.criteria, verdict.rows(), strict=True):
        margin = f"margin {row['margin']}" if row["margin"] else criterion.lacking
        end = "passed" if criterion.passed else "failed"
        lines.append(f"{criterion.key}: {row['value']} {row['asked']}, {margin}, {end}")
    return "\n".join(lines)


def _page(model: str, told: Mapping[str, str], verdict: gate.Verdict) -> str:
    """What MLflow shows with the version, in markdown."""
    names = list(verdict.rows()[0])
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in verdict.rows())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    where = f"`{model}` against {told['against']}, {told['time']}"
    return f"{told['']}: {told['summary']}\n\n{where}\n\n{table}\n"


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
