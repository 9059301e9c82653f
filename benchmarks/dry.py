"""PPO of params.yaml on a GPU that is not here: `python -m benchmarks.dry --model my/model --gpu H100`.

One update of the policy of params.yaml, or of `--model`, runs on a pretended GPU (`tests/gpu/pretend.py`)
whose floats have no numbers: hardly any memory is needed, but minutes for a real model. It tells the most
memory held in each phase beside what `rlhf plan` calculates, the work of the matmuls by type of number, and
the tokens a second beyond which one GPU cannot come. All prompts are as long as the longest, all reward
models as large as the policy, and no response ends early. One epoch is run, and all are counted. It needs a
CPU build of torch and a C++ compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlhf_tasks import config, console
from rlhf_tasks.errors import UserError
from tests.gpu.child import compile_stub


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, GGUF file or hub id in place of params.yaml's model")
    parser.add_argument("--gpu", default="H100", help="whose rates bound the tokens a second")
    parser.add_argument("--memory", type=float, default=80.0, metavar="GB")
    parser.add_argument("--rows", type=int, help="of a rollout; by default ppo.rollout_batch_size")
    parser.add_argument("--library", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.library:  # torch looks for CUDA when it is loaded, so that this comes first
            ctypes.CDLL(options.library, mode=ctypes.RTLD_GLOBAL)
            from rlhf_tasks.training.throughput import PEAKS

            if options.gpu not in PEAKS:
                raise UserError(f"--gpu {options.gpu} is none of {', '.join(PEAKS)}")
            show(measure(options.model, options.memory, options.rows), options.gpu, options.memory)
            return 0
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "stub.so"
            with console.part("compiling the pretended GPU"):
                missing = compile_stub(library)
            if missing:
                raise UserError(f"{missing}; `rlhf plan` calculates the memory without it")
            words = [sys.executable, "-m", "benchmarks.dry", *sys.argv[1:], "--library", str(library)]
            return subprocess.run(words, check=False).returncode
    except UserError as error:
        print(f"benchmarks.dry: {error}", file=sys.stderr)
        return 2


def measure(model: str | None, memory: float, rows: int | None) -> dict[str, Any]:
    """What an update of params.yaml needs of one GPU with so many GB."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from benchmarks import shapes, workloads
    from rlhf_tasks.config.scorers import RewardModelScorer
    from rlhf_tasks.training import memory_plan
    from tests import small
    from tests.gpu import dry, toy
    from tests.gpu.pretend import Gpu

    settings = config.load()
    if settings.ppo.sampler.kind != "policy" or settings.launch.num_processes > 1:
        raise UserError("one GPU is pretended, on which the policy samples: set ppo.sampler and launch so")
    known = memory_plan.config_of_params(settings, Path(), model)
    known.update({"pad_token_id": shapes.PAD, "eos_token_id": shapes.EOS, "num_labels": 1})
    is_bf16 = settings.launch.precision != "fp32"

    def made() -> shapes.Models:
        with torch.device("meta"):
            policies = [AutoModelForCausalLM.from_config(known, dtype=torch.float32) for _ in range(2)]
            scores = [
                AutoModelForSequenceClassification.from_config(known, dtype=torch.float32) for _ in range(2)
            ]
        return shapes.Models(*policies, *scores)

    plan = memory_plan.Run.of_params(settings, memory_plan.sizes_of_config(known), 1, memory * memory_plan.GB)
    batch = rows or settings.ppo.rollout_batch_size
    scorers = (RewardModelScorer(kind="reward_model", weight=1.0),) if settings.reward.train else ()
    changes: dict[str, Any] = {"rollout_batch_size": batch, "total_episodes": batch, "num_ppo_epochs": 1}
    changes |= {
        "micro_batch_tokens": plan.micro_batch_tokens,
        "scorers": scorers,
        "ptx": None,
        "guards": None,
    }
    ppo = settings.ppo.model_copy(update=changes)
    queries = shapes.random_rows(batch, plan.longest, plan.longest, known.get_text_config().vocab_size)
    gpu = Gpu(numbers=False)
    with gpu.present(), toy.phases(gpu):
        dist = small.distributed("bf16" if is_bf16 else "fp32")
        work = workloads.of_models(dist, ppo, made(), queries)
        heldout = made().reward
        dist.freeze(heldout)
        list(work.updates())
    found = dry.DryRun.of(gpu)
    epochs = {"train": settings.ppo.num_ppo_epochs}
    return {
        "parameters": plan.policy.parameters,
        "rows": batch,
        "tokens": batch * (plan.longest + ppo.response_length),
        "peaks": {phase or "else": peak / memory_plan.GB for phase, peak in found.peaks.items()},
        "plan": memory_plan.memory(plan)["peak"] / memory_plan.GB,
        "flop": [(*key, number * epochs.get(key[0], 1)) for key, number in found.flop.items()],
    }


def show(found: dict[str, Any], gpu: str, memory: float) -> None:
    from rlhf_tasks.training.throughput import PEAKS
    from tests.gpu.dry import RATES

    scale = PEAKS[gpu] / PEAKS["H100"]
    rows, seconds = [], 0.0
    for phase, kind, flop in found["flop"]:
        seconds += flop / (RATES[kind] * scale)
        rows.append((phase or "else", kind, f"{flop / 1e12:,.3g}"))
    console.table("TFLOP of the matmuls", ["phase", "numbers", "TFLOP"], rows)
    peaks = [(phase, f"{peak:,.3g}") for phase, peak in found["peaks"].items()]
    console.table("memory", ["phase", "GB at most"], [*peaks, ("`rlhf plan`", f"{found['plan']:,.3g}")])
    most, bound = max(found["peaks"].values()), found["tokens"] / seconds
    print(
        f"{found['parameters']:,} parameters, a rollout of {found['rows']} rows: {most:,.3g} GB of {memory:g}"
    )
    print(f"One {gpu} reads at most {bound:,.0f} tokens a second, by its matmuls alone")


if __name__ == "__main__":
    sys.exit(main())
