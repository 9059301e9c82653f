"""`rlhf plan`: what PPO would need and cost on GPUs that are not here."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_tasks import config, console
from rlhf_tasks.benchmark.gpus import GB, GPUS, TERA, Assumptions, Gpu
from rlhf_tasks.cli.arguments import Commands, add_command, positive_float, positive_int

if TYPE_CHECKING:
    from rlhf_tasks.benchmark.forecast import Plan

OWN = "params.yaml"
SIZES = ("1B", "8B", "70B")


def add(commands: Commands) -> None:
    plan = add_command(
        commands, "plan", run, "calculate what PPO needs and costs on GPUs that are not here",
        "Calculate memory, layout, speed and cost of PPO with the values of params.yaml, for its model and "
        "for models of 1, 8 and 70 billion parameters in bf16. Nothing is run or measured; the output names "
        "what is assumed. On a machine that is here, `rlhf bench` measures instead.",
    )  # fmt: skip
    plan.add_argument(
        "--gpus", type=positive_int, nargs="+", default=[1, 8, 16], metavar="N",
        help="numbers of GPUs to calculate for (default: 1 8 16)",
    )  # fmt: skip
    plan.add_argument("--gpu", choices=GPUS, default="h100", help="kind of GPU (default: h100)")
    plan.add_argument(
        "--price", type=positive_float, default=2.5, metavar="P",
        help="price of one GPU for one hour, in any currency (default: 2.5)",
    )  # fmt: skip
    for name, unit, what in (
        ("matrix-rate", "TFLOPS", "matrix products in bf16"),
        ("bandwidth", "GB/S", "the GPU's memory"),
        ("memory", "GB", "size of the GPU's memory"),
    ):
        plan.add_argument(
            f"--{name}", type=positive_float, metavar=unit, help=f"{what}, in place of the published figure"
        )
    for name, value in asdict(Assumptions()).items():
        kind = share if name in SHARES else positive_int if isinstance(value, int) else positive_float
        plan.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=value, metavar="X",
            help=f"{WORDS[name]} (default: {value:g})",
        )  # fmt: skip
    plan.add_argument("--json", action="store_true", help="print JSON instead of tables")


WORDS: Mapping[str, str] = {
    "matrix_share": "share of the matrix rate that passes over whole rows reach",
    "bandwidth_share": "share of the memory's bandwidth that sampling reaches",
    "layer_seconds": "least seconds of a layer in a forward pass",
    "usable_memory": "share of the memory that tensors can use",
    "gpus_per_machine": "GPUs of one machine",
    "machine_link": "GB/s between machines, for each GPU",
    "machine_memory": "GB of memory of one machine, beside that of its GPUs",
    "machine_bandwidth": "GB/s of a machine's memory, where the optimiser steps with launch.offload",
    "host_link": "GB/s between a GPU and its machine, for launch.offload",
    "folder_rate": "GB/s at which weights are written for the engine, and read by it",
}


SHARES = ("matrix_share", "bandwidth_share", "usable_memory")


def share(text: str) -> float:
    value = positive_float(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1 (given: {text})")
    return value


def run(options: argparse.Namespace) -> int:
    settings = config.load()
    given = {field.name: getattr(options, field.name) for field in fields(Assumptions)}
    assumed, gpu = Assumptions(**given), _gpu(options)
    found = [plans(settings, Path(), gpu, n, assumed, options.price) for n in options.gpus]
    notes = assumptions(settings, gpu, assumed, options.price)
    if options.json:
        tree = [{name: one.asdict() for name, one in each.items()} for each in found]
        print(json.dumps({"plans": tree, "gpu": asdict(gpu), "assumed": notes}, indent=2))
        return 0
    for num_gpus, each in zip(options.gpus, found, strict=True):
        console.table(f"PPO on {num_gpus} × {gpu.name}", ["", *each], rows(each))
    console.say("\n".join(["assumed:", *(f"- {note}" for note in notes)]))
    return 0


def _gpu(options: argparse.Namespace) -> Gpu:
    """The kind of GPU, with the figures that were given in place of the published ones."""
    given: dict[str, Any] = {}
    if options.matrix_rate:
        given |= {"bf16": options.matrix_rate * TERA}
    if options.bandwidth:
        given["bandwidth"] = options.bandwidth * GB
    if options.memory:
        given["memory"] = options.memory * GB
    return replace(GPUS[options.gpu], **given)


def plans(
    settings: config.Config, root: Path, gpu: Gpu, num_gpus: int, assumed: Assumptions, price: float
) -> dict[str, Plan]:
    """The plan of params.yaml's model and of the published sizes, which are in bf16."""
    from rlhf_tasks.benchmark import architecture
    from rlhf_tasks.benchmark.footprint import Networks
    from rlhf_tasks.benchmark.forecast import plan
    from rlhf_tasks.benchmark.speed import Machine

    machine = Machine(gpu=gpu, num_gpus=num_gpus, assumed=assumed)
    own = Networks(
        policy=architecture.of_params(settings, root), settings=settings.ppo,
        has_reward_model=settings.reward.train, is_bf16=settings.launch.precision != "fp32",
        longest=settings.data.max_prompt_tokens, offload=settings.launch.offload,
    )  # fmt: skip
    larger = replace(
        own, is_bf16=True, settings=settings.ppo.model_copy(update={"gradient_checkpointing": True})
    )
    others = {name: replace(larger, policy=architecture.published(name)) for name in SIZES}
    return {name: plan(each, machine, price) for name, each in {OWN: own, **others}.items()}


