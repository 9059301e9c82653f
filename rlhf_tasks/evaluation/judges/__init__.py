"""Whose word counts: which judges are asked, and which of them PPO was trained to please.

Nothing is judged here, and no torch is loaded: making.py makes the judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlhf_tasks.config import Judging
from rlhf_tasks.config import judge as config
from rlhf_tasks.modeling import contracts


def asked(settings: Judging, names: Sequence[str]) -> set[str]:
    """Those called `names`, by default all, and what the mixtures among them are made of."""
    wanted = set(names) or {judge.name for judge in settings.judges}
    mixtures = (j for j in settings.judges if isinstance(j, config.Mixture) and j.name in wanted)
    return wanted | {part for mixture in mixtures for part in mixture.judges}


def optimised(settings: Judging, policy: Path, names: Sequence[str] = ()) -> dict[str, str]:
    """Judges that are the very reward which PPO was given for `policy`: name → folder.

    Of those that are asked when `names` judge (parts of a mixture too), by default of all. They are known
    by their weights, whatever the folder is called. Empty for a policy that does not say what it was made
    from.
    """
    needed = asked(settings, names)
    given = contracts.parents_of(policy).get("reward")
    return {
        one.name: one.path
        for one in settings.judges
        if given is not None
        and isinstance(one, config.RewardModelJudge)
        and one.name in needed
        and contracts.is_made(Path(one.path))
        and contracts.fingerprint(Path(one.path)) == given
    }
