"""What the gate reads of the pipeline's files, and which policy they describe."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks.project import hashing
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion import measurement
from rlhf_tasks.promotion.gate import Evidence, Kl
from tests.promotion import planted


def test_evidence_is_the_results_document_and_the_kl_of_the_kept_checkpoint(tmp_path: Path) -> None:
    planted.pipeline(tmp_path, kl=3.25)
    kl = Kl(mean=3.25, standard_error=planted.KL_ERROR)
    assert measurement.read(Paths(tmp_path)) == Evidence(results=planted.BETTER, kl=kl)


def test_no_other_metric_of_ppo_is_read(tmp_path: Path) -> None:
    """Not a score, and not the KL of the last update."""
    planted.pipeline(tmp_path)
    planted.put(tmp_path / "metrics/ppo.json", {"objective/scores": 1e9, "objective/kl": 2.0})
    assert measurement.read(Paths(tmp_path)) == Evidence(results=planted.BETTER, kl=None)


@pytest.mark.parametrize("changed", ["evaluation/judge/results.json", "metrics/ppo.json"])
def test_files_that_differ_from_dvc_lock_describe_no_policy(tmp_path: Path, changed: str) -> None:
    md5 = planted.pipeline(tmp_path)
    assert measurement.is_judged_here(Paths(tmp_path), md5)
    assert not measurement.is_judged_here(Paths(tmp_path), "another.dir")
    (tmp_path / changed).write_text("{}", encoding="utf-8")
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
    assert measurement.is_judged_here(paths, md5), "parameters of other sections"
    planted.params(tmp_path, {"judge.labels": "data/labels.jsonl", "judge.num_samples_shown": 1})
    assert measurement.is_judged_here(paths, md5), "parameters that change no comparison"
    planted.params(tmp_path, {"judge.temperature": 0.5})
    assert not measurement.is_judged_here(paths, md5)
    assert measurement.is_trained_here(paths, md5), "its KL is still known"


def test_without_dvc_lock_no_policy_is_described(tmp_path: Path) -> None:
    md5 = planted.pipeline(tmp_path)
    (tmp_path / "dvc.lock").unlink()
    assert not measurement.is_judged_here(Paths(tmp_path), md5)
