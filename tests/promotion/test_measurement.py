"""What the pipeline measured of a policy, or what is measured now; files of judges that changed since."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhf_tasks import config, console
from rlhf_tasks.config import Config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import encode, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.responses import sample
from rlhf_tasks.judging.results import EvaluationResults
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import measurement
from rlhf_tasks.promotion.verdict import Kl, read_kl
from rlhf_tasks.training import auto
from tests import small, toy
from tests.promotion import planted

SFT, POLICY, CPU = Path("models/sft"), Path("models/policy"), torch.device("cpu")
SMALL = {"judge.num_examples": 6, "ppo.response_length": 8, "ppo.temperature": 0.7}


def settings(**changes: object) -> Config:
    return config.validate(small.params(SMALL | changes), "test")


def measure(given: Config, policy: Path) -> tuple[EvaluationResults, Kl | None]:
    return measurement.measure_cost(given, Paths(), policy)


def test_the_kl_and_its_standard_error_equal_those_of_a_slow_loop(models_here: Path) -> None:
    """Σ log π/π_SFT of each response at PPO's temperature, row by row, without padding, masks or batches."""
    given, paths = settings(), Paths()
    prompts = [row["prompt"] for row in read_table(paths, "prompts", "test")[:6]]
    responses = sample(
        POLICY, prompts, paths=paths, max_new_tokens=8, temperature=0.7, seed=given.seed, device=CPU
    ).ids
    queries = encode(load_tokenizer(SFT), prompts)
    policy, sft = (load_causal(folder).eval() for folder in (POLICY, SFT))
    sums = []
    for query, response in zip(queries, responses, strict=True):
        ours, theirs = (
            (small.logits_alone(model, query, response) / 0.7).log_softmax(-1) for model in (policy, sft)
        )
        sums.append(sum(float(ours[t, token] - theirs[t, token]) for t, token in enumerate(response)))
    mean = sum(sums) / 6
    variance = sum((value - mean) ** 2 for value in sums) / 5
    _, kl = measure(given, POLICY)
    assert kl is not None
    assert kl.mean == pytest.approx(mean, abs=1e-4)
    assert kl.standard_error == pytest.approx((variance / 6) ** 0.5, abs=1e-4)
    assert abs(mean) > 0.01, "two random models differ"


def test_sft_has_no_kl_and_forgot_nothing(models_here: Path) -> None:
    results, kl = measure(settings(), SFT)
    assert kl is not None
    assert kl.mean == pytest.approx(0, abs=1e-6)
    assert results.retention["policy"] == results.retention["sft"]


def test_retention_equals_that_of_the_judge_stage(models_here: Path) -> None:
    given = settings(**{"judge.judges": [small.GOLD], "judge.num_examples": 12})
    toy.run("judge", given)
    stage = EvaluationResults.read(Paths().evaluation_results)
    measured, _ = measure(given, POLICY)
    assert measured.retention == {name: stage.retention[name] for name in ("sft", "policy")}
    assert measured.responses == stage.responses


def test_without_retention_the_kl_is_still_measured(models_here: Path) -> None:
    results, kl = measure(settings(**{"judge.retention": None}), POLICY)
    assert kl is not None
    assert results.retention == {}


def test_a_policy_with_another_tokenizer_has_no_kl_and_no_perplexity(
    models_here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console.set_quiet(False)
    toy.foreign("foreign", "gpt_neox", max_position_embeddings=256)
    results, kl = measure(settings(), Path("foreign"))
    assert kl is None
    assert all(one.perplexity == {} and one.multiple_choice for one in results.retention.values())
    assert "foreign has another tokenizer than models/sft" in capsys.readouterr().out


def test_responses_are_sampled_in_the_precision_of_stage_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "choose_precision", lambda settings, root: "bf16")
    assert measurement._view(Config(), tmp_path).launch.precision == "bf16", "for `auto`"


def test_missing_data_is_a_user_error(models_here: Path) -> None:
    Path("data/sft/test.parquet").unlink()
    with pytest.raises(UserError, match=r"data/sft/test\.parquet is missing.* run `rlhf prepare`"):
        measure(settings(), POLICY)


def test_a_changed_file_is_found_by_what_stage_judge_recorded(tmp_path: Path) -> None:
    names = ["my_judges/short.py", "rubric.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("then", encoding="utf-8")
    files = {name: hashing.dvc_md5(tmp_path / name) for name in names}
    planted.params(tmp_path)
    values = config.VIEWS["judge"].of(config.load(tmp_path / "params.yaml")).declared
    recorded = planted.record(tmp_path, "judge", values, files)
    planted.put(tmp_path / "dvc.lock", {"stages": {"judge": {"cmd": "x", "deps": [recorded]}}})
    assert measurement.find_changes(Paths(tmp_path)) == []
    (tmp_path / "rubric.txt").write_text("now", encoding="utf-8")
    (tmp_path / "my_judges/short.py").unlink()
    assert measurement.find_changes(Paths(tmp_path)) == names


# ------------------------------------------------ what the pipeline measured, and of which policy


def test_the_kl_is_that_of_the_policy_s_identity(tmp_path: Path) -> None:
    """No score and no metric of what trained it."""
    planted.pipeline(tmp_path, kl=3.25)
    policy = tmp_path / "models/policy"
    assert read_kl(policy) == Kl(mean=3.25, standard_error=planted.KL_ERROR)
    planted.put(policy / "rlhf.json", {"kind": "policy"})
    assert read_kl(policy) is None


def test_results_that_differ_from_dvc_lock_describe_no_policy(tmp_path: Path) -> None:
    md5 = planted.pipeline(tmp_path)
    assert measurement.is_judged_here(Paths(tmp_path), md5)
    assert not measurement.is_judged_here(Paths(tmp_path), "another.dir")
    (tmp_path / "evaluation/judge/results.json").write_text("{}", encoding="utf-8")
    assert not measurement.is_judged_here(Paths(tmp_path), md5)


def test_a_policy_that_was_trained_after_the_judge_ran_is_not_judged(tmp_path: Path) -> None:
    old = planted.pipeline(tmp_path)
    (tmp_path / "models/policy/weights").write_text("newer", encoding="utf-8")
    new = hashing.dvc_md5(tmp_path / "models/policy")
    lock = (tmp_path / "dvc.lock").read_text(encoding="utf-8")
    ppo, judge = lock.split("  judge:", 1)
    (tmp_path / "dvc.lock").write_text(f"{ppo.replace(old, new)}  judge:{judge}", encoding="utf-8")
    assert not measurement.is_judged_here(Paths(tmp_path), new)
    assert not measurement.is_judged_here(Paths(tmp_path), old)


def test_only_changes_of_judge_that_change_comparisons_make_results_stale(tmp_path: Path) -> None:
    md5, paths = planted.pipeline(tmp_path), Paths(tmp_path)
    planted.params(tmp_path, {"promotion.max_kl": 1.0, "ppo.kl_coef": 0.5})
    assert measurement.find_changes(paths) == [], "parameters of other sections"
    planted.params(tmp_path, {"judge.labels": "data/labels.jsonl"})
    assert measurement.find_changes(paths) == [], "a parameter that changes no comparison"
    planted.params(tmp_path, {"judge.temperature": 0.5})
    assert measurement.find_changes(paths) == ["judge.temperature"]
    assert measurement.is_judged_here(paths, md5), "its KL is still known"


def test_without_dvc_lock_no_policy_is_described(tmp_path: Path) -> None:
    md5 = planted.pipeline(tmp_path)
    (tmp_path / "dvc.lock").unlink()
    assert not measurement.is_judged_here(Paths(tmp_path), md5)
