"""`rlhf generate MODEL`: responses of a checkpoint to prompts."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_tasks.cli.arguments import Commands, add_command, positive_float, positive_int
from rlhf_tasks.errors import UserError
from rlhf_tasks.project.paths import Paths

READ_PROMPTS = 1000
KNOWN_SHARE = 0.5  # of the words of a prompt, below which it is unlike the data


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
    from rlhf_tasks.models.sampling import sample_texts

    example = _Example(Paths())

    def answer(text: str) -> None:
        example.show_if_unlike(text)
        responses = sample_texts(
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


class _Example:
    """A prompt of the project's data, which is shown once, beside the first prompt that looks unlike it."""

    def __init__(self, paths: Paths) -> None:
        self._file, self._shown = paths.table("prompts", "test"), False

    def show_if_unlike(self, prompt: str) -> None:
        if self._shown or not self._file.exists():
            return
        from pyarrow import parquet

        prompts = parquet.read_table(self._file, columns=["prompt"])["prompt"][:READ_PROMPTS].to_pylist()
        if prompts and is_unlike(prompt, prompts):
            self._shown = True
            text = prompts[0].replace("\\", "\\\\").replace("\n", "\\n").replace("'", "\\'")
            print(
                f"the prompt looks unlike those of {self._file.parent}, which the models here know, such as\n"
                f"  $'{text}'",
                file=sys.stderr,
            )


def is_unlike(prompt: str, prompts: Sequence[str]) -> bool:
    """Whether it lacks the beginning or end that all the prompts share, or most of its words are in none."""
    start, end = _common_start(prompts), _common_start([one[::-1] for one in prompts])[::-1]
    known = {word for one in prompts for word in re.findall(r"\w+", one.lower())}
    words = re.findall(r"\w+", prompt.lower())
    share = sum(word in known for word in words) / max(len(words), 1)
    return not (prompt.startswith(start) and prompt.endswith(end)) or share < KNOWN_SHARE


def _common_start(texts: Sequence[str]) -> str:
    first, last = min(texts), max(texts)
    pairs = zip(first, last, strict=False)
    return first[: next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(last)))]
