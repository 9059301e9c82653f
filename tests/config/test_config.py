"""Checks of params.yaml: one message names all problems, and no problem is silent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_tasks import config, errors
from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.ppo import Gae, SeparateCritic
from rlhf_tasks.config.types import description, kinds, sections
from rlhf_tasks.errors import ConfigError
from rlhf_tasks.tracking import context
from rlhf_tasks.training.distributed import Distributed
from tests import small
from tests.ppo.toy import VLLM_SAMPLER

FUNCTION = {"kind": "function", "function": "m:f"}


def problems(changes: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        config.validate(small.params(changes), "params.yaml")
    return str(raised.value)


def test_one_message_names_every_problem() -> None:
    message = problems(
        {"ppo.advantages.gamma": 1.5, "sft.batch_size": 0, "data.source": "web", "seed": -1, "judge.foo": 1}
    )
    assert message.startswith("params.yaml has 5 problem(s):")
    for key in ("ppo.advantages.gamma: ", "sft.batch_size: ", "data.source: ", "seed: ", "judge.foo: "):
        assert key in message
    assert "(given: 1.5)" in message
    assert "(given: 'web')" in message


DUMMY = {"kind": "dummy"}
OWN = {"kind": "reward_model"}
A = {"kind": "reward_model", "path": "a"}
BY_A = {"kind": "reward_model", "name": "a", "path": "./a"}
LONG = {"kind": "length_penalty", "max_tokens": 16, "buffer": 4}
LLM = {"kind": "llm", "base_url": "https://here/v1", "model": "judge-1"}
LLM_JUDGE = {**LLM, "name": "gpt", "base_url": "https://elsewhere/v1"}
PANEL = {"kind": "all_of", "name": "panel", "judges": ["gpt", "gold"]}
HTTP = {"kind": "http", "url": "http://x"}
NO_USER = {"ppo.advantages.critic.init": "sft", "judge.judges": [small.GOLD]}
ONE_STEP = {"ppo.num_ppo_epochs": 1, "ppo.num_mini_batches": 1}
GIVE_EITHER = "give either `url`, of a server that runs, or `command`"
NOT_LOCAL = "is not the address of a server on this machine"
IMPORT_PATH = "must be a function of yours as module:function"
BOOTSTRAP = {"ppo.truncation.kind": "bootstrap_add"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    # keys and values
    ({"ppo.kl_coeff": 1}, "ppo.kl_coeff: unknown key; did you mean 'kl_coef'?"),
    ({"sft.form": 1}, "sft.form: unknown key; did you mean 'from'?"),
    ({"data.columns.promt": 1}, "data.columns.promt: unknown key; did you mean 'prompt'?"),
    ({"rewards": 1}, "rewards: unknown key; did you mean 'reward'?"),
    ({"tracking.zzz": 1}, "zzz: unknown key; known here: enabled, uri, experiment"),
    ({"ppo.scorers": [{"kind": "function"}]}, "ppo.scorers.0.function: is missing"),
    ({"seed": 2**64}, "seed: Input should be less than or equal to 4294967295 (given: 1844674407370955"),
    ({"seed": 16**9999}, "(given: 0x1000"),
    ({"model.scratch.hidden_size": 2**31}, "hidden_size: Input should be less than or equal to 65536"),
    ({"sft.num_epochs": 1e300}, "sft.num_epochs: Input should be less than or equal to 10000"),
    # sizes, data and models
    ({"ppo.num_mini_batches": 3}, "is not divisible by num_mini_batches=3"),
    ({"ppo.total_episodes": 4}, "is less than one rollout"),
    ({"ppo.advantages.samples_per_prompt": 3}, "is not divisible by advantages.samples_per_prompt=3"),
    (
        {"ppo.advantages.samples_per_prompt": 128, "launch.num_processes": 4},
        "ppo.rollout_batch_size / samples_per_prompt=2 is not divisible by launch.num_processes=4",
    ),
    ({"ppo.response_length": 500}, "exceeds data.max_completion_tokens"),
    ({"launch.num_processes": 7}, "is not divisible by launch.num_processes=7"),
    (
        {"launch.parallelism": "hsdp", "launch.num_processes": 2},
        "needs at least two machines and two processes on each",
    ),
    ({"launch.offload": True}, "has nothing to move with launch.parallelism: ddp"),
    ({"data.source": "mine:rows", "judge.judges": [small.GOLD]}, "gold only judges the synthetic task"),
    ({"data.source": "hub"}, "names the data sets of `source: hub`"),
    ({"ppo.guards.action": "raise_kl", "ppo.kl_coef": 0.0}, "0 would stay 0"),
    ({"ppo.guards.kl_min": 12.0}, "must be below"),
    ({"model.scratch": None}, "the shape of `base: scratch`"),
    ({"model.base": "some/name", "model.scratch": None}, "needs `revision`"),
    ({"sft.from": "some/name"}, "needs `revision`"),
    ({"reward.from": "some/name", "reward.revision": "main"}, "full commit hash"),
    ({"model.scratch.num_heads": 5}, "must be an even whole number"),
    ({"preferences.label_noise": 0.6}, "less than or equal to 0.5"),
    ({"preferences.samples_per_pair": 3}, "multiple of 2"),
    (
        {"preferences.samples_per_pair": 4, "data.source": "files", "judge.judges": [small.HELDOUT]},
        "preferences.samples_per_pair: 4 needs scores of the samples",
    ),
    ({"ppo.select_by": {"judge": small.GOLD}}, "kind is gold; give one of"),
    ({"ppo.select_by": {"judge": small.HELDOUT}}, "select_by cannot name models/reward_heldout"),
    (
        {"ppo.scorers": [FUNCTION], "ppo.select_by": {"judge": {**FUNCTION, "name": "f"}}},
        "PPO does not select by what it optimizes",
    ),
    ({"sft.from": ".", "sft.revision": "a" * 40}, "would be ignored"),
    # PPO
    ({"ppo.kl.kind": "in_loss", "ppo.kl.estimator": "k1"}, "ppo.kl.estimator: "),
    ({"ppo.advantages.critic": {"kind": "shared", "init": "sft"}}, "critic.init: unknown key"),
    (
        {"ppo.advantages.critic": {"kind": "shared", "warmup": {}}},
        "unknown key; known here: vf_coef, cliprange_value, kind",
    ),
    ({"ppo.lora": {}, "ppo.reference_sync": {"every": 2}}, "the reference is the policy without its"),
    ({"ppo.reference_sync": {"every": 999}}, "it would never happen"),
    ({"ppo.kl_coef": 0.0, "ppo.adaptive_kl": {}}, "stay 0"),
    ({"ppo.adaptive_kl": {"horizon": 50}}, "kl_coef would turn negative"),
    ({"ppo.target_kl": 0.1, "ppo.num_ppo_epochs": 1}, "has no further one"),
    ({"ppo.kl_penalty": {}, **ONE_STEP}, "its gradient is zero at the only optimizer step"),
    (
        {"ppo.truncation.kind": "eos_trick_subtract", "ppo.truncation.missing_eos_score": 1.0},
        "missing_eos_score: Input should be less than or equal to 0",
    ),
    ({"ppo.advantages.critic": {"warmup": {}, "vf_coef": 0.0}}, "with vf_coef=0 the critic learns"),
    ({"ppo.kl.kind": "in_loss", "ppo.kl.estimator": "k3", "ppo.kl_coef": 0.0}, "is no penalty at all"),
    ({"ppo.top_p": 0.9}, "another distribution than the log-probabilities"),
    ({"ppo.scorers": []}, "ppo.scorers: add at least one, such as {kind: dummy} (given: [])"),
    ({"ppo.scorers": [DUMMY, DUMMY]}, "dummy is named 2 times; keep one"),
    ({"ppo.scorers": [OWN, OWN]}, "the reward model models/reward is named 2 times"),
    ({"ppo.scorers": [OWN, A, {**A, "path": "./a"}]}, "model a is named 2 times"),
    ({"ppo.scorers": [{**OWN, "path": "models/reward_heldout"}]}, "must not optimize models/reward_held"),
    (
        {"ppo.scorers": [{**OWN, "path": "models/reward"}]},
        "is the default; remove path, or set it to null",
    ),
    ({"ppo.scorers": [{**OWN, "name": "Bad name"}]}, "ppo.scorers.0.name: "),
    ({"ppo.scorers": [{**OWN, "name": "score"}]}, "'score': a column of samples.parquet has this name"),
    ({"ppo.scorers": [{**OWN, "name": "a"}, {**A, "name": "a"}]}, "'a': several scorers have this name"),
    ({"ppo.scorers": [{**LONG, "buffer": 17}]}, "buffer=17 exceeds max_tokens=16"),
    ({"ppo.scorers": [{**LONG, "max_tokens": 40}]}, "which no response exceeds with response_length=32"),
    (
        {"ppo.scorers": [OWN, A], "judge.judges": [BY_A], "promotion.judge": "a"},
        "promotion.judge='a' uses ./a, which PPO optimizes",
    ),
    ({"ppo.scorers": [A], "ppo.select_by": {"judge": BY_A}}, "select_by: ./a is also a scorer"),
    (
        {**NO_USER, "ppo.scorers": [A]},
        "reward.train is true, but no scorer, critic, judge or guard uses one",
    ),
    (
        {**NO_USER, "ppo.scorers": [DUMMY]},
        "reward.train is true, but no scorer, critic, judge or guard uses one",
    ),
    ({"ppo.scorers": [{**HTTP, "url": "x"}]}, "ppo.scorers.0.url: must begin with http:// or https://"),
    ({"ppo.scorers": [{**HTTP, "urll": "x"}]}, "did you mean 'url'?"),
    # a language model that scores
    ({"ppo.scorers": [{**LLM, "lowest": 10.0}]}, "lowest=10 must be below highest=10"),
    ({"ppo.scorers": [{**LLM, "prompt": "reference"}]}, "name its column, or set prompt to rubric"),
    ({"ppo.scorers": [{**LLM, "column": "who"}]}, "prompt=rubric reads no column"),
    (
        {"ppo.scorers": [{**LLM, "prompt": "reference", "column": "no"}]},
        "ppo.scorers: llm needs the column no; add it to data.columns.keep",
    ),
    ({"ppo.scorers": [{**LLM, "base_url": "x"}]}, "base_url: must begin with http:// or https://"),
    (
        {"ppo.scorers": [LLM], "ppo.select_by": {"judge": LLM_JUDGE}},
        "select_by: the model judge-1 is also a scorer",
    ),
    (
        {"ppo.scorers": [LLM], "judge.judges": [LLM_JUDGE], "promotion.judge": "gpt"},
        "promotion.judge='gpt' uses the model judge-1, which PPO optimizes",
    ),
    (
        {"ppo.scorers": [LLM], "judge.judges": [LLM_JUDGE, small.GOLD, PANEL], "promotion.judge": "panel"},
        "promotion.judge='panel' uses the model judge-1, which PPO optimizes",
    ),
    (
        {
            **{"dpo.train": True, "preferences.function": "m:f", "promotion.judge": "own"},
            "judge.judges": [FUNCTION | {"name": "own"}],
        },
        "promotion.judge='own' uses m:f, which labels the pairs that stage dpo learns from",
    ),
    ({"ppo.stop_token": "foo"}, "must be `eos`, or the id of a token"),
    ({"reward.train": False}, "needed by ppo.scorers, ppo.advantages.critic.init, judge.judges"),
    ({**small.WITHOUT_REWARD, "ppo.guards.gap_max": 1.0}, "is needed by ppo.guards.gap_max"),
    # best-of-n
    ({"judge.best_of_n": 1}, "judge.best_of_n: Input should be greater than or equal to 2"),
    ({**small.WITHOUT_REWARD, "judge.best_of_n": 4}, "is needed by judge.best_of_n; set it to true"),
    (
        {"judge.best_of_n": 4, "judge.judges": [small.GOLD, {**BY_A, "path": "./models/reward"}]},
        "best_of_n: the judge a is models/reward, which selects the best of n: it cannot judge them",
    ),
    # estimators of advantages, functions and losses
    ({"ppo.advantages": {"kind": "rloo", "gamma": 0.99}}, "ppo.advantages.gamma: unknown key"),
    ({"ppo.advantages": {"kind": "group", "critic": {}}}, "ppo.advantages.critic: unknown key"),
    ({"ppo.advantages": {"kind": "rloo", "samples_per_prompt": 1}}, "should be greater than or equal to 2"),
    (
        {"ppo.advantages": {"kind": "ppo"}},
        "kind is ppo; give one of 'gae', 'rloo', 'group', 'function'",
    ),
    ({"ppo.scorers": [{"weight": 1}]}, "ppo.scorers.0: kind is missing"),
    ({"ppo.advantages": {"kind": "function"}}, "ppo.advantages.function: is missing"),
    ({"ppo.advantages": FUNCTION | {"function": "mine"}}, f"ppo.advantages.function: {IMPORT_PATH}"),
    ({"ppo.advantages": FUNCTION, **BOOTSTRAP}, "kind=bootstrap_add needs the value of a critic"),
    ({"ppo.advantages": {"kind": "rloo"}, **BOOTSTRAP}, "kind=bootstrap_add needs the value of a critic"),
    (
        {"ppo.advantages.kind": "rloo", "reward.train": False},
        "is needed by ppo.scorers, judge.judges",
    ),
    ({"ppo.loss_reduction": {"constant": 0}}, "ppo.loss_reduction"),
    ({"ppo.loss_reduction": "sum"}, "ppo.loss_reduction"),
    # responses that no loss reads
    ({"ppo.skip_equal_groups": True}, "compares the responses to one prompt"),
    (
        {"ppo.skip_equal_groups": True, "ppo.advantages.samples_per_prompt": 4},
        "skip_equal_groups: with a critic the responses of such a group have advantages too",
    ),
    (
        {"ppo.skip_equal_groups": True, "ppo.advantages": FUNCTION},
        "advantages.samples_per_prompt is 1; raise it, or set skip_equal_groups to false",
    ),
    (
        {"ppo.skip_truncated": True, "ppo.truncation.kind": "bootstrap"},
        "skip_truncated leaves out what truncation.kind=bootstrap is for",
    ),
    # vLLM as sampler
    ({"ppo.sampler": VLLM_SAMPLER | {"url": None}}, GIVE_EITHER),
    ({"ppo.sampler": VLLM_SAMPLER | {"command": ["vllm", "serve"]}}, GIVE_EITHER),
    ({"ppo.sampler": VLLM_SAMPLER | {"command": [], "url": None}}, "ppo.sampler.command"),
    ({"ppo.sampler": VLLM_SAMPLER | {"url": "http://10.0.0.7:8000"}}, "PPO uses loopback only"),
    ({"ppo.sampler": VLLM_SAMPLER | {"url": "https://127.0.0.1:8000"}}, NOT_LOCAL),
    ({"ppo.sampler": VLLM_SAMPLER | {"url": "http://127.0.0.1"}}, NOT_LOCAL),
    ({"ppo.sampler": VLLM_SAMPLER | {"url": "http://127.0.0.1:8000/v1"}}, NOT_LOCAL),
    ({"ppo.sampler": VLLM_SAMPLER | {"url": "http://127.0.0.1:99999"}}, "Port out of range 0-65535"),
    ({"ppo.sampler": VLLM_SAMPLER | {"importance_cap": 0.5}}, "ppo.sampler.importance_cap"),
    ({"ppo.sampler": VLLM_SAMPLER | {"batch_size": 8}}, "ppo.sampler.batch_size: unknown key"),
    ({"ppo.sampler": VLLM_SAMPLER, "ppo.temperature": 0.001}, "a temperature of at least 0.01"),
    ({"ppo.sampler": VLLM_SAMPLER, "ppo.ratio_from": "reference"}, "set ratio_from to rollout"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_settings_that_are_wrong_or_contradict_each_other_are_refused_with_the_reason(
    changes: dict[str, Any], message: str
) -> None:
    told = problems(changes)
    assert message in told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ppo.kl_coef", "0.05"),
        ("ppo.advantages.whiten_rewards", 1),
        ("ppo.advantages.whiten_rewards", "no"),
        ("sft.batch_size", 64.5),
        ("sft.batch_size", True),
        ("data.path", None),
        ("ppo.learning_rate", float("nan")),
        ("judge.judges", "gold"),
        ("tracking", None),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_never_converted(key: str, value: Any) -> None:
    assert f"{key}" in problems({key: value})


def test_the_last_seed_is_one_that_every_generator_accepts() -> None:
    settings = config.validate(small.params({"seed": 2**32 - 1}), "test")
    dist = Distributed(settings.launch, settings.seed)
    torch.Generator(dist.device).manual_seed(settings.seed)


def test_a_file_without_a_key_or_section_has_the_default() -> None:
    assert config.validate({}, "params.yaml") == Config()
    settings = config.validate({"ppo": {"advantages": {"critic": {"vf_coef": 0.5}}}}, "params.yaml").ppo
    assert settings.advantages == Gae(critic=SeparateCritic(vf_coef=0.5))
    assert settings.critic == SeparateCritic(vf_coef=0.5)
    hub = {"model": {"base": "some/name", "revision": "a" * 40}}
    assert config.validate(hub, "params.yaml").model.scratch is None


@pytest.mark.parametrize(
    "uri", ["sqlite:///mlflow.db", "sqlite+pysqlite:///a/b.db", "file:mlruns", "./mlruns"]
)
def test_a_tracking_store_with_a_relative_path_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage may work in a git worktree, which is removed with everything in it."""
    with pytest.raises(ValidationError, match=r"is relative to the working folder.*absolute path"):
        config.Tracking(enabled=True, uri=uri, experiment="a")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(errors.UserError, match=r"MLFLOW_TRACKING_URI: .* is relative to the working folder"):
        context.uri(config.Tracking(enabled=True, uri=None, experiment="a"))


