"""Every parameter has a docstring that the generated reference can print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from docs.generator.parameters import descriptions
from rlhf_tasks.config import Config, Section
from tests.plain_english import BANNED


def sections(annotation: Any) -> Iterator[type[Section]]:
    """The section types that occur anywhere in a type, with those inside them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    else:
        for inner in get_args(annotation):
            yield from sections(inner)


ALL = list(dict.fromkeys(sections(Config)))
FIELDS = [(section, name) for section in ALL for name in section.model_fields]


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_every_parameter_is_described_in_plain_english(section: type[Section], name: str) -> None:
    text = descriptions(section)[name]
    assert len(text.split()) >= 3
    assert text.endswith(".")
    assert not BANNED.search(text)


@pytest.mark.parametrize("section", ALL)
def test_every_section_has_a_docstring_of_its_own(section: type[Section]) -> None:
    text = vars(section).get("__doc__") or ""
    assert text.rstrip().endswith(".")
    assert not BANNED.search(text)


def test_descriptions_cover_every_section_of_params_yaml() -> None:
    assert len(ALL) > 30
    assert len(FIELDS) > 150
