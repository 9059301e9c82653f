"""`rlhf STAGE` and its companions. Loads a stage, and torch with it, only when it runs.

Exit status: 0 done, 2 a mistake the user can mend (one message, no traceback), 130 Ctrl-C, 143
terminated; of `rlhf promote`, 3 refused by the gate, 4 put off since MLflow does not answer; anything
else is a fault, with its traceback.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlhf_tasks import config, console
from rlhf_tasks.config import STAGES, JudgeView, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import dvc_files
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import runner
from rlhf_tasks.tracking import context
from rlhf_tasks.training import launch

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}  # set unless the user has


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwound like Ctrl-C, so that the run is closed as KILLED."""


class PeerFailed(RuntimeError):
    """Another process of this stage failed, and the launcher ends this one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The `rlhf` command; returns its exit status."""
    options = _parser().parse_args(arguments)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, _terminate)
    console.set_quiet(not context.is_main_rank())
    try:
        return int(options.command(options) or 0)
    except (UserError, OSError) as error:
        message = launch.mistake(error)
        if message is None:
            raise
        if not launch.is_worker():  # the launcher says it, once
            print(f"rlhf: {message}", file=sys.stderr)
        return 2
    except Terminated:
        return 143
    except KeyboardInterrupt:
        print("rlhf: interrupted", file=sys.stderr)
        return 130


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: let the run be closed
    told = launch.reported()
    if told is not None:
        raise PeerFailed(told["message"])
    raise Terminated("terminated (SIGTERM)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf", description="RLHF, a stage at a time; `dvc repro` runs them all."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for stage in STAGES:
        if stage == "judge":
            _add_judge(commands)
        else:
            _add(commands, stage, functools.partial(_stage, stage), runner.SUMMARIES[stage])
    for add in (
        _add_generate, _add_preset, _add_promote, _add_rollback, _add_sync, _add_lineage, _add_label,
        _add_compare, _add_mlflow,
    ):  # fmt: skip
        add(commands)
    return parser


def _add(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str, description: str = ""
) -> argparse.ArgumentParser:
    added = commands.add_parser(name, help=text, description=description or text)
    added.set_defaults(command=run)
    return added


def _stage(stage: Stage, options: argparse.Namespace) -> int:
    return runner.run(stage, Paths())


# ------------------------------------------------------------------- each command, and what it takes


def _add_judge(commands: Commands) -> None:
    judge = _add(
        commands, "judge", _judge, runner.SUMMARIES["judge"],
        "Without MODEL the stage: reference, SFT and policy against each other. With it, the win rate of any "
        "checkpoint or file of answers on the test prompts, by the judges of params.yaml.",
    )  # fmt: skip
    kinds = "a checkpoint folder, HUB/ID@COMMIT, or a .jsonl file of `prompt` and `completion`"
    judge.add_argument("model", nargs="?", metavar="MODEL", help=kinds)
    judge.add_argument("--against", metavar="MODEL", help="the same, or `reference` (default)")
    judge.add_argument(
        "--num-examples", type=_positive_int, metavar="N", help="test prompts (default: judge.num_examples)"
    )
    judge.add_argument(
        "--judge",
        action="append",
        default=[],
        metavar="NAME",
        help="of judge.judges; may be repeated (default: all)",
    )
    judge.add_argument(
        "--out", type=Path, metavar="FILE", help="write every verdict too: FILE.jsonl or FILE.parquet"
    )


def _judge(options: argparse.Namespace) -> int:
    """The stage, or one contender against another."""
    if options.model is None:
        if options.against or options.num_examples or options.judge or options.out:
            raise UserError(
                "--against, --num-examples, --judge and --out go with a MODEL, such as `rlhf judge "
                "models/policy`; the stage takes all from params.yaml"
            )
        return runner.run("judge", Paths())
    view = JudgeView.of(config.load())
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.evaluation import head_to_head

    if options.out is not None:
        head_to_head.check_format(options.out)
        _check_out(options.out)
    head_to_head.compare_models(
        view,
        options.model,
        options.against or head_to_head.REFERENCE,
        paths=Paths(),
        num_examples=options.num_examples,
        names=options.judge,
        out=options.out,
    )
    return 0


def _add_generate(commands: Commands) -> None:
    text = "answers of a checkpoint, to --prompt, stdin, or line by line"
    generate = _add(commands, "generate", _generate, text)
    generate.add_argument("model", type=Path, metavar="MODEL", help="a folder such as models/policy")
    generate.add_argument("--prompt", metavar="TEXT", help="exactly what the model is to see")
    generate.add_argument("--temperature", type=_positive_float, default=1.0)
    generate.add_argument("--max-new-tokens", type=_positive_int, default=64)
    generate.add_argument("--num-samples", type=_positive_int, default=1, help="answers per prompt")
    generate.add_argument("--seed", type=int, default=1)


def _generate(options: argparse.Namespace) -> int:
    if not options.model.is_dir():
        raise UserError(f"{options.model} is no folder; give a checkpoint, such as models/policy")
    prompts = [options.prompt] if options.prompt is not None else None
    if prompts is None and not sys.stdin.isatty():
        prompts = [sys.stdin.read().rstrip("\n")]
    if prompts is not None and not prompts[0].strip():
        raise UserError("the prompt is empty; give --prompt TEXT, or text on stdin")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a local folder loads in no time
    from rlhf_tasks.modeling.generation import respond

    def answer(prompt: str) -> None:
        answers = respond(
            options.model,
            [prompt],
            temperature=options.temperature,
            max_new_tokens=options.max_new_tokens,
            num_samples=options.num_samples,
            seed=options.seed,
        )
        for text in answers[0]:
            print(text)

    if prompts is not None:
        answer(prompts[0])
        return 0
    print(f"{options.model}: a prompt a line (\\n in it is a new line); Ctrl-D ends")
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if line.strip():
            answer(line.replace("\\n", "\n"))


def _add_preset(commands: Commands) -> None:
    preset = _add(commands, "preset", _preset, "apply presets to params.yaml, comments kept")
    preset.add_argument("names", nargs="*", metavar="NAME", help="later ones win")
    preset.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="single values on top"
    )
    preset.add_argument("--list", action="store_true", help="show all presets (also: no name)")


