"""Rollouts of a server, at once or one ahead: `python -m benchmarks.engine 1 2 3`.

The price: the planted task of tests/ppo/test_planted.py (a share of token 5 in the responses) is learned for
each seed without a server, with one, and with one that samples a rollout ahead. That server is in this
process and computes exactly, so that nothing but the age of the weights differs. Writes
docs/results/engine.md.

The default task: stage ppo with the shipped values, from the same SFT and reward models, in the same three
ways. The server is the stand-in of the tests, a process of its own. The models of the first stages are those
of `benchmarks.seeds`, or are made in a clone of the committed state. Writes the page's second table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import estimators
from rlhf_tasks.ppo.rollout import ActorCritic
from tests import small
from tests.ppo.toy import ENGINE, InMemory, started, toy

PAGE = Path(__file__).parents[1] / "docs/results/engine.md"
WAYS: Mapping[str, int | None] = {"no server": None, "server, `ahead: 0`": 0, "server, `ahead: 1`": 1}
UPDATES, LAST = 36, 6
INTRODUCTION = """\
# Rollouts one ahead

```sh
python -m benchmarks.engine {seeds}
```

A policy of {weights:,} random weights learns to write one token, from {updates} updates of 64 episodes. The
score of a response is the share of that token, from 0 to 1. For each seed the same start is trained three
times: with samples of its own, with those of [a server](../how-to/sample-with-vllm.md), and with those of a
server that samples one rollout ahead. The server computes exactly. So the first two rows differ by their
random numbers only, which shows the noise, and the last two by the age of the weights as well. Each number is
the mean score of the last {last} updates. "Reached 0.5" is the first update with this score, as a mean over
the seeds.

"""
DEFAULT = """
## The default task

Stage ppo with the shipped `params.yaml`, {episodes:,.0f} episodes, from the same SFT and reward models in
each column. The server is a process of its own with the calls of vLLM, which computes exactly. The win rate
is the gold judge's over the references on the {posts:,.0f} test posts, with its 95% interval. The KL is that
of the kept policy, in nats per response.

"""


def scores(seed: int, ahead: int | None) -> list[float]:
    """The mean raw score of each update of the planted task."""
    policy, critic = small.causal(seed=seed), small.scores(seed=100 + seed)
    training = toy(
        actor_critic=ActorCritic(policy, critic),
        reference_seed=seed,
        server=None if ahead is None else InMemory(),
        sampler={"kind": "policy"} if ahead is None else ENGINE | {"ahead": ahead},
        seed=seed,
        total_episodes=UPDATES * 64,
        rollout_batch_size=64,
        num_ppo_epochs=4,
        learning_rate=5e-3,
        schedule="linear",
        kl_coef=0.0,
        truncation__kind="none",
        temperature=0.8,
    )
    return [metrics["objective/raw_scores"] for metrics in training.updates]


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
        settings = [f"ppo.sampler={json.dumps(started(ahead=ahead))}"]
    folder = (work / str(seed) / str(ahead)).absolute()
    return estimators.trained(folder, seed, runs, None, settings)


def default_task(seeds: Sequence[int], runs: Path, work: Path) -> str:
    """The section of the page: a row per way."""
    found = {
        name: [on_default_task(seed, ahead, runs, work) for seed in seeds] for name, ahead in WAYS.items()
    }
    first = found["no server"][0]
    return DEFAULT.format(episodes=first["episodes"], posts=first["posts"]) + results_table(found, seeds)


def results_table(found: Mapping[str, Sequence[estimators.Result]], seeds: Sequence[int]) -> str:
    head = ["rollouts by", *(f"seed {seed}" for seed in seeds), "mean", "KL"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, results in found.items():
        rates = [f"{one['win_rate']:.1%} ({one['low']:.1%}–{one['high']:.1%})" for one in results]
        means = [sum(one[key] for one in results) / len(results) for key in ("win_rate", "kl")]
        lines.append("| " + " | ".join([name, *rates, f"{means[0]:.1%}", f"{means[1]:.2f}"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="*", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--runs", type=Path, default=Path(".rlhf/seeds"), help="where the first stages are")
    parser.add_argument("--work", type=Path, default=Path(".rlhf/engine-price"), help="where the results are")
    args = parser.parse_args()
    found = {name: [scores(seed, ahead) for seed in args.seeds] for name, ahead in WAYS.items()}
    text = page(found, args.seeds) + default_task(args.seeds, args.runs, args.work)
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
