"""What trivial responses would earn, before PPO: a reward that pays for them will be optimized by them.

Each kind of response is given to the same validation prompts, and scored as PPO scores its own: by the
scorers in force, under the rule for responses that did not end. B prompts.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rlhf_tasks import console
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError

REFERENCE = "reference"
Earnings = dict[str, dict[str, float]]
"""By kind of response: `score`, its mean, and `beats_reference`, the share of prompts with a higher score."""


def trivial_responses(
    queries: Sequence[Ids], references: Sequence[Ids], *, end: int, response_length: int, seed: int
) -> dict[str, list[Ids]]:
    """Responses by kind, B each, of at most `response_length` tokens.

    `references` end with `end`, and so do all kinds but `longest`; `shuffled` is the reference in disorder.
    """
    most = response_length - 1
    bodies = [reference[:-1][:most] for reference in references]
    middle = sorted(bodies, key=len)[len(bodies) // 2]
    draws = random.Random(f"audit-{seed}")
    kinds: dict[str, list[Ids]] = {
        REFERENCE: bodies,
        "shuffled": [draws.sample(body, len(body)) for body in bodies],
        "constant": [middle] * len(bodies),
        "empty": [[]] * len(bodies),
        "copied_prompt": [query[-most:] if most else [] for query in queries],
        "repeated": [body[:1] * most for body in bodies],
    }
    longest = [list(itertools.islice(itertools.cycle(body or [end]), response_length)) for body in bodies]
    return {name: [[*body, end] for body in found] for name, found in kinds.items()} | {"longest": longest}


def audit(responses: Mapping[str, list[Ids]], score: Callable[[list[Ids]], Tensor]) -> Earnings:
    """What each kind of response earns; prints a table, and a warning of each kind that beats the references.

    `score` gives the scores (B,) of one response to each prompt. A kind that a scorer refuses, such as empty
    responses, is named and left out: the policy may never write it.

    Raises:
        UserError: if a scorer refuses the references, or gives NaN or infinity for one.
    """
    scores: dict[str, Tensor] = {}
    for name, found in responses.items():
        try:
            scores[name] = score(found)
        except UserError as error:  # NaN too
            if name == REFERENCE:
                raise
            console.say(f"Warning: {name.replace('_', ' ')} responses have no score: {error}")
    references = scores[REFERENCE]
    earnings = {
        name: {"score": float(found.mean()), "beats_reference": float((found > references).float().mean())}
        for name, found in scores.items()
    }
    rows = [(name, one["score"], one["beats_reference"]) for name, one in earnings.items()]
    console.table("What trivial responses would earn", ["response", "score", "beats the reference"], rows)
    winners = [
        f"{name.replace('_', ' ')} {one['score']:.3g}"
        for name, one in earnings.items()
        if name != REFERENCE and one["score"] > earnings[REFERENCE]["score"]
    ]
    if winners:
        console.say(
            "Warning: some trivial responses earn more than the references "
            f"({earnings[REFERENCE]['score']:.3g}): {', '.join(winners)}. PPO will learn to write them; "
            "change ppo.scorers."
        )
    elif len({one["score"] for one in earnings.values()}) == 1:
        console.say("Warning: every kind of response earns the same: there is nothing to learn.")
    return earnings
