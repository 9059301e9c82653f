"""Presets: files of values that replace those of params.yaml."""

from rlhf_tasks.presets.overlays import BETWEEN, Request, apply, combine, names, read, summary

__all__ = ["BETWEEN", "Request", "apply", "combine", "names", "read", "summary"]
