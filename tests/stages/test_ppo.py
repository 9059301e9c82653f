"""Stage ppo on tiny models: what it rejects, which weights it keeps, and what it writes."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.cli import main as cli
from rlhf_tasks.config.judge import Selection
from rlhf_tasks.config.ppo import Ptx
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.tokenizer import encode, load_tokenizer
from rlhf_tasks.errors import ConfigError, UserError
from rlhf_tasks.judging.judges.build import build_judge
from rlhf_tasks.models import contracts
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import load_causal, load_reward, save_checkpoint
from rlhf_tasks.ppo import evaluate
from rlhf_tasks.ppo.vllm import VllmError
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import ppo
from rlhf_tasks.tracking import NullTracker
from tests import families, small
from tests.models.test_checks import unmask, wrap
from tests.ppo import standin
from tests.ppo.test_vllm import alive, of_servers, until
from tests.ppo.toy import started, without_critic

SETTINGS = {
    "ppo.total_episodes": 48,
    "ppo.rollout_batch_size": 16,
    "ppo.num_mini_batches": 2,
    "ppo.response_length": 8,
    "ppo.num_selections": 3,
    "ppo.num_selection_prompts": 12,
    "ppo.num_sample_generations": 2,
}


POLICY, SAMPLES = Paths().policy, Paths().ppo_samples


def run(**changes: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
    tracker = NullTracker("ppo")
    return small.run("ppo", SETTINGS | changes, tracker), tracker.history()


@pytest.mark.parametrize("role", ["reward", "reward_heldout"])
def test_a_reward_model_of_another_sft_model_is_an_error_before_training(
    role: str, models_here: Path
) -> None:
    folder = models_here / "models" / role
    identity = (folder / contracts.IDENTITY).read_text(encoding="utf-8")
    parent = contracts.fingerprint(models_here / "models/sft")
    (folder / contracts.IDENTITY).write_text(identity.replace(parent, "0" * 16), encoding="utf-8")
    before = contracts.fingerprint(models_here / "models/policy")
    with pytest.raises(contracts.ContractError, match=f"models/{role} was made from another sft model"):
        run()
    assert contracts.fingerprint(models_here / "models/policy") == before


@pytest.mark.parametrize(
    "changes", [{"ppo.loss": "nowhere:f"}, {f"ppo.{k}": v for k, v in without_critic("nowhere:f").items()}]
)
def test_a_function_that_cannot_be_imported_is_found_before_the_models_are_loaded(
    changes: dict[str, Any], models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ppo, "load_models", lambda *_: pytest.fail("the models were loaded"))
    with pytest.raises(UserError, match=r"nowhere:f cannot be imported"):
        run(**changes)


def test_a_reference_that_moves_by_less_than_its_rounding_is_refused(models_here: Path) -> None:
    dist: Any = SimpleNamespace(is_deepspeed=True, is_float32=False)
    view = small.view("ppo", SETTINGS | {"ppo.reference_sync": {"every": 1, "alpha": 0.5}})
    with pytest.raises(UserError, match=r"in bf16: small changes would be lost; set alpha: 1\.0 there"):
        ppo.load_models(dist, view, Paths())


def test_the_kept_weights_are_those_with_the_best_heldout_score(models_here: Path) -> None:
    metrics, history = run(**{"ppo.learning_rate": 1e-2})
    rows = {row["episode"]: row for row in history if "eval/heldout_scores" in row}
    assert set(rows) == {0, 16, 32, 48}
    best = max(rows, key=lambda episode: rows[episode]["eval/heldout_scores"])
    assert metrics["selected_episode"] == best
    assert metrics["selected_heldout_score"] == rows[best]["eval/heldout_scores"]
    assert metrics["selected_kl"] == rows[best]["eval/kl"]
    assert rows[0]["eval/kl"] == 0, "before training the policy is the reference"
    assert all(rows[episode]["eval/kl"] != 0 for episode in (16, 32, 48))


def test_the_stage_works_in_a_folder_other_than_the_working_folder(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained, tmp_path / "project")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    paths = Paths(tmp_path / "project")
    before = contracts.fingerprint(paths.policy)
    ppo.run(small.view("ppo", SETTINGS | {"ppo.total_episodes": 16}), paths, NullTracker("ppo"))
    assert contracts.fingerprint(paths.policy) != before
    assert not list((tmp_path / "elsewhere").iterdir())


def shorter(prompts: list[str], responses: list[str]) -> list[float]:
    return [-float(len(response)) for response in responses]


def failing(prompts: list[str], responses: list[str]) -> list[float]:
    return [float("nan")] * len(responses)


def selection_judge(function: str) -> dict[str, Any]:
    judge = {"kind": "function", "name": "shorter", "function": f"{__name__}:{function}"}
    return {"ppo.select_by": {"judge": judge, "max_failure_share": 0.5}}


def test_the_selection_judge_keeps_the_weights_with_the_best_win_rate(models_here: Path) -> None:
    metrics, history = run(**{"ppo.learning_rate": 1e-2} | selection_judge("shorter"))
    rates = {row["episode"]: row["eval/win_rate"] for row in history if "eval/win_rate" in row}
    assert set(rates) == {0, 16, 32, 48}
    assert len(set(rates.values())) > 1, "the choice makes a difference"
    rows = pq.read_table(SAMPLES / "answers.parquet").to_pylist()
    for episode, rate in rates.items():
        leads = [len(r["reference"]) - len(r["response"]) for r in rows if r["episode"] == episode]
        assert rate == pytest.approx(
            sum(1.0 if lead > 0 else 0.5 * (lead == 0) for lead in leads) / len(leads)
        )
    assert metrics["selected_episode"] == max(rates, key=lambda episode: rates[episode])
    assert metrics["selected_win_rate"] == max(rates.values())
    assert "the best by the judge shorter" in (POLICY / "README.md").read_text(encoding="utf-8")


def test_a_selection_judge_that_fails_stops_ppo_with_the_reason(models_here: Path) -> None:
    with pytest.raises(UserError, match="judge shorter: 12 of 12 comparisons failed"):
        run(**selection_judge("failing"))


def test_an_error_about_the_selection_judge_names_its_own_key(models_here: Path) -> None:
    """An error about the same judge in the list names the list's key."""
    judge = {"kind": "local", "name": "own", "path": "models/sft", "prompt": "none.txt"}
    settings = Selection.model_validate({"judge": judge, "max_failure_share": 0.5})
    problem = "the prompt 'none.txt' cannot be read"
    with pytest.raises(UserError, match=rf"^ppo\.select_by\.judge: {problem}"):
        evaluate.selection_judge(small.distributed(), settings, Paths())
    with pytest.raises(UserError, match=rf"^judge\.judges: {problem}"):
        build_judge(settings.judge, torch.device("cpu"), 0.5, Paths())