@pytest.mark.parametrize(
    "uri",
    ["sqlite:////a/mlflow.db", "file:///a/mlruns", "/a/mlruns", "http://a", "databricks", "databricks://a"],
)
def test_a_tracking_store_with_an_absolute_address_is_accepted(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config.Tracking(enabled=True, uri=uri, experiment="a")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another")
    assert context.uri(given) == uri
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert context.uri(given.model_copy(update={"uri": None})) == uri


def test_the_message_names_a_parameter_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    with pytest.raises(ConfigError, match="does not exist"):
        config.load(file)
    for text, why in {
        "seed: [1\n": "not readable as YAML",
        f"seed: {'9' * 5000}\n": "not readable as YAML: Exceeds the limit",
        "a: " + "[" * 1500 + "\n": "not readable as YAML: maximum recursion depth",
        "seed: 1\nseed: 2\n": 'found duplicate key "seed" with value "2"',
        "- seed\n": r"must hold sections .* but holds \['seed'\]",
    }.items():
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=why) as error:
            config.load(file)
        assert "suppress" not in str(error.value), "advice for programmers"


# ------------------------------------------------------------------------------------- stage views


def test_a_stage_view_has_the_declared_sections_and_no_other() -> None:
    view = small.view("judge")
    assert view.seed == small.params()["seed"]
    assert view.launch.num_processes == 1
    assert view.judge.num_examples == small.params()["judge"]["num_examples"]
    assert view.data_source == small.params()["data"]["source"], "one value of a section"
    assert not any(hasattr(view, section) for section in ("ppo", "reward", "sft", "data"))
    assert [stage for stage in config.STAGES if "preset" in config.VIEWS[stage].reads()] == ["report"]


