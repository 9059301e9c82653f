"""The group of prompts that a source belongs to."""

from __future__ import annotations

import pytest

from rlhf_tasks.judging.summary import group_of


@pytest.mark.parametrize(
    ("source", "group"),
    [
        ("synthetic", "synthetic"),
        ("prompts/test.jsonl:17", "prompts/test.jsonl"),
        ("trl-lib/tldr:17", "trl-lib/tldr"),
        ("torch==2.1 torch/nn/linear.py:Linear.forward", "torch"),
        ("json/decoder.py:detect", "json"),
        ("textwrap.py:dedent", "textwrap"),
    ],
)
def test_a_source_belongs_to_its_file_set_or_package(source: str, group: str) -> None:
    assert group_of(source) == group