def test_an_error_about_a_selection_judge_without_a_revision_names_its_own_key() -> None:
    judge = {"kind": "local", "prompt": "hhh", "name": "own", "path": "some/one"}
    with pytest.raises(ConfigError) as error:
        config.validate(small.params({"ppo.select_by": {"judge": judge, "max_failure_share": 0.5}}), "test")
    assert "ppo.select_by.judge: path of judge own='some/one' is no folder here" in str(error.value)
    assert "judge.judges" not in str(error.value)


def test_a_policy_names_the_reward_model_that_it_was_trained_on(models_here: Path) -> None:
    run()
    assert "reward" in contracts.read_parents(POLICY)
    run(**{"ppo.scorers": [{"kind": "dummy"}]})
    assert "reward" not in contracts.read_parents(POLICY), "only the critic was initialised from it"


def test_metrics_have_the_fields_names_and_samples_their_columns(models_here: Path) -> None:
    metrics, history = run(**{"ppo.truncation.kind": "none"})  # no response of these models ends
    names = "eps lr episode objective/kl objective/entropy objective/non_score_reward objective/rlhf_reward "
    names += "objective/scores policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg loss/policy_avg "
    names += "loss/value_avg val/clipfrac_avg val/ratio val/ratio_var val/num_eos_tokens"
    assert set(names.split()) <= set(metrics)
    assert [row["episode"] for row in history] == [0, 16, 32, 48]
    assert metrics["objective/rlhf_reward"] == pytest.approx(
        metrics["objective/scores"] + metrics["objective/non_score_reward"]
    )
    rows = pq.read_table(SAMPLES / "samples.parquet").to_pylist()
    assert {row["episode"] for row in rows} == {0, 48}, "two times: before training, and at its end"
    assert list(rows[0]) == ["episode", "prompt", "response", "score", "reward_heldout"]
    answers = pq.read_table(SAMPLES / "answers.parquet").to_pylist()
    given = {row["prompt"]: row["reference"] for row in read_table(Paths(), "prompts", "validation")}
    num_prompts = SETTINGS["ppo.num_selection_prompts"]
    assert [row["episode"] for row in answers] == [at for at in (0, 16, 32, 48) for _ in range(num_prompts)]
    assert all(given[row["prompt"]] == row["reference"] for row in answers)
    assert list(answers[0]) == ["episode", "prompt", "reference", "response"]
    rollouts = pq.read_table(SAMPLES / "rollouts.parquet").to_pylist()
    assert [row["update"] for row in rollouts] == [1] * 16 + [3] * 16
    columns = "episode update rollouts prompt response length notes score scorer/reward_model heldout gap kl"
    assert list(rollouts[0]) == [*columns.split(), "advantage"]
    assert sum(row["kl"] for row in rollouts[16:]) / 16 == pytest.approx(metrics["objective/kl"], abs=1e-5)
    assert sum(row["score"] for row in rollouts[16:]) / 16 == pytest.approx(metrics["objective/scores"])
    assert load_causal(POLICY) is not None
    identity = contracts.read_identity(POLICY)
    assert identity["parents"]["sft"] == contracts.fingerprint(Path("models/sft"))
    assert "sampler" not in identity, "the stage has sampled by itself"


