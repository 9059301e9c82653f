"""Words that the texts of this project avoid, because they are archaic or have a private sense."""

from __future__ import annotations

import re

BANNED = re.compile(
    r"\b(told|tells?|says?|said|asks?|asked|goes|gone|mend|knob|looks?|looked|watch|liked|crown|care|settled?|"
    r"lies|stands?|lesson|teacher|referee|trouble|courier|untold|by hand)\b",
    re.IGNORECASE,
)
