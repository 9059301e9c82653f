"""What is read of the pipeline's files, and whose it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.project import hashing
from rlhf_tasks.promotion import evidence
from tests.promotion import planted


@pytest.mark.parametrize(
    ("kept", "kl"),
    [
        (0, 0.5),  # SFT's weights: the first rollout's
        (512, 1.5),  # kept after the update at 512, first sampled from at 768
        (700, 1.5),
        (1024, 99.0),  # the last update's weights were never sampled from
    ],
)
def test_the_kl_is_that_of_the_weights_that_were_kept(kept: float, kl: float) -> None:
    curve = [(256.0, 0.5), (512.0, 0.7), (768.0, 1.5), (1024.0, 99.0)]
    assert evidence.kl_at(kept, curve) == kl


def test_without_a_curve_there_is_no_kl() -> None:
    assert evidence.kl_at(512, []) is None
    assert evidence.kl_at(512, [(768.0, float("nan"))]) is None


def test_the_files_are_read_by_name(tmp_path: Path) -> None:
    assert evidence.read(tmp_path) == {}
    planted.pipeline(tmp_path, kl=3.25)
    assert evidence.read(tmp_path) == {**planted.BETTER, "kl": 3.25}


def test_no_score_that_ppo_saw_is_among_them(tmp_path: Path) -> None:
    planted.pipeline(tmp_path)
    before = evidence.read(tmp_path)
    text = (tmp_path / "plots/ppo.csv").read_text(encoding="utf-8")
    (tmp_path / "plots/ppo.csv").write_text(text.replace(",3\n", ",1e9\n"), encoding="utf-8")
    planted.put(tmp_path / "metrics/ppo.json", {"selected_episode": 512.0, "objective/scores": 1e9})
    assert evidence.read(tmp_path) == before


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"choice/sft": null}', '{"choice/sft": []}'])
def test_a_file_that_is_torn_or_holds_no_numbers_is_named(tmp_path: Path, content: str) -> None:
    planted.pipeline(tmp_path)
    (tmp_path / "metrics/judge.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics/judge\.json cannot be read .* run `rlhf judge` again"):
        evidence.read(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"selected_episode": "x"}'])
def test_so_is_a_file_of_ppo(tmp_path: Path, content: str) -> None:
    planted.pipeline(tmp_path)
    (tmp_path / "metrics/ppo.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics/ppo\.json or .* cannot be read .* run `rlhf ppo` again"):
        evidence.read(tmp_path)


@pytest.mark.parametrize("changed", ["metrics/judge.json", "metrics/ppo.json", "plots/ppo.csv"])
def test_metrics_are_of_the_policy_that_dvc_says(tmp_path: Path, changed: str) -> None:
    md5 = planted.pipeline(tmp_path)
    assert evidence.is_of(tmp_path, md5)
    assert not evidence.is_of(tmp_path, "another.dir")
    (tmp_path / changed).write_text("{}", encoding="utf-8")
    assert not evidence.is_of(tmp_path, md5)


def test_a_policy_that_was_trained_since_is_not_the_one_judged(tmp_path: Path) -> None:
    old = planted.pipeline(tmp_path)
    (tmp_path / "models/policy/weights").write_text("newer", encoding="utf-8")
    new = hashing.dvc_md5(tmp_path / "models/policy")
    lock = (tmp_path / "dvc.lock").read_text(encoding="utf-8")
    ran, judged = lock.split("  judge:", 1)
    (tmp_path / "dvc.lock").write_text(f"{ran.replace(old, new)}  judge:{judged}", encoding="utf-8")
    assert not evidence.is_of(tmp_path, new)
    assert not evidence.is_of(tmp_path, old)


def test_judges_that_were_changed_since_have_not_judged_it(tmp_path: Path) -> None:
    md5 = planted.pipeline(tmp_path)
    planted.params(tmp_path, {"promotion.max_kl": 1.0, "ppo.kl_coef": 0.5})
    assert evidence.is_of(tmp_path, md5), "a knob of others"
    planted.params(tmp_path, {"judge.labels": "data/labels.jsonl", "judge.num_samples_shown": 1})
    assert evidence.is_of(tmp_path, md5), "what changes no verdict"
    planted.params(tmp_path, {"judge.temperature": 0.5})
    assert not evidence.is_of(tmp_path, md5)
    assert evidence.is_trained(tmp_path, md5), "its KL is known all the same"


def test_without_a_lock_nobody_can_say(tmp_path: Path) -> None:
    md5 = planted.pipeline(tmp_path)
    (tmp_path / "dvc.lock").unlink()
    assert not evidence.is_of(tmp_path, md5)
