"""The stages of the shipped dvc.yaml with planted programs, which count how often each stage runs.

Stage `inputs` is the real one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

from ruamel.yaml import YAML

from rlhf_tasks.config import STAGES
from rlhf_tasks.project import dvc_files
from tests.flows import toy

PROGRAM = """\
import json, os, pathlib, sys, time
name, home = sys.argv[1], pathlib.Path({home!r})
with (home / "ran").open("a") as ran:
    number = ran.write(name + "\\n") and ran.tell()
seed = next(line for line in open("params.yaml") if line.startswith("seed:")).split()[1]
for out in json.loads({outs!r})[name]:
    path = pathlib.Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    if "lineage" in out:
        text = json.dumps({{"rlhf.run": f"{{name}}-{{number}}"}})
    elif path.suffix == ".csv":
        text = f"step,episode,train/loss\\n1,1,{{seed}}\\n"
    else:
        verdict = {{"passed": False, "summary": "planted"}} if out.startswith("evaluation/") else {{}}
        text = json.dumps({{"seed": int(seed), **verdict}})
    if not path.suffix:
        path.mkdir()
        path /= "file"
    path.write_text(text)
order = home / f"wait-{{name}}"
if order.exists():
    order.write_text(str(os.getpid()))
    order.rename(home / "waiting")
    time.sleep(600)
"""


class Chain:
    """A committed project whose stages write their seed into every out."""

    def __init__(self, root: Path) -> None:
        self.root, self.home = root, root / ".rlhf"
        quiet = {"tracking": {"enabled": False}, "service": {"retries": 0, "grace_seconds": 20.0}}
        toy.write_params(root, judge={"labels": "given/rows.txt"}, **quiet)
        yaml = YAML()
        tree = yaml.load((toy.ROOT / "dvc.yaml").read_text(encoding="utf-8"))
        for name, stage in tree["stages"].items():
            if name == dvc_files.INPUTS:
                stage["cmd"] = f"{sys.executable} -m rlhf_tasks.cli {name}"
                continue
            stage["cmd"] = f"{sys.executable} -S stage.py {name}"
            stage["deps"] = [dep for dep in stage["deps"] if not dvc_files.is_code(dep)]
        with (root / "dvc.yaml").open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)
        outs = json.dumps({name: node.outs for name, node in dvc_files.graph(root).items()})
        (root / "stage.py").write_text(PROGRAM.format(home=str(self.home), outs=outs), encoding="utf-8")
        for folder in ("data", "evaluation", "models", "models/lineage", "inputs"):
            (root / folder).mkdir()
            shutil.copy(toy.ROOT / folder / ".gitignore", root / folder)
        with (root / ".gitignore").open("a", encoding="utf-8") as file:
            file.write("/reports\n")
        self.home.mkdir()
        toy.commit(root)

    def ran(self) -> dict[str, int]:
        """How often each stage ran."""
        return Counter((self.home / "ran").read_text(encoding="utf-8").split())

    def hold(self, stage: str) -> None:
        """Let the next run of a stage wait once it has written its outs; `waiting` then holds its pid."""
        self.waiting.unlink(missing_ok=True)
        (self.home / f"wait-{stage}").touch()

    @property
    def waiting(self) -> Path:
        return self.home / "waiting"

    def set_seed(self, seed: int) -> None:
        file = self.root / "params.yaml"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        number = f"seed: {seed} "  # a comment follows
        changed = [re.sub(r"^seed: \d+ ", number, line) for line in lines]
        file.write_text("".join(changed), encoding="utf-8")


def times(*numbers: int) -> dict[str, int]:
    """`{stage: number}`; the last number is that of all later stages."""
    given = [*numbers, *[numbers[-1]] * (len(STAGES) - len(numbers))]
    return dict(zip(STAGES, given, strict=True))
