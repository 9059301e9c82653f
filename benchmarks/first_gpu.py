"""What a GPU shows that no CPU can: `python -m benchmarks.first_gpu --out FOLDER`, in about ten minutes.

Each part is a process of its own, with a limit of time: one that fails or hangs costs the others nothing.
FOLDER/first_gpu.json has all figures, and FOLDER/first_gpu.md a page of them, both written after each part.

    versions     packages, driver, GPUs
    cpu          log-probs and gradients of one pass, against the CPU's
    waits        how often an update makes the host wait, by line
    first_ratio  the first ratio's error by layout and precision, on a toy and on shape S
    head         the output layer by TF32 against float32: time, and errors of log-probs
    casts        sampling below adapters, with 16-bit copies kept and made for every token
    reward       a reward model in float32 and in bfloat16
    memory       peak of an update, against `rlhf plan`
    rows         responses that share their prompt's row, and in rows of their own
    shape_d      seconds of sampling, scoring and training of Pythia-1B's shape, 128 rows, and MFU
    resume       the smoke preset's pipeline: PPO is killed, and goes on
    ranks        that pipeline on two GPUs, by DDP and FSDP2

Without CUDA it is a rehearsal: the same code on small shapes, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from benchmarks import shapes, workloads
from benchmarks.shapes import EOS, PAD, SHAPES, Shape, random_rows
from rlhf_tasks.data.batches import collate
from rlhf_tasks.models import heads, logprobs, sampling
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import place
from rlhf_tasks.models.logprobs import token_stats
from rlhf_tasks.ppo import sampler
from rlhf_tasks.scoring import reward_model
from rlhf_tasks.scoring.protocol import Responses
from rlhf_tasks.training import memory_plan
from tests import small

Found = dict[str, Any]
LAYOUTS = ("ddp", "zero2", "zero3", "fsdp2")
SEED = 1
ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".rlhf", ".dvc", "__pycache__", "*.egg-info", "reports")


def has_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> Any:
    return torch.device("cuda" if has_gpu() else "cpu")


def shape_of(name: str, **changes: Any) -> Shape:
    """A named shape; a small one in a rehearsal."""
    return replace(SHAPES[name] if has_gpu() else SHAPES["A"], **changes)


def seconds_of(compute: Callable[[], Any], times: int = 5) -> float:
    """The median of some calls, after one that is not counted."""
    found = list[float]()
    for _ in range(times + 1):
        start = time.perf_counter()
        compute()
        if has_gpu():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def workload(shape: Shape, num_updates: int, **changes: Any) -> Any:
    """PPO of random models of a shape, and its process."""
    return workloads.of_shape(small.distributed(shape.precision), small.ppo(**changes), shape, num_updates)


def batch_of(shape: Shape) -> Any:
    """Queries and responses of random tokens."""
    queries = random_rows(8, shape.query_min, shape.query, shape.vocab)
    responses = [[*ids, EOS] for ids in random_rows(8, 4, shape.response - 1, shape.vocab, seed=2)]
    return collate(queries, responses, PAD).to(device())


# ------------------------------------------------------------------------------------------------ parts


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def measure_versions() -> Found:
    found: Found = {
        name: version_of(name) for name in ("torch", "transformers", "accelerate", "deepspeed", "dvc")
    }
    found["python"], found["cuda"] = sys.version.split()[0], torch.version.cuda
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found["gpus"] = [f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus]
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
    return found


def measure_cpu() -> Found:
    shape, passes = SHAPES["A"], list[tuple[Any, Any]]()
    batch = batch_of(shape)
    for where in (torch.device("cpu"), device()):
        model = place(shapes.models(shape).policy, where)
        logprobs = token_stats(model, batch.to(where), 0.7).logprobs
        logprobs.sum().backward()
        gradients = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
        passes.append((logprobs.detach().cpu(), gradients))
    (cpu, of_cpu), (gpu, of_gpu) = passes
    largest = float(of_cpu.abs().max())
    return {
        "largest difference of log-probs": float((cpu - gpu).abs().max()),
        "largest difference of gradients, to the largest": float((of_cpu - of_gpu).abs().max()) / largest,
    }


def measure_waits() -> Found:
    updates = workload(replace(SHAPES["A"], precision="bf16" if has_gpu() else "fp32"), 2).updates()
    next(updates)
    if has_gpu():
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(updates)
    waits = [one for one in caught if "synchroniz" in str(one.message)]
    lines = Counter(f"{Path(one.filename).name}:{one.lineno}" for one in waits)
    return {"waits of an update": len(waits), **dict(lines.most_common(30))}


def measure_first_ratio() -> Found:
    found: Found = {}
    for precision in ("fp32", "bf16"):
        for layout in LAYOUTS if has_gpu() else ("ddp",):
            words = [sys.executable, "-m", "tests.training.first_update", layout, precision]
            done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
            last = done.stdout.splitlines()[-1:] if done.returncode == 0 else []
            found[f"toy, {layout}, {precision}"] = json.loads(last[0]) if last else done.stderr[-500:]
            print(json.dumps(found), flush=True)  # what is there if the time ends
    metrics = next(workload(shape_of("S", precision="bf16"), 1).updates())
    return found | {"shape S, ddp, bf16": metrics["val/first_ratio_error"]}


def measure_head() -> Found:
    shape = shape_of("D")
    model, batch = place(shapes.models(shape, device()).policy, device()), batch_of(shape)
    found, of_kind = dict[str, Any](), dict[str, Any]()

    def train() -> None:
        token_stats(model, batch, 0.7).logprobs.sum().backward()

    for name, rounds in {"TF32": True, "float32": False}.items():
        with (
            mock.patch.object(logprobs, "_uses_tf32", lambda *_, rounds=rounds: rounds),
            torch.autocast(device().type, torch.bfloat16),
        ):
            of_kind[name] = token_stats(model, batch, 0.7).logprobs.detach()
            found[f"seconds of a pass with gradients, {name}"] = seconds_of(train)
    error = (of_kind["TF32"] - of_kind["float32"])[batch.mask]
    found["root mean square error of log-probs by TF32"] = float(error.square().mean().sqrt())
    return found


def measure_casts() -> Found:
    shape, found = shape_of("D", batch=32), dict[str, Any]()
    model = place(shapes.models(shape, device()).policy, device()).requires_grad_(False)
    queries = random_rows(32, shape.query_min, shape.query, shape.vocab)
    contexts = {"kept": sampling.keep_casts, "for every token": lambda model: nullcontext()}
    for name, context in contexts.items():
        one = sampler.LocalSampler(
            small.distributed("bf16"),
            model,
            torch.Generator(device()).manual_seed(SEED),
            num_samples=1,
            batch_size=None,
            max_new_tokens=shape.response,
            temperature=1.0,
            ends=(shape.vocab + 1,),
            pad=PAD,
        )
        with mock.patch.object(sampler, "keep_casts", context):
            seconds = seconds_of(partial(one.sample, queries, 0), times=2)
        found[f"milliseconds of a token of 32 rows, copies {name}"] = 1000 * seconds / shape.response
    return found


def measure_reward() -> Found:
    shape, scores, found = shape_of("D"), dict[str, Any](), dict[str, Any]()
    model, words = place(shapes.models(shape, device()).reward, device()), shapes.tokenizer(shape.vocab)
    queries = random_rows(64, shape.query_min, shape.query, shape.vocab)
    responses = [[*ids, EOS] for ids in random_rows(64, 4, shape.response - 1, shape.vocab, seed=2)]
    texts = [str(words.decode(ids)) for ids in queries]
    rows = Responses.of_ids(texts, queries, responses, words, {})
    placement = small.distributed("bf16")
    for name, where in {"float32": None, "bf16": placement}.items():
        scorer = reward_model.RewardModel(TokenScores(model), words, 16384, where)
        scores[name] = scorer(rows)
        found[f"seconds of 64 rows, {name}"] = seconds_of(partial(scorer, rows), times=3)
    error = scores["bf16"] - scores["float32"]
    return found | {"root mean square error, in deviations": float(error.std() / scores["float32"].std())}


def measure_memory() -> Found:
    found: Found = {}
    for name in ("S", "D"):
        shape = shape_of(name, **({"batch": 32} if name == "D" else {}))
        one = workload(shape, 1, scorers=[{"kind": "reward_model", "weight": 1.0}])
        run = memory_plan.Run(
            policy=memory_plan.sizes_of(one.actor_critic.policy),
            ppo=one.settings,
            longest=shape.query,
            num_gpus=1,
            is_bf16=shape.precision == "bf16",
            has_reward_model=True,
        )
        if has_gpu():
            torch.cuda.reset_peak_memory_stats()
        next(one.updates())
        peak = torch.cuda.max_memory_allocated() / 1e9 if has_gpu() else 0.0
        found[f"{name}: GB at the peak"] = peak
        found[f"{name}: GB by rlhf plan"] = memory_plan.memory(run)["peak"] / 1e9
        del one
        gc.collect()
        if has_gpu():
            torch.cuda.empty_cache()
    return found


def measure_rows() -> Found:
    found, shares = dict[str, Any](), heads.supports_shared_prefix
    advantages = {"kind": "rloo", "samples_per_prompt": 8}
    for name, supports in {"shared": shares, "apart": lambda model: False}.items():
        with (
            mock.patch.object(heads, "supports_shared_prefix", supports),
            mock.patch.object(reward_model, "supports_shared_prefix", supports),
        ):
            updates = workload(
                shape_of("D", batch=64), 2, advantages=advantages, whiten_advantages=False
            ).updates()
            next(updates)
            metrics = next(updates)
        found |= {f"{key}, prompts {name}": metrics[f"time/{key}_seconds"] for key in ("score", "train")}
    return found


def measure_shape_d() -> Found:
    updates = workload(shape_of("D", batch=128), 2).updates()
    next(updates)
    metrics = next(updates)
    names = [name for name in metrics if name.startswith("time/")]
    peak = {"GB at the peak": torch.cuda.max_memory_allocated() / 1e9} if has_gpu() else {}
    return {name: metrics[name] for name in [*names, "eps", "val/first_ratio_error"]} | peak


def make_project(folder: Path, *values: str) -> Callable[..., subprocess.Popen[str]]:
    """A copy of the project with the smoke preset; what starts an `rlhf` command in it."""
    shutil.copytree(ROOT, folder, ignore=NOT_COPIED)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    name = ["-c", "user.name=first", "-c", "user.email=first@gpu"]
    for words in (["init", "--quiet"], ["add", "."], [*name, "commit", "--quiet", "--message", "a copy"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet", "--force"], cwd=folder, check=True)

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "rlhf_tasks.cli", *words]
        with (folder / "first_gpu.log").open("a", encoding="utf-8") as log:
            return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=log, stderr=log)

    done = start("preset", "smoke", "--set", *values, "ppo.total_episodes=1280")
    assert done.wait() == 0, (folder / "first_gpu.log").read_text("utf-8")
    return start


def finish(program: subprocess.Popen[str], folder: Path) -> Found:
    if program.wait():
        return {"failed": (folder / "first_gpu.log").read_text("utf-8")[-2000:]}
    metrics = json.loads((folder / "metrics/ppo.json").read_text("utf-8"))
    return {name: metrics[name] for name in ("objective/kl", "objective/scores", "time/train_seconds")}


def lacking() -> Found:
    """What a whole run needs and this machine has not."""
    missing = [name for name in ("dvc", "mlflow", "deepspeed") if version_of(name) == "missing"]
    missing += [] if shutil.which("git") else ["git"]
    return {"skipped": f"{', '.join(missing)} is not here"} if missing else {}


def measure_resume() -> Found:
    """PPO is killed at its first snapshot; the second command goes on from there."""
    if missing := lacking():
        return missing
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "project"
        start = make_project(folder, "resume.every_seconds=1")
        program = start("run")
        state = folder / ".rlhf/state/ppo"
        while program.poll() is None and not [*state.glob("*/ppo/step-*")]:
            time.sleep(0.2)
        if was_killed := program.poll() is None:
            end(program)
        start_of_second = time.perf_counter()
        found = finish(start("run"), folder)
        return {"was killed": was_killed, "seconds": time.perf_counter() - start_of_second, **found}


def measure_ranks() -> Found:
    if torch.cuda.device_count() < 2:
        return {"skipped": "there are not two GPUs"}
    if missing := lacking():
        return missing
    found: Found = {}
    for layout in ("ddp", "fsdp2"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "project"
            start = make_project(folder, "launch.num_processes=2", f"launch.parallelism={layout}")
            found[layout] = finish(start("run"), folder)
    return found


PARTS: Mapping[str, tuple[Callable[[], Found], int]] = {
    "versions": (measure_versions, 30),
    "cpu": (measure_cpu, 60),
    "head": (measure_head, 60),
    "reward": (measure_reward, 60),
    "casts": (measure_casts, 60),
    "waits": (measure_waits, 60),
    "memory": (measure_memory, 90),
    "shape_d": (measure_shape_d, 150),
    "rows": (measure_rows, 60),
    "resume": (measure_resume, 150),
    "first_ratio": (measure_first_ratio, 180),
    "ranks": (measure_ranks, 150),
}
"""By name, what measures, and the most seconds that it may take."""


# ---------------------------------------------------------------------------------------------- command


def run_part(name: str, out: Path) -> Found:
    """What a process prints last, and its error, or that it took too long, beside it."""
    limit = PARTS[name][1] * (1 if has_gpu() else 10)
    command, start = [sys.executable, "-m", "benchmarks.first_gpu", "--part", name], time.time()
    with (out / f"{name}.log").open("w+", encoding="utf-8") as log:
        # a session of its own, so that nothing of it is left on the GPU
        program = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        problem = {}
        try:
            if program.wait(timeout=limit):
                problem = {"failed": f"with status {program.returncode}; see {name}.log"}
        except subprocess.TimeoutExpired:
            problem = {"failed": f"it took more than {limit} seconds"}
            end(program)
        log.seek(0)
        lines = [line for line in log if line.startswith("{")]
    found = json.loads(lines[-1]) if lines else {}
    return {"seconds of this part": round(time.time() - start, 1), **found, **problem}


def end(program: subprocess.Popen[Any]) -> None:
    """Kill a program with all that it has started."""
    for process in [*psutil.Process(program.pid).children(recursive=True), program]:
        process.kill()
    program.wait()


def page(everything: Mapping[str, Found]) -> str:
    """All figures as Markdown, a table a part."""
    text = ["# The first run on a GPU\n"]
    for name, found in everything.items():
        text += [f"\n## {name}\n", "| | |", "|---|---|"]
        for key, value in found.items():
            shown = f"{value:.4g}" if isinstance(value, float) else re.sub(r"\s+", " ", str(value))
            text.append(f"| {key} | {shown.replace('|', '/')} |")
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".rlhf/first_gpu"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part][0]()))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    everything: dict[str, Found] = {}
    for name in options.only:
        everything[name] = run_part(name, options.out)
        (options.out / "first_gpu.json").write_text(json.dumps(everything, indent=2), encoding="utf-8")
        (options.out / "first_gpu.md").write_text(page(everything), encoding="utf-8")
        print(name, json.dumps(everything[name]), flush=True)


if __name__ == "__main__":
    main()
