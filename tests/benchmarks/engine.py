"""Rollouts of an engine, at once or one ahead: `python -m tests.benchmarks.engine 1 2 3`.

The price: the planted task of tests/ppo/test_planted.py (a share of token 5 in the responses) is learned for
each seed without an engine, with one, and with one that samples a rollout ahead. That engine is in this
process and computes exactly, so that nothing but the age of the weights differs. Writes
docs/results/engine.md.

The default task: stage ppo with the shipped values, from the same SFT and reward models, in the same three
ways. The engine is the stand-in of the tests, a process of its own. The models of the first stages are those
of `tests.benchmarks.seeds`, or are made in a clone of the committed state. Writes the page's second table.

The timeline: a few updates with a server in a process of its own, which is vLLM if RLHF_VLLM names its
program, and else the stand-in of the tests. Writes docs/pictures/engine_timeline.png.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from transformers import PreTrainedModel

from rlhf_tasks.config import Scratch
from rlhf_tasks.config.engine import Engine as Settings
from rlhf_tasks.data.batches import Ids
from rlhf_tasks.modeling.load import from_scratch
from rlhf_tasks.ppo.engines.protocol import Answers, Engine
from rlhf_tasks.ppo.engines.vllm import Rollouts, VllmEngine
from rlhf_tasks.ppo.engines.wire import Sampling
from rlhf_tasks.ppo.reference import OwnModel
from rlhf_tasks.ppo.rollout import ActorCritic
from rlhf_tasks.ppo.trainer import Trainer
from tests import small
from tests.benchmarks import estimators
from tests.ppo import standin
from tests.ppo.toy import ENGINE, QUERIES, InMemory, Planted

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PAGE = Path(__file__).parents[2] / "docs/results/engine.md"
PICTURE = Path(__file__).parents[2] / "docs/pictures/engine_timeline.png"
WAYS: Mapping[str, int | None] = {"no engine": None, "engine, `ahead: 0`": 0, "engine, `ahead: 1`": 1}
UPDATES, LAST = 36, 6
INTRODUCTION = """\
# Rollouts one ahead

```sh
python -m tests.benchmarks.engine {seeds}
```

A policy of {weights:,} random weights learns to write one token, from {updates} updates of 64 episodes. The
score of a response is the share of that token, from 0 to 1. For each seed the same start is trained three
times: with samples of its own, with those of [an engine](../how-to/sample-with-vllm.md), and with those of an
engine that samples one rollout ahead. The engine computes exactly. So the first two rows differ by their
random numbers only, which shows the noise, and the last two by the age of the weights as well. Each number is
the mean score of the last {last} updates. "Reached 0.5" is the first update with this score, as a mean over
the seeds.

"""
DEFAULT = """
## The default task

Stage ppo with the shipped `params.yaml`, {episodes:,.0f} episodes, from the same SFT and reward models in
each column. The engine is a process of its own with the calls of vLLM, which computes exactly. The win rate
is the gold judge's over the references on the {posts:,.0f} test posts, with its 95% interval. The KL is that
of the kept policy, in nats per response.

