"""Fill in the run forms of Prefect's two interfaces."""

from __future__ import annotations

import json
from typing import Any

INTERFACES = ("/v2", "")
"""The paths of the interface that opens and of the old one."""


def fill(page: Any, interface: str, name: str, value: Any) -> None:
    """Set one field as a person would."""
    title = f"{name} (Optional)"
    if interface:
        label = page.locator(f'label:text-is("{title}")')
        one = page.locator("div.group", has=label).last
    else:
        label = page.locator(f'.schema-form-property__label:text-is("{title}")')
        one = page.locator(".schema-form-property", has=label).last
    one.wait_for()
    if isinstance(value, bool):
        one.locator("[role=switch], .p-toggle__control").click()
    elif isinstance(value, dict):
        _fill_code(page, one, value)
    elif isinstance(value, list):
        _fill_list(page, one, value)
    elif (choice := one.locator('[aria-label^="Select "], .p-select-button__control')).count():
        choice.click() if interface else choice.press("ArrowDown")  # which opens the old one's list
        page.locator("[role=option], .p-select-option").get_by_text(value, exact=True).click()
    else:
        one.locator("input, textarea").last.fill(str(value))


def _fill_code(page: Any, one: Any, value: Any) -> None:
    """Replace the text of a JSON editor."""
    one.locator(".cm-content, textarea.p-code-input__textarea").last.click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(json.dumps(value))


def _fill_list(page: Any, one: Any, value: list[Any]) -> None:
    """Add one item per value."""
    editors = one.locator("input, textarea, .cm-content")
    for item in value:
        before = editors.count()
        one.get_by_role("button", name="Add item").click()
        editors.nth(before).wait_for(state="attached")
        if isinstance(item, dict):
            _fill_code(page, one, item)
        else:
            one.locator("input, textarea").last.fill(str(item))
