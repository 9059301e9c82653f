"""Every parameter has a docstring that the generated reference can print."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf_tasks.config import Config, Section
from rlhf_tasks.config.types import descriptions, kinds, sections


def with_inner(section: type[Section]) -> Iterator[type[Section]]:
    """A section type, and those inside it."""
    yield section
    for field in section.model_fields.values():
        for inner in sections(field.annotation):
            yield from with_inner(inner)


ALL = list(dict.fromkeys(with_inner(Config)))
FIELDS = [
    (section, name)
    for section in ALL
    for name in section.model_fields
    if name != "kind" or len(kinds(section)) > 1  # the only kind is described by its section
]


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_every_parameter_is_described_in_plain_english(section: type[Section], name: str) -> None:
    text = descriptions(section)[name]
    assert len(text.split()) >= 3
    assert text.endswith(".")


@pytest.mark.parametrize("section", ALL)
def test_every_section_has_a_docstring_of_its_own(section: type[Section]) -> None:
    text = vars(section).get("__doc__") or ""
    assert text.rstrip().endswith(".")


def test_descriptions_cover_every_section_of_params_yaml() -> None:
    assert len(ALL) > 30
    assert len(FIELDS) > 150
