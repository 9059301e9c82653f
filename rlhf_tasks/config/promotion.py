"""The criteria by which a policy becomes the champion in MLflow's model registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rlhf_tasks.config.judge import CombinedJudge, FunctionJudge, Judge, Judging, RewardModelJudge
from rlhf_tasks.config.ppo import Ppo
from rlhf_tasks.config.scorers import reward_folders
from rlhf_tasks.config.types import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section


class Promotion(Section):
    """The gate's criteria; null turns a criterion off. None of them reads the reward that PPO optimised."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    """Name of the registered model in MLflow."""
    judge: str
    """Name of the judge in judge.judges whose win rates decide."""
    second_judge: str | None
    """Name of a second judge whose win rates must exceed the same bounds; null: one judge decides."""
    over_sft: Fraction
    """Bound that the lower end of the 95% interval of the win rate over SFT must exceed."""
    over_champion: Fraction | None
    """The same bound for the win rate over the champion, if there is one; null: it is not compared."""
    max_kl: PositiveFloat | None
    """Largest KL from SFT of the checkpoint that PPO kept, in nats per response."""
    max_perplexity_growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    """Largest ratio of the policy's perplexity to SFT's, on each text of judge.retention."""
    max_choice_drop: Fraction | None
    """Largest drop of multiple-choice accuracy from SFT to the policy."""
    max_task_drop: NonNegativeFloat | None
    """Largest drop from SFT to the policy on each task of judge.retention.tasks, in its first metric."""
    max_failure_share: Fraction | None
    """Largest share of failures among the comparisons of the gate's judges."""
    min_examples: PositiveInt
    """Smallest number of comparisons per judge and pair, without failures."""

    @property
    def named(self) -> tuple[str, ...]:
        """The gate's judges."""
        return (self.judge,) if self.second_judge is None else (self.judge, self.second_judge)


def with_parts(judges: Sequence[Judge], name: str) -> set[str]:
    """A judge's name, and the names of the judges that it combines."""
    parts = {
        part for one in judges if isinstance(one, CombinedJudge) and one.name == name for part in one.judges
    }
    return {name} | parts


def conflicts(promotion: Promotion, judging: Judging, ppo: Ppo) -> Iterator[str]:
    """The problems of the section that come from other sections."""
    yield from _judge_conflicts(promotion, judging, ppo)
    for key in ("max_perplexity_growth", "max_choice_drop"):
        if getattr(promotion, key) is not None and judging.retention is None:
            yield f"promotion.{key} needs judge.retention, which measures it; set one, or the other to null"
    retention = judging.retention
    if promotion.max_task_drop is not None and (retention is None or retention.tasks is None):
        yield "promotion.max_task_drop needs judge.retention.tasks, whose tasks it bounds; set it to null"
    if promotion.min_examples > judging.num_examples:
        yield (
            f"promotion.min_examples={promotion.min_examples} is more than judge.num_examples="
            f"{judging.num_examples}, so that no policy could pass"
        )
    if promotion.max_kl is not None and ppo.reference_sync is not None:
        yield (
            "promotion.max_kl bounds the KL from SFT, but with ppo.reference_sync PPO measures the KL from a "
            "reference that follows the policy; set promotion.max_kl to null"
        )


def _judge_conflicts(promotion: Promotion, judging: Judging, ppo: Ppo) -> Iterator[str]:
    known = [judge.name for judge in judging.judges]
    for key in ("judge", "second_judge"):
        name = getattr(promotion, key)
        if name is None:
            continue
        if name not in known:
            yield (
                f"promotion.{key}={name!r} is not in judge.judges ({', '.join(known)}); name one of those, "
                "or set promotion to null"
            )
        for reward in _optimised(judging, ppo, with_parts(judging.judges, name)):
            yield (
                f"promotion.{key}={name!r} uses {reward}, which PPO optimises, so it cannot show whether the "
                "policy got better; name another judge"
            )
    if promotion.second_judge is not None:
        shared = _shared(promotion, judging)
        if shared:
            yield (
                f"promotion.second_judge={promotion.second_judge!r} and promotion.judge={promotion.judge!r} "
                f"both use {', '.join(shared)}; name a second judge that is independent, or set it to null"
            )


def _shared(promotion: Promotion, judging: Judging) -> list[str]:
    """The judges behind `second_judge` that are defined as one behind `judge`, whatever their names."""
    first, second = (
        {one.name: _definition(one) for one in judging.judges if one.name in with_parts(judging.judges, name)}
        for name in promotion.named
    )
    return sorted(name for name, definition in second.items() if definition in first.values())


def _definition(judge: Judge) -> dict[str, Any]:
    """Everything but the name: two judges of different names may be the same."""
    known = judge.model_dump(exclude={"name"})
    return known | ({"path": Path(known["path"]).as_posix()} if "path" in known else {})


def _optimised(judging: Judging, ppo: Ppo, names: set[str]) -> Iterator[str]:
    """The named judges that are also a scorer of PPO, according to params.yaml."""
    functions = {scorer.function for scorer in ppo.scorers if scorer.kind == "function"}
    folders = reward_folders(ppo.scorers)
    for judge in judging.judges:
        if judge.name not in names:
            continue
        if isinstance(judge, FunctionJudge) and judge.function in functions:
            yield judge.function
        if isinstance(judge, RewardModelJudge) and Path(judge.path).as_posix() in folders:
            yield judge.path
