"""What a judge is, and what needs no model: comparisons in both orders, combined judges, prompts. No torch.

Two kinds of judges implement the Protocol `Judge`: those that score each response (build.py), and those that
compare two responses, each pair in both orders, since many models favor a place. N prompts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rlhf_tasks.config import Judging
from rlhf_tasks.config import judge as config
from rlhf_tasks.config.schema import with_parts
from rlhf_tasks.data.columns import NONE, Columns, take
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.judging.statistics import Floats
from rlhf_tasks.models import contracts


@dataclass(frozen=True)
class Comparisons:
    """A against B on N prompts. Arrays are (N,) float64."""

    outcomes: Floats
    """1 where A wins, ½ for a tie, 0 where B wins, NaN for a failure of the judge."""
    scores: tuple[Floats, Floats] | None = None
    """The scores of A and of B, from a judge that scores."""
    orders: tuple[Floats, Floats] | None = None
    """Probability that A is better, with A shown first and with A shown second, from a pairwise judge.

    NaN for a failure, and where both responses are the same, so that the judge does not see them."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """The reason of each failure, by the prompt's number."""
    num_replies: int = 0
    """The replies that the comparisons cost, in this run or in an earlier one; `num_tokens` likewise."""
    num_tokens: int = 0


class Judge(Protocol):
    @property
    def name(self) -> str: ...

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        """Compare A's responses with B's, one of each per prompt; `columns` are those of the prompts' rows.

        Raises:
            UserError: if the judge cannot work, reaches its budget, or fails too often.
        """


def check_failures(judge: str, comparisons: Comparisons, max_share: float) -> None:
    """Refuse comparisons of which too many failed.

    Raises:
        UserError: naming the judge, the share, and the most frequent reason.
    """
    count, failed = len(comparisons.outcomes), len(comparisons.failures)
    if failed > max_share * count or failed == count:
        reasons = list(comparisons.failures.values())
        raise too_many_failures(judge, reasons, f"{failed} of {count} comparisons", max_share)


def too_many_failures(judge: str, reasons: Collection[str], what: str, max_share: float) -> UserError:
    reason, times = Counter(reasons).most_common(1)[0]
    return UserError(
        f"judge {judge}: {what} failed, more than max_failure_share={max_share:g} allows; "
        f"{times} with: {reason.rstrip('.')}. Correct the judge, or raise max_failure_share; what a server "
        "has replied is kept, and the same command continues"
    )


class Question(NamedTuple):
    prompt: str
    first: str
    second: str


@dataclass(frozen=True)
class Reply:
    """Probability that the response shown first is the better one; NaN, with the reason, after a failure."""

    probability: float
    failure: str = ""
    num_tokens: int = 0

    @classmethod
    def failed(cls, reason: str, num_tokens: int = 0) -> Reply:
        return cls(math.nan, reason, num_tokens)


class Comparer(Protocol):
    """A model that replies to questions."""

    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        """A reply to each question, in order; `columns` are those of the questions' rows.

        Raises:
            UserError: if the model cannot reply at all, or as soon as more than `max_failures` replies have
                failed.
        """


class PairwiseJudge:
    """A judge that compares each pair in both orders.

    A preference that changes with the order is a tie. Two equal responses are a tie, and the model does not
    see them. Comparisons are remembered, so that a combined judge repeats no question.
    """

    def __init__(self, name: str, comparer: Comparer, max_failure_share: float) -> None:
        self.name = name
        self._comparer, self._max_failure_share = comparer, max_failure_share
        self._known: dict[tuple[tuple[str, ...] | str, ...], Comparisons] = {}

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        key = (tuple(prompts), tuple(a), tuple(b), repr(columns))
        if key in self._known:
            return self._known[key]
        differ = [i for i in range(len(prompts)) if a[i] != b[i]]
        questions = [Question(prompts[i], *order) for i in differ for order in ((a[i], b[i]), (b[i], a[i]))]
        # Two failed replies to one pair are one failed comparison: fewer failed replies prove nothing yet.
        max_failures = 2 * self._max_failure_share * len(prompts)
        rows = take(columns, [i for i in differ for _ in range(2)])
        replies = self._comparer(questions, max_failures, rows) if questions else []
        a_first, a_second = np.full(len(prompts), np.nan), np.full(len(prompts), np.nan)
        outcomes = np.full(len(prompts), 0.5)
        failures: dict[int, str] = {}
        for i, first, second in zip(differ, replies[0::2], replies[1::2], strict=True):
            a_first[i], a_second[i] = first.probability, 1 - second.probability
            if first.failure or second.failure:
                failures[i] = first.failure or second.failure
        outcomes[differ] = statistics.both_orders(a_first[differ], a_second[differ])
        self._known[key] = Comparisons(
            outcomes,
            orders=(a_first, a_second),
            failures=failures,
            num_replies=len(replies),
            num_tokens=sum(reply.num_tokens for reply in replies),
        )
        return self._known[key]


