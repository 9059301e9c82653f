"""Every parameter has a docstring that the generated reference can print."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.types import description, kinds, sections


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
        names = set(section.model_fields) - {"kind"} if len(kinds(section)) == 1 else section.model_fields
        for name in names:  # its section describes a single kind
            text = description(section, name)
            assert len(text.split()) >= 3, (section, name)
            assert text.endswith("."), (section, name)
