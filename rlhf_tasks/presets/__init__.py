"""Presets: files of values that replace those of params.yaml."""

from rlhf_tasks.presets.overlays import (
    Request,
    apply,
    combined,
    in_yaml,
    matching,
    names,
    nested,
    overlay_onto,
    read,
    replaced,
    summary,
)

__all__ = [
    "Request", "apply", "combined", "in_yaml", "matching", "names", "nested", "overlay_onto",
    "read", "replaced", "summary",
]  # fmt: skip
