"""The table of tests/benchmarks/engine.py."""

from __future__ import annotations

from tests.benchmarks import engine


def test_the_table_has_the_mean_of_the_last_updates_and_when_a_half_was_reached() -> None:
    slow, fast = [0.0] * 3 + [0.5] * 6, [0.6, 0.4] + [0.9] * 6
    rows = engine.table({"no engine": [slow, fast]}, [1, 2]).splitlines()
    assert rows[0] == "| rollouts by | seed 1 | seed 2 | mean | reached 0.5 |"
    assert rows[2] == "| no engine | 0.500 | 0.900 | 0.700 | update 2.5 |"
    assert engine.reached_half([0.1, 0.2]) == 3


def test_a_recorded_call_has_its_process_and_its_time() -> None:
    spans: list[engine.Span] = []
    assert engine.timed(lambda x: x + 1, spans, "trainer", "learn")(2) == 3
    assert [(span.process, span.what, span.end >= span.start) for span in spans] == [
        ("trainer", "learn", True)
    ]
