"""What `ppo.guards.gap_max` does to over-optimisation: `python -m benchmarks.gap_guard 1 2 3`.

The preset `over_optimised` with a KL penalty of a tenth of the default, which a guard can raise, without and
with the guard, on one thread. See `benchmarks.cells`. Writes the table of docs/results/over-optimisation.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import cells

NAME, PAGE = "gap_guard", Path("docs/results/over-optimisation.md")
SHARED = {"ppo.kl_coef": "0.003", "ppo.guards.kl_max": "1000.0"}  # the guard on the KL is to do nothing
VARIANTS: Mapping[str, Mapping[str, str]] = {
    "none": {**SHARED, "ppo.guards.action": "warn", "ppo.guards.gap_max": "null"},
    "raise_kl": {**SHARED, "ppo.guards.action": "raise_kl", "ppo.guards.gap_max": "1.0"},
}


def measure(folder: Path) -> cells.Cell:
    """The kept checkpoint, the last weights, the gap at the end, and how often the guard tripped."""
    ppo, judge, cell = cells.metrics(folder, "ppo"), cells.metrics(folder, "judge"), cells.Cell()
    for name in ("win_rate", "low", "high"):
        cell[f"kept_{name}"] = judge[f"gold/policy_vs_reference/{name}"]
        cell[f"last_{name}"] = cells.last(folder / "plots/judge.csv", f"gold/{name}")
    curves = folder / "plots/ppo.csv"
    cell |= {"kept_kl": ppo["selected_kl"], "last_kl": cells.last(curves, "eval/kl")}
    gap = cells.last(curves, "eval/standardized_gap")
    return cell | {"last_gap": gap, "trips": int(ppo["guards/trips"])}


def table(found: Sequence[cells.Cell]) -> str:
    """A row per cell."""
    lines = [
        "| Seed | Guard on the gap | Trips | Gold win rate, kept checkpoint | KL "
        "| Gold win rate, last weights | KL | Gap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in found:
        parts = [str(cell["seed"]), cell["variant"], str(cell["trips"])]
        for which in ("kept", "last"):
            rate, low, high = (cell[f"{which}_{name}"] for name in ("win_rate", "low", "high"))
            parts += [f"{rate:.1%} ({low:.1%}–{high:.1%})", f"{cell[f'{which}_kl']:.1f}"]
        lines.append(f"| {' | '.join([*parts, format(cell['last_gap'], '.2f')])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    args = cells.arguments(__doc__, list(VARIANTS)).parse_args()
    found = cells.run(NAME, "over_optimised", VARIANTS, measure, args, {"OMP_NUM_THREADS": "1"})
    cells.publish(PAGE, NAME, table(found), args)


if __name__ == "__main__":
    main()
