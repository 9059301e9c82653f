"""Exact resume: after a kill, the same command continues from the last snapshot of a training loop.

    $RLHF_STATE_DIR/STAGE/DIGEST/        by default under .rlhf/state of the main checkout
      run                                the key of the run that is resumed
      LOOP/step-000000120/               a snapshot: fsynced, then renamed; the last K are kept
        manifest.json                    the sha256 of every file, and the settings of the run
        shared.pt  rank-0.pt  files-0/   the state that all processes share, that of each, DeepSpeed's files

The digest covers all that decides what the stage writes (`lineage.identity`). So a changed value, input or
line of code never resumes from another's snapshots, and all worktrees share the folder under one lock. It
is outside the outs, which DVC deletes before a stage runs. The next stage that starts removes it: until then,
DVC may be killed before it has stored the complete outs. With several machines it must be on a disk that all
of them share.

After SIGTERM or SIGINT the stage finishes its step, saves a snapshot and ends; a second signal ends it at
once. A worker whose launcher was killed ends in the same way. No torch at import.
"""

from rlhf_tasks.training.resume.claims import Claim, claim
from rlhf_tasks.training.resume.manifests import point
from rlhf_tasks.training.resume.snapshots import Loop, Snapshots, open

__all__ = ["Claim", "Loop", "Snapshots", "claim", "open", "point"]
