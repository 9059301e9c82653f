"""Sums and products with a known answer, for a verifier: `rlhf preset arithmetic`.

    data:
      source: "examples.arithmetic:arithmetic"
      options: {num_prompts: 7000, num_sft: 6000}
      columns: {keep: [answer]}

Every problem is in one split only. References are right, and so are the demonstrations of the test split. In
the others, the writer of the demonstrations is off by 1, 2 or 10 in the share WRONG of them.
"""

import random
from typing import Any

WRONG = 0.2
SLIPS = (-10, -2, -1, 1, 2, 10)


def arithmetic(
    seed: int, num_validation: int, num_test: int, num_prompts: int = 2000, num_sft: int = 600
) -> dict[str, list[dict[str, Any]]]:
    """Demonstrations and prompts; the first `num_sft` train prompts have a demonstration."""
    rng = random.Random(f"arithmetic-{seed}")
    problems = [(f"{a}+{b}=", a + b) for a in range(100, 1000) for b in range(1, 10)]
    problems += [(f"{a}*{b}=", a * b) for a in range(10, 100) for b in (2, 3)]
    rng.shuffle(problems)
    held_out = num_test + num_validation
    if num_prompts > (left := len(problems) - held_out):
        raise ValueError(f"{left} problems are left for train, fewer than {num_prompts=}; lower it")
    parts = {
        "train": problems[held_out : held_out + num_prompts],
        "validation": problems[num_test:held_out],
        "test": problems[:num_test],
    }
    sft, prompts = [], []
    for split, part in parts.items():
        for number, (prompt, answer) in enumerate(part):
            row = {"prompt": prompt, "split": split, "source": "arithmetic"}
            prompts.append(row | {"reference": str(answer), "answer": answer})
            if split == "train" and number >= num_sft:
                continue
            slips = split != "test" and rng.random() < WRONG
            written = max(0, answer + rng.choice(SLIPS)) if slips else answer
            sft.append(row | {"completion": str(written)})
    return {"sft": sft, "prompts": prompts}
