"""The shipped presets, and single values that override them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from rlhf_tasks import config, errors, presets
from rlhf_tasks.config.ppo import AdaptiveKl, EosTrickReplace, Gae, Group, Guards
from rlhf_tasks.data.batches import micro_batches
from rlhf_tasks.presets import Request
from tests import toy
from tests.conftest import Command
from tests.test_contracts import UNPINNED

ROOT = Path(__file__).parents[2]
SHIPPED = (ROOT / "params.yaml").read_text(encoding="utf-8")


def with_preset(name: str) -> config.Config:
    tree: Any = YAML(typ="safe", pure=True).load(SHIPPED) | {"preset": name}
    config.merge(tree, presets.read(name))
    config.merge(tree, UNPINNED.get(name, {}))
    return config.validate(tree, name)


def test_single_values_come_after_presets(project: Path, rlhf: Command) -> None:
    rlhf("preset smoke --set seed=7 sft.learning_rate=1.0e-4 data.max_rows=null")
    settings = config.load()
    assert (settings.seed, settings.sft.learning_rate, settings.data.max_rows) == (7, 1e-4, None)
    assert settings.ppo.total_episodes == with_preset("smoke").ppo.total_episodes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--set seed", "give KEY=VALUE"),
        ("--set seed=[", "not readable as YAML"),
        ("--set sed=2", "did you mean 'seed'"),
        ("--set seed=two", "should be a valid integer"),
        (f"--set sft.revision={'a' * 40}", "sft.from names no model: `revision` would be"),
        ("trl smoke ppo.kl_coef=-1", "params.yaml with trl, smoke, ppo.kl_coef=-1 has 1 problem"),
        ("smok", "there is no preset 'smok'; give one of arithmetic, "),
    ],
)
def test_what_cannot_be_set_changes_nothing(project: Path, words: str, message: str, rlhf: Command) -> None:
    before = Path("params.yaml").read_text(encoding="utf-8")
    assert message in rlhf(f"preset {words}", status=2).err
    assert Path("params.yaml").read_text(encoding="utf-8") == before


def test_a_preset_keeps_comments_and_is_listed_with_its_first_line(project: Path, rlhf: Command) -> None:
    before = Path("params.yaml").read_text(encoding="utf-8")
    rlhf("preset trl")
    after = Path("params.yaml").read_text(encoding="utf-8")
    assert re.findall("#.*", after) == re.findall("#.*", before)
    assert f"trl | {presets.summary('trl')}"[:40] in rlhf("preset").out


@pytest.mark.parametrize("broken", ["kl_coef: -1.0", "kl_coef: high", "kl_coef: {a: 1}"])
def test_a_value_can_be_set_to_repair_an_invalid_file(project: Path, broken: str, rlhf: Command) -> None:
    path = Path("params.yaml")
    before = path.read_text(encoding="utf-8")
    valid = re.search(r"kl_coef: [\d.]+", before)
    assert valid is not None
    path.write_text(before.replace(valid[0], broken), encoding="utf-8")
    rlhf("preset --set", f"ppo.{valid[0].replace(': ', '=')}")
    assert config.load(path) == config.validate(config.parse(before, "before"), "before")


@pytest.mark.parametrize("name", ["smoke", "reviews"])
def test_a_preset_does_not_turn_on_a_gate_that_is_null(project: Path, name: str, rlhf: Command) -> None:
    """`promotion: null` is the user's decision; the rest of the preset applies."""
    rlhf("preset --set promotion=null")
    assert "promotion stays null (a preset changes its " in rlhf("preset", name).out
    settings = config.load()
    assert settings.promotion is None
    assert settings.judge == with_preset(name).judge
    assert presets.read(name)["promotion"], "the preset itself is unchanged"
    gate = with_preset(name).model_dump(mode="json")["promotion"] | {"max_kl": 7.5}
    assert "stays null" not in rlhf("preset", name, "--set", f"promotion={json.dumps(gate)}").out
    promotion = config.load().promotion
    assert promotion is not None
    assert promotion.model_dump(mode="json") == gate, "the same command turns it on; single values win"


def test_values_that_remain_of_a_former_preset_are_shown(project: Path, rlhf: Command) -> None:
    assert "remain" not in rlhf("preset sentiment").out, "there is no commit"
    shutil.copy(toy.ROOT / "params.yaml", "params.yaml")
    for words in ("init -q", "add params.yaml", "-c user.name=a -c user.email=a@b commit -q -m x"):
        subprocess.run(["git", *words.split()], check=True)
    assert "remain" not in rlhf("preset sentiment --set ppo.kl_coef=0.3").out, "the command sets all of it"
    shown = rlhf("preset reviews --set ppo.truncation.kind=none").out.partition("Earlier changes")[2]
    assert "ppo.guards.action: stop → warn" in shown  # reviews does not set it
    for key in ("model.base", "ppo.kl_coef", "ppo.truncation"):
        assert key not in shown  # the command does
    rlhf("preset constraints")
    assert "ppo.scorers: " in rlhf("preset grpo").out.partition("Earlier changes")[2]  # a list


