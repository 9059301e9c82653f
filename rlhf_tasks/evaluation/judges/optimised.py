"""Which judges an evaluation needs, and which of them PPO has optimised. No torch, and no judge is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_tasks.config import Judging
from rlhf_tasks.config import judge as config
from rlhf_tasks.models import contracts


def required_judges(settings: Judging, names: Sequence[str]) -> set[str]:
    """The judges `names`, by default all, and the judges that the combined ones among them are made of."""
    selected = set(names) or {judge.name for judge in settings.judges}
    combined = (j for j in settings.judges if isinstance(j, config.CombinedJudge) and j.name in selected)
    return selected | {part for judge in combined for part in judge.judges}


def optimised_judges(
    settings: Judging, policy: Path, root: Path, names: Sequence[str] = ()
) -> dict[str, str]:
    """Judges that are a reward model which PPO optimised for `policy`: name → folder as configured.

    Only judges that `names` need are considered. Their folders are below `root`. Weights identify a reward
    model, whatever its folder is called. Empty for a policy whose rlhf.json names no reward model.
    """
    required = required_judges(settings, names)
    rewards = contracts.optimized_rewards(policy)
    return {
        judge.name: judge.path
        for judge in settings.judges
        if rewards
        and isinstance(judge, config.RewardModelJudge)
        and judge.name in required
        and contracts.has_model(root / judge.path)
        and contracts.fingerprint(root / judge.path) in rewards
    }
