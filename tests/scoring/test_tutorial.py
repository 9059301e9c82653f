"""The reward of docs/tutorials/your-own-reward.md, as the page shows it."""

from __future__ import annotations

import re
from pathlib import Path

from ruamel.yaml import YAML

from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.columns import Columns
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.function import FunctionScorer
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.stages import prepare
from rlhf_tasks.tracking import NullTracker
from tests import small
from tests.small import ROOT

PAGE = (ROOT / "docs/tutorials/your-own-reward.md").read_text(encoding="utf-8")


def test_the_function_gives_more_to_a_closer_number(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    columns: Columns = {"answer": [355, 355, 355], "other": ["a", "b", "c"]}
    reward = FunctionScorer("my_rewards:closeness", "ppo.scorers", tmp_path, columns)
    rows = Responses.of_texts(["347+8="] * 3, ["355", "352", "-"], columns)
    assert reward(rows).tolist() == [1.0, 0.25, 0.0]


def test_the_parameters_are_accepted_and_the_rows_keep_their_answers(tmp_path: Path) -> None:
    blocks = [YAML(typ="safe").load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)]
    tree = small.params(gate=True)
    for section in ("data", "reward", "ppo", "judge", "promotion"):
        for block in blocks[:2]:
            tree[section] |= block.get(section, {})
    settings = config.validate(tree, "the tutorial")
    assert settings.ppo.scorers[0].kind == "verifier"
    (rows,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    folder = tmp_path / "my_problems"
    folder.mkdir()
    more = "".join(f'{{"prompt": "{n}+1=", "completion": "{n + 1}", "answer": {n + 1}}}\n' for n in range(20))
    (folder / "sft.jsonl").write_text(rows + more, encoding="utf-8")
    prepare.run(config.PrepareView.of(settings), Paths(tmp_path), NullTracker("prepare"))
    answers = [
        (row["reference"], row["columns"]["answer"])
        for split in ("train", "validation", "test")
        for row in read_table(Paths(tmp_path), "prompts", split)
    ]
    assert len(answers) == 22
    assert all(text == str(answer) for text, answer in answers)