"""


def learner(
    seed: int, policy: PreTrainedModel, engine: Engine | None, ahead: int | None, **changes: Any
) -> Trainer:
    """A trainer of the planted task."""
    section = None if ahead is None else ENGINE | {"ahead": ahead}
    settings = small.ppo(**({
        "engine": section, "rollout_batch_size": 64, "num_ppo_epochs": 4, "learning_rate": 5e-3,
        "schedule": "linear", "kl_coef": 0.0, "truncation": "none", "temperature": 0.8,
    } | changes))  # fmt: skip
    reference = copy.deepcopy(policy).requires_grad_(False)
    return Trainer(
        small.runtime(), settings, ActorCritic(policy, small.scores(seed=100 + seed)),
        OwnModel(reference, moves=False), Planted(), small.tokenizer(), QUERIES, seed=seed, engine=engine,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- price


def scores(seed: int, ahead: int | None) -> list[float]:
    """The mean raw score of each update."""
    engine = None if ahead is None else InMemory()
    one = learner(seed, small.causal(seed=seed), engine, ahead, total_episodes=UPDATES * 64)
    return [metrics["objective/raw_scores"] for metrics in one.updates()]


def table(found: Mapping[str, Sequence[Sequence[float]]], seeds: Sequence[int]) -> str:
    """A row per way: the last scores of each seed, their mean, and when 0.5 was reached."""
    head = ["rollouts by", *(f"seed {seed}" for seed in seeds), "mean", "reached 0.5"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, curves in found.items():
        last = [sum(curve[-LAST:]) / LAST for curve in curves]
        reached = [reached_half(curve) for curve in curves]
        when = f"update {sum(reached) / len(reached):.1f}"
        cells = [name, *(f"{x:.3f}" for x in last), f"{sum(last) / len(last):.3f}", when]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def reached_half(curve: Sequence[float]) -> int:
    """The number of the first update with a score of 0.5; one more than there are if none has."""
    return next((number for number, score in enumerate(curve, 1) if score >= 0.5), len(curve) + 1)


def page(found: Mapping[str, Sequence[Sequence[float]]], seeds: Sequence[int]) -> str:
    weights = sum(p.numel() for p in small.causal().parameters())
    text = INTRODUCTION.format(seeds=" ".join(map(str, seeds)), weights=weights, updates=UPDATES, last=LAST)
    return text + table(found, seeds)


# --------------------------------------------------------------------------------------- default task


def on_default_task(seed: int, ahead: int | None, runs: Path, work: Path) -> estimators.Result:
    """The result of stage ppo with a seed; it runs if there is none."""
    settings = []
    if ahead is not None:
        command = [sys.executable, standin.__file__, "serve"]
        section = ENGINE | {"url": None, "command": command, "ahead": ahead}
        settings = [f"ppo.engine={json.dumps(section)}"]
    folder = (work / str(seed) / str(ahead)).absolute()
    return estimators.trained(folder, seed, runs, None, settings)


def default_task(seeds: Sequence[int], runs: Path, work: Path) -> str:
    """The section of the page: a row per way."""
    found = {
        name: [on_default_task(seed, ahead, runs, work) for seed in seeds] for name, ahead in WAYS.items()
    }
    first = found["no engine"][0]
    return DEFAULT.format(episodes=first["episodes"], posts=first["posts"]) + results_table(found, seeds)


def results_table(found: Mapping[str, Sequence[estimators.Result]], seeds: Sequence[int]) -> str:
    head = ["rollouts by", *(f"seed {seed}" for seed in seeds), "mean", "KL"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, results in found.items():
        rates = [f"{one['win_rate']:.1%} ({one['low']:.1%}–{one['high']:.1%})" for one in results]
        means = [sum(one[key] for one in results) / len(results) for key in ("win_rate", "kl")]
        lines.append("| " + " | ".join([name, *rates, f"{means[0]:.1%}", f"{means[1]:.2f}"]) + " |")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------- timeline


class Span(NamedTuple):
    process: str
    what: str
    start: float
    end: float


class Timed:
    """An engine whose calls are recorded."""

    def __init__(self, engine: Engine, spans: list[Span]) -> None:
        self._engine, self._spans, self.name = engine, spans, engine.name

    def load(self, weights: PreTrainedModel, version: int) -> None:
        timed(self._engine.load, self._spans, "engine", "load weights")(weights, version)
        self.name = self._engine.name

    def sample(self, queries: Sequence[Ids], n: int, seeds: Sequence[int]) -> Answers:
        answers: Answers = timed(self._engine.sample, self._spans, "engine", "generate")(queries, n, seeds)
        return answers

    def close(self) -> None:
        self._engine.close()


def timed(call: Callable[..., Any], spans: list[Span], process: str, what: str) -> Callable[..., Any]:
    def recorded(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            spans.append(Span(process, what, start, time.perf_counter()))

    return recorded


def timeline(ahead: int, updates: int, home: Path) -> tuple[list[Span], str]:
    """The spans of each update but the first, which starts the server, and the engine's name."""
    spans: list[Span] = []
    engine = Timed(server(ahead, home), spans)
    shape = Scratch(
        family="llama", hidden_size=64, num_layers=2, num_heads=2, vocab_size=1024, tokenizer="words"
    )
    torch.manual_seed(1)
    policy = from_scratch(shape, small.tokenizer(), max_positions=128).eval()
    changes = {"response_length": 32, "total_episodes": 64 * (updates + 1), "num_ppo_epochs": 2}
    one = learner(1, policy, engine, ahead, **changes)
    one.collector.score = timed(one.collector.score, spans, "trainer", "score")  # type: ignore[method-assign]
    one.optimiser.optimise = timed(one.optimiser.optimise, spans, "trainer", "learn")  # type: ignore[method-assign]
    try:
        run = one.updates()
        next(run)
        begin = time.perf_counter()
        for _ in run:
            pass
    finally:
        engine.close()
    return [
        span._replace(start=span.start - begin, end=span.end - begin) for span in spans if span.end > begin
    ], engine.name


