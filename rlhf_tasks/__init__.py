"""RLHF as a pipeline of stages that meet only through files: see README.md."""
