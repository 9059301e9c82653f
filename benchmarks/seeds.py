"""The default run, or a preset, over several seeds, as a table: `python -m benchmarks.seeds 1 2 3`.

See `benchmarks.cells`; NAME is `seeds`, or the preset. Two seeds run at a time, a thread each: the bits
depend on the number of threads. `--preset arithmetic` is that of docs/results/verifier.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks import cells

ROWS: Mapping[str | None, Mapping[str, tuple[str, str]]] = {
    None: {
        "SFT vs reference (gold)": ("judge", "gold/sft_vs_reference/win_rate"),
        "PPO vs reference (gold)": ("judge", "gold/policy_vs_reference/win_rate"),
        "PPO vs SFT (gold)": ("judge", "gold/policy_vs_sft/win_rate"),
        "coverage SFT": ("judge", "gold/sft/coverage"),
        "coverage PPO": ("judge", "gold/policy/coverage"),
        "faithfulness SFT": ("judge", "gold/sft/faithfulness"),
        "faithfulness PPO": ("judge", "gold/policy/faithfulness"),
        "objective/kl at the end": ("ppo", "objective/kl"),
        "reward model's accuracy, held-out pairs": ("reward", "accuracy"),
        "reward model's agreement, pairs of SFT samples": ("judge", "agreement/reward/sft_samples"),
        "reward model's agreement, pairs of PPO samples": ("judge", "agreement/reward/policy_samples"),
    },
    "arithmetic": {
        "accuracy SFT": ("judge", "verifier/accuracy/sft"),
        "accuracy PPO": ("judge", "verifier/accuracy/policy"),
        "difference": ("judge", "verifier/accuracy_gain"),
    },
}
"""The metrics of a row, by preset."""


def cell(folder: Path, stage: str, key: str) -> str:
    """A metric, with its 95% interval where it has one."""
    metrics = cells.metrics(folder, stage)
    stem = key.removesuffix("/win_rate")
    low, high = metrics.get(f"{stem}/low"), metrics.get(f"{stem}/high")
    if "kl" in key:
        return f"{metrics[key]:.2f}"
    return f"{metrics[key]:.1%}" + ("" if low is None else f" ({low:.1%}–{high:.1%})")


def main() -> None:
    parser = cells.arguments(__doc__, ["whole run"], jobs=2)
    parser.add_argument("--preset", choices=[name for name in ROWS if name], help="run this preset")
    args = parser.parse_args()
    rows = ROWS[args.preset]
    found = cells.run(
        args.preset or "seeds",
        {"whole run": {}},
        lambda folder: {name: cell(folder, *where) for name, where in rows.items()},
        args,
        preset=args.preset,
        environment=cells.ONE_THREAD,
    )
    found = [one for one in found if one["seed"] in args.seeds]
    header = ["", *(f"seed {one['seed']}" for one in found)]
    print(cells.table(header, ([name, *(one[name] for one in found)] for name in rows)))


if __name__ == "__main__":
    main()
