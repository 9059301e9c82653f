"""What happens when something breaks: `python -m benchmarks.faults` runs the tests that break it.

Each test of FAULTS runs in a process of its own, the slow ones too. Its result is a cell of the table in
docs/results/faults.md. `--quick` leaves out the slow tests, `--only WORD` those whose name lacks the word,
and `--write` all of them; a test that does not run keeps the result that the page has. All tests together
take about an hour on two cores. Exit status 1 if one fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/results/faults.md"
MARK = "\n## A long run\n"
"""Begins the part of the page that `benchmarks.soak` writes."""
FAILED, NOT_RUN = "**failed**", "not run"
NOTHING_SELECTED = 5  # an exit status of pytest


class Fault(NamedTuple):
    """A row of the table."""

    fault: str
    happens: str
    file: str
    name: str

    @property
    def test(self) -> str:
        return f"{self.file}::{self.name}"


FAULTS: Sequence[Fault] = (
    Fault(
        "A stage is killed, at any moment",
        "the same command resumes from the last snapshot, and ends with the same bytes",
        "tests/training/test_killed.py",
        "test_one_process_killed_twenty_times_ends_with_the_same_bytes",
    ),
    Fault(
        "One of several processes is killed",
        "the launch ends, with a status other than 0; the same command resumes, and ends with the same bytes",
        "tests/training/test_killed.py",
        "test_two_processes_killed_ten_times_end_with_the_same_bytes",
    ),
    Fault(
        "One process meets NaN",
        "all processes stop together, and name the numbers and the batch",
        "tests/ppo/test_ranks.py",
        "test_nan_on_one_rank_stops_both",
    ),
    Fault(
        "In any layout, one process is killed, meets NaN, or is out of memory",
        "the launch ends on all processes, with a status other than 0",
        "tests/training/test_layouts.py",
        "test_all_processes_end_when_one_fails",
    ),
    Fault(
        "One of several machines fails, or its process is killed",
        "the launches on the other machines end, with a status other than 0; within two seconds without GPUs",
        "tests/training/test_machines.py",
        "test_when_a_machine_or_its_process_is_gone_the_other_machine_ends",
    ),
    Fault(
        "One GPU is out of memory in a step or an evaluation",
        "the micro-batches are halved, and it is repeated; "
        "if one row does not fit, one message and exit status 2",
        "tests/training/test_supervised.py",
        "test_out_of_memory_halves_the_micro_batch_and_changes_no_step",
    ),
    Fault(
        "A GPU is out of memory while it samples for judges",
        "half as many rows are sampled at a time, with the same responses",
        "tests/models/test_sampling.py",
        "test_half_as_many_rows_are_sampled_where_the_memory_is_full",
    ),
    Fault(
        "A cluster's job has more or fewer machines than `launch.num_machines`",
        "the stage is refused with one message; exit status 2",
        "tests/training/test_launch.py",
        "test_machines_that_the_launch_does_not_know_are_refused",
    ),
    Fault(
        "A flow or DVC is killed",
        "the next run restores the stages that ended, and resumes the one that did not",
        "tests/training/test_killed.py",
        "test_a_flow_killed_at_random_moments_ends_with_the_same_bytes",
    ),
    Fault(
        "The worker is killed",
        "`rlhf up` starts it again, and its run becomes Crashed and can be retried",
        "tests/flows/test_service.py",
        "test_up_restarts_a_killed_worker_and_its_run_becomes_crashed",
    ),
    Fault(
        "The Prefect server restarts",
        "the run continues, and keeps its GPU slot for a minute without the server; mostly also for longer",
        "tests/flows/test_service.py",
        "test_a_run_survives_a_restart_of_the_servers",
    ),
    Fault(
        "Slurm pre-empts the job",
        "the job is queued again and resumes",
        "tests/test_slurm.py",
        "test_a_pre_empted_pipeline_is_queued_again_resumes_and_ends",
    ),
    Fault(
        "The vLLM server of `ppo.sampler` is killed in a rollout",
        "the stage ends with one message, which names the server's log; exit status 1",
        "tests/stages/test_ppo_engine.py",
        "test_an_engine_that_ends_ends_the_stage_with_one_message_that_names_its_log",
    ),
    Fault(
        "The vLLM server is killed, and several processes train",
        "all of them end, with one message",
        "tests/training/test_layouts.py",
        "test_an_engine_that_ends_ends_both_processes_with_one_message",
    ),
    Fault(
        "The disk is full while a snapshot is saved",
        "the snapshots before it are kept; one message names the folder and the missing bytes",
        "tests/training/test_disks.py",
        "test_a_snapshot_that_does_not_fit_leaves_those_before_it",
    ),
    Fault(
        "The disk is full while a stage writes its result",
        "the old result stays; the same command resumes, and ends with the same bytes",
        "tests/training/test_disks.py",
        "test_a_stage_on_a_full_disk_ends_with_one_message_and_resumes_to_the_same_bytes",
    ),
    Fault(
        "A snapshot is damaged",
        "it is reported, and the one before it is used",
        "tests/training/test_resume.py",
        "test_a_damaged_snapshot_is_reported_and_the_one_before_is_used",
    ),
    Fault(
        "A folder is read-only",
        "one message names the folder; exit status 2; the old result stays, and the same command resumes",
        "tests/training/test_disks.py",
        "test_a_stage_in_a_read_only_folder_ends_with_one_message_and_keeps_the_old_result",
    ),
    Fault(
        "MLflow is away when a run starts or ends",
        "the run completes, keeps its record and reports this; `rlhf sync` delivers it",
        "tests/flows/test_service.py",
        "test_a_run_completes_without_mlflow_and_says_so",
    ),
    Fault(
        "MLflow stops during a run, and starts again",
        "training does not wait; MLflow gets every point once",
        "tests/tracking/test_sync.py",
        "test_a_server_that_dies_midway_gets_every_point_once",
    ),
    Fault(
        "MLflow is away for minutes",
        "delivery is tried every 20 seconds, and training does not wait; MLflow gets every point once",
        "tests/tracking/test_sync.py",
        "test_mlflow_that_is_away_for_long_is_tried_again_and_gets_every_point_once",
    ),
    Fault(
        "An HTTP scorer is down",
        "the request is tried five times with growing waits; then one message names the scorer",
        "tests/scoring/test_http.py",
        "test_a_permanent_fault_is_an_error_after_the_last_try",
    ),
    Fault(
        "An HTTP scorer is slow, or never ends its reply",
        "the request ends at `timeout_seconds`, and is repeated",
        "tests/scoring/test_http.py",
        "test_a_request_with_a_silent_or_endless_reply_is_repeated",
    ),
    Fault(
        "An HTTP scorer returns too few scores, no numbers, NaN",
        "one message shows the reply; no update is taken with it",
        "tests/scoring/test_http.py",
        "test_a_reply_without_scores_is_an_error_and_the_request_is_not_repeated",
    ),
    Fault(
        "A judge's server is down, or returns nonsense",
        "these comparisons are failures, which are counted and never losses",
        "tests/judging/test_llm.py",
        "test_a_malformed_reply_is_a_failure_and_not_kept",
    ),
    Fault(
        "The clock jumps back, in a run or between a kill and its resumption",
        "MLflow gets every point once, in the order of the steps",
        "tests/tracking/test_delivery.py",
        "test_a_clock_that_is_set_back_loses_no_point_and_doubles_none",
    ),
    Fault(
        "The clock jumps back, while servers and workers run",
        "they are still recognised as running",
        "tests/project/test_processes.py",
        "test_a_change_of_the_clock_ends_no_process",
    ),
    Fault(
        "The same training is started twice",
        "the second one waits for the first, and then resumes from its last snapshot",
        "tests/training/test_resume.py",
        "test_a_second_process_with_the_same_training_waits_for_the_first",
    ),
    Fault(
        "Two flow runs in one checkout",
        "the second one is refused; runs in workspaces of their own are not",
        "tests/flows/test_pipeline.py",
        "test_the_checkout_has_one_run_at_a_time",
    ),
)


def run(test: str, *, quick: bool) -> str | None:
    """Run a test and return its result; None if it is a slow one, which `quick` leaves out."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = "not slow and not gpu" if quick else ""
        words = [sys.executable, "-m", "pytest", test, "-m", chosen, f"--junitxml={report}"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode == NOTHING_SELECTED:
            return None
        found = outcome(report.read_text(encoding="utf-8")) if done.returncode == 0 else FAILED
    if found == FAILED:
        print(done.stdout[-5000:] + done.stderr[-2000:], file=sys.stderr)
    return found


def outcome(report: str) -> str:
    """The result in a JUnit report of a test without failures; skipped parameters with their reasons."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    skipped = [each.get("message", "") for case in cases for each in case.iter("skipped")]
    reasons = "; ".join(dict.fromkeys(reason.replace("|", "/").replace("\n", " ") for reason in skipped))
    if not skipped:
        return "passed"
    which = "skipped" if len(skipped) == len(cases) else f"passed, but {len(skipped)} of {len(cases)} skipped"
    return f"{which}: {reasons}"


PAGE = """\
# Faults

What happens when something breaks, and the test that breaks it. `python -m benchmarks.faults` runs the
tests and writes this table. A test is skipped where it lacks something, such as the rights of root. Run one
test by its name: `python -m pytest TEST`; those of `make test-slow` need `-m slow` too.

"""
HEAD = "| Fault | What happens | Test | Result |"


def table(results: Mapping[str, str]) -> str:
    """A row a fault; `results` by test."""
    rows = [f"| {x.fault} | {x.happens} | `{x.test}` | {results.get(x.test, NOT_RUN)} |" for x in FAULTS]
    return "\n".join([HEAD, "|---|---|---|---|", *rows])


def results_of(page: str) -> dict[str, str]:
    """The result of each test in a page that `write` has made."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {row[2].strip("`"): row[3] for row in rows if len(row) == 4}


def write(results: Mapping[str, str], out: Path = OUT) -> None:
    """Write the page, but not the part of the long run."""
    _, mark, rest = out.read_text(encoding="utf-8").partition(MARK)
    out.write_text(PAGE + table(results) + "\n" + mark + rest, encoding="utf-8")


def write_long_run(text: str, out: Path = OUT) -> None:
    """Write the part of the long run, and nothing else."""
    rest, _, _ = out.read_text(encoding="utf-8").partition(MARK)
    out.write_text(rest + MARK + text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="leave out the slow tests")
    parser.add_argument("--only", metavar="WORD", default="", help="run the tests with WORD in their name")
    parser.add_argument("--write", action="store_true", help="write the page without running a test")
    options = parser.parse_args()
    results = results_of(OUT.read_text(encoding="utf-8"))
    for each in () if options.write else [fault for fault in FAULTS if options.only in fault.test]:
        found = run(each.test, quick=options.quick)
        print(f"{each.test}: {found or NOT_RUN}", flush=True)
        results |= {each.test: found} if found else {}
        write(results)
    write(results)
    print(f"wrote {OUT}")
    return int(FAILED in results.values())


if __name__ == "__main__":
    sys.exit(main())
