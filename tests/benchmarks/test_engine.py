"""The table of benchmarks/engine.py."""

from __future__ import annotations

from benchmarks import engine


def test_the_table_has_the_mean_of_the_last_updates_and_when_a_half_was_reached() -> None:
    slow, fast = [0.0] * 3 + [0.5] * 6, [0.6, 0.4] + [0.9] * 6
    rows = engine.table({"no server": [slow, fast]}, [1, 2]).splitlines()
    assert rows[0] == "| rollouts by | seed 1 | seed 2 | mean | reached 0.5 |"
    assert rows[2] == "| no server | 0.500 | 0.900 | 0.700 | update 2.5 |"
    assert engine.reached_half([0.1, 0.2]) == 3
