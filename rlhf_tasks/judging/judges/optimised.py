"""Which judges an evaluation needs, and which of them PPO has optimised or chosen checkpoints by.

No torch, and no judge is built.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
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
    return _with_weights(settings, contracts.optimized_rewards(policy), root, names)


def selecting_judges(
    settings: Judging, policy: Path, root: Path, names: Sequence[str] = ()
) -> dict[str, str]:
    """Judges that are the reward model by which PPO chose the checkpoint `policy`: as `optimised_judges`."""
    chosen_by = contracts.read_identity(policy).get("chosen_by")
    return _with_weights(settings, {chosen_by} if chosen_by else set(), root, names)


def has_reward(policy: Path) -> bool:
    """False for a policy that says of itself that only dummy scorers have trained it."""
    return bool(contracts.read_identity(policy).get("reward") != "none")


def _with_weights(settings: Judging, rewards: Set[str], root: Path, names: Sequence[str]) -> dict[str, str]:
    required = required_judges(settings, names)
    return {
        judge.name: judge.path
        for judge in settings.judges
        if rewards
        and isinstance(judge, config.RewardModelJudge)
        and judge.name in required
        and contracts.has_model(root / judge.path)
        and contracts.fingerprint(root / judge.path) in rewards
    }
