"""The evidence about a policy: what the pipeline measured, or else what is measured now.

The judges' files (prompts, texts, questions, tasks, model folders, modules of functions) are read from the
user's project, whichever run is judged. Outs of the pipeline (models/reward_heldout) are the exception: they
belong to the run that is judged. No torch here: what runs models is imported when something must be measured.
"""

from __future__ import annotations

import functools
import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_tasks import config, console
from rlhf_tasks.config import VIEWS, Config, JudgeView, Judging
from rlhf_tasks.config.judge import Retention
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import (
    has_reward,
    is_trial,
    optimized_judges,
    selecting_judges,
)
from rlhf_tasks.judging.results import EvaluationResults, ResponseStatistics
from rlhf_tasks.models import contracts
from rlhf_tasks.models.contracts import ContractError
from rlhf_tasks.project import dvc_files, hashing, inputs
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import evidence
from rlhf_tasks.promotion.gate import Evidence, Kl, Opponent

DISPLAY_ONLY = ("judge.labels",)  # it changes no comparison


@dataclass(frozen=True)
class Candidate:
    """A policy that may become champion."""

    paths: Paths
    """The project that it belongs to: the user's, or the worktree of an experiment."""
    model: str
    """Its folder, as a path from the project's folder."""
    label: str
    """Its name in messages."""
    settings: Config
    """Its parameters, with the judges, the gate and the registry of the user's project."""
    local: Paths
    """The user's project."""

    @property
    def folder(self) -> Path:
        return self.paths.root / self.model

    @functools.cached_property
    def md5(self) -> str:
        return hashing.dvc_md5(self.folder)


def is_trained_here(paths: Paths, md5: str) -> bool:
    """Whether metrics/ppo.json describes the policy with these bytes, according to dvc.lock."""
    return _describes(paths, "ppo", paths.metrics("ppo"), md5)


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
    is_of_policy = is_trained_here(paths, md5) and _describes(paths, "judge", paths.judge_results, md5)
    return is_of_policy and decisive == used


def _describes(paths: Paths, stage: str, written: Path, md5: str) -> bool:
    """Whether what a stage wrote is what dvc.lock has, and the stage wrote or read the policy of this md5."""
    locked = dvc_files.locked_by(paths.root, stage)
    is_current = written.exists() and hashing.dvc_md5(written) == locked.get(paths.relative(written))
    return is_current and locked.get(paths.relative(paths.policy)) == md5


def reward_functions(paths: Paths) -> set[str]:
    """The functions that PPO optimized when it trained the policy of dvc.lock, and those of params.yaml.

    The cache may lack the record of the training.
    """
    now = dvc_files.parameters(paths.root).get("ppo", {}).get("scorers", [])
    scorers = [*inputs.used(paths.root, "ppo").values.get("ppo.scorers", []), *now]
    return {scorer["function"] for scorer in scorers if "function" in scorer}


def stale_reason(candidate: Candidate) -> str | None:
    """Why the project's results do not describe the candidate by today's judges; None if they do."""
    paths = candidate.paths
    if not is_judged_here(paths, candidate.md5):
        return f"are not of {candidate.model}"
    try:
        EvaluationResults.read(paths.evaluation_results)
    except UserError:
        file = paths.relative(paths.evaluation_results)
        return f"are of another version of the code ({file} is missing or has another form)"
    changed = changed_files(paths.root, candidate.local.root)
    return f"were measured with another {', '.join(changed)}" if changed else None


def changed_files(run: Path, local: Path) -> list[str]:
    """Files below `local` that differ from those that stage judge used in `run`, by its inputs file."""
    files = inputs.used(run, "judge").files
    return [
        path
        for path, md5 in files.items()
        if not (local / path).exists() or hashing.dvc_md5(local / path) != md5
    ]


def collect(candidate: Candidate, stale: str | None) -> Evidence:
    """The pipeline's results, or new ones if `stale` is a reason not to use those."""
    paths, settings = candidate.paths, _with_local_files(candidate)
    is_own = is_trained_here(paths, candidate.md5)
    if stale is None:
        known = evidence.read(paths)
    else:
        console.say(f"the results here {stale}: the policy is judged and measured against SFT now")
        bounds = candidate.settings.promotion
        known = Evidence(results=EvaluationResults(), kl=None)
        if bounds is not None and {
            bounds.max_kl,
            bounds.max_perplexity_growth,
            bounds.max_response_perplexity_growth,
            bounds.min_distinct_ratio,
            bounds.max_choice_drop,
            bounds.max_task_drop,
        } != {None}:
            known = measure_cost(settings, paths, candidate.folder)
        if is_own:
            known = replace(known, kl=evidence.selected_kl(paths) or known.kl)
        known = with_opponent(candidate, known, "sft", paths.sft)
    optimized = optimized_judges(settings.judge, candidate.folder, paths.root)
    if is_own:
        functions = reward_functions(paths)
        own = [one for one in settings.judge.judges if one.kind == "function" and one.function in functions]
        optimized |= {one.name: one.function for one in own}
    facts = {
        "has_reward": has_reward(candidate.folder),
        "is_trial": is_trial(candidate.folder),
        "optimised_judges": {**known.results.optimised_judges, **optimized},
        "selecting_judges": selecting_judges(settings.judge, candidate.folder, paths.root),
    }
    return replace(known, results=known.results.model_copy(update=facts))


