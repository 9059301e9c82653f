"""PPO, RLOO and DPO beside TRL's on the default task: `python -m benchmarks.quality --peer PYTHON 1 2 3`.

Both sides begin from the same SFT model, reward model and pairs, with the values of params.yaml and of the
presets `rloo` and `dpo`, on one thread each. The gold judge compares both policies with SFT on the test
posts. Differences that remain: ours keeps the weights that the held-out reward model likes best, TRL's the
last; TRL's RLOO clips the ratio of a whole response, and so does "RLOO, whole responses", but the preset
that of each token. Writes a table of docs/results/methods.md. See `benchmarks.cells`. PYTHON is the
interpreter of an environment with trl 1.12.0 and requests, without which TRL's RLOO cannot be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import cells
from rlhf_tasks import config
from rlhf_tasks.data.batches import read_table
from rlhf_tasks.data.splits import pairs_of
from rlhf_tasks.judging.head_to_head import compare_models
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.promotion.measurement import measure_kl

WHOLE = "RLOO, whole responses"
PRESETS = {"PPO": "ppo", "RLOO": "rloo", WHOLE: "rloo", "DPO": "dpo"}
LIKE_TRL = {  # whose PPO clips no gradient, and takes the penalty of an unfinished response off its score
    "PPO": {
        "ppo.max_grad_norm": "null",
        "ppo.truncation": "{kind: eos_trick_subtract, missing_eos_score: -1.0}",
    },
    WHOLE: {"ppo.loss": "examples.whole_response:clip", "ppo.loss_reduction": "response_mean"},
}
VARIANTS = {name: cells.values_of(preset) | LIKE_TRL.get(name, {}) for name, preset in PRESETS.items()}
NUM_KL_PROMPTS = 256


def measure(folder: Path, peer: Path) -> cells.Cell:
    """Each side's win rate over SFT with its bounds, and its KL from SFT in nats per response."""
    folder = folder.resolve()
    settings, paths, theirs = config.load(folder / "params.yaml"), Paths(folder), folder / ".rlhf/trl"
    pairs = pairs_of(read_table(paths, "comparisons", "train"), "reward")
    asked = {
        "method": "dpo" if settings.dpo.train else settings.ppo.advantages.kind,
        "seed": settings.seed,
        "ppo": settings.ppo.model_dump(mode="json"),
        "dpo": settings.dpo.model_dump(mode="json"),
        "prompts": list(read_table(paths, "prompts", "train").texts("prompt")),
        "pairs": [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in pairs],
        "out": str(theirs),
    }
    request = folder / ".rlhf/trl.json"
    request.write_text(json.dumps(asked), encoding="utf-8")
    with (folder / "run.log").open("a", encoding="utf-8") as log:
        words = [str(peer.absolute()), "-m", "benchmarks.trl_trainers", str(request)]
        subprocess.run(words, env=os.environ | cells.ONE_THREAD, stdout=log, stderr=log, check=True)
    view = config.JudgeView.of(settings)
    prompts = read_table(paths, "prompts", "validation").texts("prompt")[:NUM_KL_PROMPTS]
    cell: cells.Cell = {}
    for side, model in (("ours", paths.policy), ("TRL's", theirs)):
        [found] = compare_models(view, str(model), str(paths.sft), paths=paths, names=["gold"]).comparisons
        rate = found.win_rate
        kl = measure_kl(settings, paths, model, prompts, torch.device("cpu"))
        cell[side] = [rate.value, rate.low, rate.high, kl.mean]
    return cell


def table(found: Sequence[cells.Cell]) -> str:
    rows = []
    for cell in found:
        sides = [cell["ours"], cell["TRL's"]]
        rates = [f"{100 * rate:.1f}% ({100 * low:.1f} to {100 * high:.1f})" for rate, low, high, _ in sides]
        rows.append([cell["variant"], str(cell["seed"]), *rates, *(f"{kl:.2f}" for *_, kl in sides)])
    kls = ["KL of ours, nats", "KL of TRL's"]
    return cells.table(["Method", "Seed", "Ours over SFT", "TRL's over SFT", *kls], rows)


def main() -> None:
    parser = cells.arguments(__doc__, VARIANTS)
    parser.add_argument("--peer", type=Path, required=True, metavar="PYTHON")
    args = parser.parse_args()
    found = cells.run(
        "quality",
        VARIANTS,
        lambda folder: measure(folder, args.peer),
        args,
        preset="ppo",
        environment=cells.ONE_THREAD,
    )
    cells.publish(Path("docs/results/methods.md"), "quality", table(found), args)


if __name__ == "__main__":
    main()
