"""How often luck promotes a policy as good as the champion: `python -m benchmarks.false_promotions`.

Simulates 100 nights on each of which a policy of the champion's quality is compared with the champion, by
the gate's rule: the lower end of Wilson's 95% interval is above one half, for each judge. The champion's
responses to the test prompts stay the same until another policy is promoted, as they do in the pipeline. So
the champion of a lucky night is lucky on all later ones, and is harder to beat.
"""

from __future__ import annotations

import argparse

import numpy as np

from rlhf_tasks.judging.statistics import wilson

NIGHTS = 100
JUDGES_NOISE = 0.5
"""Of one judge's score of a response, in deviations of the scores of a policy's responses to one prompt."""


def count_promotions(num_prompts: int, num_judges: int, rng: np.random.Generator) -> int:
    """The promotions in NIGHTS nights of policies that are all equally good."""
    judges_noise = JUDGES_NOISE * (num_judges > 1)

    def judged() -> np.ndarray:
        """(judges, prompts): what each judge thinks of one policy's responses."""
        responses = rng.standard_normal(num_prompts)
        return responses + judges_noise * rng.standard_normal((num_judges, num_prompts))

    champion, promotions = judged(), 0
    for _ in range(NIGHTS):
        policy = judged()
        wins = (policy > champion).sum(axis=1)
        if all(wilson(int(number), num_prompts).low > 0.5 for number in wins):
            champion, promotions = policy, promotions + 1
    return promotions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=400)
    repeats = parser.parse_args().repeats
    print(f"false promotions in {NIGHTS} nights, mean of {repeats} simulations (standard error)")
    for num_judges in (1, 2):
        for num_prompts in (194, 1000):
            rng = np.random.default_rng(0)
            found = [count_promotions(num_prompts, num_judges, rng) for _ in range(repeats)]
            error = np.std(found) / len(found) ** 0.5
            print(f"{num_judges} judge(s), {num_prompts} prompts: {np.mean(found):.2f} ({error:.2f})")


if __name__ == "__main__":
    main()
