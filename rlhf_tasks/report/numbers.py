"""Numbers as text."""

from __future__ import annotations

import math


def number(value: float) -> str:
    """A number as text: whole numbers in full, others with four significant digits."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if float(value).is_integer() and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif abs(value) >= 1000:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.4g}"
    return text.replace("-", "−")


def hundredths(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"
