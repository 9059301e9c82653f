"""Builds the judges of `judge.judges`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlhf_tasks.config import Judging
from rlhf_tasks.config import judge as config
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.combined import RULES, CombinedJudge
from rlhf_tasks.judging.judges.comparisons import Comparisons, Judge
from rlhf_tasks.judging.judges.function import FunctionComparer
from rlhf_tasks.judging.judges.local import LocalComparer, RankerComparer
from rlhf_tasks.judging.judges.optimised import required_judges
from rlhf_tasks.judging.judges.pairwise import PairwiseJudge
from rlhf_tasks.judging.judges.scoring import ScoringJudge, gold_facets, score_gold
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring import reward_model
from rlhf_tasks.scoring.function import FunctionScorer
from rlhf_tasks.scoring.verifier import Verifier

if TYPE_CHECKING:
    from rlhf_tasks.judging.human_labels import Label
    from rlhf_tasks.judging.judges.llm import Trace


class MemoizedJudge:
    """A judge that remembers its comparisons, so that a combined judge does not repeat them."""

    def __init__(self, judge: Judge) -> None:
        self.name = judge.name
        self._judge = judge
        self._known: dict[tuple[tuple[str, ...] | str, ...], Comparisons] = {}

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        key = (tuple(prompts), tuple(a), tuple(b), repr(columns))
        if key not in self._known:
            self._known[key] = self._judge.compare(prompts, a, b, columns)
        return self._known[key]

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        return self._judge.facets(prompts, responses, columns)


def build_judges(
    settings: Judging,
    source: str,
    device: torch.device,
    paths: Paths,
    *,
    names: Sequence[str] = (),
    trace: Trace | None = None,
    labels: Sequence[Label] = (),
    functions_root: Path | None = None,
    columns: Collection[str] = (),
) -> list[Judge]:
    """The judges of `judge.judges`, or those called `names`, in the order of the list.

    Relative paths of models and prompts are below `paths.root`. Functions are imported from files below
    `functions_root`, by default `paths.root`. `source` is `data.source`; `trace` records replies of llm
    judges, with what `labels` say of them; `columns` are the names of the kept columns.

    Raises:
        UserError: for an unknown name, for a judge whose key, model, prompt or function is missing, and for a
            function that needs a column that is not kept.
    """
    known = [judge.name for judge in settings.judges]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UserError(f"judge.judges has no judge {', '.join(unknown)}; it has {', '.join(known)}")
    selected, required = set(names or known), required_judges(settings, names)
    gold = {one.name for one in settings.judges if isinstance(one, config.GoldJudge)}
    if source != "synthetic" and gold & required:
        raise UserError(
            f"judge.judges: gold knows the synthetic task only, data.source is {source!r}; use reward_model"
        )
    judges: dict[str, Judge] = {
        one.name: MemoizedJudge(
            build_judge(
                one, device, settings.max_failure_share, paths, trace=trace, num_traces=settings.num_traces,
                labels=labels, functions_root=functions_root, columns=columns,
            )
        )
        for one in settings.judges
        if not isinstance(one, config.CombinedJudge) and one.name in required
    }  # fmt: skip
    for one in settings.judges:
        if isinstance(one, config.CombinedJudge) and one.name in selected:
            judges[one.name] = CombinedJudge(one.name, RULES[one.kind], [judges[name] for name in one.judges])
    return [judges[name] for name in known if name in selected]


def build_judge(
    one: config.Judge,
    device: torch.device,
    max_failure_share: float,
    paths: Paths,
    *,
    trace: Trace | None = None,
    num_traces: int = 0,
    labels: Sequence[Label] = (),
    functions_root: Path | None = None,
    columns: Collection[str] = (),
    key: str = config.LISTED,
) -> Judge:
    """One judge that is not a combined one; `key` is its place in params.yaml, for messages.

    Raises:
        UserError: as `build_judges`.
    """
    root = paths.root
    if isinstance(one, config.GoldJudge):
        return ScoringJudge(one.name, score_gold, gold_facets)
    if isinstance(one, config.RewardModelJudge):
        return ScoringJudge(one.name, reward_model.load(root / one.path, device))
    if isinstance(one, config.FunctionJudge) and one.pairwise:
        own = FunctionComparer(one.function, key, functions_root or root, columns)
        return PairwiseJudge(one.name, own, max_failure_share)
    if isinstance(one, config.FunctionJudge):
        return ScoringJudge(one.name, FunctionScorer(one.function, key, functions_root or root, columns))
    if isinstance(one, config.VerifierJudge):
        return ScoringJudge(one.name, Verifier(one.checks, one.format))
    if isinstance(one, config.LlmJudge):
        # The import takes a second: only configurations with such a judge pay for it.
        from rlhf_tasks.judging.judges.llm import LlmComparer

        llm = LlmComparer(
            one, max_failure_share, paths, key=key, trace=trace, num_traces=num_traces, labels=labels
        )
        return PairwiseJudge(one.name, llm, max_failure_share)
    if isinstance(one, config.LocalJudge):
        return PairwiseJudge(one.name, LocalComparer(one, device, root, key), max_failure_share)
    assert isinstance(one, config.PairRmJudge), "a combined judge is built from other judges"
    return PairwiseJudge(one.name, RankerComparer(one, device, root, key), max_failure_share)
