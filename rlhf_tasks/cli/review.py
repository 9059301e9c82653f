"""Commands that review results: `rlhf mlflow`, `compare`, `lineage`, `judge`, `generate`, `sync`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from typer import Argument, Option

from rlhf_tasks import config, console
from rlhf_tasks.cli.params import above_zero
from rlhf_tasks.config.stages import PRECISION
from rlhf_tasks.config.types import LAST_SEED
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths


def project() -> Paths:
    """The project in the working folder. Raises UserError in a folder without one."""
    paths = Paths()
    dvc_files.graph(paths.root)
    return paths


def check_output_file(out: Path) -> None:
    """Check that a file can be written, before anything is sampled or paid for. Makes its folder.

    Raises UserError if the file cannot be written.
    """
    if out.is_dir():
        raise UserError(f"--out {out}: this is a folder; give the name of a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: its folder cannot be made ({error}); give another name") from None
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: {out.parent} is not writable; give another folder")


def mlflow(
    port: int = Option(5000, min=1, max=65535, help="first port to try; the next free one is taken"),
) -> int:
    """Serve the MLflow dashboard on this machine."""
    from rlhf_tasks.tracking.dashboard import serve

    return serve(project().home, port)


def compare(
    runs: list[str] = Argument(
        ...,
        metavar="RUN",
        help="an MLflow run's id or name, a run key, an experiment, or a folder with metrics/",
    ),
    out: Path = Option(Path("comparison.html"), metavar="FILE", help="the page to write"),
) -> int:
    """Write one page that compares runs: results and curves; seeds of one setting as mean and band."""
    paths = project()
    check_output_file(out)
    from rlhf_tasks.report import comparison

    comparison.run(paths, runs, out)
    return 0


def lineage(
    target: str = Argument(
        ..., metavar="MODEL_OR_COMMIT", help="an out of dvc.yaml, an experiment, or a git revision"
    ),
) -> int:
    """Show the data, code and runs that made a model, its verdict, and how to restore it."""
    from rlhf_tasks.project import lineage_chain

    root = project().root.absolute()
    print("\n".join(lineage_chain.lines(lineage_chain.find(root, target))))
    return 0


def judge(
    model: str | None = Argument(
        None, metavar="MODEL", help="a checkpoint, OWNER/NAME@COMMIT, or .jsonl with `prompt`, `completion`"
    ),
    against: str | None = Option(
        None, metavar="MODEL", help="the second model: a MODEL, or `reference` (default)"
    ),
    num_examples: int | None = Option(None, min=1, help="test prompts to use (default: judge.num_examples)"),
    judges: list[str] | None = Option(
        None, "--judge", metavar="NAME", help="a judge of judge.judges; may be repeated (default: all)"
    ),
    out: Path | None = Option(None, metavar="FILE", help="also write every comparison, to .jsonl"),
) -> int:
    """Run the stage judge: compare reference, SFT and policy.

    With MODEL, compute the win rate of a checkpoint or a file of responses on the test prompts, by the judges
    of params.yaml.
    """
    if model is None:
        if any((against, num_examples, judges, out)):
            raise UserError(
                "--against, --num-examples, --judge and --out need a MODEL, such as `rlhf judge "
                "models/policy`; the stage takes everything from params.yaml"
            )
        from rlhf_tasks.stages import runner

        return runner.run("judge", Paths())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.judging import head_to_head
    from rlhf_tasks.training import auto

    view = config.JudgeView.of(auto.resolve(config.load(), Path(), needed=[PRECISION]))
    if out is not None:
        check_output_file(out)
    head_to_head.compare_models(
        view,
        model,
        against or head_to_head.REFERENCE,
        paths=Paths(),
        num_examples=num_examples,
        names=judges or [],
        out=out,
    )
    return 0


def generate(
    model: Path = Argument(..., metavar="MODEL", help="a checkpoint's folder, such as models/policy"),
    prompt: str | None = Option(None, metavar="TEXT", help="the prompt; a user's turn for a chat model"),
    temperature: float = Option(1.0, callback=above_zero, help="temperature of the sampling"),
    max_new_tokens: int = Option(64, min=1, help="longest response, in tokens"),
    num_samples: int = Option(1, min=1, help="number of responses per prompt"),
    seed: int = Option(1, min=0, max=LAST_SEED, help="seed of the sampling"),
) -> int:
    """Sample responses of a checkpoint to --prompt, to standard input, or to each line that you type."""
    if not model.is_dir():
        raise UserError(f"{model} is not a folder; give a checkpoint, such as models/policy")
    is_typed = prompt is None and sys.stdin.isatty()
    if prompt is None and not is_typed:
        prompt = sys.stdin.read().rstrip("\n")
    if prompt is not None and not prompt.strip():
        raise UserError("the prompt is empty; give --prompt TEXT, or text on stdin")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a local folder loads at once
    from rlhf_tasks.models.sampling import load_for_texts, sample_texts

    loaded = load_for_texts(model)

    def answer(text: str) -> None:
        responses = sample_texts(
            *loaded,
            text,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            num_samples=num_samples,
            seed=seed,
        )
        print("\n".join(responses))

    if prompt is not None:
        answer(prompt)
        return 0
    print(f"{model}: type one prompt per line (write a line break as \\n); Ctrl-D ends")
    if (table := Paths().table("prompts", "test")).exists():
        from pyarrow import parquet

        known = parquet.read_table(table, columns=["prompt"])["prompt"][0].as_py()
        print(f"prompts of {table.parent}, which the models here know, look like\n  {known!r}"[:2000])
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if line.strip():
            answer(line.replace("\\n", "\n"))


def sync() -> int:
    """Deliver runs to MLflow that could not be delivered before."""
    from rlhf_tasks.tracking.sync import sync as deliver

    delivered, failed = deliver(project().home)
    console.say(f"{delivered} run(s) delivered to MLflow")
    if failed:
        reasons = "".join(f"\n  {key}: {reason}" for key, reason in failed.items())
        raise UserError(f"{len(failed)} run(s) could not be delivered, and stay in .rlhf/outbox:{reasons}")
    return 0
