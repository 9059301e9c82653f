"""Words that the texts of this project avoid, because they are archaic or have a private sense."""

from __future__ import annotations

import re

BANNED = re.compile(
    r"\b(?:told|tells?|telling|says?|said|asks?|asked|goes|gone|go on from|mend(?:s|ed|ing)?|knobs?"
    r"|looks?|looked|looking at|watch(?:es|ed|ing)?|liked|your own word|crown(?:s|ed)?|gives? back|untold"
    r"|of here|manned|troubles?|couriers?|lessons?|teachers?|referees?|cares?|settle[sd]?|is none|lies"
    r"|what stands|begins anew|by hand|put to the gate)\b",
    re.IGNORECASE,
)
