"""Presets: files of values that replace those of params.yaml."""

from rlhf_tasks.presets.overlays import (
    MOSTLY,
    Request,
    apply,
    matching,
    names,
    read,
    remaining,
    replaced,
    summary,
)

__all__ = ["MOSTLY", "Request", "apply", "matching", "names", "read", "remaining", "replaced", "summary"]
