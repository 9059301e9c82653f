"""The report's section about the gate's verdict."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_tasks.project.paths import Paths
from rlhf_tasks.report import inputs, page
from tests.report import workspace


def section(root: Path, text: str | None) -> str:
    workspace.put_all(root)
    if text is not None:
        workspace.put_text(root / "evaluation/verdict.json", text)
    html = page.render(inputs.read(Paths(root)), {})
    return html.partition('<section aria-labelledby="verdict">')[2].partition("</section>")[0]


def test_every_criterion_is_shown_with_its_value_and_reason(tmp_path: Path) -> None:
    criteria = [
        {"key": "kl", "title": "KL", "value": 11.2, "relation": "<=", "bound": 10.0, "lacking": "",
         "standard_error": 0.25, "margin": -1.2, "passed": False},
        {"key": "examples", "title": "judged examples", "value": 990.0, "relation": ">=", "bound": 200.0,
         "lacking": "", "standard_error": None, "margin": 790.0, "passed": True},
        {"key": "choice", "title": "right choices <lost>", "value": None, "relation": "<=", "bound": 0.05,
         "lacking": "choice/sft was not measured", "standard_error": None, "margin": None, "passed": False},
    ]  # fmt: skip
    verdict = {"passed": False, "summary": "KL 11.2 > 10", "criteria": criteria}
    shown = section(tmp_path, json.dumps(verdict))
    assert "11.2 ± 0.25" in shown
    assert "Refused: KL 11.2 &gt; 10" in shown
    assert shown.count('<th scope="row">') == 3
    assert "choice/sft was not measured" in shown
    assert "Right choices &lt;lost&gt;" in shown
    assert "790" in shown


def test_a_gate_that_is_off_differs_from_a_missing_verdict(tmp_path: Path) -> None:
    assert "there is no gate to pass" in section(tmp_path, "{}")
    assert "evaluation/verdict.json is missing" in section(tmp_path / "other", None)
