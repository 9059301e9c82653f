"""The shipped presets, and single values that override them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks import config, errors, presets
from rlhf_tasks.cli import main
from rlhf_tasks.data.batches import micro_batches
from rlhf_tasks.presets import Request
from tests import toy
from tests.test_contracts import UNPINNED

ROOT = Path(__file__).parents[2]


def with_preset(name: str) -> config.Config:
    tree: Any = YAML(typ="safe", pure=True).load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    presets.overlay_onto(tree, presets.read(name))
    presets.overlay_onto(tree, UNPINNED.get(name, {}))
    return config.validate(tree, name)


def test_single_values_come_after_presets(project: Path) -> None:
    words = ["preset", "smoke", "--set", "seed=7", "sft.learning_rate=1.0e-4", "data.max_rows=null"]
    assert main.main(words) == 0
    settings = config.load()
    assert (settings.seed, settings.sft.learning_rate, settings.data.max_rows) == (7, 1e-4, None)
    assert settings.ppo.total_episodes == with_preset("smoke").ppo.total_episodes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("seed", "give KEY=VALUE"),
        ("seed=[", "not readable as YAML"),
        ("sed=2", "did you mean 'seed'"),
        ("seed=two", "should be a valid integer"),
        (
            "sft.revision=0123456789abcdef0123456789abcdef01234567",
            "sft.from names no model: `revision` would be",
        ),
    ],
)
def test_a_value_that_cannot_be_set_changes_nothing(
    project: Path, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Path("params.yaml").read_text(encoding="utf-8")
    assert main.main(["preset", "--set", words]) == 2
    assert message in capsys.readouterr().err
    assert Path("params.yaml").read_text(encoding="utf-8") == before


@pytest.mark.parametrize("name", ["smoke", "docstrings"])
def test_a_preset_does_not_turn_on_a_gate_that_is_null(
    project: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`promotion: null` is the user's decision; the rest of the preset applies."""
    assert main.main(["preset", "--set", "promotion=null"]) == 0
    assert main.main(["preset", name]) == 0
    assert "promotion stays null (a preset changes its " in capsys.readouterr().out
    settings = config.load()
    assert settings.promotion is None
    assert settings.judge == with_preset(name).judge
    assert presets.read(name)["promotion"], "the preset itself is unchanged"