def test_the_stage_trains_without_a_critic(models_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a critic nor its metrics are made; the first rollouts come from the SFT model."""
    monkeypatch.setattr(ppo, "new_critic", None)
    before = contracts.fingerprint(POLICY)
    metrics, history = run(**{f"ppo.{key}": value for key, value in without_critic("group").items()})
    assert contracts.fingerprint(POLICY) != before
    assert not {"loss/value_avg", "val/clipfrac_avg", "val/explained_variance"} & set().union(*history)
    assert all(math.isfinite(value) for row in history for value in row.values())
    assert abs(history[1]["objective/kl"]) < 1e-4
    assert metrics["val/group_deviation"] > 0
    assert load_causal(POLICY) is not None


def test_ptx_text_is_the_documents_of_a_file(tmp_path: Path) -> None:
    """A document is cut at the model's length; no row spans two documents."""
    tokenizer, policy, file = small.tokenizer(), small.causal(), tmp_path / "text.txt"
    documents = [" ".join(small.WORDS * 10), "w7 w8\nw9", "w6 w5"]
    file.write_text(f"\n{documents[0]}\n\n \n{documents[1]}\n\n{documents[2]}\n", encoding="utf-8")
    rows = ppo.ptx_text(Ptx(text="text.txt"), Paths(tmp_path), tokenizer, policy)
    assert rows is not None
    assert {len(query) for query in rows.queries} == {1}
    pieces = [query + response for query, response in zip(rows.queries, rows.responses, strict=True)]
    most = policy.config.max_position_embeddings
    first, *others = encode(tokenizer, documents)
    assert pieces == [*[first[n : n + most] for n in range(0, len(first), most)], *others]
    assert len(first) > most


@pytest.mark.parametrize("content", [None, " \n\n"])
def test_ptx_without_a_text_is_an_error(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"ppo\.ptx\.text: .*(cannot be read|holds no text)"):
        ppo.ptx_text(Ptx(text=str(file)), Paths(tmp_path), small.tokenizer(), small.causal())


def test_a_stop_token_outside_the_vocabulary_is_an_error(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"ppo\.stop_token=99999 is not a token"):
        run(**{"ppo.stop_token": 99999})


def test_without_a_reward_model_the_last_policy_is_kept(models_here: Path) -> None:
    metrics, history = run(**small.WITHOUT_REWARD)
    assert metrics["selected_episode"] == 48
    assert "eval/heldout_scores" not in history[0]
    assert set(contracts.read_identity(POLICY)["parents"]) == {"sft"}


def test_a_policys_generation_config_names_all_that_ends_its_responses(models_here: Path) -> None:
    run(**{"ppo.stop_token": 7})
    assert load_causal(POLICY).generation_config.eos_token_id == [small.EOS, 7]


# -------- Stage ppo refuses a model that answers otherwise in sampling than in training, before it trains it


def run_with(
    family: str,
    value_model: str = "separate",
    settings: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> None:
    """The stage without a reward model, its SFT model replaced by a random one of this family."""
    folder = Paths().sft
    words = load_tokenizer(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    model = families.causal(family, vocab_size=len(words), eos_token_id=words.eos_token_id, **changes)
    save_checkpoint(model, words, folder, identity={}, card="a card")
    given = SETTINGS | dict(small.WITHOUT_REWARD) | {"ppo.advantages.critic.kind": value_model, **settings}
    small.run("ppo", given)


@pytest.mark.slow
def test_ppo_trains_a_family_with_linear_attention(models_here: Path) -> None:
    run_with("qwen3_next")
    assert load_causal(models_here / "models/policy").config.model_type == "qwen3_next"


def test_a_family_whose_state_keeps_rows_that_have_ended_is_refused(models_here: Path) -> None:
    with pytest.raises(UserError) as error:
        run_with("recurrent_gemma", "shared")
    assert "models/sft fails the check before training" in str(error.value)
    assert "ended rows do not change the others: off by " in str(error.value)


def test_a_held_out_reward_model_that_answers_otherwise_in_a_batch_is_refused(
    models_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = load_reward

    def load_unmasked(folder: Path) -> TokenScores:
        scores = load(folder)
        if folder == Paths().reward_heldout:
            wrap(scores.model.base_model, unmask)
        return scores

    monkeypatch.setattr(ppo, "load_reward", load_unmasked)
    with pytest.raises(UserError, match="models/reward_heldout fails the check before training"):
        small.run("ppo", SETTINGS)


def test_positions_that_depend_on_the_longest_row_are_refused(models_here: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="models/sft rescales its rotary positions for a whole batch"):
        run_with("llama", max_position_embeddings=16, rope_parameters=rope)


def test_a_sparse_index_shorter_than_the_rows_is_refused(models_here: Path) -> None:
    with pytest.raises(UserError, match=r"models/sft selects by a sparse index .* exceeds 8 tokens"):
        run_with("deepseek_v32", index_topk=8)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "jamba", "phimoe", "deepseek_v3"])
def test_ppo_trains_adapters_of_a_family_with_layers_that_get_none(models_here: Path, family: str) -> None:
    run_with(family, settings={"ppo.lora": {"r": 2}, "ppo.advantages.critic.lora": {"r": 2}})
    assert load_causal(models_here / "models/policy").config.model_type == family


# -------- Stage ppo with vLLM: what it writes, how it ends when the server fails, and that no server is left


def section(*options: str, **changes: Any) -> dict[str, Any]:
    """A server that the stage starts, with options of the stand-in."""
    return {"ppo.sampler": started(*options, **changes)}


def test_the_policy_names_the_sampler_and_the_run_has_its_metrics(models_here: Path) -> None:
    _, history = run(**section())
    rows = [row for row in history if "sampler/logprob_diff" in row]
    assert [row["episode"] for row in rows] == [16, 32, 48]
    assert all(0 < row["sampler/logprob_diff"] <= row["sampler/logprob_diff_max"] < 1e-4 for row in rows)
    assert all(row["sampler/kl"] < 1e-6 and row["sampler/load_seconds"] > 0 for row in rows)
    identity = json.loads((POLICY / contracts.IDENTITY).read_text(encoding="utf-8"))
    assert identity["sampler"] == f"vLLM {standin.VERSION}"
    assert f"its rollouts were sampled by vLLM {standin.VERSION}" in (POLICY / "README.md").read_text("utf-8")
    assert not of_servers(models_here)
    assert len(list((models_here / ".rlhf/vllm").iterdir())) == 1, "the log alone is kept"


def test_a_server_that_ends_ends_the_stage_with_one_message_that_names_its_log(
    models_here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contracts.fingerprint(POLICY)
    with pytest.raises(VllmError, match=r"vLLM at .* does not answer .*; its log is .*\.log"):
        run(**section("--fault", "die"))
    assert contracts.fingerprint(POLICY) == before
    assert not of_servers(models_here)

    def fail(*_: object) -> int:
        raise VllmError("vLLM has gone")

    monkeypatch.setattr("rlhf_tasks.stages.runner.run", fail)
    assert cli.main(["ppo"]) == 1
    assert capsys.readouterr().err == "rlhf: vLLM has gone\n"


@pytest.mark.slow
@pytest.mark.e2e
def test_a_cancelled_stage_leaves_no_server(models_here: Path) -> None:
    """The server hangs in the first rollout. The first SIGTERM waits for the update, the second does not."""
    shutil.copy(small.ROOT / "dvc.yaml", Path())
    marker = models_here / "marker"
    server = section("--canned", "--fault", "hang", "--marker", str(marker))
    changes = SETTINGS | server | {"tracking.enabled": False}
    YAML().dump(small.params(changes), Path("params.yaml"))
    environment = os.environ | {"PYTHONPATH": str(small.ROOT)}
    words = [sys.executable, "-m", "rlhf_tasks.cli", "ppo"]
    stage = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: stage.poll() is not None or marker.exists())
    assert stage.poll() is None
    running = of_servers(models_here)
    assert len(running) == 2
    while stage.poll() is None:
        stage.terminate()
        time.sleep(0.1)
    assert stage.returncode == 143
    until(lambda: not alive(running))
