"""The evidence about a policy: what the pipeline measured, or else what is measured now.

No torch here: what runs models is imported when something must be measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_tasks import console
from rlhf_tasks.config import Config, JudgeView, Promotion
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import has_reward, optimized_judges, selecting_judges
from rlhf_tasks.judging.results import ComparisonResult, EvaluationResults
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import evidence, judge_files
from rlhf_tasks.promotion.candidate import Candidate
from rlhf_tasks.promotion.gate import Evidence, Kl, Opponent


def stale_reason(candidate: Candidate, local: Paths) -> str | None:
    """Why the project's results do not describe the candidate by today's judges; None if they do."""
    paths = candidate.paths
    if not evidence.is_judged_here(paths, candidate.md5):
        return f"are not of {candidate.model}"
    if not _has_readable_results(paths):
        file = paths.relative(paths.evaluation_results)
        return f"are of another version of the code ({file} is missing or has another form)"
    changed = judge_files.changed(paths.root, local.root)
    return f"were measured with another {', '.join(changed)}" if changed else None


def _has_readable_results(paths: Paths) -> bool:
    try:
        EvaluationResults.read(paths.evaluation_results)
    except UserError:
        return False
    return True


@dataclass(frozen=True)
class Measurer:
    """Measures one candidate, with the models and the data of its own project."""

    settings: Config
    criteria: Promotion
    candidate: Candidate
    local: Paths
    """The project whose files the judges read."""

    def collect(self, stale: str | None) -> Evidence:
        """The pipeline's results, or new ones if `stale` is a reason not to use those."""
        paths = self.candidate.paths
        if stale is None:
            known = evidence.read(paths)
        else:
            console.say(f"the results here {stale}: the policy is judged and measured against SFT now")
            known = self._measure()
        judging, folder = self._settings().judge, self.candidate.folder
        own = {
            "has_reward": has_reward(folder),
            "optimised_judges": {**known.results.optimised_judges, **self._optimized()},
            "selecting_judges": selecting_judges(judging, folder, paths.root),
        }
        return replace(known, results=known.results.model_copy(update=own))

    def with_champion(self, known: Evidence, champion: Path) -> Evidence:
        """The evidence, and the comparisons with the champion's weights."""
        model = os.path.relpath(champion, self.candidate.paths.root)
        comparisons = (*known.results.comparisons, *self._compare(model, "champion"))
        return replace(known, results=known.results.model_copy(update={"comparisons": comparisons}))

    def with_bar(self, known: Evidence) -> Evidence:
        """The evidence, and the comparisons with `judge.bar`, if they are not among it."""
        paths, bar = self.candidate.paths, self.settings.judge.bar
        if any(one.a == "policy" and one.b == bar for one in known.results.comparisons):
            return known
        model = "reference" if bar == "reference" else paths.relative(paths.base)
        comparisons = (*known.results.comparisons, *self._compare(model, bar))
        return replace(known, results=known.results.model_copy(update={"comparisons": comparisons}))

    def _measure(self) -> Evidence:
        paths = self.candidate.paths
        results = EvaluationResults(comparisons=self._compare(paths.relative(paths.sft), "sft"))
        kl: Kl | None = None
        if self._needs_cost():
            from rlhf_tasks.promotion import cost

            measured = cost.measure(self._settings(), paths, self.candidate.folder)
            kept = {"retention": measured.retention, "task_changes": measured.task_changes}
            results, kl = results.model_copy(update=kept), measured.kl
        if evidence.is_trained_here(paths, self.candidate.md5):
            kl = evidence.selected_kl(paths) or kl
        return Evidence(results=results, kl=kl)

    def _compare(self, against: str, opponent: Opponent) -> tuple[ComparisonResult, ...]:
        """The candidate against another model by the gate's judges, as `policy` against `opponent`."""
        from rlhf_tasks.judging import head_to_head

        results = head_to_head.compare_models(
            JudgeView.of(self._settings()),
            self.candidate.model,
            against,
            paths=self.candidate.paths,
            names=self.criteria.named,
            functions_root=self.local.root,
        )
        names = {"a": "policy", "b": opponent}
        return tuple(comparison.model_copy(update=names) for comparison in results.comparisons)

    def _needs_cost(self) -> bool:
        own = self.criteria
        bounds = (own.max_kl, own.max_perplexity_growth, own.max_choice_drop, own.max_task_drop)
        return any(bound is not None for bound in bounds)

    def _optimized(self) -> dict[str, str]:
        """Judges that are what PPO optimized for the candidate: its reward model, or a function."""
        paths, judging = self.candidate.paths, self._settings().judge
        optimized = optimized_judges(judging, self.candidate.folder, paths.root)
        if evidence.is_trained_here(paths, self.candidate.md5):
            functions = evidence.reward_functions(paths)
            optimized |= {
                one.name: one.function
                for one in judging.judges
                if one.kind == "function" and one.function in functions
            }
        return optimized

    def _settings(self) -> Config:
        return judge_files.with_local_paths(self.settings, self.candidate.paths.root, self.local.root)
