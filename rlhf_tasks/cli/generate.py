"""`rlhf generate MODEL`: responses of a checkpoint to prompts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command, positive_float, positive_int
from rlhf_tasks.errors import UserError


def add(commands: Commands) -> None:
    summary = "sample responses of a checkpoint to --prompt, to standard input, or to each line that you type"
    generate = add_command(commands, "generate", run, summary)
    generate.add_argument(
        "model", type=Path, metavar="MODEL", help="a checkpoint's folder, such as models/policy"
    )
    generate.add_argument("--prompt", metavar="TEXT", help="the exact text that the model continues")
    generate.add_argument(
        "--temperature", type=positive_float, default=1.0, help="temperature of the sampling (default: 1.0)"
    )
    generate.add_argument(
        "--max-new-tokens", type=positive_int, default=64, help="longest response, in tokens (default: 64)"
    )
    generate.add_argument(
        "--num-samples", type=positive_int, default=1, help="number of responses per prompt (default: 1)"
    )
    generate.add_argument("--seed", type=int, default=1, help="seed of the sampling (default: 1)")


def run(options: argparse.Namespace) -> int:
    if not options.model.is_dir():
        raise UserError(f"{options.model} is not a folder; give a checkpoint, such as models/policy")
    prompt = options.prompt
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty; give --prompt TEXT, or text on stdin")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a local folder loads at once
    from rlhf_tasks.modeling.generation import respond

    def answer(text: str) -> None:
        responses = respond(
            options.model,
            [text],
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            num_samples=options.num_samples,
            seed=options.seed,
        )
        for response in responses[0]:
            print(response)

    if prompt is not None:
        answer(prompt)
        return 0
    print(f"{options.model}: type one prompt per line (write a line break as \\n); Ctrl-D ends")
    return _answer_lines(answer)


def _answer_lines(answer: Callable[[str], None]) -> int:
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if line.strip():
            answer(line.replace("\\n", "\n"))
