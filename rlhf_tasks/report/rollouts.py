"""The page of PPO's kept rollouts, in rollouts.html: what PPO sampled, and what it learned from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import escape

from rlhf_tasks.config import Ppo
from rlhf_tasks.config.scorers import scorer_names

Rows = list[dict[str, Any]]
LARGEST_PAGE = 20_000_000  # bytes
CELLS = 2_500  # bytes of a row beside its texts, at most


def context(
    rows: Rows, trips: Sequence[Mapping[str, Any]], ppo: Ppo, largest: int = LARGEST_PAGE
) -> dict[str, Any]:
    """What rollouts.html shows of rollouts.parquet; `trips` are those of guards.json.

    Where the page would exceed `largest` bytes, the last rollouts of all updates are left out.
    """
    places: dict[int, int] = {}
    updates: dict[int, dict[str, Any]] = {}
    for row in rows:
        episode = row["episode"]
        row["place"] = places[episode] = places.get(episode, -1) + 1
        guards = [trip["guard"] for trip in trips if trip["episode"] == episode]
        updates[episode] = {key: row[key] for key in ("update", "rollouts")} | {"guards": guards, "shown": 0}
    left, shown = largest - 100_000, list[dict[str, Any]]()  # the style and the texts around the table
    for row in sorted(rows, key=lambda row: (row["place"], row["episode"])):
        left -= CELLS + sum(len(escape(row[key]).encode()) for key in ("prompt", "response", "notes"))
        if left < 0:
            break
        shown.append(row)
        updates[row["episode"]]["shown"] += 1
    weights = (getattr(one, "weight", 0.0) for one in ppo.scorers)
    return {
        "rows": sorted(shown, key=lambda row: (row["episode"], row["place"])),
        "updates": updates,
        "num_kept": len(rows),
        "scorers": dict(zip(scorer_names(ppo.scorers), weights, strict=True)),
        "has_heldout": any("heldout" in row for row in rows),
        "ppo": ppo,
    }
