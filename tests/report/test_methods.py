"""Methods side by side: paired differences over seeds, and what each costs, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlhf_tasks.errors import UserError
from rlhf_tasks.judging import statistics
from rlhf_tasks.report import document, methods
from rlhf_tasks.report.comparison import Result, select_decisive
from rlhf_tasks.report.methods import Trial
from tests.report.test_page import Document

PPO = {"ppo.train": "true", "dpo.train": "false", "ppo.scorers": '[{"kind": "reward_model"}]'}
DPO = {"ppo.train": "false", "dpo.train": "true"}


def trial(seed: int, parameters: dict[str, str], outcomes: Sequence[float], kl: float = 2.0) -> Trial:
    """A run of a model of a million parameters, whose token is 2e-6 TFLOP."""
    stage = "dpo" if parameters["dpo.train"] == "true" else "ppo"
    metrics = {"base/parameters": 1e6, "ppo/selected_kl": kl, "judge/length/policy": 12.0}
    metrics |= {"preferences/compute/forward_tflop": 1.0, "dpo/compute/forward_tflop": 2.0 * (stage == "dpo")}
    curve = [
        {"step": 0.0, "eval/kl": 0.0, "eval/heldout_scores": 0.0},
        {"step": 1.0, "compute/tflop": 4.0},
        {"step": 2.0, "compute/tflop": 8.0, "eval/kl": 1.0, "eval/heldout_scores": 0.5},
    ]
    curves = {stage: curve, "reward": [{"step": 1.0, "compute/tflop": 3.0, "heldout/compute/tflop": 4.0}]}
    run = Result("", seed, f"{stage}-{seed}", metrics, curves, parameters | {"judge.best_of_n": "4"})
    known = {("gold", "policy"): np.array(outcomes), ("gold", "best_of_n"): np.array([1.0, 0.0])}
    return Trial(run, known, (f"prompt of {seed}", "another"), 30.0, seed / 4)


GROUPS = {
    "ppo": [trial(1, PPO, [1.0, 0.0]), trial(2, PPO, [1.0, 0.5])],
    "dpo": [trial(1, DPO, [1.0, 1.0]), trial(2, DPO, [1.0, 1.0], kl=4.0)],
}


def test_a_run_costs_tokens_of_its_own_and_those_of_pairs_and_reward_models() -> None:
    """A million of them are 2 TFLOP."""
    own, alone = GROUPS["ppo"][0], GROUPS["dpo"][0]
    assert own.tokens(*methods.SHARED) == alone.tokens(*methods.SHARED) == pytest.approx((1 + 3 + 4) / 2e-6)
    assert own.tokens(*methods.OWN) == pytest.approx(8 / 2e-6)
    assert alone.tokens(*methods.OWN) == pytest.approx((2 + 8) / 2e-6), "with the log-probs of the SFT model"
    assert own.course == [(0.0, 0.0, 0.0), (pytest.approx(4e6), 1.0, 0.5)]
    assert alone.course[-1][0] == alone.tokens(*methods.OWN), "the course ends at what the table has"
    own.run.curves["value"] = [{"step": 1.0, "compute/tflop": 6.0}]  # type: ignore[index]
    assert dataclasses.replace(own).course[0][0] == pytest.approx(6 / 2e-6), "the critic's, before PPO"
    del own.run.curves["value"]  # type: ignore[attr-defined]


def test_each_method_stands_beside_the_first_on_the_same_seeds_and_prompts() -> None:
    rows = methods.context(GROUPS)["rows"]
    assert [*rows] == ["ppo", "dpo", "best of 4 by models/reward"]
    assert rows["ppo"]["gold"].endswith("(0% to 100%)"), "no interval of a share leaves these bounds"
    assert "gold/lead" not in rows["ppo"]
    assert rows["ppo"]["gold"].startswith("6")  # 0.625, with the t of one degree of freedom
    lead = statistics.mean_over_seeds([[0.0, 1.0], [0.0, 0.5]], same_prompts=False, num_intervals=2)
    assert rows["dpo"]["gold/lead"] == document.interval(lead, 100)
    assert (rows["dpo"]["kl"], rows["dpo"]["own"], rows["dpo"]["shared"]) == ("3 ± 1", "5.0", "4.0")
    assert rows["dpo"]["memory"] == "0.5", "the most of two seeds"


def test_best_of_n_of_another_model_is_no_method_from_the_same_start() -> None:
    other = PPO | {"judge.best_of_n_model": "policy"}
    rows = methods.context({"ppo": [trial(seed, other, [1.0, 0.0]) for seed in (1, 2)]})["rows"]
    assert [*rows] == ["ppo"]


def test_what_labels_scores_and_chooses_is_named() -> None:
    assert methods.optimizes(PPO) == "scores by reward_model; weights chosen by models/reward_heldout"
    both = DPO | {"ppo.train": "true", "ppo.scorers": '[{"kind": "verifier"}]', "reward.train": "false"}
    text = "pairs by the data's labels, then scores by verifier; weights chosen by nothing: the last"
    assert methods.optimizes(both) == text
    assert methods.optimizes(both | {"ppo.select_by.judge.name": "exact"}).endswith("chosen by exact")
    labeled = DPO | select_decisive({"preferences.function": "my.file:best", "reward.train": False})
    text = "pairs by my.file:best; weights chosen by its validation loss"
    assert methods.optimizes(labeled) == text


def test_the_page_is_whole() -> None:
    page = Document(document.render("methods.html", methods.context(GROUPS)))
    assert "2 methods from the same start, 2 seeds" in page.text
    assert len(page.of("svg")) == 2
    assert "Held-out score over KL" in page.text
    alone = trial(1, PPO, [1.0, 0.0])
    for row in alone.run.curves["ppo"]:
        row.pop("eval/heldout_scores", None)  # type: ignore[attr-defined]
    one = Document(document.render("methods.html", methods.context({"ppo": [alone]})))
    assert "another seed may change the order" in one.text
    assert len(one.of("svg")) == 1, "KL over cost"


def test_methods_without_a_common_seed_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"a": GROUPS["ppo"][0], "b": GROUPS["dpo"][1]}
    monkeypatch.setattr(methods, "read", lambda root, experiment: known[experiment])
    with pytest.raises(UserError, match="no seed has a finished run of every method"):
        methods.write(tmp_path, [("ppo", "a"), ("dpo", "b")], tmp_path / "page.html")
    methods.write(tmp_path, [("ppo", "a")], tmp_path / "page.html")
    assert (tmp_path / "page.html").exists()