def test_a_preset_applies_to_a_section_that_the_same_command_turns_on(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = with_preset("smoke").model_dump(mode="json")["promotion"] | {"max_kl": 7.5}
    assert main.main(["preset", "--set", "promotion=null"]) == 0
    capsys.readouterr()
    assert main.main(["preset", "smoke", "--set", f"promotion={json.dumps(gate)}"]) == 0
    assert "stays null" not in capsys.readouterr().out
    settings = config.load().promotion
    assert settings is not None
    assert settings.model_dump(mode="json") == gate, "single values win"


def test_replacing_a_section_leaves_no_key_of_the_old_one() -> None:
    """A key that only the file's own section has is removed, even an unknown one."""
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    own = text.replace("tracking:\n", "tracking:\n  of_old: 1\n")
    sections = {"tracking": {"enabled": False, "uri": None, "experiment": "b"}}
    written, settings = presets.replaced(own, sections, "params.yaml")
    assert settings.tracking.experiment == "b"
    assert config.validate(config.parse(written, "params.yaml"), "params.yaml") == settings
    assert settings.ppo == config.validate(config.parse(text, "params.yaml"), "params.yaml").ppo


def test_a_preset_does_not_turn_on_guards_that_are_null(project: Path) -> None:
    assert main.main(["preset", "over_optimised", "--set", "ppo.guards=null"]) == 0
    assert main.main(["preset", "over_optimised"]) == 0
    settings = config.load()
    assert (settings.ppo.guards, settings.ppo.kl_coef) == (None, 0.0)


def test_a_preset_with_a_complete_section_turns_it_on(project: Path) -> None:
    assert config.load().ppo.ptx is None
    assert main.main(["preset", "ppo_max"]) == 0
    settings = config.load()
    assert settings.ppo.ptx is not None
    assert settings.ppo.critic_warmup is not None


def test_setting_one_value_of_a_null_section_is_refused_and_names_the_missing_keys(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["preset", "--set", "ppo.ptx=null", "ppo.adaptive_kl.target=3.0"]) == 2
    message = capsys.readouterr().err
    assert "ppo.adaptive_kl is null, so that target alone cannot be set" in message
    assert "give horizon, clip too, as one ppo.adaptive_kl={…}" in message
    whole = "ppo.adaptive_kl={target: 3.0, horizon: 10000, clip: 0.2}"
    assert main.main(["preset", "--set", whole, "ppo.adaptive_kl.target=4.0"]) == 0
    assert config.load().ppo.adaptive_kl is not None


def test_the_tldr_preset_names_the_revisions_that_must_be_set(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["preset", "tldr-pythia-1b"]) == 2
    message = capsys.readouterr().err
    for where in (
        "datasets/trl-lib/tldr-preference",
        "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",
    ):
        assert f"git ls-remote https://huggingface.co/{where} HEAD" in message
    pins = [f"{key}={value}" for key, value in config.flatten(UNPINNED["tldr-pythia-1b"]).items()]
    assert main.main(["preset", "tldr-pythia-1b", "--set", *pins]) == 0
    assert config.load() == with_preset("tldr-pythia-1b")


def test_the_tldr_preset_has_the_sizes_of_the_benchmark() -> None:
    """512 episodes per update = 16 rows × 4 accumulated × 8 processes; a row has 512 + 53 tokens."""
    settings = with_preset("tldr-pythia-1b")
    own = settings.ppo.rollout_batch_size // settings.launch.num_processes
    longest = settings.data.max_prompt_tokens + settings.ppo.response_length
    cut = micro_batches([longest] * own, settings.ppo.micro_batch_tokens)
    assert [len(rows) for rows in cut] == [16, 16, 16, 16]
    assert (settings.ppo.num_ppo_epochs, settings.ppo.num_mini_batches) == (4, 1)
    assert (settings.ppo.learning_rate, settings.ppo.schedule) == (3e-6, "linear")
    assert (settings.ppo.kl_coef, settings.ppo.temperature, settings.ppo.response_length) == (0.05, 0.7, 53)
    assert (settings.ppo.truncation, settings.ppo.missing_eos_score) == ("eos_trick_replace", -1.0)
    assert settings.ppo.total_episodes == 1_000_000
    assert settings.judge.num_examples == 1000


def test_the_tldr_preset_runs_with_a_tiny_model_of_the_same_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-NeoX with ready SFT and reward models; only the number of episodes and the texts are small."""
    monkeypatch.chdir(tmp_path)
    preset = presets.read("tldr-pythia-1b")
    ppo = preset["ppo"] | {"total_episodes": 16, "rollout_batch_size": 16}
    toy.write_given()
    toy.foreign("foreign/base", "gpt_neox", max_position_embeddings=128)
    toy.foreign("foreign/sft", "gpt_neox", seed=2, max_position_embeddings=128)
    toy.foreign("foreign/reward", "gpt_neox", seed=3, labels=1, max_position_embeddings=128)
    settings = toy.write_params(
        data={"max_completion_tokens": 53},
        sft=preset["sft"] | {"from": "foreign/sft"},
        preferences=preset["preferences"],
        reward=preset["reward"] | {"from": "foreign/reward"},
        ppo=ppo,
        judge=preset["judge"],
    )
    for stage in ("prepare", "base", "sft", "preferences", "reward"):
        toy.run(stage, settings)
    metrics = toy.run("ppo", settings)
    assert metrics["lr"] == 3e-6
    assert metrics["val/response_length"] <= 53
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-3), "four epochs at 3e-6 hardly move it"
    assert metrics["objective/kl"] == pytest.approx(0, abs=1e-3), "the policy is its reference at first"
    assert 0 <= toy.run("judge", settings)["reward_model/policy_vs_reference/win_rate"] <= 1


# --------------------------------------------------------------------------- published values

TRL = "TRL 1.12, trl/experimental/ppo/ppo_config.py: "
TRL_CODE = "TRL 1.12, trl/experimental/ppo/ppo_trainer.py: "
N_PLUS = "arXiv 2403.17031, tables of hyperparameters: "
N_PLUS_CODE = "vwxyzjn/summarize_from_feedback_details@1851cac, "
LMHP = "openai/lm-human-preferences@1ab856d, "
PAPER = "arXiv 2307.04964, "
MOSS = "OpenLMLab/MOSS-RLHF@5096bd9, "
OURS = "no source gives it: "

# The values after the preset is applied to the shipped ones, each with its source.
PUBLISHED: dict[str, list[tuple[str, Any, str]]] = {
    "trl": [
        ("ppo.learning_rate", 3e-6, TRL + "learning_rate"),
        ("ppo.schedule", "linear", TRL + "lr_scheduler_type, of TrainingArguments"),
        ("ppo.warmup_fraction", 0.0, TRL + "warmup, of TrainingArguments"),
        ("ppo.adam_betas", [0.9, 0.999], TRL + "adam_beta1, adam_beta2, of TrainingArguments"),
        ("ppo.max_grad_norm", None, TRL_CODE + "no call of clip_grad_norm_"),
        ("ppo.num_ppo_epochs", 4, TRL + "num_ppo_epochs"),
        ("ppo.num_mini_batches", 1, TRL + "num_mini_batches"),
        ("ppo.temperature", 0.7, TRL + "temperature"),
        ("ppo.stop_token", "eos", TRL + "stop_token, and the TL;DR example's --stop_token eos"),
        ("ppo.truncation", "none", TRL + "missing_eos_penalty: None"),
        ("ppo.kl_coef", 0.05, TRL + "kl_coef"),
        ("ppo.kl_estimator", "k1", TRL + "kl_estimator"),
        ("ppo.kl_in", "reward", TRL_CODE + "non_score_reward = -kl_coef * kl"),
        ("ppo.adaptive_kl", None, TRL + "there is none any more"),
        ("ppo.target_kl", None, TRL + "there is none any more"),
        ("ppo.ratio_from", "rollout", TRL_CODE + "exp(new_logprobs - mb_logprobs)"),
        ("ppo.cliprange", 0.2, TRL + "cliprange"),
        ("ppo.cliprange_high", None, TRL + "one cliprange"),
        ("ppo.dual_clip", None, TRL + "there is none"),
        ("ppo.cliprange_value", 0.2, TRL + "cliprange_value"),
        ("ppo.vf_coef", 0.1, TRL + "vf_coef"),
        ("ppo.entropy_coef", 0.0, TRL + "there is none"),
        ("ppo.gamma", 1.0, TRL + "gamma"),
        ("ppo.lam", 0.95, TRL + "lam"),
        ("ppo.whiten_rewards", False, TRL + "whiten_rewards"),
        ("ppo.whiten_advantages", True, TRL_CODE + "masked_whiten(advantages)"),
        ("ppo.score_scaling", None, TRL + "there is none any more"),
        ("ppo.num_sample_generations", 10, TRL + "num_sample_generations"),
        ("ppo.value_model", "separate", TRL_CODE + "value_model is an argument"),
        ("ppo.critic_init", "reward", "TRL 1.12, examples/scripts/ppo/ppo_tldr.py: value_model"),
    ],
    "n_plus": [
        ("ppo.total_episodes", 1_000_000, N_PLUS + "1M episodes, 8.56 epochs"),
        ("ppo.rollout_batch_size", 512, N_PLUS + "batch size"),
        ("ppo.num_mini_batches", 1, N_PLUS + "minibatches"),
        ("ppo.num_ppo_epochs", 4, N_PLUS + "K"),
        ("ppo.learning_rate", 3e-6, N_PLUS + "one rate everywhere"),
        ("ppo.value_learning_rate", None, N_PLUS + "one rate everywhere"),
        ("ppo.schedule", "linear", N_PLUS + "linear to 0"),
        ("ppo.warmup_fraction", 0.0, N_PLUS_CODE + "new/ppo_left_padding.py: warm_up_steps"),
        ("ppo.adam_betas", [0.9, 0.999], N_PLUS_CODE + "new/ppo_left_padding.py: AdamW(…, eps)"),
        ("ppo.max_grad_norm", None, N_PLUS_CODE + "new/ppo_left_padding.py: no clip_grad_norm_"),
        ("ppo.temperature", 0.7, N_PLUS + "sampling temperature in training"),
        ("ppo.stop_token", "eos", N_PLUS_CODE + "new/ppo_left_padding.py: truncate_token"),
        ("ppo.truncation", "eos_trick_replace", N_PLUS + "EOS trick"),
        ("ppo.missing_eos_score", -1.0, N_PLUS_CODE + "new/ppo_left_padding.py: penalty_reward_value"),
        ("ppo.kl_coef", 0.05, N_PLUS + "beta"),
        ("ppo.adaptive_kl", None, N_PLUS_CODE + "new/ppo_left_padding.py: use_adaptive_kl"),
        ("ppo.cliprange", 0.2, N_PLUS + "clip"),
        ("ppo.cliprange_value", 0.2, N_PLUS + "value clip"),
        ("ppo.vf_coef", 0.1, N_PLUS + "value coefficient"),
        ("ppo.gamma", 1.0, N_PLUS + "gamma"),
        ("ppo.lam", 0.95, N_PLUS + "lambda"),
        ("ppo.whiten_rewards", False, N_PLUS + "reward whitening off"),
        ("ppo.whiten_advantages", True, N_PLUS + "advantage whitening on"),
        ("ppo.value_model", "separate", N_PLUS + "separate value network"),
        ("ppo.critic_init", "reward", N_PLUS + "the value model starts as the reward model"),
        ("reward.learning_rate", 3e-6, N_PLUS + "one rate everywhere"),
        ("reward.schedule", "cosine", N_PLUS_CODE + "new/reward.py: scheduler"),
        ("reward.warmup_fraction", 0.0, N_PLUS_CODE + "new/reward.py: warm_up_steps"),
        ("reward.batch_size", 64, N_PLUS + "reward model, batch size"),
        ("reward.num_epochs", 1, N_PLUS + "reward model, epochs"),
        ("reward.margin", 0.0, N_PLUS_CODE + "new/reward.py: logsigmoid(preferred - rejected)"),
        ("reward.centring_coef", 0.0, N_PLUS_CODE + "new/reward.py: the loss has no such term"),
        ("reward.lm_coef", 0.0, N_PLUS_CODE + "new/reward.py: the loss has no such term"),
    ],
    "ziegler": [
        ("ppo.total_episodes", 1_000_000, LMHP + "launch.py: _books_task"),
        ("ppo.rollout_batch_size", 512, LMHP + "launch.py: _books_task"),
        ("ppo.learning_rate", 1e-5, LMHP + "launch.py: _books_task"),
        ("ppo.adam_betas", [0.9, 0.999], "TensorFlow's AdamOptimizer, whose betas it keeps"),
        ("ppo.max_grad_norm", None, LMHP + "train_policy.py: no clip"),
        ("ppo.temperature", 0.7, LMHP + "launch.py: books_task"),
        ("ppo.kl_coef", 0.15, LMHP + "launch.py: sentiment, descriptiveness"),
        ("ppo.adaptive_kl.target", 6.0, LMHP + "launch.py: sentiment, descriptiveness"),
        ("ppo.adaptive_kl.horizon", 10_000, LMHP + "train_policy.py: AdaptiveKLParams"),
        ("ppo.adaptive_kl.clip", 0.2, LMHP + "train_policy.py: AdaptiveKLController"),
        ("ppo.num_mini_batches", 1, LMHP + "train_policy.py: PpoHParams.nminibatches"),
        ("ppo.num_ppo_epochs", 4, LMHP + "train_policy.py: PpoHParams.noptepochs"),
        ("ppo.vf_coef", 0.1, LMHP + "train_policy.py: PpoHParams"),
        ("ppo.cliprange", 0.2, LMHP + "train_policy.py: PpoHParams"),
        ("ppo.cliprange_value", 0.2, LMHP + "train_policy.py: PpoHParams"),
        ("ppo.gamma", 1.0, LMHP + "train_policy.py: PpoHParams"),
        ("ppo.lam", 0.95, LMHP + "train_policy.py: PpoHParams"),
        ("ppo.whiten_rewards", True, LMHP + "train_policy.py: PpoHParams"),
        ("ppo.whiten_advantages", True, LMHP + "train_policy.py: loss"),
        ("ppo.schedule", "linear", LMHP + "train_policy.py: train_minibatch"),
        ("ppo.warmup_fraction", 0.0, LMHP + "train_policy.py: train_minibatch"),
        ("ppo.truncation", "eos_trick_replace", LMHP + "train_policy.py: make_score_fn"),
        ("ppo.missing_eos_score", -1.0, LMHP + "lm_tasks.py: penalty_reward_value"),
        ("ppo.kl_estimator", "k1", LMHP + "train_policy.py: compute_rewards"),
        ("ppo.kl_in", "reward", LMHP + "train_policy.py: compute_rewards"),
        ("ppo.value_model", "shared", LMHP + "policy.py: scalar_heads=['value']"),
        ("ppo.critic_init", "sft", LMHP + "policy.py: the trunk is the policy's"),
        ("reward.learning_rate", 5e-5, LMHP + "launch.py: get_train_reward_experiments, _books_task"),
        ("reward.batch_size", 32, LMHP + "launch.py: get_train_reward_experiments, _books_task"),
        ("reward.schedule", "linear", LMHP + "train_reward.py: train"),
        ("reward.warmup_fraction", 0.0, LMHP + "train_reward.py: train"),
        ("reward.num_epochs", 1, LMHP + "train_reward.py: train"),
        ("reward.weight_decay", 0.0, LMHP + "utils/core.py: Adam"),
        ("reward.centring_coef", 0.0, LMHP + "label_types.py: the loss has no such term"),
        ("reward.lm_coef", 0.0, LMHP + "label_types.py: the loss has no such term"),
    ],
    "ppo_max": [
        ("ppo.rollout_batch_size", 128, PAPER + "training setup: rollout"),
        ("ppo.num_mini_batches", 4, PAPER + "training setup: 128 in batches of 32"),
        ("ppo.num_ppo_epochs", 1, MOSS + "ppo/ppo_trainer.py: train goes through each rollout once"),
        ("ppo.learning_rate", 5e-7, PAPER + "training setup: actor"),
        ("ppo.value_learning_rate", 1.65e-6, PAPER + "training setup: critic"),
        ("ppo.adam_betas", [0.9, 0.95], MOSS + "adam betas"),
        ("ppo.warmup_fraction", 0.1, PAPER + "training setup; MOSS: 500 of 5000 steps"),
        ("ppo.value_model", "separate", PAPER + "PPO-max setup: the critic is a model of its own"),
        ("ppo.critic_init", "reward", PAPER + "PPO-max setup: critic from the reward model"),
        ("ppo.critic_warmup.max_updates", 20, OURS + "pre-trained till its loss is near 0, says the paper"),
        ("ppo.critic_warmup.settled", 0.02, OURS + "pre-trained till its loss is near 0, says the paper"),
        ("ppo.kl_coef", 0.05, PAPER + "policy constraints: lambda"),
        ("ppo.kl_estimator", "k1", PAPER + "policy constraints: log pi - log pi_ref"),
        ("ppo.kl_in", "reward", PAPER + "policy constraints: a penalty in each token's reward"),
        ("ppo.adaptive_kl", None, PAPER + "policy constraints: a fixed coefficient"),
        ("ppo.ratio_from", "rollout", PAPER + "importance sampling from the reference is no part of PPO-max"),
        ("ppo.cliprange", 0.2, MOSS + "config_ppo.py: pg_clip"),
        ("ppo.cliprange_value", 0.2, PAPER + "PPO-max setup: value clip; MOSS config_ppo.py: value_clip"),
        ("ppo.advantage_clip", None, PAPER + "constrain the reward rather than the advantage"),
        ("ppo.score_scaling.subtract_mean", True, PAPER + "eq. 18"),
        ("ppo.score_scaling.clip", 0.8, PAPER + "score reparameterisation: delta of 0.3 and 0.8"),
        ("ppo.whiten_rewards", False, PAPER + "appendix B.1: score tricks are not stacked"),
        ("ppo.whiten_advantages", True, MOSS + "ppo/ppo_datahelper.py: whiten"),
        ("ppo.vf_coef", 1.0, MOSS + "config_ppo.py: vf_loss_weight"),
        ("ppo.entropy_coef", 0.0, PAPER + "policy constraints: not recommended"),
        ("ppo.ptx.coef", 0.1, OURS + "PPO-ptx is used, says the paper"),
        ("ppo.ptx.text", None, OURS + "on the demonstrations"),
        ("ppo.gamma", 1.0, PAPER + "training setup"),
        ("ppo.lam", 0.9, PAPER + "training setup"),
        ("reward.learning_rate", 5e-6, PAPER + "training setup: reward model"),
        ("reward.lm_coef", 1.0, PAPER + "eq. 4: beta of 1"),
        ("reward.margin", 0.0, PAPER + "eq. 4"),
        ("reward.centring_coef", 0.0, PAPER + "eq. 4: the loss has no such term"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_of_a_paper_has_the_published_values(name: str) -> None:
    values = config.flatten(with_preset(name).model_dump(mode="json", by_alias=True))
    assert [(key, values.get(key)) for key, _, _ in PUBLISHED[name]] == [
        (key, value) for key, value, _ in PUBLISHED[name]
    ]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_of_a_paper_has_a_source_for_every_value(name: str) -> None:
    keys, cited = config.flatten(presets.read(name)), [key for key, _, _ in PUBLISHED[name]]
    assert sorted(set(keys) - set(cited)) == []
    assert len(set(cited)) == len(cited)
    assert {key.split(".")[0] for key in keys} <= {"ppo", "reward"}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("under", ["docstrings", "tldr-pythia-1b"])
def test_a_preset_of_a_paper_combines_with_another_task(project: Path, name: str, under: str) -> None:
    pins = [f"{key}={value}" for key, value in config.flatten(UNPINNED.get(under, {})).items()]
    assert main.main(["preset", under, name, "--set", *pins, "seed=2"]) == 0
    assert config.load().data.source == with_preset(under).data.source


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_summary_of_a_preset_of_a_paper_names_the_model_size(name: str) -> None:
    assert "written for" in presets.summary(name)


def test_the_smoke_preset_neither_trains_nor_uses_a_reward_model() -> None:
    settings = with_preset("smoke")
    assert not settings.reward.train
    assert [scorer.kind for scorer in settings.ppo.scorers] == ["dummy"]
    assert (settings.ppo.critic_init, [judge.kind for judge in settings.judge.judges]) == ("sft", ["gold"])


SHIPPED = (ROOT / "params.yaml").read_text(encoding="utf-8")


def test_single_values_of_a_request_override_its_preset() -> None:
    request = Request("smoke", 9, {"ppo.total_episodes": 128, "ppo": {"gamma": 0.5}})
    _, settings, changes = request.resolve(SHIPPED)
    assert (settings.seed, settings.ppo.total_episodes, settings.ppo.gamma) == (9, 128, 0.5)
    assert settings.ppo.rollout_batch_size == 64, "the preset's"
    assert {"seed: 1 → 9", "reward.train: true → false", "ppo.critic_init: reward → sft"} <= {*changes}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("tracking.experiment", text)
            for text in ("true", "Null", "1", "", "two\nlines", "a: b", "- a", "plain", "models/x-1.0")
        ),
        ("tracking.uri", None),
        ("ppo.kl_coef", 1.5),
    ],
)
def test_a_value_in_a_change_list_is_one_line_of_yaml(key: str, value: str | float | None) -> None:
    shipped = SHIPPED.replace("uri: null", "uri: /a")
    _, _, (change,) = Request(overrides={key: value}).resolve(shipped)
    text = change.partition(" → ")[2]
    assert "\n" not in text
    assert YAML(typ="safe", pure=True).load(text) == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"ppo.kl_cof": 1.0}, "did you mean 'kl_coef'"),
        ({"ppo.kl_coef": "0.1"}, "ppo.kl_coef"),
        ({"nothing.of.it": 1}, "nothing: unknown key"),
        ({"ppo.kl_coef": 0.1, "sft.batch_size": -1}, "sft.batch_size"),
    ],
)
def test_overrides_of_a_request_are_checked_by_the_config_types(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Request(overrides=overrides).resolve(SHIPPED)
