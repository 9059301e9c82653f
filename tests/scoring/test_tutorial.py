"""docs/tutorials/your-own-reward.md and the how-to page on rewards of other trainers, as they show it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.function import ImportedScorer
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.stages import prepare
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.small import ROOT

PAGE = (ROOT / "docs/tutorials/your-own-reward.md").read_text(encoding="utf-8")
SMALL = (
    "ppo.total_episodes=8 ppo.rollout_batch_size=8 ppo.num_mini_batches=1 ppo.num_selections=1 "
    "ppo.num_selection_prompts=4 ppo.num_sample_generations=1 ppo.response_length=24 judge.num_examples=8 "
    "judge.retention.num_examples=4 promotion.min_examples=8 promotion.trial=true"
)


OTHERS = (ROOT / "docs/how-to/rewards-of-other-trainers.md").read_text(encoding="utf-8")


def blocks(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def write_files(folder: Path) -> None:
    """The page's modules, each named by the comment in its first line."""
    for code in blocks("python"):
        (folder / code.splitlines()[0].removeprefix("# ")).write_text(code, encoding="utf-8")


def test_the_functions_score_as_the_page_says(tmp_path: Path) -> None:
    write_files(tmp_path)
    columns: Columns = {"answer": [355, 355, 355], "other": ["a", "b", "c"]}
    checks = ImportedScorer("my_checks:closeness", "ppo.scorers", tmp_path, columns)
    rows = Responses.of_texts(["347+8="] * 3, ["355", "352", "-"], columns)
    assert checks(rows).tolist() == [1.0, 0.25, 0.0]
    texts = ["The rain is good for the farm.", "The rain is extraordinarily good for the whole farm."]
    plain = ImportedScorer("my_rewards:plain", "ppo.scorers", tmp_path, {})
    assert plain(Responses.of_texts(["p"] * 2, texts)).tolist() == pytest.approx([0.0, 8 / 9])
    easy = ImportedScorer("my_judges:easy", "judge.judges", tmp_path, {})
    of_seven, of_nine = easy(Responses.of_texts(["p"] * 2, texts)).tolist()
    assert of_seven == pytest.approx(206.8 - 1.015 * 7 - 84.6 * 7 / 7)
    assert of_nine < of_seven


def test_rewards_of_other_trainers_score_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "verl_reward.py").write_text(blocks("python", OTHERS)[0], encoding="utf-8")
    (tmp_path / "my_verl_rewards.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(data_source == 's' and solution_str == ground_truth) + extra_info['bonus']\n",
        encoding="utf-8",
    )
    (tmp_path / "of_trl.py").write_text(
        "def accuracy(completions, ground_truth, **kwargs):\n"
        "    assert sorted(kwargs) == ['data_source', 'extra_info', 'prompts']\n"
        "    return [float(c == g) for c, g in zip(completions, ground_truth)]\n",
        encoding="utf-8",
    )
    columns: Columns = {
        "data_source": ["s", "s"],
        "ground_truth": ["4", "5"],
        "extra_info": [{"bonus": 0.5}, {"bonus": 0.25}],
    }
    rows = Responses.of_texts(["2+2=", "2+3="], ["4", "4"], columns)
    for function, scores in (("verl_reward:score", [1.5, 0.25]), ("of_trl:accuracy", [1.0, 0.0])):
        assert ImportedScorer(function, "ppo.scorers", tmp_path, columns)(rows).tolist() == scores


def test_the_verifiers_parameters_are_accepted_and_the_rows_keep_their_answers(tmp_path: Path) -> None:
    verifier = YAML(typ="safe").load(blocks("yaml")[0])
    tree = small.params(gate=True)
    for section, values in verifier.items():
        tree[section] |= values
    tree["data"] |= {"source": "files", "path": "problems.jsonl"}
    tree["data"]["columns"] = {"keep": ["answer"]}
    tree["reward"]["train"] = False
    tree["ppo"]["advantages"] = {"critic": {"init": "sft"}}
    settings = config.validate(tree, "the tutorial")
    assert settings.ppo.scorers[0].kind == "verifier"
    rows = "".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}", "answer": {n + 1}}}\n' for n in range(22))
    (tmp_path / "problems.jsonl").write_text(rows, encoding="utf-8")
    prepare.run(config.PrepareView.of(settings), Paths(tmp_path), NullTracker("prepare"))
    answers = [
        (row["reference"], row["columns"]["answer"])
        for split in ("train", "validation", "test")
        for row in read_table(Paths(tmp_path), "prompts", split)
    ]
    assert len(answers) == 22
    assert all(text == str(answer) for text, answer in answers)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the extra smollm2")
def test_the_pages_commands_train_and_judge_the_real_model(tmp_path: Path) -> None:
    """With fewer episodes and prompts; about five minutes on two cores."""
    for name in ("rlhf_tasks", "flows"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }

    def run(*words: str) -> None:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    write_files(tmp_path)
    run("git", "init", "-q")
    run("dvc", "init", "-q")
    run(sys.executable, "make_prompts.py")
    (commands,) = (block for block in blocks("sh") if "rlhf run" in block)
    preset, of_run = commands.replace("\\\n", " ").splitlines()
    run(*shlex.split(preset), *SMALL.split())
    run(*shlex.split(of_run))
    judged = json.loads((tmp_path / "metrics/judge.json").read_text(encoding="utf-8"))
    assert 0 <= judged["easy/policy_vs_sft/win_rate"] <= 1
    assert judged["easy/policy_vs_sft/examples"] == 8
