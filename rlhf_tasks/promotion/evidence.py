"""What the pipeline measured of its policy, for the gate. No torch here.

    metrics/judge.json    win rates, retention, marks of judges that PPO optimised
    metrics/ppo.json      which episode's weights were kept
    plots/ppo.csv         the KL as training went

Of the last two nothing else is read: no score, no reward.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files, hashing

JUDGE, PPO, CURVE = Path("metrics/judge.json"), Path("metrics/ppo.json"), Path("plots/ppo.csv")
POLICY = "models/policy"
KL = "objective/kl_k1"  # whatever ppo.kl_estimator says
BESIDE = ("labels", "num_traces", "num_samples_shown")  # keys of `judge` that change no verdict


def read(root: Path) -> dict[str, float]:
    """metrics/judge.json, and `kl` where it is known.

    Raises:
        UserError: for a file that is there and cannot be read.
    """
    try:
        told = json.loads((root / JUDGE).read_text(encoding="utf-8")) if (root / JUDGE).exists() else {}
        found = {key: float(value) for key, value in told.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{JUDGE} cannot be read ({error}); run `rlhf judge` again") from None
    return found | kl(root)


def kl(root: Path) -> dict[str, float]:
    """`kl` of the weights that were kept; empty where it is not known.

    Raises:
        UserError: for a file that is there and cannot be read.
    """
    try:
        if (root / PPO).exists() and (root / CURVE).exists():
            kept = json.loads((root / PPO).read_text(encoding="utf-8")).get("selected_episode")
            with (root / CURVE).open(encoding="utf-8", newline="") as file:
                curve = [
                    (float(row["episode"]), float(row[KL])) for row in csv.DictReader(file) if row.get(KL)
                ]
            found = None if kept is None else kl_at(kept, curve)
            return {} if found is None else {"kl": found}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{PPO} or {CURVE} cannot be read ({error}); run `rlhf ppo` again") from None
    return {}


def is_trained(root: Path, md5: str) -> bool:
    """Whether PPO's files here tell of the policy with these bytes, by dvc.lock."""
    ppo = dvc_files.locked_by(root, "ppo")
    here = all(
        (root / path).exists() and hashing.dvc_md5(root / path) == ppo.get(str(path)) for path in (PPO, CURVE)
    )
    return here and ppo.get(POLICY) == md5


def rewards(root: Path) -> set[str]:
    """The functions that PPO optimised when it made the policy of dvc.lock."""
    scorers = dvc_files.locked_params(root, "ppo").get("ppo", {}).get("scorers", [])
    return {scorer["function"] for scorer in scorers if "function" in scorer}


def is_of(root: Path, md5: str) -> bool:
    """Whether these files tell of the policy with these bytes, by dvc.lock.

    They do not where PPO has run again and the judge has not, where git has brought back other metrics, or
    where params.yaml asks for other judges by now.
    """
    judge = dvc_files.locked_by(root, "judge")
    here = (root / JUDGE).exists() and hashing.dvc_md5(root / JUDGE) == judge.get(str(JUDGE))
    then, now = dvc_files.locked_params(root, "judge").get("judge", {}), dvc_files.parameters(root)["judge"]
    return is_trained(root, md5) and here and judge.get(POLICY) == md5 and _decisive(then) == _decisive(now)


def _decisive(judge: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in judge.items() if key not in BESIDE}


def kl_at(episode: float, curve: list[tuple[float, float]]) -> float | None:
    """The KL of the weights kept at an episode.

    A point of the curve tells of the rollout before its update: weights kept after an update are the
    next point's. Those of the last update have none, and the point before them stands in.
    """
    points = [point for point in curve if math.isfinite(point[1])]
    after = [kl for at, kl in points if at > episode]
    return after[0] if after else points[-1][1] if points else None
