"""What is measured of a policy that the pipeline did not make: KL and retention, by the pipeline's names."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rlhf_tasks import config, console
from rlhf_tasks.config import Config
from rlhf_tasks.data.batches import encode, load_tokenizer, read_table
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.answers import sample
from rlhf_tasks.modeling import models
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import cost
from tests import small, toy

SFT, POLICY, CPU = Path("models/sft"), Path("models/policy"), torch.device("cpu")
SMALL = {"judge.num_examples": 6, "ppo.response_length": 8, "ppo.temperature": 0.7}


def settings(**changes: object) -> Config:
    return config.validate(small.params(SMALL | changes), "test")


def test_the_kl_is_that_of_a_slow_loop_at_ppos_temperature(models_here: Path) -> None:
    """Σ log π/π_SFT of each answer, row by row, without padding, masks or batches."""
    given = settings()
    prompts = [row["prompt"] for row in read_table(Paths(), "prompts", "test")[:6]]
    answers = sample(POLICY, prompts, max_new_tokens=8, temperature=0.7, seed=given.seed, device=CPU).ids
    queries = encode(load_tokenizer(SFT), prompts)
    policy, sft = (models.load_causal(folder).eval() for folder in (POLICY, SFT))
    sums = []
    for query, answer in zip(queries, answers, strict=True):
        ours, theirs = (
            (small.logits_alone(model, query, answer) / 0.7).log_softmax(-1) for model in (policy, sft)
        )
        sums.append(sum(float(ours[t, token] - theirs[t, token]) for t, token in enumerate(answer)))
    assert cost.measured(given, POLICY, SFT)["kl"] == pytest.approx(sum(sums) / 6, abs=1e-4)
    assert abs(sum(sums) / 6) > 0.01, "two random models differ"


def test_sft_itself_went_nowhere_and_forgot_nothing(models_here: Path) -> None:
    found = cost.measured(settings(), SFT, SFT)
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    for what in ("perplexity/sft_text", "choice"):
        assert found[f"{what}/policy"] == found[f"{what}/sft"]


def test_retention_is_what_the_judge_stage_measures(models_here: Path) -> None:
    """By its own code, on the same texts: the very numbers of metrics/judge.json."""
    given = settings(**{"judge.judges": [small.GOLD], "judge.num_examples": 12})
    ours, stages = cost.measured(given, POLICY, SFT), toy.run("judge", given)
    names = [key for key in ours if key != "kl"]
    assert {key.split("/")[0] for key in names} == {"perplexity", "choice"}
    assert {key: ours[key] for key in names} == pytest.approx({key: stages[key] for key in names})


def test_without_retention_the_kl_is_still_measured(models_here: Path) -> None:
    assert set(cost.measured(settings(**{"judge.retention": None}), POLICY, SFT)) == {"kl"}


def test_tokens_of_another_kind_have_no_kl_and_no_perplexity_to_compare(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console.set_quiet(False)
    toy.foreign("foreign", "gpt_neox", max_position_embeddings=256)
    found = cost.measured(settings(), Path("foreign"), SFT)
    assert {key.split("/")[0] for key in found} == {"choice"}
    assert "foreign has another tokenizer than models/sft" in capsys.readouterr().out
    assert all(math.isfinite(value) for value in found.values())


def test_data_that_is_not_here_is_named(models_here: Path) -> None:
    Path("data/sft/test.parquet").unlink()
    with pytest.raises(UserError, match=r"data/sft/test\.parquet is not here.* run `rlhf prepare`"):
        cost.measured(settings(), POLICY, SFT)
