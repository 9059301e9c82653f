"""Prefect's pages make no request to another machine. Does not import Prefect.

Prefect's present interface asks an analytics host at every load, and no setting stops that. Its server copies
the pages into a folder of ours, where they get a Content-Security-Policy: browsers refuse every such request.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_tasks.tracking.local_pages import POLICY

META = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'


def keep_local(folder: Path) -> None:
    """Add the policy to both interfaces; call it once the server has copied them."""
    for page in folder.glob("*/index.html"):
        text = page.read_text(encoding="utf-8")
        if META not in text:
            page.write_text(text.replace("<head>", f"<head>\n    {META}", 1), encoding="utf-8")
