"""Stage dpo: losses against numbers by hand and a slow reference, and what later stages make of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig

from rlhf_tasks import config
from rlhf_tasks.config import Dpo
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.ragged import Ragged
from rlhf_tasks.data.splits import pairs_of
from rlhf_tasks.data.tokenizer import Ids, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.models.passes import TokenBudget
from rlhf_tasks.models.stop_tokens import ends_of
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.verdict import Kl, read_kl
from rlhf_tasks.stages import dpo
from rlhf_tasks.tracking import NullTracker
from rlhf_tasks.training.dpo import (
    PAIR_LOSSES,
    LabeledResponses,
    PairLogProbs,
    PolicyPairs,
    read_logprobs,
    responses_to_others,
)
from tests import small
from tests.small import PAD

CPU = torch.device("cpu")
QUERIES, CHOSEN = small.rows(6, seed=1)
REJECTED = small.rows(6, seed=2)[1]
LOSSES = [*config.schema.DPO_LOSSES]
SMALL: dict[str, Any] = {
    "dpo": {
        "train": True,
        "batch_size": 8,
        "num_epochs": 2.0,
        "learning_rate": 0.01,
        "micro_batch_tokens": 4096,
        "num_selection_prompts": 8,
    },
    "ppo.micro_batch_tokens": 4096,
    "ppo.response_length": 6,
}


def logprob(model: Any, query: Ids, response: Ids) -> Tensor:
    """Σ log π of one response, read alone."""
    logits = model(torch.tensor([query + response])).logits[0, len(query) - 1 : -1]
    return F.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None]).sum()


def reference(model: Any, first: Any, second: Any) -> Tensor:
    with torch.no_grad():
        return torch.tensor(
            [
                [logprob(model, q, a).item(), logprob(model, q, b).item()]
                for q, a, b in zip(QUERIES, first, second, strict=True)
            ]
        )


def task_of(loss: str, seed: int = 0, **changes: Any) -> PolicyPairs | LabeledResponses:
    """On six pairs, with the model of this seed as the reference."""
    settings, model = Dpo(train=True, loss=loss, **changes), small.causal(seed=seed)
    if loss != "kto":
        known = reference(model, CHOSEN, REJECTED)
        return PolicyPairs(QUERIES, CHOSEN, REJECTED, known, PAD, settings, PAIR_LOSSES[loss])
    responses = [*CHOSEN[:3], *REJECTED[3:]]
    others = [*responses[1:], responses[0]]
    known = reference(model, responses, others)
    return LabeledResponses(QUERIES, responses, others, torch.arange(6) < 3, known, PAD, settings)


def mean_loss(task: PolicyPairs | LabeledResponses, model: Any) -> Tensor:
    task.prepare(small.distributed(), model, range(6), TokenBudget(4096))
    return task.sums(model, range(6), CPU)["loss"] / 6


@pytest.mark.parametrize(
    ("loss", "changes", "expected"),
    [
        ("sigmoid", {}, math.log(2)),
        ("sigmoid", {"label_smoothing": 0.3}, math.log(2)),
        ("ipo", {"beta": 0.2}, 1 / (4 * 0.2**2)),
        ("kto", {}, 0.5),
        ("kto", {"desirable_weight": 3.0, "undesirable_weight": 2.0}, 0.5 * 2.5),
    ],
)
def test_the_loss_at_the_start(loss: str, changes: dict[str, Any], expected: float) -> None:
    assert mean_loss(task_of(loss, **changes), small.causal()).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("loss", "expected"),
    # lead: (−4 + 5) − (−9 + 6) = 4; β · lead = 2; a token's: 1/2 − (−3/3) = 1.5, minus 1/(2 · 0.5) = 0.5
    [("sigmoid", 0.8 * math.log1p(math.exp(-2)) + 0.2 * math.log1p(math.exp(2))), ("ipo", 0.25), ("nll", 2)],
)
def test_the_loss_of_a_pair_by_hand(loss: str, expected: float) -> None:
    numbers = (torch.tensor([float(x)]) for x in (-4, -9, -5, -6, 2, 3))
    settings = Dpo(beta=0.5, label_smoothing=0.2 if loss == "sigmoid" else 0.0, loss=loss)
    assert PAIR_LOSSES[loss](PairLogProbs(*numbers), settings).item() == pytest.approx(expected)


def test_the_kl_of_kto_is_of_responses_to_other_prompts() -> None:
    """Also where rows of one prompt stand together, and around the end."""
    queries, responses = [[7], [8], [8], [9], [7]], [[10], [11], [12], [13], [14]]
    assert [*responses_to_others(queries, responses)] == [[11], [13], [13], [14], [11]]
    assert len(responses_to_others([[7], [7]], [[10], [11]])) == 2, "there is no other prompt"
    assert [*responses_to_others([], [])] == []


def slow_loss(loss: str, model: Any, ref: Any, beta: float) -> Tensor:
    """The formulas of the papers, a response at a time."""
    total = torch.zeros(())
    if loss == "kto":
        responses = [*CHOSEN[:3], *REJECTED[3:]]
        others = [*responses[1:], responses[0]]
        ratios = [logprob(model, q, y) - logprob(ref, q, y) for q, y in zip(QUERIES, others, strict=True)]
        z = max(0.0, sum(ratio.item() for ratio in ratios) / 6)
        for i, (q, y) in enumerate(zip(QUERIES, responses, strict=True)):
            ratio = logprob(model, q, y) - logprob(ref, q, y).detach()
            total = total + 1 - torch.sigmoid(beta * (ratio - z if i < 3 else z - ratio))
        return total / 6
    for q, w, l in zip(QUERIES, CHOSEN, REJECTED, strict=True):
        r_w, r_l = (logprob(model, q, y) - logprob(ref, q, y).detach() for y in (w, l))
        if loss == "sigmoid":
            total = total - torch.log(torch.sigmoid(beta * (r_w - r_l)))
        elif loss == "ipo":
            total = total + (r_w / len(w) - r_l / len(l) - 1 / (2 * beta)) ** 2
        else:
            total = total - logprob(model, q, w) / len(w)
    return total / 6


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_a_slow_reference(loss: str) -> None:
    model, slow, ref = small.causal(seed=1), small.causal(seed=1), small.causal(seed=0)
    found = mean_loss(task_of(loss, beta=0.3), model)
    expected = slow_loss(loss, slow, ref, 0.3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)
    found.backward()
    expected.backward()
    for (name, ours), theirs in zip(model.named_parameters(), slow.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_the_cost_of_kto_has_its_passes_over_other_responses() -> None:
    """The first response stands at the end there."""
    assert task_of("kto").num_prepared(range(6)) == sum(task_of("kto").sizes)
    responses = [*CHOSEN[:3], *REJECTED[3:]]
    assert task_of("kto").num_prepared([0]) == len(QUERIES[0]) + len(responses[1])
    assert task_of("sigmoid").num_prepared(range(6)) == 0


def test_the_margin_of_kto_is_how_far_each_response_moved_to_its_side() -> None:
    model, ref, responses = small.causal(seed=1), small.causal(seed=0), [*CHOSEN[:3], *REJECTED[3:]]
    moved = [
        (logprob(model, q, y) - logprob(ref, q, y)).item() for q, y in zip(QUERIES, responses, strict=True)
    ]
    expected = 0.3 * (sum(moved[:3]) - sum(moved[3:]))
    found = task_of("kto", beta=0.3).sums(model, range(6), CPU)["margin"].item()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_cut_into_micro_batches_changes_no_sum(loss: str) -> None:
    task, model = task_of(loss), small.causal(seed=1)
    task.prepare(small.distributed(), model, range(6), TokenBudget(16))
    whole = task.sums(model, range(6), CPU)
    parts = [task.sums(model, rows, CPU) for rows in ([0, 1, 2], [3], [4, 5])]
    for name, total in whole.items():
        assert total.item() == pytest.approx(sum(part[name].item() for part in parts), rel=1e-4, abs=1e-5)


def test_pairs_that_share_a_row_give_the_same_sums() -> None:
    alone, model = task_of("sigmoid"), small.causal(seed=1)
    assert isinstance(alone, PolicyPairs)
    shared = PolicyPairs(**(vars_of(alone) | {"shares_prefix": True}))
    for name, total in shared.sums(model, range(6), CPU).items():
        assert total.item() == pytest.approx(
            alone.sums(model, range(6), CPU)[name].item(), rel=1e-4, abs=1e-5
        )


def vars_of(task: PolicyPairs) -> dict[str, Any]:
    return {name: value for name, value in vars(task).items() if name != "sizes"}


# ------------------------------------------------------------------------------------------ the stage


@pytest.mark.parametrize("loss", [*LOSSES, "losses:hinge"])
def test_a_policy_learns_from_the_pairs(models_here: Path, loss: str) -> None:
    Path("losses.py").write_text(
        "def hinge(pairs, settings):\n    return (1 - settings.beta * pairs.lead).clamp_min(0)\n"
    )
    tracker = NullTracker("dpo")
    metrics = small.run("dpo", SMALL | {"dpo.loss": loss}, tracker)
    losses = [row["train/loss"] for row in tracker.history() if "train/loss" in row]
    assert losses[-1] < losses[0]
    assert metrics["selected_kl_standard_error"] > 0
    identity = contracts.read_identity(Paths().dpo)
    assert identity["parents"] == {"sft": contracts.fingerprint(Paths().sft)}
    assert identity["chosen_by"] == contracts.fingerprint(Paths().reward_heldout)
    assert identity["kl"] == [metrics["selected_kl"], metrics["selected_kl_standard_error"]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pairs.lead.mean()", r"dpo\.loss: losses:mine returned \(\); it must return one loss for each pair"),
        ("-pairs.lead.detach()", "nothing would be learned"),
        ("pairs.margins", r"dpo\.loss: losses:mine raised AttributeError: .*margins"),
    ],
)
def test_a_loss_that_cannot_be_used_is_a_clear_message(models_here: Path, body: str, message: str) -> None:
    Path("losses.py").write_text(f"def mine(pairs, settings):\n    return {body}\n", encoding="utf-8")
    with pytest.raises(UserError, match=message):
        small.run("dpo", SMALL | {"dpo.loss": "losses:mine"})


@pytest.mark.parametrize("changes", [{}, small.WITHOUT_REWARD])
def test_kto_learns_the_same_from_pairs_and_from_their_responses_as_single_rows(
    models_here: Path, changes: dict[str, Any]
) -> None:
    histories = list[Any]()
    for has_pairs in (True, False):
        for split in () if has_pairs else ("train", "validation"):
            file = models_here / f"data/comparisons/{split}.parquet"
            known = pq.read_table(file)
            labels = [row | {side: None} for row in known.to_pylist() for side in ("rejected", "chosen")]
            pq.write_table(pa.Table.from_pylist(labels, known.schema), file)
        tracker = NullTracker("dpo")
        small.run("dpo", {**SMALL, **changes, "dpo.loss": "kto"}, tracker)
        histories.append(tracker.history())
    assert histories[0] == histories[1]
    with pytest.raises(UserError, match=r"dpo\.loss=ipo needs pairs, .* alone; set dpo\.loss to kto"):
        small.run("dpo", {**SMALL, **changes, "dpo.loss": "ipo"})


def test_it_trains_on_no_pair_of_the_model_that_selects(models_here: Path, monkeypatch: Any) -> None:
    seen = list[Any]()

    def stop(dist: Any, policy: Any, task: Any, *_: Any, **__: Any) -> None:
        seen.append(task)
        raise KeyboardInterrupt

    monkeypatch.setattr(dpo, "train", stop)
    with pytest.raises(KeyboardInterrupt):
        small.run("dpo", SMALL)
    rows = read_table(Paths(), "comparisons", "train")
    assert len(seen[0].queries) == len(pairs_of(rows, "reward")) < len(rows)


def test_the_pairs_stay_in_mapped_files(models_here: Path, monkeypatch: Any) -> None:
    """As lists of numbers they would take ten times the memory."""
    seen = list[Any]()

    def watch(dist: Any, model: Any, queries: Any, responses: Any, *others: Any) -> Tensor:
        seen.extend([queries, responses])
        return read_logprobs(dist, model, queries, responses, *others)

    monkeypatch.setattr(dpo, "read_logprobs", watch)
    for loss in ("sigmoid", "kto"):
        small.run("dpo", SMALL | {"dpo.loss": loss, "dpo.num_epochs": 0.5})
    assert [type(rows) for rows in seen] == [Ragged] * 8


def test_without_a_reward_model_the_validation_loss_selects(models_here: Path) -> None:
    metrics = small.run("dpo", {**SMALL, **small.WITHOUT_REWARD})
    assert "selected_heldout_score" not in metrics
    assert not {"chosen_by", "labeled_by"} & contracts.read_identity(Paths().dpo).keys()


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_without_a_pair_to_validate_on_the_last_weights_within_the_bound_are_kept(
    models_here: Path, loss: str
) -> None:
    rows = read_table(Paths(), "comparisons", "validation")
    pq.write_table(rows.table.slice(0, 0), Paths().table("comparisons", "validation"))
    changes = {**SMALL, **small.WITHOUT_REWARD, "dpo.loss": loss, "dpo.max_kl": 1e3}
    metrics = small.run("dpo", changes)
    assert metrics["selected_step"] == metrics["steps_trained"]
    assert "loss" not in metrics
    assert "the last" in (Paths().dpo / "README.md").read_text(encoding="utf-8")


def test_weights_above_the_bound_on_the_kl_are_not_kept(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"dpo\.max_kl=1e-06: the KL from the SFT model was higher"):
        small.run("dpo", SMALL | {"dpo.max_kl": 1e-6, "dpo.learning_rate": 0.1})


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_ppo_starts_from_it_and_its_kl_is_from_the_sft_model(models_here: Path, lora: Any) -> None:
    changes = SMALL | {"dpo.lora": lora, "ppo.lora": lora, "dpo.learning_rate": 0.05}
    changes |= {"preferences.function": "mine:score"}
    small.run("dpo", changes)
    small.run("value", changes)
    tracker = NullTracker("ppo")
    metrics = small.run("ppo", changes | {"ppo.learning_rate": 1e-9, "ppo.total_episodes": 256}, tracker)
    first = next(row for row in tracker.history() if "eval/kl" in row)
    assert first["eval/kl"] == pytest.approx(0, abs=1e-3), "from the policy that PPO starts from"
    assert metrics["selected_kl"] > 0.01, "from the SFT model"
    identity = contracts.read_identity(Paths().policy)
    assert identity["parents"]["dpo"] == contracts.fingerprint(Paths().dpo)
    assert identity["method"].startswith("ppo")
    assert identity["labeled_by"] == contracts.read_identity(Paths().dpo)["labeled_by"] == "mine:score"
    assert identity["kl"] == [metrics["selected_kl"], metrics["selected_kl_standard_error"]]


def test_the_critic_of_stage_value_learns_from_its_responses(models_here: Path) -> None:
    changes = SMALL | {"ppo.advantages.critic.init": "value", "value.num_prompts": 16, "value.num_epochs": 1}
    changes |= {"value.micro_batch_tokens": 4096, "ppo.truncation": {"kind": "none"}}
    small.run("dpo", changes)
    small.run("value", changes)
    assert contracts.read_parents(Paths().value)["dpo"] == contracts.fingerprint(Paths().dpo)
    assert "the outcome that the DPO policy reaches" in (Paths().value / "README.md").read_text("utf-8")


def test_without_ppo_it_is_the_policy_that_is_judged(models_here: Path) -> None:
    changes = SMALL | {"ppo.train": False}
    metrics = small.run("dpo", changes)
    passed_on = small.run("ppo", changes)
    assert passed_on["selected_kl"] == metrics["selected_kl"]
    assert contracts.fingerprint(Paths().policy) == contracts.fingerprint(Paths().dpo)
    identity = contracts.read_identity(Paths().policy)
    assert identity == contracts.read_identity(Paths().dpo)
    assert identity["method"] == "dpo, loss sigmoid"
    assert read_kl(Paths().policy) == Kl(mean=metrics["selected_kl"], standard_error=identity["kl"][1])
    assert pq.read_table(Paths().ppo_responses).num_rows == 0
    assert "reward_model/policy_vs_sft/win_rate" in small.run("judge", changes)


def test_it_ends_its_responses_at_the_stop_token_wherever_it_is_sampled(models_here: Path) -> None:
    small.run("dpo", SMALL | {"ppo.stop_token": 5, "dpo.num_epochs": 0.5})
    known = GenerationConfig.from_pretrained(Paths().dpo).eos_token_id
    assert known == list(ends_of(load_causal(Paths().sft), load_tokenizer(Paths().sft), [5]))


def test_without_need_there_is_a_readme_and_no_metric(models_here: Path) -> None:
    assert small.run("dpo") == {}
    assert [file.name for file in Paths().dpo.iterdir()] == ["README.md"]
    assert Paths().start == Paths().sft
    declared = [config.VIEWS["dpo"].of(config.validate(small.params(), "test")).declared]
    assert declared == [{"dpo.train": False}]


@pytest.mark.parametrize(
    "changes",
    [
        {**small.WITHOUT_REWARD, "ppo.guards": {"gap_max": 2.0}},
        {"launch.num_processes": 2, "ppo.rollout_batch_size": 255, "ppo.num_mini_batches": 1},
        {"launch.num_processes": 2, "ppo.advantages.critic.init": "value", "value.batch_size": 31},
        {"launch.parallelism": "zero2", "ppo.advantages.critic.steps": 2},
    ],
)
def test_nothing_is_asked_of_a_ppo_that_does_not_train(changes: dict[str, Any]) -> None:
    config.validate(small.params({"dpo.train": True, "ppo.train": False, **changes}), "test")
    with pytest.raises(UserError):
        config.validate(small.params({"dpo.train": True, **changes}), "test")


def test_the_batches_of_stages_that_train_nothing_may_have_any_size() -> None:
    """`sft.from` makes base and SFT models ready ones."""
    ready = {"model.base": "ready", "model.scratch": None, "sft.from": "ready", **small.WITHOUT_REWARD}
    sizes = {"base.batch_size": 7, "sft.batch_size": 7, "reward.batch_size": 7, "launch.num_processes": 2}
    config.validate(small.params({"dpo.train": True, "ppo.train": False, **ready, **sizes}), "test")
    with pytest.raises(UserError, match=r"sft\.batch_size=7 is not divisible"):
        config.validate(small.params({**ready, "sft.from": None, **sizes}), "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ppo.train": False}, "no policy but the SFT model"),
        ({"dpo.train": True, "dpo.loss": "ipo", "dpo.label_smoothing": 0.1}, "label_smoothing"),
        ({"dpo.train": True, "dpo.desirable_weight": 2.0}, "loss: kto"),
        ({"dpo.train": True, "data.format": "unpaired_labels"}, "set dpo.loss to kto"),
        ({"dpo.train": True, "dpo.loss": "hinge"}, "must be sigmoid, ipo, kto, nll"),
        ({"dpo.train": True, "dpo.batch_size": 9, "launch.num_processes": 2}, "dpo.batch_size=9"),
    ],
)
def test_what_cannot_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.validate(small.params(changes), "test")