def rows(found: Mapping[str, Plan]) -> Sequence[Sequence[str]]:
    """The table of one number of GPUs: a column for each model."""
    plans = list(found.values())
    table = [
        ["parameters", *(f"{one.parameters:,}" for one in plans)],
        ["trained, with the critic", *(f"{one.trained_parameters:,}" for one in plans)],
        ["layout", *(_layout(one) for one in plans)],
    ]
    names = {
        "cache": "KV cache", "prompts": "the pass over the prompts", "gathered": "gathered weights",
        "start": "the start", "machine": "the first machine's own memory",
    }  # fmt: skip
    for part in asdict(plans[0].memory):
        cells = [f"{getattr(one.memory, part) / GB:,.2f}" for one in plans]
        table.append([f"GB of {names.get(part, part)}", *cells])
    has_engine = any(one.engine_gpus for one in plans)
    for part in ("generate", "score", "train", *(["renew"] if has_engine else [])):
        cells = [_number(None if one.seconds is None else getattr(one.seconds, part)) for one in plans]
        what = "renew the engine's weights" if part == "renew" else part
        table.append([f"seconds to {what}", *cells])
    if has_engine:
        table.append(["further GPUs, of the engine", *(str(one.engine_gpus) for one in plans)])
    return [
        *table,
        ["episodes per second", *(_number(one.episodes_per_second) for one in plans)],
        ["cost of a million episodes", *(_number(one.cost_per_million_episodes) for one in plans)],
        ["least GPUs that fit", *(str(one.least_gpus or "none") for one in plans)],
    ]


def _layout(one: Plan) -> str:
    if one.layout is None:
        return str(one.problem)
    return one.layout


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def assumptions(settings: config.Config, gpu: Gpu, assumed: Assumptions, price: float) -> Sequence[str]:
    """In words, everything that the numbers rest on and that is not arithmetic."""
    ppo = settings.ppo
    own = []
    if ppo.sampler.kind == "vllm":
        own += [
            "the engine has GPUs of its own on the first machine: the least power of two that holds the "
            "policy, its cache and a quarter more; the cost counts them; its folder of weights is on a disk"
        ]
    if settings.launch.offload:
        own += ["with launch.offload nothing is copied between GPU and machine while a pass computes"]
    return [
        *own,
        f"{gpu.name}: {gpu.memory / GB:g} GB at {gpu.bandwidth / GB:g} GB/s; {gpu.bf16 / TERA:g} TFLOPS in "
        f"bf16, {gpu.fp32 / TERA:g} in fp32; {gpu.link / GB:g} GB/s to each other ({gpu.source}, where not "
        "given otherwise)",
        *(f"{words}: {getattr(assumed, name):g}" for name, words in WORDS.items()),
        f"a GPU costs {price:g} per hour; the evaluations of the selection prompts are not counted",
        f"every prompt has {settings.data.max_prompt_tokens} tokens and every response {ppo.response_length}",
        "reward models, critic and reference are as large as the policy; the critic and two reward models "
        "only where params.yaml has them",
        "under fsdp2 and zero3 the reference and the reward models are divided among the GPUs, and without "
        "an engine the policy's weights are gathered whole to sample; under zero3 policy and critic are "
        "whole on each GPU at the start",
        "the first machine holds the selected weights of the policy, and under fsdp2 and zero3 the policy "
        "once more when it is written; files that are read are not counted, as the system can drop them",
        "the number of GPUs also divides the batch sizes of base, sft and reward, which are not planned",
        "1B, 8B and 70B differ from params.yaml by the model, bf16 and gradient checkpointing",
    ]
