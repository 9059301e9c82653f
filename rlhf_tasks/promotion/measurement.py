"""What decides about a policy: what the pipeline measured, or else what is measured now.

No torch here: what runs models is imported when something must be measured.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_tasks import config, console
from rlhf_tasks.config import VIEWS, Config, JudgeView, Promotion
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import describe_training
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.models import contracts
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.project import dvc_files, hashing, inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.verdict import Kl, Measurements, Opponent, read_kl
from rlhf_tasks.training import auto

DISPLAY_ONLY = ("judge.labels",)  # it changes no comparison
BOUNDS_OF_COST = (
    *("max_kl", "max_perplexity_growth", "max_response_perplexity_growth", "min_distinct_ratio"),
    *("max_choice_drop", "max_task_drop"),
)
"""Criteria whose values `measure_cost` measures."""


@dataclass(frozen=True)
class Candidate:
    """A policy that may become champion."""

    paths: Paths
    model: str
    """Its folder, as a path from the project's folder."""
    label: str
    """Its name in messages."""
    settings: Config
    criteria: Promotion

    @property
    def folder(self) -> Path:
        return self.paths.root / self.model

    @functools.cached_property
    def md5(self) -> str:
        return hashing.dvc_md5(self.folder)


def is_trained_here(paths: Paths, md5: str) -> bool:
    """Whether stage ppo has written the policy with these bytes, according to dvc.lock."""
    return dvc_files.locked_by(paths.root, "ppo").get(paths.relative(paths.policy)) == md5


def is_judged_here(paths: Paths, md5: str) -> bool:
    """Whether the files in the project describe the policy with these bytes, according to dvc.lock.

    They do not if PPO has run since the judge did, if the files were replaced, or if `judge` in params.yaml
    has changed since.
    """
    now = VIEWS["judge"].of(config.load(paths.params)).declared
    decisive, used = (
        {k: v for k, v in values.items() if k.startswith("judge.") and k not in DISPLAY_ONLY}
        for values in (now, inputs.used(paths.root, "judge").values)
    )
    locked, written = dvc_files.locked_by(paths.root, "judge"), paths.judge_results
    is_current = written.exists() and hashing.dvc_md5(written) == locked.get(paths.relative(written))
    is_of_policy = is_trained_here(paths, md5) and locked.get(paths.relative(paths.policy)) == md5
    return is_current and is_of_policy and decisive == used


def find_stale_reason(candidate: Candidate) -> str | None:
    """Why the project's results do not describe the candidate by today's judges; None if they do."""
    paths = candidate.paths
    if not is_judged_here(paths, candidate.md5):
        return f"are not of {candidate.model}"
    try:
        EvaluationResults.read(paths.evaluation_results)
    except UserError:
        file = paths.relative(paths.evaluation_results)
        return f"are of another version of the code ({file} is missing or has another form)"
    if candidate.criteria.max_kl is not None and read_kl(candidate.folder) is None:
        return f"lack a KL: {candidate.model}/rlhf.json, by an older version of the code, has none"
    changed = find_changed_files(paths.root)
    return f"were measured with another {', '.join(changed)}" if changed else None


def find_changed_files(root: Path) -> list[str]:
    """Files of a project that differ from those that stage judge used, by its inputs file."""
    files = inputs.used(root, "judge").files
    return [
        path
        for path, md5 in files.items()
        if not (root / path).exists() or hashing.dvc_md5(root / path) != md5
    ]


def collect(candidate: Candidate, stale: str | None) -> Measurements:
    """The pipeline's results, or new ones if `stale` is a reason not to use those."""
    paths, settings = candidate.paths, candidate.settings
    is_own = is_trained_here(paths, candidate.md5)
    if stale is None:
        known = Measurements.read(paths, candidate.folder)
    else:
        console.say(f"the results here {stale}: the policy is judged and measured against SFT now")
        known = Measurements(results=EvaluationResults(), kl=None)
        if any(getattr(candidate.criteria, key) is not None for key in BOUNDS_OF_COST):
            known = measure_cost(settings, paths, candidate.folder)
        if is_own:
            known = replace(known, kl=read_kl(candidate.folder) or known.kl)
        known = compare_with(candidate, known, "sft", paths.sft)
    training = describe_training(settings.judge, candidate.folder, paths.root)
    optimized = {**known.results.optimised_judges, **training["optimised_judges"]}
    functions = {contracts.read_identity(candidate.folder).get("labeled_by")}  # dpo optimizes its labels
    if is_own:  # params.yaml counts too, since the cache may lack the record of the training
        ppo = config.parse(config.read_text(paths.params), "params.yaml").get("ppo", {})
        named = ppo.get("scorers", []) if ppo.get("train", True) else []
        scorers = [*inputs.used(paths.root, "ppo").values.get("ppo.scorers", []), *named]
        functions |= {scorer["function"] for scorer in scorers if "function" in scorer}
    own = [one for one in settings.judge.judges if one.kind == "function" and one.function in functions]
    training["optimised_judges"] = optimized | {one.name: one.function for one in own}
    return replace(known, results=known.results.model_copy(update=training))