def server(ahead: int, home: Path) -> VllmEngine:
    """vLLM if RLHF_VLLM names it, else the stand-in, as a process of its own."""
    program = os.environ.get("RLHF_VLLM")
    words = [sys.executable, standin.__file__, "serve"]
    if program:
        words = [
            "env",
            "VLLM_TARGET_DEVICE=cpu",
            "VLLM_CPU_KVCACHE_SPACE=1",
            program,
            "serve",
            "--enforce-eager",
        ]
    settings = Settings.model_validate(
        ENGINE | {"url": None, "command": words, "ahead": ahead, "start_seconds": 900.0}
    )
    sampling = Sampling(temperature=0.8, max_tokens=32, stop=small.EOS)
    return VllmEngine(
        settings, home, small.tokenizer(), Rollouts(sampling=sampling, max_tokens=64, is_float32=True)
    )


def draw(found: Mapping[int, Sequence[Span]], name: str, out: Path) -> None:
    colours = {
        "generate": "tab:blue",
        "load weights": "tab:orange",
        "score": "tab:grey",
        "learn": "tab:green",
    }
    figure, panels = plt.subplots(len(found), 1, figsize=(9, 4), sharex=True, layout="constrained")
    longest = max(span.end for spans in found.values() for span in spans)
    for panel, (ahead, spans) in zip(panels, found.items(), strict=True):
        for what, colour in colours.items():
            for height, process in enumerate(("engine", "trainer")):
                bars = [
                    (max(0.0, s.start), s.end - max(0.0, s.start))
                    for s in spans
                    if (s.process, s.what) == (process, what)
                ]
                panel.broken_barh(bars, (height - 0.35, 0.7), color=colour, label=what if bars else None)
        panel.set_yticks([0, 1], ["engine", "trainer"])
        panel.set_xlim(0, longest)
        panel.set_title(f"ahead: {ahead}, {max(span.end for span in spans):.1f} s", loc="left")
    panels[-1].set_xlabel(f"seconds; {name}")
    labels = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(labels.values(), labels.keys(), loc="outside right upper", frameon=False)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--updates", type=int, default=8, help="draw so many updates in the timeline")
    parser.add_argument("--only", choices=["price", "timeline"], help="make one of the two")
    parser.add_argument("--runs", type=Path, default=Path(".rlhf/seeds"), help="where the first stages are")
    parser.add_argument("--work", type=Path, default=Path(".rlhf/engine-price"), help="where the results are")
    args = parser.parse_args()
    if args.only != "timeline":
        found = {name: [scores(seed, ahead) for seed in args.seeds] for name, ahead in WAYS.items()}
        text = page(found, args.seeds) + default_task(args.seeds, args.runs, args.work)
        PAGE.write_text(text, encoding="utf-8")
        print(text)
    if args.only != "price":
        with tempfile.TemporaryDirectory() as home:
            spans = {ahead: timeline(ahead, args.updates, Path(home)) for ahead in (0, 1)}
        draw({ahead: own for ahead, (own, _) in spans.items()}, spans[0][1], PICTURE)
        for ahead, (own, name) in spans.items():
            print(f"ahead {ahead}: {args.updates} updates in {max(s.end for s in own):.2f} s ({name})")


if __name__ == "__main__":
    main()