@pytest.mark.parametrize("stage", config.STAGES)
def test_the_declared_parameters_are_those_that_the_stage_reads(stage: config.Stage) -> None:
    critic = {"ppo.advantages.critic": {"kind": "separate", "init": "value"}, "dpo.train": True}
    declared = small.view(stage, critic).declared
    reads = config.VIEWS[stage].reads()
    assert all(any(key == r or key.startswith(f"{r}.") for r in reads) for key in declared)
    unread = {"dpo"} if stage == "preferences" else set()  # where a reward model trains on the pairs
    assert {key.split(".")[0] for key in declared} == {r.split(".")[0] for r in reads} - unread
    assert list(small.view("value").declared) == ["ppo.advantages.critic.init"], "where it trains nothing"


@pytest.mark.parametrize("function", ["gspo", "mine:", "mine:a.b", "mine: gspo", "ppo_clip:"])
def test_a_function_is_named_by_its_import_path(function: str) -> None:
    own = {"kind": "function", "function": function}
    message = problems({"ppo.loss": function, "ppo.scorers": [own], "judge.judges": [own | {"name": "own"}]})
    assert "ppo.loss: must be ppo_clip, or a function of yours as module:function" in message
    assert message.count(f"function: {IMPORT_PATH}") == 2


def test_a_loss_of_ones_own_is_reduced_by_a_setting() -> None:
    own = {"ppo.loss": "mine:gspo", "ppo.advantages": {**FUNCTION, "critic": {"kind": "shared"}}}
    for reduction in ("response_mean", {"constant": 32}):
        config.validate(small.params(own | {"ppo.loss_reduction": reduction}), "test")


def test_a_server_by_its_address_or_by_its_command_is_accepted() -> None:
    for own in ({}, {"url": None, "command": ["/opt/vllm/bin/vllm", "serve"]}):
        sampler = config.validate(small.params({"ppo.sampler": VLLM_SAMPLER | own}), "test").ppo.sampler
        assert sampler.kind == "vllm"
        assert sampler.command == (("/opt/vllm/bin/vllm", "serve") if own else None)


# ------------------------------------------------------------------------------------ descriptions


def with_inner(section: type[Section]) -> Iterator[type[Section]]:
    """A section type, and those inside it."""
    yield section
    for field in section.model_fields.values():
        for inner in sections(field.annotation):
            yield from with_inner(inner)


def test_every_section_and_parameter_is_described_in_plain_english() -> None:
    found = list(dict.fromkeys(with_inner(Config)))
    assert len(found) > 30
    for section in found:
        assert (vars(section).get("__doc__") or "").rstrip().endswith("."), section
        names = set(section.model_fields) - {"kind"} if len(kinds(section)) == 1 else section.model_fields
        for name in names:  # its section describes a single kind
            text = description(section, name)
            assert len(text.split()) >= 3, (section, name)
            assert text.endswith("."), (section, name)