def _view(settings: Config, root: Path) -> JudgeView:
    """What stage judge would read here, so that responses are sampled in its precision."""
    return JudgeView.of(auto.resolve(settings, root, needed=[PRECISION]))


def compare_with(
    candidate: Candidate, known: Measurements, opponent: Opponent, folder: Path | None
) -> Measurements:
    """These measurements, and the comparisons with a model in a folder, or with the references.

    The gate's judges compare; the results name the models `policy` and `opponent`.
    """
    from rlhf_tasks.judging import head_to_head

    results = head_to_head.compare_models(
        _view(candidate.settings, candidate.paths.root),
        candidate.model,
        head_to_head.REFERENCE if folder is None else os.path.relpath(folder, candidate.paths.root),
        paths=candidate.paths,
        names=candidate.criteria.named,
    )
    named = (one.model_copy(update={"a": "policy", "b": opponent}) for one in results.comparisons)
    comparisons = (*known.results.comparisons, *named)
    return replace(known, results=known.results.model_copy(update={"comparisons": comparisons}))


def measure_cost(settings: Config, paths: Paths, policy: Path) -> Measurements:
    """What PPO cost the policy: its KL from the SFT model of a project, and the retention of both.

    A policy with another tokenizer than SFT's has no KL. Its perplexity per token cannot be compared either:
    of retention only the multiple-choice accuracy, which is computed per character, and the tasks are left.

    Raises:
        UserError: if the data does not exist.
    """
    import torch

    from rlhf_tasks.data.batches import read_table
    from rlhf_tasks.judging.responses import sample_alike
    from rlhf_tasks.judging.retention import Probes, measure_responses

    needed = [paths.table("prompts", "test"), paths.table("sft", "test")]
    missing = [paths.relative(path) for path in needed if not path.exists()]
    if missing:
        raise UserError(
            f"{', '.join(missing)} is missing, and is needed to measure the KL and retention of {policy}; "
            "run `rlhf prepare`, or `dvc checkout data`"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = EvaluationResults()
    if settings.judge.retention is not None:
        probes = Probes(settings.judge.retention, paths)
        retention, changes = probes.measure_all({"sft": paths.sft, "policy": policy}, device)
        results = EvaluationResults(
            retention=retention, task_changes=changes, has_demonstrations=probes.has_demonstrations
        )
    try:
        contracts.check_same_tokenizer(paths.sft, policy)
    except ContractError as error:
        console.say(f"KL, perplexity and what the responses are like cannot be compared with SFT's: {error}")
        kept = {name: one.model_copy(update={"perplexity": {}}) for name, one in results.retention.items()}
        return Measurements(results=results.model_copy(update={"retention": kept}), kl=None)
    sources: dict[str, Any] = {"sft": (paths.sft, None), "policy": (policy, None)}
    if paths.base.exists():  # it shares its ends, and samples nothing
        sources["base"] = (paths.base, None)
    rows = read_table(paths, "prompts", "test")[: settings.judge.num_examples]
    prompts, references = [row["prompt"] for row in rows], [row["reference"] for row in rows]
    sampled = sample_alike(
        _view(settings, paths.root), paths, prompts, device, sources=sources, names=("sft", "policy")
    )
    measured = measure_responses(
        paths.sft,
        prompts,
        sampled,
        None if None in references else references,
        settings.judge.retention,
        device,
    )
    results = results.model_copy(update={"responses": measured})
    return Measurements(results=results, kl=measure_kl(settings, paths, policy, prompts, device))


def measure_kl(settings: Config, paths: Paths, policy: Path, prompts: Sequence[str], device: Any) -> Kl:
    """Mean over prompts of Σ log π/π_SFT of a sampled response: objective/kl_k1 of PPO.

    Responses are sampled as PPO does, at `ppo.temperature`, which both log-probs use.
    """
    from rlhf_tasks.data.tokenizer import encode, load_tokenizer
    from rlhf_tasks.judging.responses import sample
    from rlhf_tasks.judging.retention import logprob_sums
    from rlhf_tasks.models.load import load_causal, place

    ppo = auto.resolve(settings, paths.root).ppo
    responses = sample(
        policy,
        prompts,
        paths=paths,
        max_new_tokens=ppo.response_length,
        temperature=ppo.temperature,
        seed=settings.seed,
        device=device,
    ).sampled
    tokenizer = load_tokenizer(paths.sft)
    queries = encode(tokenizer, prompts)
    ours, theirs = (
        logprob_sums(
            place(load_causal(folder), device).eval(),
            queries,
            responses,
            tokenizer,
            ppo.micro_batch_tokens,
            ppo.temperature,
        )
        for folder in (policy, paths.sft)
    )
    kls = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(kls) / len(kls) ** 0.5 if len(kls) > 1 else abs(kls[0])
    return Kl(mean=statistics.fmean(kls), standard_error=error)
