"""`accelerate launch` without its own traceback when a worker fails: the worker has said what failed."""

from __future__ import annotations

import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError:
        sys.exit(1)


if __name__ == "__main__":
    main()
