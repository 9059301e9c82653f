"""Plain lines without a terminal, nothing on quiet ranks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from rlhf_tasks import console
from rlhf_tasks.console import Console, duration


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console, "time", clock)
    return clock


def test_markup_in_text_is_shown_as_it_is() -> None:
    out = io.StringIO()
    Console(out).say("[bold] :smile: " + "long " * 60)
    assert out.getvalue() == "[bold] :smile: " + "long " * 60 + "\n"


def test_a_table_without_a_terminal_has_a_line_per_row() -> None:
    out = io.StringIO()
    Console(out).table("samples", ["query", "score"], [["two\nlines", 0.123456], ["[x]", 2]])
    assert out.getvalue() == "samples\nquery | score\ntwo lines | 0.1235\n[x] | 2\n"


def test_progress_without_a_terminal_shows_every_tenth_seconds_apart_and_if_fast_one_line(
    clock: Clock,
) -> None:
    out = io.StringIO()
    with Console(out).progress("sft", 100, unit="steps") as bar:
        for step in range(1, 101):
            clock.now += 1.0
            bar.advance(1, loss=1 / step)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "sft  10% of 100 steps  1/s  1m30s left  loss 0.1"
    assert lines[-1] == "sft  100% of 100 steps  1/s  in 1m40s  loss 0.01"
    fast = io.StringIO()
    with Console(fast).progress("sft", 3, unit="epochs") as bar:
        for _ in range(30):
            clock.now += 0.01
            bar.advance(0.1)
    assert fast.getvalue() == "sft  100% of 3 epochs  10/s  in 0s\n"


def test_a_stage_prints_its_number_and_writes_tables_to_a_log(clock: Clock, tmp_path: Path) -> None:
    out, log = io.StringIO(), tmp_path / "logs/ppo.log"
    console = Console(out)
    with console.stage("ppo", 7, 10):
        with console.log_to(log):
            console.table("samples", ["query", "score"], [["two\nlines", 20000.0]])
            console.remark("bf16")
            console.say("a guard acted")
            for description in ("ppo", "judge gold"):
                with console.progress(description, 1, unit="epochs") as bar:
                    clock.now += 2.0
                    bar.advance(1)
        assert console.name("ppo") == "7/10 ppo"
    assert out.getvalue().splitlines() == [
        "a guard acted",
        "7/10 ppo  100% of 1 epoch  in 2s",
        "7/10 ppo  judge gold  100% of 1 epoch  in 2s",
    ]
    written = log.read_text(encoding="utf-8").splitlines()
    assert written[:5] == ["samples", "query | score", "two lines | 20000", "bf16", "a guard acted"]
    console.remark("without a log it is printed")
    assert out.getvalue().endswith("without a log it is printed\n")


def test_a_stage_writes_its_own_progress_for_whoever_started_it(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress.json"
    monkeypatch.setenv(console.PROGRESS, str(file))
    made = Console(io.StringIO())
    with made.stage("ppo", 7, 10), made.progress("ppo", 8, unit="episodes") as bar:
        bar.skip(2)
        clock.now += 3.0
        with made.progress("judge gold", 4) as inner:
            inner.advance()
        assert not file.exists(), "an evaluation is not the stage"
        bar.advance(3)
        assert json.loads(file.read_text()) == {"share": 0.625, "work": "62% of 8 episodes  1/s", "left": 3.0}
        file.unlink()
        bar.advance(1)
        assert not file.exists(), "once a second at most"


def test_the_time_left_does_not_count_a_warm_up(clock: Clock) -> None:
    out = io.StringIO()
    with Console(out).progress("ppo", 4, unit="episodes") as bar:
        clock.now += 60.0
        bar.restart_speed()
        for _ in range(4):
            clock.now += 10.0
            bar.advance(1)
    assert out.getvalue().splitlines()[0] == "ppo  25% of 4 episodes  30s left"
    assert out.getvalue().endswith("100% of 4 episodes  in 1m40s\n"), "of all of it"


def test_interrupted_work_is_not_shown_as_finished(clock: Clock) -> None:
    out = io.StringIO()

    def breaks_off() -> None:
        with Console(out).progress("sft", 3) as bar:
            bar.advance()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        breaks_off()
    assert out.getvalue() == ""


def test_a_silent_stage_says_after_ten_seconds_what_it_does_and_in_a_log_ever_more_rarely(
    clock: Clock,
) -> None:
    out = io.StringIO()
    shown = Console(out)
    written_at = []
    with shown.stage("sft", 3, 10), shown.part("loading SmolLM2-135M"):
        for clock.now in range(1, 200):
            before = out.getvalue()
            shown.show_life()
            if out.getvalue() != before:
                written_at.append(clock.now)
    assert written_at == [10, 30, 70, 130, 190]
    assert out.getvalue().splitlines()[0] == "3/10 sft  loading SmolLM2-135M  10s so far"
    with shown.stage("sft", 3, 10):
        clock.now += 12
        shown.show_life()
    assert out.getvalue().endswith("3/10 sft  at work  12s so far\n"), "where nothing has named itself"


def test_the_line_of_life_names_a_part_within_a_meter_and_how_much_of_both_is_done(clock: Clock) -> None:
    out = io.StringIO()
    shown = Console(out)
    with shown.stage("ppo", 7, 10), shown.progress("ppo", 8192, unit="episodes") as episodes:
        episodes.advance(2048)
        with shown.part("sampling", 64, "responses") as responses:
            clock.now += 12.0
            responses.advance(7.68)
            with shown.progress("judge gpt", 2, unit="replies"):
                clock.now += 4.0
                shown.show_life()
    line = "7/10 ppo  25% of 8,192 episodes  128/s  sampling  12% of 64 responses  judge gpt  0% of 2 replies"
    assert out.getvalue().splitlines()[0] == f"{line}  4s so far", "a meter within a meter is a part"


def test_a_log_shows_a_short_part_as_its_meter(clock: Clock) -> None:
    out = io.StringIO()
    shown = Console(out)
    with shown.stage("reward", 5, 10), shown.progress("reward", 3, unit="epochs") as epochs:
        epochs.advance(0.1, loss=0.5)
        clock.now += 12.0
        with shown.part("gradients", 1, "micro-batches"):
            clock.now += 1.0
            shown.show_life()
    assert out.getvalue() == "5/10 reward  3% of 3 epochs  6m17s left  loss 0.5\n"


def test_a_terminal_has_one_live_line_with_share_and_time_left(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    shown = Console(out)
    with shown.stage("ppo", 7, 10), shown.progress("ppo", 8, unit="episodes") as bar:
        clock.now += 3.0
        bar.advance(2, kl=0.5)
        with shown.part("sampling [a]", 64, "responses"):
            clock.now += 12.0
            shown.show_life()
            shown._bar.refresh()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "25% of 8 episodes  9s left  kl 0.5  sampling [a]  0% of 64 responses  12s so far" in plain


def test_a_quiet_console_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    quiet = Console(out, quiet=True)
    quiet.say("x")
    quiet.table("t", ["a"], [[1]])
    with quiet.progress("p", 1) as bar:
        bar.advance()
    assert out.getvalue() == ""
    console.set_quiet(True)
    console.say("first")
    console.set_quiet(False)
    console.say("second")
    assert capsys.readouterr().out == "second\n"


def test_durations_are_short() -> None:
    assert [duration(seconds) for seconds in (3.4, 75, 3700)] == ["3s", "1m15s", "1h01m"]
