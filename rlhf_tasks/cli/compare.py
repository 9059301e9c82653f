"""`rlhf compare RUN …`: runs side by side on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command, check_output_file
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths


def add(commands: Commands) -> None:
    summary = "write one page that compares runs: results and curves; seeds of one setting as mean and band"
    compare = add_command(commands, "compare", run, summary)
    compare.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="an MLflow run's id or name, a run key (MLflow's tag `rlhf.run` or `rlhf.pipeline`), an "
        "experiment of `dvc exp list`, or a folder that holds metrics/ (. is this project)",
    )
    compare.add_argument(
        "--out",
        type=Path,
        default=Path("comparison.html"),
        metavar="FILE",
        help="the page to write (default: comparison.html)",
    )


def run(options: argparse.Namespace) -> int:
    paths = Paths()
    dvc_files.graph(paths.root)  # refuses a folder without a project before git runs
    check_output_file(options.out)
    from rlhf_tasks.report import comparison_page

    comparison_page.run(paths, options.runs, options.out)
    return 0
