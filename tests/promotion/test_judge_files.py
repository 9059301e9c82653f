"""Files of judges that changed since the pipeline judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rlhf_tasks.project import hashing
from rlhf_tasks.promotion import judge_files

JUDGES = [
    {"kind": "function", "name": "own", "function": "my_judges.short:scores"},
    {"kind": "llm", "name": "gpt", "prompt": "./rubric.txt"},
    {"kind": "reward_model", "name": "reward_model", "path": "models/reward_heldout"},
]


@pytest.mark.parametrize(
    ("deps", "changed"),
    [
        (["my_judges/short.py", "rubric.txt"], ["./rubric.txt", "my_judges/short.py"]),
        (["my_judges", "rubric.txt"], ["./rubric.txt", "my_judges/short.py"]),
        (["my_judges"], ["my_judges/short.py"]),  # a file that is not a dep has no recorded hash
        ([], []),
    ],
)
def test_a_changed_file_is_found_by_its_dep_or_the_folder_that_is_one(
    deps: list[str], changed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = YAML(typ="safe", pure=True)
    (tmp_path / "my_judges").mkdir()
    for name in ("my_judges/short.py", "rubric.txt"):
        (tmp_path / name).write_text("then", encoding="utf-8")
    stage = {"cmd": "true", "deps": deps, "outs": ["models/reward_heldout"]}
    locked = [{"path": dep, "md5": hashing.dvc_md5(tmp_path / dep)} for dep in deps]
    written = {
        "dvc.yaml": {"stages": {"judge": stage}},
        "dvc.lock": {"schema": "2.0", "stages": {"judge": {"cmd": "true", "deps": locked}}},
        "params.yaml": {"judge": {"judges": JUDGES, "retention": None}},
    }
    for name, tree in written.items():
        with (tmp_path / name).open("w", encoding="utf-8") as file:
            yaml.dump(tree, file)
    assert judge_files.changed(tmp_path, tmp_path) == []
    for name in ("my_judges/short.py", "rubric.txt"):
        (tmp_path / name).write_text("now", encoding="utf-8")
    assert sorted(judge_files.changed(tmp_path, tmp_path)) == changed
