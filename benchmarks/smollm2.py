"""The presets on SmolLM2-135M over seeds: `python -m benchmarks.smollm2 --preset sentiment 1 2 3`.

    constraints   RLOO as in the preset, in float32 and in bfloat16; in bfloat16 PPO with a critic at equal
                  episodes, and RLOO with LoRA adapters
    reviews       SFT, reward model, stage value and PPO as in the preset, in bfloat16, and RLOO at equal
                  episodes
    sentiment     four KL coefficients, in bfloat16: optimized and judged score over the KL, with the fit of
                  Gao et al.

Needs what the preset needs. See `benchmarks.cells`. Writes the table of docs/results/PRESET.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from benchmarks import cells

Points = Sequence[tuple[float, float, float]]
"""(KL, optimized score, VADER's score) of an evaluation, each the mean over its responses."""


class Table(NamedTuple):
    variants: Mapping[str, Mapping[str, str]]
    measure: Callable[[Path], cells.Cell]
    text: Callable[[Sequence[cells.Cell]], str]


def shared(folder: Path) -> cells.Cell:
    """The gate's decision, and what PPO cost."""
    verdict = json.loads((folder / "evaluation/verdict.json").read_text("utf-8"))
    seconds = json.loads((folder / ".rlhf/durations.json").read_text("utf-8"))["ppo"]
    judge, ppo = cells.metrics(folder, "judge"), cells.metrics(folder, "ppo")
    return {
        "passed": verdict["passed"],
        "minutes": seconds / 60,
        "kl": ppo["selected_kl"],
        "perplexity": judge["sft_perplexity/policy"] / judge["sft_perplexity/sft"],
        "distinct": judge["corpus_distinct_2/policy"] / judge["corpus_distinct_2/sft"],
    }


def in_words(cell: cells.Cell) -> list[str]:
    """The last columns of all tables."""
    return [
        f"{cell['kl']:.1f}",
        f"{cell['perplexity']:.2f}",
        f"{cell['distinct']:.2f}",
        "passed" if cell["passed"] else "refused",
        f"{cell['minutes']:.0f} min",
    ]


SHARED = ("KL, nats per response", "Perplexity of the responses", "Different 2-grams", "Gate", "PPO")


# --------------------------------------------------------------------------------------- constraints


def constraints_cell(folder: Path) -> cells.Cell:
    judge, cell = cells.metrics(folder, "judge"), shared(folder)
    for name, group in {"seen": "yes", "unseen": "no"}.items():
        key = f"constraints/accuracy_gain/in/seen.{group}"
        cell[name] = [judge[f"{key}{bound}"] for bound in ("", "/low", "/high")]
    return cell


def constraints_table(found: Sequence[cells.Cell]) -> str:
    lines = []
    for cell in found:
        gains = [
            f"{100 * gain:+.1f} [{100 * low:.1f}, {100 * high:.1f}]"
            for gain, low, high in (cell["seen"], cell["unseen"])
        ]
        lines.append([cell["variant"], str(cell["seed"]), *gains, *in_words(cell)])
    return cells.table(["", "Seed", "Seen kinds, points", "Unseen kinds, points", *SHARED], lines)


# ------------------------------------------------------------------------------------------- reviews


def reviews_cell(folder: Path) -> cells.Cell:
    """Win rates, and the means of what the critic explained, from the fifth update on."""
    judge, reward = cells.metrics(folder, "judge"), cells.metrics(folder, "reward")
    bounds = ("win_rate", "low", "high")
    curve = [row for row in cells.curve(folder) if row.get("val/explained_variance_first")][4:]
    known = {name: [float(row[f"val/{column}"]) for row in curve] for name, column in EXPLAINED.items()}
    return shared(folder) | {
        "accuracy": reward["accuracy/sft_samples"],
        **{name: [judge[f"{name}/policy_vs_sft/{bound}"] for bound in bounds] for name in REVIEWERS},
        **{name: float(np.mean(values)) if values else None for name, values in known.items()},
    }


EXPLAINED = {"first": "explained_variance_first", "share": "prompt_share"}
REVIEWERS = {"vader": "VADER", "people": "people's ratings", "reward_model": "the held-out model"}


def reviews_table(found: Sequence[cells.Cell]) -> str:
    lines = []
    for cell in found:
        rates = [
            f"{rate:.1%} [{low:.1%}, {high:.1%}]" for rate, low, high in (cell[name] for name in REVIEWERS)
        ]
        known = "" if cell["first"] is None else f"{cell['first']:.2f} of {cell['share']:.2f}"
        first = [cell["variant"], str(cell["seed"]), f"{cell['accuracy']:.1%}"]
        lines.append([*first, *rates, known, *in_words(cell)])
    wins = [f"Win rate over SFT by {name}" for name in REVIEWERS.values()]
    header = ["", "Seed", "Reward model's accuracy", *wins, "Explained at the first token"]
    return cells.table([*header, *SHARED], lines)


# ----------------------------------------------------------------------------------------- sentiment


def sentiment_cell(folder: Path) -> cells.Cell:
    from examples.sentiment import vader

    judge, cell = cells.metrics(folder, "judge"), shared(folder)
    cell["win_rate"] = [judge[f"vader/policy_vs_sft/{name}"] for name in ("win_rate", "low", "high")]
    answers = pq.read_table(folder / "evaluation/ppo/answers.parquet").to_pylist()
    curve = {int(float(row["episode"])): row for row in cells.curve(folder) if row["eval/kl"]}
    points = []
    for episode, row in curve.items():
        texts = [one["response"] for one in answers if one["episode"] == episode]
        judged = float(np.mean(vader(texts, texts)))
        points.append((float(row["eval/kl"]), float(row["eval/scores"]), judged))
    return cell | {"points": points}


def gao(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """α, β and the share of variance of R(d) = d · (α − β · log d), d = √KL (arXiv 2210.10760, eq. 2).

    `points` are (KL, R), R being 0 at a KL of 0; those of no KL say nothing.
    """
    kl, r = np.array([point for point in points if point[0] > 0]).T
    d = np.sqrt(kl)
    x = np.stack([d, -d * np.log(d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(x, r, rcond=None)
    rest = r - x @ np.array([alpha, beta])
    return float(alpha), float(beta), float(1 - (rest**2).sum() / ((r - r.mean()) ** 2).sum())


def sentiment_table(found: Sequence[cells.Cell]) -> str:
    """The cells, and the fits over all of their evaluations, each recentered at the beginning of its run."""
    lines, optimized, judged = [], [], []
    for cell in found:
        (_, first, first_judged), *points = cell["points"]
        optimized += [(kl, score - first) for kl, score, _ in points]
        judged += [(kl, score - first_judged) for kl, _, score in points]
        rate, low, high = cell["win_rate"]
        _, score, vader = points[-1]
        gains = [f"{score - first:+.2f}", f"{first_judged:.2f} → {vader:.2f}"]
        win = f"{rate:.1%} [{low:.1%}, {high:.1%}]"
        lines.append([cell["variant"], str(cell["seed"]), *gains, win, *in_words(cell)])
    header = ["KL coefficient", "Seed", "Optimized score", "VADER's score", "VADER's win rate over SFT"]
    text = cells.table([*header, *SHARED], lines) + "\n"
    fits = []
    for name, points in {"optimized": optimized, "VADER's": judged}.items():
        alpha, beta, share = gao(points)
        furthest = max(kl for kl, _ in points)
        is_seen = beta > 0 and 2 * (alpha / beta - 1) <= math.log(furthest)
        peak = f"{math.exp(2 * (alpha / beta - 1)):,.1f}" if is_seen else f"above {furthest:.1f}"
        fits.append([name, f"{alpha:.3f}", f"{beta:.3f}", peak, f"{share:.0%}"])
    return text + cells.table(["Score", "α", "β", "KL of the highest score", "Share of variance"], fits)


# ------------------------------------------------------------------------------------------- command

FP32, BF16 = {"launch.precision": "fp32"}, {"launch.precision": "bf16"}
RLOO = {"ppo.guards.action": "warn"}
WITH_CRITIC = RLOO | {
    "ppo.advantages": "{kind: gae, samples_per_prompt: 8, critic: {init: sft}}",
    "ppo.whiten_advantages": "true",
}
CRITIC = "learning_rate: 1.0e-4, schedule: constant, adam_eps: 1.0e-8, max_grad_norm: 1.0, vf_coef: 1.0"


STAGE_VALUE = {"learning_rate": "1.0e-4", "num_epochs": "2", "evals_per_epoch": "4", "patience": "8"}


def with_critic(init: str, lam_value: str, lam: str = "0.95") -> dict[str, str]:
    """PPO whose critic has an optimizer of its own and begins as the SFT model or as stage value's."""
    critic = f"{{init: {init}, cliprange_value: null, {CRITIC}}}"
    gae = f"{{kind: gae, samples_per_prompt: 8, lam: {lam}, lam_value: {lam_value}, critic: {critic}}}"
    value = {f"value.{key}": text for key, text in STAGE_VALUE.items()}
    return RLOO | BF16 | value | {"ppo.advantages": gae, "ppo.whiten_advantages": "true"}


WITHOUT_CRITIC = {
    "ppo.advantages": "{kind: rloo, samples_per_prompt: 8}",
    "ppo.whiten_advantages": "false",
}
WITH_LORA = RLOO | {"ppo.lora": "{r: 16, alpha: 32.0}", "ppo.learning_rate": "3e-4"}
TABLES = {
    "constraints": Table(
        {
            "RLOO, float32": RLOO | FP32,
            "RLOO, bf16": RLOO | BF16,
            "PPO with a critic, bf16": WITH_CRITIC | BF16,
            "RLOO, LoRA r = 16, bf16": WITH_LORA | BF16,
            "PPO, stage value, λ of the critic 1": with_critic("value", "1.0"),
            "PPO, stage value, λ of both 1": with_critic("value", "1.0", "1.0"),
            "PPO, stage value, λ of the critic 0.95": with_critic("value", "0.95"),
            "PPO, new critic, λ of the critic 1": with_critic("sft", "1.0"),
            "PPO, new critic, λ of the critic 0.95": with_critic("sft", "0.95"),
        },
        constraints_cell,
        constraints_table,
    ),
    "reviews": Table({"PPO": BF16, "RLOO": BF16 | WITHOUT_CRITIC}, reviews_cell, reviews_table),
    "sentiment": Table(
        {coef: BF16 | {"ppo.kl_coef": coef} for coef in ("0.0", "0.02", "0.05", "0.2")},
        sentiment_cell,
        sentiment_table,
    ),
}


def main() -> None:
    variants = dict.fromkeys(name for table in TABLES.values() for name in table.variants)
    parser = cells.arguments(__doc__, variants)
    parser.add_argument("--preset", choices=list(TABLES), required=True)
    args = parser.parse_args()
    table = TABLES[args.preset]
    args.only = [name for name in args.only if name in table.variants]
    if not args.only:
        parser.error(f"--only: the variants of {args.preset} are {', '.join(table.variants)}")
    found = cells.run(args.preset, table.variants, table.measure, args, preset=args.preset)
    cells.publish(Path(f"docs/results/{args.preset}.md"), args.preset, table.text(found), args)


if __name__ == "__main__":
    main()
