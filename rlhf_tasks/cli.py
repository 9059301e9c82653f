"""`rlhf STAGE` and its companions. Loads a stage, and torch with it, only when it runs.

Exit status: 0 done, 2 a mistake the user can mend (one message, no traceback), 130 Ctrl-C, 143
terminated; of `rlhf promote`, 3 refused by the gate, 4 put off since MLflow does not answer; anything
else is a fault, with its traceback.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import cast

from rlhf_tasks import checkpoint, config, console, launch, lineage, resume, tracking
from rlhf_tasks.config import STAGES, Stage, StageView, UserError
from rlhf_tasks.tracking import curves

MODULES: Mapping[Stage, str] = {
    "prepare": "rlhf_tasks.data.prepare",
    "base": "rlhf_tasks.base",
    "sft": "rlhf_tasks.sft",
    "preferences": "rlhf_tasks.preferences",
    "reward": "rlhf_tasks.reward",
    "ppo": "rlhf_tasks.ppo.stage",
    "judge": "rlhf_tasks.judge.stage",
    "verdict": "rlhf_tasks.promotion.stage",
    "report": "rlhf_tasks.report.stage",
}
SUMMARIES: Mapping[Stage, str] = {
    "prepare": "read, check and split the data; make the tokenizer",
    "base": "train a small base model, or fetch one",
    "sft": "supervised fine-tuning on completions",
    "preferences": "pairs for the reward model: given ones, and compared samples of the SFT policy",
    "reward": "train the reward model, and the held-out one",
    "ppo": "train the policy against the reward model",
    "judge": "win rates of reference, SFT and policy answers",
    "verdict": "whether the policy may be promoted, by the criteria of `promotion`",
    "report": "one page of all of it",
}
QUIET = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}  # set unless the user has
SHOWN_METRICS = 20


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
    console.set_quiet(not tracking.context.is_main_rank())
    try:
        return int(options.command(options) or 0)
    except UserError as error:
        if not launch.is_worker():  # the launcher says it, once
            print(f"rlhf: {error}", file=sys.stderr)
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


# --------------------------------------------------------------------------------------- stages


def run_stage(stage: Stage) -> int:
    """Check, then run one stage here or in launched workers, and write what belongs to every stage."""
    settings = config.load()
    check_inputs(stage)
    if launch.is_needed(stage, settings.launch):
        return launch.run(stage, settings.launch)
    start = time.monotonic()
    view, is_main = StageView(settings, stage), tracking.context.is_main_rank()
    with resume.claim(view, main=is_main) as claim:
        with tracking.open_run(stage, view, key=claim.key) as tracker:
            metrics = _run_module(stage, view, tracker)
            if not is_main:
                return 0
            write_results(stage, claim.key, metrics, tracker.history())
            tracker.final(metrics)
        claim.clear()
    _say_summary(stage, metrics, time.monotonic() - start, tracked=settings.tracking.enabled)
    return 0


def _run_module(stage: Stage, view: StageView, tracker: tracking.Tracker) -> dict[str, float]:
    try:
        metrics: dict[str, float] = importlib.import_module(MODULES[stage]).run(view, tracker)
    except KeyboardInterrupt:
        raise  # no failure: the others end by it too
    except BaseException as error:
        launch.report(error)
        raise
    return metrics


def check_inputs(stage: Stage) -> None:
    """Raises UserError naming each missing input and the stage that makes it."""
    graph = lineage.graph()
    if stage not in graph:
        raise UserError(f"dvc.yaml declares no stage {stage!r}; it has {', '.join(graph)}")
    makers = {out: name for name, node in graph.items() for out in node.outs}
    missing = [
        f"{path} (made by `rlhf {makers[path]}`)" if path in makers else path
        for path in graph[stage].inputs
        if not Path(path).exists()
    ]
    if missing:
        advice = "run `dvc repro`, which runs what is needed in order"
        raise UserError(f"stage {stage} lacks {', '.join(missing)}; {advice}")


def write_results(
    stage: Stage, key: str, metrics: Mapping[str, float], history: Sequence[Mapping[str, float]]
) -> None:
    """metrics/STAGE.json (if declared), plots/STAGE.csv (stages with curves) and models/lineage/STAGE.json.

    Raises:
        ValueError: a metric that is no finite number.
    """
    wrong = [f"{name}={value!r}" for name, value in sorted(metrics.items()) if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"stage {stage} ended with metrics that are no finite numbers: {', '.join(wrong)}")
    if f"metrics/{stage}.json" in lineage.graph()[stage].outs:
        checkpoint.write_json(Path("metrics") / f"{stage}.json", dict(sorted(metrics.items())))
    if stage in curves.CURVES:
        text = curves.csv_text(history, curves.axis(stage))
        checkpoint.write_text(Path("plots") / f"{stage}.csv", text)
    lineage.write(stage, key)


def _say_summary(stage: Stage, metrics: Mapping[str, float], seconds: float, *, tracked: bool) -> None:
    shown = sorted(metrics.items())[:SHOWN_METRICS]
    title = f"{stage}: done in {console.duration(seconds)}"
    if shown:
        console.table(title, ["metric", "value"], shown)
    else:
        console.say(title)
    outs = [path for path in lineage.graph()[stage].outs if Path(path).exists()]
    console.say(f"wrote {', '.join(outs)}")
    more = "`dvc metrics show`" + (", and curves in MLflow: `make mlflow`" if tracked else "")
    console.say(f"more: {more}")


# ------------------------------------------------------------------------------ other commands


def _generate(options: argparse.Namespace) -> int:
    if not options.model.is_dir():
        raise UserError(f"{options.model} is no folder; give a checkpoint, such as models/policy")
    prompts = [options.prompt] if options.prompt is not None else None
    if prompts is None and not sys.stdin.isatty():
        prompts = [sys.stdin.read().rstrip("\n")]
    if prompts is not None and not prompts[0].strip():
        raise UserError("the prompt is empty; give --prompt TEXT, or text on stdin")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a local folder loads in no time
    from rlhf_tasks.generation import respond

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


def _judge(options: argparse.Namespace) -> int:
    """The stage, or one contender against another."""
    if options.model is None:
        if options.against or options.num_examples or options.judge or options.out:
            raise UserError(
                "--against, --num-examples, --judge and --out go with a MODEL, such as `rlhf judge "
                "models/policy`; the stage takes all from params.yaml"
            )
        return run_stage("judge")
    view = StageView(config.load(), "judge")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.judge import command

    command.run(
        view,
        options.model,
        options.against or command.REFERENCE,
        num_examples=options.num_examples,
        names=options.judge,
        out=options.out,
    )
    return 0


def _promote(options: argparse.Namespace) -> int:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from rlhf_tasks.promotion import command

    return command.promote(options.model, again=options.again)


def _rollback(options: argparse.Namespace) -> int:
    from rlhf_tasks.promotion import command

    return command.rollback()


def _preset(options: argparse.Namespace) -> int:
    from rlhf_tasks import presets

    if options.list or not (options.names or options.set):
        console.table("presets", ["name", "what it is"], [[n, presets.summary(n)] for n in presets.names()])
        return 0
    changed = presets.apply(options.names, Path("params.yaml"), options.set)
    console.say("params.yaml: " + (", ".join(changed) if changed else "nothing to change"))
    return 0


def _sync(options: argparse.Namespace) -> int:
    from rlhf_tasks.tracking.courier import sync

    delivered, failed = sync(lineage.home())
    console.say(f"{delivered} run(s) delivered to MLflow")
    if failed:
        reasons = "".join(f"\n  {key}: {reason}" for key, reason in failed.items())
        raise UserError(f"{len(failed)} run(s) could not be delivered, and stay in .rlhf/spool:{reasons}")
    return 0


def _lineage(options: argparse.Namespace) -> int:
    from rlhf_tasks import provenance

    lineage.graph()  # a project is here, before anything is asked of git
    for line in provenance.lines(provenance.find(Path.cwd(), options.asked)):
        print(line)
    return 0


def _label(options: argparse.Namespace) -> int:
    lineage.graph()  # a project is here
    from rlhf_tasks.judge import labelling

    try:
        labelling.run(options.pairs, most=options.num_examples, seed=options.seed, by=options.by)
    finally:
        labelling.keep()
    return 0


def _compare(options: argparse.Namespace) -> int:
    lineage.graph()  # a project is here, before anything is asked of git
    from rlhf_tasks.report import comparison

    comparison.run(Path.cwd(), options.runs, options.out)
    return 0


def _mlflow(options: argparse.Namespace) -> int:
    """The dashboard, on loopback only, over the embedded store."""
    from rlhf_tasks.tracking.dashboard import serve

    return serve(lineage.home(), options.port)


# --------------------------------------------------------------------------------------- parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlhf", description="RLHF, a stage at a time; `dvc repro` runs them all."
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for stage in STAGES:
        added = commands.add_parser(stage, help=SUMMARIES[stage], description=SUMMARIES[stage])
        added.set_defaults(command=lambda options, stage=stage: run_stage(cast(Stage, stage)))
        if stage == "judge":
            _add_contenders(added)
    _add_generate(commands)
    preset = commands.add_parser("preset", help="apply presets to params.yaml, comments kept")
    preset.add_argument("names", nargs="*", metavar="NAME", help="later ones win")
    preset.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="single values on top"
    )
    preset.add_argument("--list", action="store_true", help="show all presets (also: no name)")
    preset.set_defaults(command=_preset)
    text = "put a policy to the gate, and make it champion if it passes (exit status 3: refused)"
    promote = commands.add_parser("promote", help=text, description=text)
    promote.add_argument(
        "model",
        nargs="?",
        default="models/policy",
        metavar="MODEL",
        help="a folder, or an experiment of `dvc exp list` (default: models/policy)",
    )
    promote.add_argument("--again", action="store_true", help="also one that was rolled back")
    promote.set_defaults(command=_promote)
    text = "make the champion before the present one champion again"
    rollback = commands.add_parser("rollback", help=text, description=text)
    rollback.set_defaults(command=_rollback)
    sync = commands.add_parser("sync", help="deliver to MLflow what could not be delivered before")
    sync.set_defaults(command=_sync)
    text = "from raw data to the verdict: what a model or a run came from, and what brings it back"
    chain = commands.add_parser("lineage", help=text, description=text)
    chain.add_argument(
        "asked",
        metavar="MODEL_OR_RUN",
        help="a path such as models/policy, an experiment, a git revision, or a run (its key "
        "`rlhf.run`, a flow run's id, an MLflow run's id)",
    )
    chain.set_defaults(command=_lineage)
    text = "judge pairs of answers yourself, blind: a key each, resumable; judges are compared with it"
    label = commands.add_parser("label", help=text, description=text)
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
    label.set_defaults(command=_label)
    text = "runs side by side in one page: results, curves, seeds of one setting as mean and band"
    compare = commands.add_parser("compare", help=text, description=text)
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
    compare.set_defaults(command=_compare)
    mlflow = commands.add_parser("mlflow", help="the MLflow dashboard on this machine")
    mlflow.add_argument("--port", type=int, default=5000, help="the next free one is taken (default: 5000)")
    mlflow.set_defaults(command=_mlflow)
    return parser


def _add_contenders(judge: argparse.ArgumentParser) -> None:
    judge.description = (
        "Without MODEL the stage: reference, SFT and policy against each other. With it, the win rate of any "
        "checkpoint or file of answers on the test prompts, by the judges of params.yaml."
    )
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
    judge.set_defaults(command=_judge)


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "answers of a checkpoint, to --prompt, stdin, or line by line"
    generate = commands.add_parser("generate", help=text, description=text)
    generate.add_argument("model", type=Path, metavar="MODEL", help="a folder such as models/policy")
    generate.add_argument("--prompt", metavar="TEXT", help="exactly what the model is to see")
    generate.add_argument("--temperature", type=_positive_float, default=1.0)
    generate.add_argument("--max-new-tokens", type=_positive_int, default=64)
    generate.add_argument("--num-samples", type=_positive_int, default=1, help="answers per prompt")
    generate.add_argument("--seed", type=int, default=1)
    generate.set_defaults(command=_generate)


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
