"""`python -m rlhf_tasks.cli` is the `rlhf` command."""

import sys

from rlhf_tasks.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
