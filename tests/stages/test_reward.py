"""The reward model's loss by hand, its head, its zero, and the stage from end to end in small."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.rows import Rows
from rlhf_tasks.data.splits import pairs_of
from rlhf_tasks.data.tokenizer import Ids, encode_rows, load_tokenizer
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import score_head, supports_shared_prefix
from rlhf_tasks.models.load import add_score_head, load_causal, load_reward, save_checkpoint
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import reward
from rlhf_tasks.tracking import NullTracker, context
from rlhf_tasks.training.tasks import PreferencePairs, RewardLearner, pair_sums
from tests import small
from tests.small import EOS, FAMILIES, PAD, Family

QUERIES, CHOSEN = small.rows(6, seed=1, longest=6)
_, REJECTED = small.rows(6, seed=2, longest=6)
OUTS = {"reward": Paths().reward, "reward_heldout": Paths().reward_heldout}
SMALL = {"reward.num_epochs": 1.0, "reward.batch_size": 8}


def pairs(pad: int = PAD, **changes: Any) -> PreferencePairs:
    return PreferencePairs(QUERIES, CHOSEN, REJECTED, pad, **changes)


def test_pair_loss_by_hand_with_margin_and_centring() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 1.0, 0.5])
    found = pair_sums(chosen, rejected, margin=0.5, centering_coef=0.1)
    loss = sum(math.log(1 + math.exp(-(lead - 0.5))) for lead in (1.0, -2.0, 0.0)) + 0.1 * (9 + 0 + 1)
    assert found["loss"].item() == pytest.approx(loss, abs=1e-5)
    assert found["accuracy"].item() == 1.5  # a right order, a wrong one, and a tie for half
    assert found["margin"].item() == pytest.approx(-1.0)


def test_a_step_down_the_pair_loss_raises_the_chosen_score() -> None:
    scores = torch.zeros(2, requires_grad=True)
    pair_sums(scores[:1], scores[1:], 0.0, 0.0)["loss"].backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [-0.5, 0.5]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pad", [PAD, EOS])
def test_pairs_are_scored_at_their_last_real_token(family: Family, pad: int) -> None:
    learner = RewardLearner(small.scores(family), None)
    chosen = small.last_scores_alone(learner.scores, QUERIES, CHOSEN)
    rejected = small.last_scores_alone(learner.scores, QUERIES, REJECTED)
    found = pairs(pad).sums(learner, range(6), torch.device("cpu"))
    loss = sum(math.log(1 + math.exp(-lead)) for lead in (chosen - rejected).tolist())
    assert found["loss"].item() == pytest.approx(loss, rel=1e-5)
    assert found["margin"].item() == pytest.approx((chosen - rejected).sum().item(), rel=1e-4, abs=1e-5)


def sum_of_nlls(policy: PreTrainedModel) -> float:
    """Σ over the chosen responses of their mean −log p, every row alone."""
    nlls = []
    for query, answer in zip(QUERIES, CHOSEN, strict=True):
        log_p = small.logits_alone(policy, query, answer).log_softmax(-1)
        nlls.append(-sum(log_p[t, token].item() for t, token in enumerate(answer)) / len(answer))
    return sum(nlls)


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_the_lm_term_is_the_mean_nll_of_each_chosen_answer(pad: int) -> None:
    policy = small.causal()
    scores = small.scores()
    scores.model.base_model.load_state_dict(policy.base_model.state_dict())
    learner = RewardLearner(scores, policy)
    plain = pairs(pad).sums(learner, range(6), torch.device("cpu"))["loss"].item()
    found = pairs(pad, lm_coef=0.3).sums(learner, range(6), torch.device("cpu"))["loss"].item()
    assert found - plain == pytest.approx(0.3 * sum_of_nlls(policy), rel=1e-4)


@pytest.mark.parametrize("family", [*small.CHANGING, "opt", "olmoe"])
def test_the_lm_term_is_that_of_the_policys_own_logits_in_float64(family: str, tmp_path: Path) -> None:
    """Also where the policy changes the states before its head or the logits after it."""
    save_checkpoint(small.other(family), small.tokenizer(), tmp_path, identity={}, card="")
    scores = add_score_head(tmp_path, torch.Generator().manual_seed(1))
    learner, exact = RewardLearner(scores, load_causal(tmp_path)), small.in_float64(family)
    plain = pairs().sums(learner, range(6), torch.device("cpu"))["loss"]
    found = pairs(lm_coef=0.3).sums(learner, range(6), torch.device("cpu"))["loss"]
    assert (found - plain).item() == pytest.approx(0.3 * sum_of_nlls(exact), rel=1e-5)
    found.backward()
    trunk = scores.model.base_model
    assert not [name for name, p in trunk.named_parameters() if p.grad is None]
    assert learner.lm is not None
    assert [p for p in learner.lm.parameters() if p.grad is None] == []
    # both losses train one trunk: the policy's own is gone
    beside = {id(p) for p in learner.parameters()} - {id(p) for p in scores.parameters()}
    heads = {name for name, p in learner.lm.named_parameters() if id(p) in beside}
    assert all("layers" not in name for name in heads), heads


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_is_read_once_gives_the_same_sums_and_gradients(family: Family) -> None:
    def found(shares_prefix: bool, queries: list[Ids]) -> tuple[dict[str, float], Tensor]:
        learner = RewardLearner(small.scores(family), None)
        task = PreferencePairs(queries, CHOSEN, REJECTED, PAD, 0.1, 0.01, shares_prefix=shares_prefix)
        sums = task.sums(learner, range(6), torch.device("cpu"))
        sums["loss"].backward()
        gradients = [p.grad.flatten() for p in learner.parameters() if p.grad is not None]
        return {key: value.item() for key, value in sums.items()}, torch.cat(gradients)

    assert supports_shared_prefix(small.scores(family).model)
    (twice, expected), (once, gradient) = found(False, QUERIES), found(True, QUERIES)
    assert once == pytest.approx(twice, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)
    assert expected.abs().max() > 1e-2
    # a reversed prompt has other scores, so that the sums depend on it
    assert found(True, [query[::-1] for query in QUERIES])[0] != pytest.approx(once, rel=1e-4)


def test_a_pair_without_a_prompt_is_scored_at_its_own_ends() -> None:
    model = RewardLearner(small.scores(), None)
    alone = PreferencePairs([[]], [[8, 9, 10]], [[11, 12]], PAD).sums(model, [0], torch.device("cpu"))
    shares_prefix = PreferencePairs([[]], [[8, 9, 10]], [[11, 12]], PAD, shares_prefix=True).sums(
        model, [0], torch.device("cpu")
    )
    torch.testing.assert_close(alone, shares_prefix)


def test_a_model_with_a_sliding_window_reads_each_prompt_twice() -> None:
    model = small.scores("qwen2").model
    model.config.sliding_window = 4
    assert not supports_shared_prefix(model)


def test_micro_batches_change_no_sum_of_pairs() -> None:
    learner = RewardLearner(small.scores(), small.causal())
    task, cpu = pairs(lm_coef=0.3, margin=0.1, centering_coef=0.01), torch.device("cpu")
    whole = task.sums(learner, range(6), cpu)
    parts = [task.sums(learner, [i], cpu) for i in range(6)]
    for key, value in whole.items():
        assert value.item() == pytest.approx(sum(part[key].item() for part in parts), rel=1e-4, abs=1e-5)


def test_each_model_trains_on_its_own_half_of_the_prompts() -> None:
    prompts = [f"prompt {i}" for i in range(900)]
    rows = Rows("preferences", "train", pa.table({"prompt": prompts}), np.arange(900))
    halves = [pairs_of(rows, name).texts("prompt") for name in ("reward", "reward_heldout")]
    assert sorted([*halves[0], *halves[1]]) == sorted(prompts)
    assert 0.45 < len(halves[0]) / 900 < 0.55


# ----------------------------------------------------------------------------------- the stage


def mean_score_of_demonstrations(folder: Path) -> float:
    """Every row is scored alone."""
    words, rows = load_tokenizer(folder), read_table(Paths(), "sft", "train")
    queries, answers = encode_rows(
        words, [row["prompt"] for row in rows], [row["completion"] for row in rows]
    )
    return small.last_scores_alone(load_reward(folder).eval(), queries, answers).mean().item()


def test_demonstrations_score_zero_on_average_and_still_do_after_loading(models_here: Path) -> None:
    small.run("reward", SMALL)
    for name, folder in OUTS.items():
        assert load_reward(folder).mean != 0, name
        assert mean_score_of_demonstrations(folder) == pytest.approx(0, abs=1e-4)


def test_without_demonstrations_the_responses_of_the_pairs_score_zero_on_average(models_here: Path) -> None:
    file = models_here / "data/sft/train.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), file)
    small.run("reward", SMALL)
    for name, folder in OUTS.items():
        pairs = pairs_of(read_table(Paths(), "comparisons", "train"), name)
        texts = [(row["prompt"], row[side]) for row in pairs for side in ("chosen", "rejected")]
        queries, answers = encode_rows(load_tokenizer(folder), *zip(*texts, strict=True))
        scores = small.last_scores_alone(load_reward(folder).eval(), queries, answers)
        assert scores.mean().item() == pytest.approx(0, abs=1e-4), name


def test_the_stage_measures_both_models_and_names_its_parent(models_here: Path) -> None:
    metrics = small.run("reward", SMALL | {"reward.lm_coef": 0.1})
    keys = ("accuracy", "accuracy/low", "accuracy/high", "margin", "calibration", "length_correlation")
    assert {f"{prefix}{key}" for prefix in ("", "heldout/") for key in keys} <= set(metrics)
    assert 0 <= metrics["accuracy/low"] <= metrics["accuracy"] <= metrics["accuracy/high"] <= 1
    parent = {"sft": contracts.fingerprint(Path("models/sft"))}
    assert [contracts.read_identity(out)["parents"] for out in OUTS.values()] == [parent, parent]
    first, second = (contracts.fingerprint(out) for out in OUTS.values())
    assert first != second


def test_the_second_of_two_processes_begins_when_the_first_has_locked_the_snapshots_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same stage may be at work in another process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    monkeypatch.setattr(context, "is_worker", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(context, "is_main_rank", lambda: False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    begun = threading.Event()

    def make(*args: Any) -> dict[str, float]:
        begun.set()
        return {}

    monkeypatch.setattr(reward, "_make_reward_model", make)
    arguments = small.view("reward", SMALL), Paths(), NullTracker("reward")
    second = threading.Thread(target=reward.run, args=arguments, daemon=True)
    second.start()
    assert not begun.wait(0.5)
    store.set(reward.LOCKED, "")
    second.join()
    assert begun.is_set()


def test_adapters_are_trained_and_merged_and_the_trunk_alone_is_not(models_here: Path) -> None:
    lora = {"reward.lora": {"r": 2, "alpha": 4.0}}
    small.run("reward", SMALL | lora)
    start = load_causal(Paths().sft).base_model.state_dict()
    for name, folder in OUTS.items():
        found = load_reward(folder)  # a plain model, or keys would be missing
        changes = {key: w - start[key] for key, w in found.model.base_model.state_dict().items()}
        changed = {key: change for key, change in changes.items() if change.any()}
        assert {*changed} == {f"layers.{i}.{part}.weight" for i in (0, 1) for part in small.NEOX_LINEAR}, name
        assert all(torch.linalg.matrix_rank(change, atol=1e-5) <= 2 for change in changed.values())
        seed = 1 + 1000 * (name == "reward_heldout")
        fresh = add_score_head(Paths().sft, torch.Generator().manual_seed(seed))
        assert not torch.equal(score_head(found.model).weight, score_head(fresh.model).weight)
        assert mean_score_of_demonstrations(folder) == pytest.approx(0, abs=1e-4)
    assert OUTS["reward"].joinpath("README.md").read_text(encoding="utf-8").count("reward.lora.r") == 1


def test_without_reward_training_the_outs_hold_only_a_readme(models_here: Path) -> None:
    (Paths().sft / "model.safetensors").unlink()  # nothing loads it
    assert all(contracts.has_model(out) for out in OUTS.values())
    assert small.run("reward", small.WITHOUT_REWARD) == {}
    for out in OUTS.values():
        assert [file.name for file in out.iterdir()] == ["README.md"]
        assert "reward.train" in (out / "README.md").read_text(encoding="utf-8")
        assert not contracts.has_model(out)
