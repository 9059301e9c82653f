"""`accelerate launch` without its own traceback when a worker fails or the launch is stopped.

The worker has said what failed. Only a worker that was killed could not say it.
"""

from __future__ import annotations

import signal
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from rlhf_tasks.training import launch


def main() -> None:
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                _say_killed(rank, signal.Signals(-failure.exitcode).name)
        sys.exit(1)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)


def _say_killed(rank: int, name: str) -> None:
    why = "; a system that runs out of memory does so: its log (`dmesg`) tells" if name == "SIGKILL" else ""
    message = f"process {rank} was killed by {name}{why}"
    print(f"rlhf: {message}", file=sys.stderr)
    launch.report_killed(message)


if __name__ == "__main__":
    main()
