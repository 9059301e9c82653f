"""Builds the judges of `judge.judges`, and the judges that score: the higher score wins in either order."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from rlhf_tasks.config import Judging
from rlhf_tasks.config import judge as config
from rlhf_tasks.data import synthetic
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.tokenizer import load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.judges.comparisons import (
    RULES,
    Comparer,
    Comparisons,
    Judge,
    JudgePanel,
    PairwiseJudge,
    Question,
    Reply,
    list_required_judges,
)
from rlhf_tasks.judging.judges.local import LocalComparer
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring import reward_model
from rlhf_tasks.scoring.build import score_gold
from rlhf_tasks.scoring.function import TWO, ColumnsFunction, ImportedScorer
from rlhf_tasks.scoring.protocol import Responses, Scorer, read_scores
from rlhf_tasks.scoring.retokenize import special_names
from rlhf_tasks.scoring.verifier import Verifier

Facets = Callable[[Sequence[str], Sequence[str]], dict[str, float]]
"""Means of other measures over prompts and their responses."""


class ScoringJudge:
    """A judge made of a scorer; a score that is not finite is a failure.

    A set of responses is scored once, however often it is compared.
    """

    def __init__(self, name: str, scorer: Scorer, facets: Facets = lambda prompts, responses: {}) -> None:
        self.name = name
        self._scorer, self._facets = scorer, facets
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[float]] = {}

    def _scores(self, prompts: Sequence[str], responses: Sequence[str], columns: Columns) -> list[float]:
        key = (tuple(prompts), tuple(responses), repr(columns))
        if key not in self._known:
            scores: list[float] = self._scorer(Responses.of_texts(prompts, responses, columns)).tolist()
            self._known[key] = [score if math.isfinite(score) else math.nan for score in scores]
        return self._known[key]

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        scores = np.array(self._scores(prompts, a, columns)), np.array(self._scores(prompts, b, columns))
        outcomes = statistics.outcomes(*scores)
        failed = np.isnan(outcomes).nonzero()[0].tolist()
        return Comparisons(outcomes, scores=scores, failures=dict.fromkeys(failed, "no finite score"))

    def facets(
        self, prompts: Sequence[str], responses: Sequence[str], columns: Columns = NONE
    ) -> dict[str, float]:
        finite = [score for score in self._scores(prompts, responses, columns) if not math.isnan(score)]
        mean = {"score": sum(finite) / len(finite)} if finite else {}
        return self._facets(prompts, responses) | mean


def gold_facets(prompts: Sequence[str], responses: Sequence[str]) -> dict[str, float]:
    """What the gold score is made of."""
    scores = [synthetic.gold(p, r) for p, r in zip(prompts, responses, strict=True)]
    names = ("coverage", "faithfulness", "brevity")
    return {name: sum(getattr(s, name) for s in scores) / len(scores) for name in names}


class FunctionComparer:
    """A `Comparer`: `function(prompts, a, b, **columns)` gives per pair the probability that `a` is better.

    None is a failure.

    Raises:
        UserError: as `ColumnsFunction`, and if it does not return one number from 0 to 1, or None, per pair.
    """

    def __init__(self, function: str, key: str, root: Path, columns: Collection[str] = ()) -> None:
        self._function = ColumnsFunction(function, key, root, columns, TWO)

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        returned = self._function(*zip(*questions, strict=True), columns=columns)
        name, count = self._function.name, len(questions)
        found = read_scores(name, returned, count, per="pair", undecided=True).tolist()
        wrong = next((x for x in found if x < 0 or x > 1), None)
        if wrong is not None:
            raise UserError(f"{name} must return a probability or None per pair, but gave {wrong:g}")
        return [Reply.failed("the function cannot tell") if math.isnan(x) else Reply(x) for x in found]


def build_judges(
    settings: Judging,
    device: torch.device,
    paths: Paths,
    *,
    names: Sequence[str] = (),
    columns: Collection[str] = (),
) -> list[Judge]:
    """The judges of `judge.judges`, or those called `names`, in the order of the list.

    Relative paths of models, prompts and functions are below `paths.root`. `columns` are the names of the
    kept columns.

    Raises:
        UserError: for an unknown name, for a judge whose key, model, prompt or function is missing, and for a
            function that needs a column that is not kept.
    """
    known = [judge.name for judge in settings.judges]
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise UserError(f"judge.judges has no judge {', '.join(unknown)}; it has {', '.join(known)}")
    selected, required = set(names or known), list_required_judges(settings, names)
    judges: dict[str, Judge] = {}
    for one in sorted(settings.judges, key=lambda one: isinstance(one, config.CombinedJudge)):
        if isinstance(one, config.CombinedJudge) and one.name in selected:  # after its parts
            judges[one.name] = JudgePanel(one.name, RULES[one.kind], [judges[name] for name in one.judges])
        elif not isinstance(one, config.CombinedJudge) and one.name in required:
            judges[one.name] = build_judge(one, device, settings.max_failure_share, paths, columns=columns)
    return [judges[name] for name in known if name in selected]


def build_judge(
    one: config.Judge,
    device: torch.device,
    max_failure_share: float,
    paths: Paths,
    *,
    columns: Collection[str] = (),
    key: str = config.LISTED,
) -> Judge:
    """One judge that is not a combined one; `key` is its place in params.yaml, for messages."""
    root = paths.root
    comparer: Comparer
    match one:
        case config.GoldJudge():
            return ScoringJudge(one.name, score_gold, gold_facets)
        case config.RewardModelJudge():
            policy = None if one.is_of_pipeline else load_tokenizer(paths.tokenizer)
            return ScoringJudge(one.name, reward_model.load(root / one.path, device, policy))
        case config.VerifierJudge():
            return ScoringJudge(one.name, Verifier(one.checks, one.format))
        case config.FunctionJudge(pairwise=False):
            return ScoringJudge(one.name, ImportedScorer(one.function, key, root, columns))
        case config.FunctionJudge():
            comparer = FunctionComparer(one.function, key, root, columns)
        case config.LlmJudge():
            # The import takes a second: only configurations with such a judge pay for it.
            from rlhf_tasks.judging.judges.llm import LlmComparer

            special = special_names(load_tokenizer(paths.tokenizer))
            comparer = LlmComparer(one, max_failure_share, paths, key=key, special=special)
        case config.LocalJudge():
            comparer = LocalComparer(one, device, root, key)
        case _:
            raise AssertionError("a combined judge is built from other judges")
    return PairwiseJudge(one.name, comparer, max_failure_share)
