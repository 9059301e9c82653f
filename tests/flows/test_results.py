"""What a finished run shows: its metrics, win rates, responses and verdict; no server is started here."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import results
from flows.results import Outcome
from rlhf_tasks.promotion.verdict import make_table

pytestmark = pytest.mark.filterwarnings("ignore")  # those of Prefect


def outcome(**fields: Any) -> Outcome:
    return Outcome(**{"name": "n", "how": {}, "revision": "c", **fields})


def test_metrics_are_compared_with_those_of_the_last_run(root: Path) -> None:
    (root / "metrics").mkdir()
    (root / "metrics/first.json").write_text('{"rows": 1.5, "new": 2.0}', encoding="utf-8")
    assert results.metric_rows(results.metrics(root), {"first/rows": 1.0, "gone/by": 3.0}) == [
        {"metric": "first/new", "value": 2.0, "last run": None, "change": None},
        {"metric": "first/rows", "value": 1.5, "last run": 1.0, "change": 0.5},
    ]


def test_what_is_no_number_is_no_metric(root: Path) -> None:
    """DVC takes any JSON as metrics of a stage of the user's."""
    (root / "metrics").mkdir()
    (root / "metrics/first.json").write_text('{"rows": 1, "model": "m", "loss": NaN, "no": null}', "utf-8")
    assert results.metrics(root) == {"first/rows": 1}


def test_headlines_come_first() -> None:
    values = {"judge/a/b": 1.0, "ppo/eps": 2.0, "ppo/policy/clipfrac_avg": 0.25}
    names = [row["metric"] for row in results.metric_rows(values, {})]
    assert names == ["ppo/policy/clipfrac_avg", "judge/a/b", "ppo/eps"]


def test_cells_of_a_table_stay_in_their_line() -> None:
    assert make_table([{"a": "x | y", "b": "1\n2"}]) == "| a | b |\n| --- | --- |\n| x \\| y | 1<br>2 |"


def test_changes_come_after_the_results_and_stay_code(root: Path) -> None:
    changes = ["seed: 1 → 2", 'ppo.x: "a`b" → null']
    text = results.page(outcome(changes=changes, verdict="Not promoted", reason="it lost"), root, {})
    places = [text.index(title) for title in ("## Results", "## Changes", "## Stages")]
    assert places == sorted(places)
    assert '- `` seed: 1 → 2 ``\n- `` ppo.x: "a`b" → null ``\n' in text


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({}, "Completed", "nothing had to run"),
        ({"how": {"a": "ran", "b": "cached"}, "experiment": "c0ffee"}, "Completed", "ran a; experiment n"),
        ({"verdict": "Not promoted", "reason": "KL"}, "Not promoted", "Not promoted: KL; nothing had to run"),
        ({"unpushed": "x"}, "Unpushed", "nothing had to run; not pushed: x"),
    ],
)
def test_the_final_state_names_verdict_stages_and_experiment(
    fields: dict[str, Any], name: str, message: str
) -> None:
    state = outcome(**fields).state()
    assert (state.is_completed(), state.name, state.message) == (True, name, message)


def test_verdict_and_rates_are_on_the_card_in_the_state_and_at_the_end_of_the_log(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The card has no links, which Prefect's list of artifacts does not open."""
    cards = list[str]()
    monkeypatch.setattr(results, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr("flows.results.Artifact.get", lambda key: None)
    monkeypatch.setattr(
        results, "create_markdown_artifact", lambda text, key, description: cards.append(description)
    )
    caplog.set_level(logging.INFO, "run")
    card = {"Win rate": "79% (77% to 81%) over the SFT model; by the gold judge", "Verdict": "refused: KL"}
    shown = outcome(verdict="Not promoted", reason="KL 11.2 > 10; it is version 2", card=card)
    results.show(shown, root, {"pipeline": "http://m/1", "report/index.html": "http://m/2"}, "one")
    verdict, rate = "Not promoted: KL 11.2 > 10; it is version 2", f"Win rate {card['Win rate']}"
    assert caplog.messages == [verdict, rate, "Report: http://m/2", "MLflow: http://m/1"]
    assert str(shown.state().message).startswith(f"{verdict}; {rate}; ")
    assert cards[0].split("  \n") == [
        *("Not promoted:", "KL 11.2 > 10;", "it is version 2"),
        *("Win rate 79% (77% to 81%) over the SFT model;", "by the gold judge"),
    ]
    assert outcome(card=card).lines == ["refused: KL", rate], "without a promotion: the verdict of its stage"


@pytest.mark.parametrize(("project", "before"), [("one", 3.0), ("two", None)])
def test_metrics_are_compared_with_the_last_run_of_this_project(
    root: Path, monkeypatch: pytest.MonkeyPatch, project: str, before: float | None
) -> None:
    """Several projects may share a server, and with it the name of the artifact."""
    last = SimpleNamespace(data='[{"metric": "first/rows", "value": 3.0}]', description="metrics, of one")
    tables = list[list[dict[str, Any]]]()
    monkeypatch.setattr(results, "get_run_logger", lambda: logging.getLogger("run"))
    monkeypatch.setattr("flows.results.Artifact.get", lambda key: last)
    monkeypatch.setattr(results, "create_markdown_artifact", lambda *_, **__: None)
    monkeypatch.setattr(results, "create_table_artifact", lambda rows, **_: tables.append(rows))
    put = root / "metrics/first.json"
    put.parent.mkdir(exist_ok=True)
    put.write_text('{"rows": 4.0}', encoding="utf-8")
    results.show(outcome(), root, {}, project)
    assert [row["last run"] for row in tables[0] if row["metric"] == "first/rows"] == [before]
