"""Files of judges that changed since the pipeline judged."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_tasks.project import hashing
from rlhf_tasks.promotion import measurement


def test_a_changed_file_is_found_by_what_stage_judge_recorded(tmp_path: Path) -> None:
    names = ["my_judges/short.py", "rubric.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("then", encoding="utf-8")
    files = {name: hashing.dvc_md5(tmp_path / name) for name in names}
    (tmp_path / "inputs").mkdir()
    record = tmp_path / "inputs/judge.json"
    record.write_text(json.dumps({"values": {}, "files": files, "packages": {}}), encoding="utf-8")
    (tmp_path / "dvc.lock").write_text(
        "stages:\n  judge:\n    cmd: x\n    deps:\n"
        f"    - {{path: inputs/judge.json, md5: {hashing.dvc_md5(record)}}}\n",
        encoding="utf-8",
    )
    assert measurement.changed_files(tmp_path, tmp_path) == []
    (tmp_path / "rubric.txt").write_text("now", encoding="utf-8")
    (tmp_path / "my_judges/short.py").unlink()
    assert measurement.changed_files(tmp_path, tmp_path) == names
