"""Exact resume: the last states of a training loop, from which the same command goes on after a kill.

    $RLHF_STATE_DIR/STAGE/DIGEST/        by default under .rlhf/state of the main checkout
      run                                the key of the run that goes on
      LOOP/step-000000120/               a snapshot: written beside, fsynced, renamed; the last K are kept
        manifest.json                    the sha256 of every file, and what the snapshot was made by
        shared.pt  rank-0.pt  files-0/   what is the same on all processes, each one's own part, DeepSpeed's

The digest is of all that decides what the stage writes (`lineage.identity`), so that a changed value,
input or line of code never meets another's state; and so that worktrees share it, under one lock. It
lies outside the outs, which DVC deletes before a stage runs, and is cleared when they are whole.
With several machines the folder must be on a disk that all of them see.

SIGTERM and SIGINT wait for the end of the step, when a snapshot is taken; a second one does not wait. A
worker whose launcher was killed ends in the same way.
No torch at import.
"""

from rlhf_tasks.training.resume.claims import Claim, claim
from rlhf_tasks.training.resume.snapshots import Loop, Snapshots, open

__all__ = ["Claim", "Loop", "Snapshots", "claim", "open"]
