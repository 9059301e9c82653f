"""The criteria by which a policy becomes the champion in MLflow's model registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rlhf_tasks.config.judge import OPTIMISED, FunctionJudge, Judge, Judging, Mixture, RewardModelJudge
from rlhf_tasks.config.ppo import Ppo
from rlhf_tasks.config.types import Fraction, PositiveFloat, PositiveInt, Section


class Promotion(Section):
    """The gate's criteria; null turns a criterion off. None of them reads the reward that PPO optimised."""

    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = Field(
        description="the name of the registered model in MLflow"
    )
    judge: str = Field(description="the judge, of judge.judges, whose win rates decide")
    second_judge: str | None = Field(
        description="a judge that must confirm it with the same bounds; null: one judge decides"
    )
    over_sft: Fraction = Field(
        description="lower bound of the 95% interval of the win rate over SFT (exclusive)"
    )
    over_champion: Fraction | None = Field(
        description="the same for the win rate over the champion, if there is one"
    )
    max_kl: PositiveFloat | None = Field(
        description="largest KL from SFT of the checkpoint that PPO kept, in nats per response"
    )
    max_perplexity_growth: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        description="largest ratio of the policy's perplexity to SFT's, on each text of judge.retention"
    )
    max_choice_drop: Fraction | None = Field(
        description="largest drop of multiple-choice accuracy from SFT to the policy"
    )
    max_failure_share: Fraction | None = Field(
        description="largest share of failures among the comparisons of the gate's judges"
    )
    min_examples: PositiveInt = Field(
        description="smallest number of comparisons per judge and pair, failures not counted"
    )

    @property
    def named(self) -> tuple[str, ...]:
        """The judges that the gate goes by."""
        return (self.judge,) if self.second_judge is None else (self.judge, self.second_judge)


def parts(judges: Sequence[Judge], name: str) -> set[str]:
    """The judge itself, and those that it mixes."""
    mixed = {part for one in judges if isinstance(one, Mixture) and one.name == name for part in one.judges}
    return {name} | mixed


def conflicts(promotion: Promotion, judging: Judging, ppo: Ppo) -> Iterator[str]:
    """What of the section cannot be, seeing the others."""
    known = [judge.name for judge in judging.judges]
    for key in ("judge", "second_judge"):
        name = getattr(promotion, key)
        if name is None:
            continue
        if name not in known:
            yield (
                f"promotion.{key}={name!r} is no judge of judge.judges ({', '.join(known)}); name one of "
                "those, or set promotion to null"
            )
        for one in _optimised(judging, ppo, parts(judging.judges, name)):
            yield (
                f"promotion.{key}={name!r} goes by {one}, which PPO optimises: its word says nothing about "
                "whether the policy got better; name another judge"
            )
    if promotion.second_judge is not None:
        first, second = (
            {one.name: _asked(one) for one in judging.judges if one.name in parts(judging.judges, name)}
            for name in promotion.named
        )
        both = sorted(name for name, asked in second.items() if asked in first.values())
        if both:
            yield (
                f"promotion.second_judge={promotion.second_judge!r} and promotion.judge={promotion.judge!r} "
                f"both go by what {', '.join(both)} says; name one that judges by itself, or set it to null"
            )
    for key in ("max_perplexity_growth", "max_choice_drop"):
        if getattr(promotion, key) is not None and judging.retention is None:
            yield f"promotion.{key} needs judge.retention, which measures it; set one, or the other to null"
    if promotion.min_examples > judging.num_examples:
        yield (
            f"promotion.min_examples={promotion.min_examples} is more than judge.num_examples="
            f"{judging.num_examples}, so that nothing could pass"
        )
    if promotion.max_kl is not None and ppo.reference_sync is not None:
        yield (
            "promotion.max_kl: with ppo.reference_sync the KL is told from a reference that follows the "
            "policy, not from SFT; set promotion.max_kl to null"
        )


def _asked(judge: Judge) -> dict[str, Any]:
    """All that decides what a judge says: two of different names may be one."""
    known = judge.model_dump(exclude={"name"})
    return known | ({"path": Path(known["path"]).as_posix()} if "path" in known else {})


def _optimised(judging: Judging, ppo: Ppo, names: set[str]) -> Iterator[str]:
    """Those of the judges that are what a scorer of PPO's is, by what params.yaml says."""
    functions = {scorer.function for scorer in ppo.scorers if scorer.kind == "function"}
    rewarded = any(scorer.kind == "reward_model" for scorer in ppo.scorers)
    for judge in judging.judges:
        if judge.name not in names:
            continue
        if isinstance(judge, FunctionJudge) and judge.function in functions:
            yield judge.function
        if isinstance(judge, RewardModelJudge) and rewarded and Path(judge.path).as_posix() == OPTIMISED:
            yield judge.path
