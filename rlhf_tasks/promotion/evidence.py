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
from pathlib import Path

from ruamel.yaml import YAML

from rlhf_tasks import lineage
from rlhf_tasks.config import UserError

JUDGE, PPO, CURVE = Path("metrics/judge.json"), Path("metrics/ppo.json"), Path("plots/ppo.csv")
POLICY = "models/policy"
KL = "objective/kl_k1"  # whatever ppo.kl_estimator says


def read(root: Path) -> dict[str, float]:
    """metrics/judge.json, and `kl` where it is known.

    Raises:
        UserError: for a file that is there and cannot be read.
    """
    found: dict[str, float] = {}
    try:
        if (root / JUDGE).exists():
            found |= json.loads((root / JUDGE).read_text(encoding="utf-8"))
        if (root / PPO).exists() and (root / CURVE).exists():
            kept = json.loads((root / PPO).read_text(encoding="utf-8")).get("selected_episode")
            with (root / CURVE).open(encoding="utf-8", newline="") as file:
                curve = [
                    (float(row["episode"]), float(row[KL])) for row in csv.DictReader(file) if row.get(KL)
                ]
            kl = None if kept is None else kl_at(kept, curve)
            found |= {} if kl is None else {"kl": kl}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{JUDGE}, {PPO} or {CURVE} cannot be read ({error}); run `rlhf judge` or `rlhf ppo` again"
        ) from None
    return found


def is_of(root: Path, md5: str) -> bool:
    """Whether these files tell of the policy with these bytes, by dvc.lock.

    They do not where PPO has run again and the judge has not, where git has brought back other metrics, or
    where params.yaml asks for other judges by now.
    """
    judge, ppo = lineage.locked_by("judge", root), lineage.locked_by("ppo", root)
    found = {path: lineage.digest(root / path) for path in (JUDGE, PPO, CURVE) if (root / path).exists()}
    said = {JUDGE: judge.get(str(JUDGE)), PPO: ppo.get(str(PPO)), CURVE: ppo.get(str(CURVE))}
    asked = YAML(typ="safe", pure=True).load((root / "params.yaml").read_text(encoding="utf-8"))["judge"]
    same_judges = lineage.locked_params("judge", root).get("judge") == asked
    return said == found and judge.get(POLICY) == ppo.get(POLICY) == md5 and same_judges


def kl_at(episode: float, curve: list[tuple[float, float]]) -> float | None:
    """The KL of the weights kept at an episode.

    A point of the curve tells of the rollout before its update: weights kept after an update are the
    next point's. Those of the last update have none, and the point before them stands in.
    """
    points = [point for point in curve if math.isfinite(point[1])]
    after = [kl for at, kl in points if at > episode]
    return after[0] if after else points[-1][1] if points else None