def with_opponent(candidate: Candidate, known: Evidence, opponent: Opponent, folder: Path | None) -> Evidence:
    """The evidence, and the comparisons with a model in a folder, or with the references.

    The gate's judges compare; the results name the models `policy` and `opponent`.
    """
    from rlhf_tasks.judging import head_to_head

    root, promotion = candidate.paths.root, candidate.settings.promotion
    results = head_to_head.compare_models(
        JudgeView.of(_with_local_files(candidate)),
        candidate.model,
        head_to_head.REFERENCE if folder is None else os.path.relpath(folder, root),
        paths=candidate.paths,
        names=promotion.named if promotion is not None else (),
        functions_root=candidate.local.root,
    )
    named = (one.model_copy(update={"a": "policy", "b": opponent}) for one in results.comparisons)
    comparisons = (*known.results.comparisons, *named)
    return replace(known, results=known.results.model_copy(update={"comparisons": comparisons}))


def measure_cost(settings: Config, paths: Paths, policy: Path) -> Evidence:
    """What PPO cost the policy: its KL from the SFT model of a project, and the retention of both.

    A policy with another tokenizer than SFT's has no KL. Its perplexity per token cannot be compared either:
    of retention only the multiple-choice accuracy, which is computed per character, and the tasks are left.

    Raises:
        UserError: if the data does not exist.
    """
    import torch

    from rlhf_tasks.judging.retention import Probes

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
        return Evidence(results=results.model_copy(update={"retention": kept}), kl=None)
    measured = measure_responses(settings, paths, policy, device)
    return Evidence(
        results=results.model_copy(update={"responses": measured}),
        kl=measure_kl(settings, paths, policy, device),
    )


def measure_responses(
    settings: Config, paths: Paths, policy: Path, device: Any
) -> dict[str, ResponseStatistics]:
    """What stage judge measures of the responses of SFT and a policy with the same tokenizer."""
    from rlhf_tasks.data.batches import read_table
    from rlhf_tasks.judging.responses import as_judged, response_statistics, shared_ends
    from rlhf_tasks.judging.retention import perplexities_by_sft

    view, folders = JudgeView.of(settings), {"sft": paths.sft, "policy": policy}
    rows = read_table(paths, "prompts", "test")[: view.judge.num_examples]
    prompts, references = [row["prompt"] for row in rows], [row["reference"] for row in rows]
    base = [paths.base] if paths.base.exists() else []  # it shares its ends, and samples nothing
    ends = shared_ends([(folder, None) for folder in (*folders.values(), *base)])
    sample = as_judged(view, paths, device)
    sampled = {
        who: sample(folder, prompts, ends=own_ends)
        for (who, folder), own_ends in zip(folders.items(), ends, strict=False)
    }
    ids = {who: responses.ids for who, responses in sampled.items()}
    perplexities = perplexities_by_sft(paths.sft, prompts, ids, view.judge.retention or Retention(), device)
    known = None if None in references else references
    return {
        who: response_statistics(responses, known, perplexities[who]) for who, responses in sampled.items()
    }


def measure_kl(settings: Config, paths: Paths, policy: Path, device: Any) -> Kl:
    """Mean over test prompts of Σ log π/π_SFT of a sampled response: objective/kl_k1 of PPO.

    Responses are sampled as PPO does, at `ppo.temperature`, which both log-probs use.
    """
    from rlhf_tasks.data.batches import load_tokenizer, read_table
    from rlhf_tasks.data.tokenizer import encode
    from rlhf_tasks.judging.responses import sample
    from rlhf_tasks.judging.retention import logprob_sums
    from rlhf_tasks.models.load import load_causal, place

    ppo = inputs.resolved(paths.root, settings).ppo
    rows = read_table(paths, "prompts", "test")[: settings.judge.num_examples]
    prompts = [row["prompt"] for row in rows]
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


def _with_local_files(candidate: Candidate) -> Config:
    """The config with absolute paths to the judges' files in the user's project; outs stay relative."""
    settings, run, local = candidate.settings, candidate.paths.root, candidate.local.root
    if run == local:
        return settings
    outs = [out for node in dvc_files.graph(run).values() for out in node.outs]
    judge = settings.judge.model_dump(mode="json")
    for key, path in inputs.files_named({"judge": judge}):
        _, *inner, last = key.split(".")
        part: Any = judge
        for name in inner:
            part = part[int(name) if name.isdigit() else name]
        if not dvc_files.is_in(path, outs):
            part[last] = str(local.resolve() / path)
    return settings.model_copy(update={"judge": Judging.model_validate(judge)})