def test_a_single_value_turns_on_a_section_that_is_null(project: Path, rlhf: Command) -> None:
    rlhf("preset --set ppo.guards=null ppo.adaptive_kl.target=3.0")
    rlhf("preset over_optimised --set ppo.kl_coef=0.01")
    settings = config.load().ppo
    assert (settings.guards, settings.adaptive_kl) == (None, AdaptiveKl(target=3.0)), "no preset does"
    rlhf("preset over_optimised --set ppo.kl_coef=0.01 ppo.guards.patience=5")
    assert config.load().ppo.guards == Guards(action="warn", patience=5), "then it is on for presets too"


def test_the_tldr_preset_names_the_revisions_that_must_be_set(project: Path, rlhf: Command) -> None:
    message = rlhf("preset tldr-pythia-1b", status=2).err
    for where in (
        "datasets/trl-lib/tldr-preference",
        "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr",
    ):
        assert f"git ls-remote https://huggingface.co/{where} HEAD" in message
    pins = [f"{key}={value}" for key, value in config.flatten(UNPINNED["tldr-pythia-1b"]).items()]
    rlhf("preset tldr-pythia-1b --set", *pins)
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
    assert settings.ppo.truncation == EosTrickReplace(missing_eos_score=-1.0)
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
    toy.run_stages(settings)
    metrics = toy.run("ppo", settings)
    assert metrics["lr"] == 3e-6
    assert metrics["val/response_length"] <= 53
    assert metrics["val/ratio"] == pytest.approx(1, abs=1e-3), "four epochs at 3e-6 hardly move it"
    assert metrics["objective/kl"] == pytest.approx(0, abs=1e-3), "the policy is its reference at first"
    assert 0 <= toy.run("judge", settings)["reward_model/policy_vs_reference/win_rate"] <= 1


# --------------------------------------------------------------------------- published values

PUBLISHED: dict[str, list[tuple[str, Any, str]]] = YAML(typ="safe", pure=True).load(
    (ROOT / "tests" / "config" / "published.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_of_a_paper_has_the_published_values_and_a_source_for_each(name: str) -> None:
    values, cited = config.in_force(with_preset(name)), {key: value for key, value, _ in PUBLISHED[name]}
    assert {key: values.get(key) for key in cited} == cited
    keys = config.flatten(presets.read(name)).keys()
    assert keys <= cited.keys()
    assert len(cited) == len(PUBLISHED[name])
    assert {key.split(".")[0] for key in keys} <= {"ppo", "reward"}
    assert "written for" in presets.summary(name), "the size of the model"


@pytest.mark.parametrize(("name", "advantages"), [("rloo", "rloo"), ("grpo", "group")])
@pytest.mark.parametrize("under", ["reviews", "smoke", "trl"])
def test_one_command_trains_without_a_critic(
    project: Path, name: str, advantages: str, under: str, rlhf: Command
) -> None:
    rlhf("preset", under, name)
    settings = config.load().ppo
    assert (settings.advantages.kind, settings.critic) == (advantages, None)


def test_a_preset_that_names_no_kind_keeps_the_one_in_force(project: Path, rlhf: Command) -> None:
    rlhf("preset rloo")
    rlhf("preset smoke")
    assert config.load().ppo.advantages == Group(kind="rloo")


def test_a_key_inside_a_section_keeps_its_kind_and_another_kind_replaces_the_section() -> None:
    """The order of the values does not matter, and a file without the section has its default."""
    for text in (SHIPPED, "seed: 1\n", "ppo: {advantages: {kind: gae, gamma: 0.9}}\n"):
        _, settings, _ = Request(overrides={"ppo.advantages.lam": 0.5}).resolve(text)
        assert isinstance(settings.ppo.advantages, Gae)
        assert settings.ppo.advantages.lam == 0.5
        several = {"ppo.advantages.samples_per_prompt": 8, "ppo.advantages.kind": "rloo"}
        _, settings, changes = Request(overrides=several).resolve(text)
        assert settings.ppo.advantages == Group(kind="rloo", samples_per_prompt=8)
        assert "ppo.advantages.kind: gae → rloo" in changes
        with pytest.raises(errors.ConfigError, match=r"advantages\.lam: unknown key"):
            Request(overrides={"ppo.advantages": {"kind": "rloo", "lam": 0.5}}).resolve(text)


def test_single_values_of_a_request_override_its_preset() -> None:
    request = Request("smoke", 9, {"ppo.total_episodes": 128, "ppo": {"cliprange": 0.5}})
    _, settings, changes = request.resolve(SHIPPED)
    assert (settings.seed, settings.ppo.total_episodes, settings.ppo.cliprange) == (9, 128, 0.5)
    assert settings.ppo.rollout_batch_size == 64, "the preset's"
    assert {"seed: 1 → 9", "reward.train: true → false", "ppo.advantages.critic.init: reward → sft"} <= {
        *changes
    }


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (presets.Request(), "default-7f3a"),
        (presets.Request("smoke", 2, {"ppo.kl_coef": 0.05}), "smoke-kl_coef=0.05-seed=2-7f3a"),
        (presets.Request(None, None, {"sft.from": "../my model"}), "default-from=_my_model-7f3a"),
        (
            presets.Request(None, None, {f"ppo.x{i}": i for i in range(6)}),
            "default-x0=0-x1=1-x2=2-x3=3-2-more-7f3a",
        ),
    ],
)
def test_a_run_is_named_by_what_differs_and_an_id(request_: presets.Request, name: str) -> None:
    assert request_.name("0123-7f3a") == name
    subprocess.run(["git", "check-ref-format", f"refs/exps/{name}"], check=True)
