"""Where the files of a project are."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from rlhf_tasks.config import Split, Stage
from rlhf_tasks.project import git


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
        root = self.root.resolve()
        common = git.quiet_output(root, "rev-parse", "--path-format=absolute", "--git-common-dir")
        top = git.quiet_output(root, "rev-parse", "--show-toplevel")
        if not common or not top or Path(common).name != ".git":
            return root / ".rlhf"
        return Path(common).parent / root.relative_to(Path(top).resolve()) / ".rlhf"

    # ------------------------------------------------------------------------------------ data

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def tokenizer(self) -> Path:
        return self.data / "tokenizer"

    @property
    def quarantine(self) -> Path:
        """The rows that `prepare` has left out, and why."""
        return self.data / "quarantine" / "rows.jsonl"

    @property
    def labels(self) -> Path:
        """The human labels that `rlhf label` writes."""
        return self.data / "labels.jsonl"

    def rows(self, role: str) -> Path:
        """The folder of sft, preferences, prompts or comparisons: a Parquet file per split."""
        return self.data / role

    def table(self, role: str, split: Split) -> Path:
        """The rows of one split."""
        return self.rows(role) / f"{split}.parquet"

    # ----------------------------------------------------------------------------- checkpoints

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def base(self) -> Path:
        return self.models / "base"

    @property
    def sft(self) -> Path:
        return self.models / "sft"

    @property
    def reward(self) -> Path:
        return self.models / "reward"

    @property
    def reward_heldout(self) -> Path:
        return self.models / "reward_heldout"

    @property
    def policy(self) -> Path:
        return self.models / "policy"

    # --------------------------------------------------------------------------------- results

    def metrics(self, stage: Stage) -> Path:
        return self.root / "metrics" / f"{stage}.json"

    def curves(self, stage: Stage) -> Path:
        return self.root / "plots" / f"{stage}.csv"

    def lineage(self, stage: Stage) -> Path:
        return self.models / "lineage" / f"{stage}.json"

    @property
    def ppo_samples(self) -> Path:
        """The folder of PPO's evaluations: samples, responses, guards."""
        return self.root / "evaluation" / "ppo"

    @property
    def judge_results(self) -> Path:
        """The folder of the results of stage judge."""
        return self.root / "evaluation" / "judge"

    @property
    def evaluation_results(self) -> Path:
        """The results document of stage judge: see `evaluation.results.EvaluationResults`."""
        return self.judge_results / "results.json"

    @property
    def judged_responses(self) -> Path:
        """The table of prompts, references and responses of stage judge, with their scores."""
        return self.judge_results / "answers.parquet"

    @property
    def verdict(self) -> Path:
        return self.root / "evaluation" / "verdict.json"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    # ----------------------------------------------------------------------------------- project

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def dvc_yaml(self) -> Path:
        return self.root / "dvc.yaml"

    @property
    def deepspeed(self) -> Path:
        """The folder of DeepSpeed's settings."""
        return self.root / "infra" / "deepspeed"

    def relative(self, path: Path) -> str:
        """A path below the project's folder as dvc.yaml writes it."""
        return path.relative_to(self.root).as_posix()
