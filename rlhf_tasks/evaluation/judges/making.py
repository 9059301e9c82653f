"""`judge.judges` → judges, in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_tasks.config import Judging
from rlhf_tasks.config import judge as config
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.judges import asked
from rlhf_tasks.evaluation.judges.comparing import Comparing
from rlhf_tasks.evaluation.judges.local import Local, Ranker
from rlhf_tasks.evaluation.judges.mixtures import RULES, Mixed
from rlhf_tasks.evaluation.judges.scoring import Function, Gold, RewardModel, Scoring
from rlhf_tasks.evaluation.judges.verdicts import Judge, Verdicts
from rlhf_tasks.project.paths import Paths

if TYPE_CHECKING:
    from rlhf_tasks.evaluation.judges.llm import Trace


class Once:
    """A judge that remembers its verdicts, so that a mixture asks for nothing twice."""

    def __init__(self, judge: Judge) -> None:
        self.name = judge.name
        self._judge = judge
        self._known: dict[tuple[tuple[str, ...], ...], Verdicts] = {}

    def compare(self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str]) -> Verdicts:
        key = (tuple(prompts), tuple(a), tuple(b))
        if key not in self._known:
            self._known[key] = self._judge.compare(prompts, a, b)
        return self._known[key]

    def facets(self, prompts: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
        return self._judge.facets(prompts, answers)


def build(
    settings: Judging,
    source: str,
    device: torch.device,
    names: Sequence[str] = (),
    trace: Trace | None = None,
) -> list[Judge]:
    """The judges of `judge.judges`, or those called `names` of them; `trace` shows what llm judges say.

    Raises:
        UserError: for one that cannot be made: an unknown name, a missing key, model, prompt or function.
    """
    known = [judge.name for judge in settings.judges]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UserError(f"judge.judges has no judge {', '.join(unknown)}; it has {', '.join(known)}")
    wanted, needed = set(names or known), asked(settings, names)
    gold = {one.name for one in settings.judges if isinstance(one, config.GoldJudge)}
    if source != "synthetic" and gold & needed:
        raise UserError(
            f"judge.judges: gold knows the synthetic task only, data.source is {source!r}; use reward_model"
        )
    made: dict[str, Judge] = {
        one.name: Once(single(one, device, settings.max_failure_share, trace, settings.num_traces))
        for one in settings.judges
        if not isinstance(one, config.Mixture) and one.name in needed
    }
    for one in settings.judges:
        if isinstance(one, config.Mixture) and one.name in wanted:
            made[one.name] = Mixed(one.name, RULES[one.kind], [made[name] for name in one.judges])
    return [made[name] for name in known if name in wanted]


def single(
    one: config.Judge,
    device: torch.device,
    max_failure_share: float,
    trace: Trace | None = None,
    num_traces: int = 0,
    *,
    key: str = config.LISTED,
) -> Judge:
    """Any judge but a mixture; `key` is where params.yaml has it, for messages.

    Raises:
        UserError: as `build`.
    """
    if isinstance(one, config.GoldJudge):
        return Scoring(one.name, Gold())
    if isinstance(one, config.RewardModelJudge):
        return Scoring(one.name, RewardModel(Path(one.path), device))
    if isinstance(one, config.FunctionJudge):
        return Scoring(one.name, Function(one.function, key))
    if isinstance(one, config.LlmJudge):
        from rlhf_tasks.evaluation.judges.llm import (
            Llm,
        )  # a second of importing for those alone who have such a judge

        llm = Llm(one, max_failure_share, Paths().home, key=key, trace=trace, num_traces=num_traces)
        return Comparing(one.name, llm, max_failure_share)
    if isinstance(one, config.LocalJudge):
        return Comparing(one.name, Local(one, device, key), max_failure_share)
    assert isinstance(one, config.PairRmJudge), "a mixture is made of judges that are there"
    return Comparing(one.name, Ranker(one, device, key), max_failure_share)
