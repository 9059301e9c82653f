"""Every parameter has a docstring that the generated reference can print."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.types import descriptions, kinds, sections


def with_inner(section: type[Section]) -> Iterator[type[Section]]:
    """A section type, and those inside it."""
    yield section
    for field in section.model_fields.values():
        for inner in sections(field.annotation):
            yield from with_inner(inner)


def test_every_section_and_parameter_is_described_in_plain_english() -> None:
    found = list(dict.fromkeys(with_inner(Config)))
    assert len(found) > 30
    for section in found:
        assert (vars(section).get("__doc__") or "").rstrip().endswith("."), section
        texts = descriptions(section)
        for name in section.model_fields:
            if name == "kind" and len(kinds(section)) == 1:
                continue  # its section describes it
            assert len(texts[name].split()) >= 3, (section, name)
            assert texts[name].endswith("."), (section, name)