def _preset(options: argparse.Namespace) -> int:
    from rlhf_tasks import presets

    if options.list or not (options.names or options.set):
        console.table("presets", ["name", "what it is"], [[n, presets.summary(n)] for n in presets.names()])
        return 0
    changed = presets.apply(options.names, Path("params.yaml"), options.set)
    console.say("params.yaml: " + (", ".join(changed) if changed else "nothing to change"))
    return 0


def _add_promote(commands: Commands) -> None:
    text = "put a policy to the gate, and make it champion if it passes (exit status 3: refused)"
    promote = _add(commands, "promote", _promote, text)
    promote.add_argument(
        "model",
        nargs="?",
        default="models/policy",
        metavar="MODEL",
        help="a folder, or an experiment of `dvc exp list` (default: models/policy)",
    )
    promote.add_argument("--again", action="store_true", help="also one that was rolled back")
    promote.add_argument(
        "--unless-judging",
        action="store_true",
        help="only if what is measured already decides it (exit status 5: it does not)",
    )


def _promote(options: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.promotion import command

    return command.promote(Paths(), options.model, again=options.again, unless_judging=options.unless_judging)


def _add_rollback(commands: Commands) -> None:
    _add(commands, "rollback", _rollback, "make the champion before the present one champion again")


def _rollback(options: argparse.Namespace) -> int:
    from rlhf_tasks.promotion import command

    return command.rollback(Paths())


def _add_sync(commands: Commands) -> None:
    _add(commands, "sync", _sync, "deliver to MLflow what could not be delivered before")


def _sync(options: argparse.Namespace) -> int:
    from rlhf_tasks.tracking.uploader import sync

    delivered, failed = sync(Paths().home)
    console.say(f"{delivered} run(s) delivered to MLflow")
    if failed:
        reasons = "".join(f"\n  {key}: {reason}" for key, reason in failed.items())
        raise UserError(f"{len(failed)} run(s) could not be delivered, and stay in .rlhf/outbox:{reasons}")
    return 0


def _add_lineage(commands: Commands) -> None:
    text = "from raw data to the verdict: what a model or a run came from, and what brings it back"
    _add(commands, "lineage", _lineage, text).add_argument(
        "asked",
        metavar="MODEL_OR_RUN",
        help="a path such as models/policy, an experiment, a git revision, or a run (its key "
        "`rlhf.run`, a flow run's id, an MLflow run's id)",
    )


def _lineage(options: argparse.Namespace) -> int:
    from rlhf_tasks.project import provenance

    dvc_files.graph(Path())  # a project is here, before anything is asked of git
    print("\n".join(provenance.lines(provenance.find(Path.cwd(), options.asked))))
    return 0


def _add_label(commands: Commands) -> None:
    text = "judge pairs of answers yourself, blind: a key each, resumable; judges are compared with it"
    label = _add(commands, "label", _label, text)
    label.add_argument(
        "--pairs",
        action="append",
        default=[],
        metavar="A_vs_B",
        help="of policy, sft, reference; may be repeated (default: policy_vs_reference, policy_vs_sft)",
    )
    label.add_argument(
        "--num-examples",
        type=_positive_int,
        metavar="N",
        help="pairs, skipped ones not counted (default: all)",
    )
    label.add_argument("--seed", type=int, default=1, help="of the order, and of which is shown first")
    label.add_argument("--by", metavar="NAME", help="write who labelled, and when (default: neither)")


def _label(options: argparse.Namespace) -> int:
    dvc_files.graph(Path())  # a project is here
    from rlhf_tasks.evaluation import labelling

    try:
        labelling.run(
            Paths(),
            options.pairs,
            most=options.num_examples,
            seed=options.seed,
            by=options.by,
            stream=sys.stdin,
        )
    except KeyboardInterrupt:
        labelling.keep(Paths())
        raise
    labelling.keep(Paths())
    return 0


def _add_compare(commands: Commands) -> None:
    text = "runs side by side in one page: results, curves, seeds of one setting as mean and band"
    compare = _add(commands, "compare", _compare, text)
    compare.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="an MLflow run's id or name, a key (`rlhf.run`, `rlhf.pipeline`), an experiment of "
        "`dvc exp list`, or a folder that holds metrics/ (. is this one)",
    )
    compare.add_argument(
        "--out", type=Path, default=Path("comparison.html"), metavar="FILE", help="default: comparison.html"
    )


def _compare(options: argparse.Namespace) -> int:
    dvc_files.graph(Path())  # a project is here, before anything is asked of git
    _check_out(options.out)
    from rlhf_tasks.report import comparison_page

    comparison_page.run(Paths(), options.runs, options.out)
    return 0


def _add_mlflow(commands: Commands) -> None:
    mlflow = _add(commands, "mlflow", _mlflow, "the MLflow dashboard on this machine")
    mlflow.add_argument("--port", type=int, default=5000, help="the next free one is taken (default: 5000)")


def _mlflow(options: argparse.Namespace) -> int:
    """The dashboard, on loopback only, over the embedded store."""
    from rlhf_tasks.tracking.dashboard import serve

    return serve(Paths().home, options.port)


def _check_out(out: Path) -> None:
    """That a file can be written, before anything is sampled or paid for.

    Raises:
        UserError: if it cannot.
    """
    if out.is_dir():
        raise UserError(f"--out {out}: that is a folder; name a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: its folder cannot be made ({error}); name another") from None
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out {out}: {out.parent} cannot be written to; name another folder")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more (given: {text})")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"must be above 0 (given: {text})")
    return value


if __name__ == "__main__":
    sys.exit(main())
