"""Where the files of a project are."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from rlhf_tasks.config import Split, Stage
from rlhf_tasks.project import git


class _Place:
    """A file or folder at a fixed path below the project's root."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, paths: Paths, owner: type[Paths]) -> Path:
        return paths.root / self._path


@dataclass(frozen=True, eq=False)
class Paths:
    """The files of one project by name, below `root`, its folder in a checkout or in a worktree.

    `Paths()` is the project in the working folder. Only the command line makes it; others receive it.
    What is cached of a project is cached per object: two objects of one folder are not equal.
    """

    root: Path = Path()

    @functools.cached_property
    def home(self) -> Path:
        """The absolute `.rlhf` folder of the main checkout: nothing in it is lost with a git worktree.

        Outside git it is `root/.rlhf`.
        """
        root = folder = self.root.resolve()
        words = ("rev-parse", "--path-format=absolute", "--git-common-dir", "--show-toplevel")
        common, _, top = git.quiet_output(root, *words).partition("\n")
        if Path(common).name == ".git":
            folder = Path(common).parent / root.relative_to(Path(top).resolve())
        return folder / ".rlhf"

    # ------------------------------------------------------------------------------------ data

    data = _Place("data")
    tokenizer = _Place("data/tokenizer")
    quarantine = _Place("data/quarantine/rows.jsonl")
    """The rows that `prepare` has left out, and why."""

    def rows(self, role: str) -> Path:
        """The folder of sft, preferences, prompts or comparisons: a Parquet file per split."""
        return self.data / role

    def table(self, role: str, split: Split) -> Path:
        return self.rows(role) / f"{split}.parquet"

    # ----------------------------------------------------------------------------- checkpoints

    models = _Place("models")
    base = _Place("models/base")
    sft = _Place("models/sft")
    reward = _Place("models/reward")
    reward_heldout = _Place("models/reward_heldout")
    dpo = _Place("models/dpo")
    value = _Place("models/value")
    policy = _Place("models/policy")

    @property
    def start(self) -> Path:
        """The policy that PPO starts from: models/dpo where stage dpo has trained one, else models/sft."""
        return self.dpo if (self.dpo / "config.json").exists() else self.sft

    # --------------------------------------------------------------------------------- results

    def metrics(self, stage: Stage) -> Path:
        return self.root / "metrics" / f"{stage}.json"

    def curves(self, stage: Stage) -> Path:
        return self.root / "plots" / f"{stage}.csv"

    def inputs(self, stage: str) -> Path:
        """What the stage reads beside the deps of dvc.yaml: see `project.inputs`."""
        return self.root / "inputs" / f"{stage}.json"

    def lineage(self, stage: Stage) -> Path:
        return self.models / "lineage" / f"{stage}.json"

    ppo_samples = _Place("evaluation/ppo")
    """The folder of PPO's evaluations: samples, responses, guards."""
    ppo_responses = _Place("evaluation/ppo/answers.parquet")
    """The table of prompts, references and responses of PPO's evaluations."""
    judge_results = _Place("evaluation/judge")
    """The folder of the results of stage judge."""
    evaluation_results = _Place("evaluation/judge/results.json")
    """The results document of stage judge: see `judging.results.EvaluationResults`."""
    judged_responses = _Place("evaluation/judge/answers.parquet")
    """The table of prompts, references and responses of stage judge, with their scores."""
    verdict = _Place("evaluation/verdict.json")
    reports = _Place("reports")

    # ----------------------------------------------------------------------------------- project

    params = _Place("params.yaml")
    dvc_yaml = _Place("dvc.yaml")
    deepspeed = _Place("infra/deepspeed")
    """The folder of DeepSpeed's settings."""

    def relative(self, path: Path) -> str:
        """A path below the project's folder as dvc.yaml writes it."""
        return path.relative_to(self.root).as_posix()