Rule = Callable[[Floats], Floats]
"""(M, N) outcomes of M judges → (N,) outcomes of the combined judge."""


def all_of(outcomes: NDArray[np.float64]) -> Floats:
    """A win or a loss needs all judges; a failure of one is a failure; everything else is a tie."""
    won, lost = (outcomes == 1).all(axis=0), (outcomes == 0).all(axis=0)
    return np.where(np.isnan(outcomes).any(axis=0), np.nan, 0.5 + 0.5 * won - 0.5 * lost)


def majority(outcomes: NDArray[np.float64]) -> Floats:
    """The side that more judges prefer; equal numbers are a tie. Failures of half of them are a failure."""
    lead = np.sign((outcomes == 1).sum(axis=0) - (outcomes == 0).sum(axis=0))
    failed = 2 * np.isnan(outcomes).sum(axis=0) >= len(outcomes)
    return np.where(failed, np.nan, 0.5 + 0.5 * lead)


RULES: Mapping[str, Rule] = {"all_of": all_of, "majority": majority}


class JudgePanel:
    """A judge made of others by one of the rules. It adds nothing to their cost."""

    def __init__(self, name: str, rule: Rule, judges: Sequence[Judge]) -> None:
        self.name = name
        self._rule, self._judges = rule, judges

    def compare(
        self, prompts: Sequence[str], a: Sequence[str], b: Sequence[str], columns: Columns = NONE
    ) -> Comparisons:
        outcomes = self._rule(
            np.stack([judge.compare(prompts, a, b, columns).outcomes for judge in self._judges])
        )
        failed = np.isnan(outcomes).nonzero()[0].tolist()
        names = ", ".join(judge.name for judge in self._judges)
        return Comparisons(outcomes, failures=dict.fromkeys(failed, f"too many of {names} failed"))


PROMPTS = Path(__file__).parent / "prompts"
LETTERS = ("A", "B")


def list_required_judges(settings: Judging, names: Sequence[str]) -> set[str]:
    """The judges `names`, by default all, and the judges that the combined ones among them are made of."""
    selected = names or [judge.name for judge in settings.judges]
    return {part for name in selected for part in with_parts(settings.judges, name)}


def find_judges_by_weights(settings: Judging, rewards: Set[str], root: Path) -> dict[str, str]:
    """Judges that are one of the reward models `rewards`, given by their fingerprints: name → folder.

    Weights identify a reward model, whatever its folder is called; folders are below `root`.
    """
    models = (one for one in settings.judges if isinstance(one, config.RewardModelJudge) and rewards)
    ready = {one.name: one.path for one in models if contracts.has_model(root / one.path)}
    return {name: path for name, path in ready.items() if contracts.fingerprint(root / path) in rewards}


def find_optimized_judges(settings: Judging, policy: Path, root: Path) -> dict[str, str]:
    """Judges that are a reward model which PPO optimized for `policy`, as `find_judges_by_weights`.

    A model behind an endpoint is known by its name: judge → model.
    """
    models = contracts.optimized_chat_models(policy)
    judges = (one for one in settings.judges if isinstance(one, config.LlmJudge))
    by_model = {judge.name: judge.model for judge in judges if judge.model in models}
    return by_model | find_judges_by_weights(settings, contracts.optimized_rewards(policy), root)


def describe_training(settings: Judging, policy: Path, root: Path) -> dict[str, Any]:
    """What a policy says of its own training, as fields of `EvaluationResults`."""
    identity = contracts.read_identity(policy)
    chosen_by = identity.get("chosen_by")  # the fingerprint of a reward model, or the judge of ppo.select_by
    same = {judge.name: judge.kind for judge in settings.judges if judge.definition == chosen_by}
    weights = find_judges_by_weights(settings, {chosen_by} if chosen_by else set(), root)
    return {
        "has_reward": identity.get("reward") != "none",
        "is_trial": bool(identity.get("trial", False)),
        "optimised_judges": find_optimized_judges(settings, policy, root),
        "selecting_judges": same | weights,
    }
