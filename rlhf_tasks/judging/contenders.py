"""The contenders of stage judge: the references, and the responses of SFT and policy to the test prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rouge_score.rouge_scorer import RougeScorer

from rlhf_tasks import console
from rlhf_tasks.config import JudgeView
from rlhf_tasks.data import columns
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.judging.responses import Responses, ends_of_all, sample
from rlhf_tasks.judging.results import ResponseStatistics
from rlhf_tasks.models.tensors import distinct
from rlhf_tasks.project.paths import Paths

SAMPLED = ("sft", "policy")
BASE = "base"
"""Sampled too where it is the bar of the gate."""


@dataclass(frozen=True)
class Contenders:
    """The responses of all contenders to the same test prompts, and the sources of the prompts."""

    prompts: list[str]
    sources: list[str]
    texts: dict[str, list[str]]
    """By contender, the references included."""
    sampled: dict[str, Responses]
    columns: Columns
    """The kept columns of the prompts' rows."""


def sample_contenders(config: JudgeView, paths: Paths, device: torch.device) -> Contenders:
    rows = read_table(paths, "prompts", "test")[: config.judge.num_examples]
    prompts = [row["prompt"] for row in rows]
    names = (*SAMPLED, *([BASE] if config.judge.bar == BASE else []))
    sampled: dict[str, Responses] = {}
    with console.progress("judge", len(names), unit="models") as bar:
        for name in names:
            sampled[name] = sample_policy(config, paths, name, prompts, config.seed, device)
            bar.advance()
    texts = {"reference": [row["reference"] for row in rows]}
    texts |= {name: responses.texts for name, responses in sampled.items()}
    return Contenders(prompts, [row.get("source", "") for row in rows], texts, sampled, columns.of_rows(rows))


def sample_policy(
    config: JudgeView, paths: Paths, who: str, prompts: list[str], seed: int, device: torch.device
) -> Responses:
    """Responses at the judge's temperature; contenders are sampled with the same seed."""
    return sample(
        paths.models / who,
        prompts,
        paths=paths,
        max_new_tokens=config.max_completion_tokens,
        temperature=config.judge.temperature,
        seed=seed,
        device=device,
        ends=ends_of_all((paths.models / name, None) for name in (*SAMPLED, BASE)),
    )


def response_statistics(contenders: Contenders, who: str) -> ResponseStatistics:
    """ROUGE-L against the references (Lin 2004, F measure), lengths in tokens, and repetition."""
    scorer, responses = RougeScorer(["rougeL"]), contenders.sampled[who]
    pairs = zip(contenders.texts["reference"], responses.texts, strict=True)
    rouge = [scorer.score(reference, text)["rougeL"].fmeasure for reference, text in pairs]
    return ResponseStatistics(
        rouge_l=sum(rouge) / len(rouge),
        length=sum(map(len, responses.ids)) / len(responses.ids),
        ended=sum(responses.ended) / len(responses.ended),
        distinct_1=float(distinct(responses.ids, 1).mean()),
        distinct_2=float(distinct(responses.ids, 2).mean()),
        repetition=1 - float(distinct(responses.ids, 3).mean()),
    )
