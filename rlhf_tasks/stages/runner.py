"""Runs a stage: checks its inputs, calls it, and writes metrics, curves and lineage."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Mapping, Sequence

from rlhf_tasks import config, console, tracking
from rlhf_tasks.config import STAGES, VIEWS, Stage
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic, disk, durations, dvc_files, lineage
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.stages import after, preflight
from rlhf_tasks.tracking import catalogue, context, curves
from rlhf_tasks.training import auto, checkpoint, failures, launch, signals

SHOWN_METRICS = 3
NOT_MADE = "no stage produces this; restore it, or name another file or folder in params.yaml"


def module_of(stage: Stage) -> str:
    """The name of the stage's module, which has `run(view, paths, tracker) -> metrics`."""
    return f"rlhf_tasks.stages.{stage}"


def run(stage: Stage, paths: Paths) -> int:
    """Check, then run one stage here or in launched workers; returns the exit status.

    A failure is written down for the program that started the stage (`failures.report`).
    """
    try:
        failures.running(stage)
        number, count = STAGES.index(stage) + 1, len(STAGES)
        with signals.listening(stage) as listener, console.stage(stage, number, count):
            status = _run(stage, paths, listener)
        failures.running("")
        return status
    except KeyboardInterrupt as signal:  # which is not a failure
        failures.running(stage, stopped=f"was {str(signal) or 'interrupted'}")
        raise
    except disk.DiskFullError as error:
        point = checkpoint.point(paths, stage)
        stands = f"The last complete snapshot is intact, and the stage resumes from it: {point}"
        lost = "The stage will start from the beginning, because it has no complete snapshot"
        full = disk.DiskFullError(f"{error}. {stands if point else lost}")
        failures.report(full)
        raise full from error
    except BaseException as error:
        failures.report(error)
        raise


def _run(stage: Stage, paths: Paths, listener: signals.Listener) -> int:
    settings = config.load(paths.params)
    _check_inputs(paths, stage)
    settings = auto.resolve_for(paths, stage, settings, check=not context.is_worker())
    if not context.is_worker():
        preflight.check(stage, settings, paths)
        launch.check_machines(stage, settings.launch)
    if launch.is_needed(stage, settings.launch) or launch.trains_side_by_side(stage, settings):
        return launch.run(paths, stage, settings)
    view, is_main = VIEWS[stage].of(settings), context.is_main_rank()
    with (
        checkpoint.claim(paths, view, main=is_main) as claim,
        console.log_to(paths.home / "logs" / f"{claim.key}.log"),
    ):
        listener.next_run, start = claim.next_run, time.monotonic() - claim.earlier_seconds
        if tokens := view.declared.get(f"{stage}.micro_batch_tokens"):
            console.remark(f"{stage}: {view.launch.precision}, at most {tokens:,} tokens a micro-batch")
        with tracking.open_run(paths, stage, view, key=claim.key) as tracker:
            with console.part("loading its libraries"):
                module = importlib.import_module(module_of(stage))
            metrics: dict[str, float] = module.run(view, paths, tracker)
            if not is_main:
                return 0
            if stage == "prepare":  # the user's file may have been written while it was read
                auto.resolve_for(paths, stage, settings)
            _write_results(paths, stage, metrics, tracker.history())
            seconds = time.monotonic() - start
            lineage.write(paths, stage, claim.key, seconds)
            tracker.final(metrics)
        claim.finish()
        durations.record(paths.home, stage, seconds)
        _print_summary(paths, stage, metrics, seconds)
    after.run(stage, paths, settings)
    return 0


def _check_inputs(paths: Paths, stage: Stage) -> None:
    """Refuse to run without an input, naming each missing one and the stage that makes it."""
    graph = dvc_files.graph(paths.root)
    if stage not in graph:
        raise UserError(f"dvc.yaml declares no stage {stage!r}; it has {', '.join(graph)}")
    makers = {out: name for name, node in graph.items() for out in node.outs}
    record = paths.relative(paths.inputs(stage))  # only `dvc repro` needs it
    needed = (path for path in graph[stage].inputs if path != record)
    missing = [path for path in needed if not (paths.root / path).exists()]
    if missing:
        named = [
            f"{path} ({f'made by `rlhf {makers[path]}`' if path in makers else NOT_MADE})" for path in missing
        ]
        advice = "; run `dvc repro`, which runs all stages that are needed, in order"
        is_made = any(path in makers for path in missing)
        raise UserError(f"stage {stage} lacks {', '.join(named)}{advice if is_made else ''}")


def _write_results(
    paths: Paths, stage: Stage, metrics: Mapping[str, float], history: Sequence[Mapping[str, float]]
) -> None:
    """Metrics (if declared) and curves (of stages that have them)."""
    wrong = [f"{name}={value!r}" for name, value in sorted(metrics.items()) if not math.isfinite(value)]
    if wrong:
        raise ValueError(f"stage {stage} ended with metrics that are not finite numbers: {', '.join(wrong)}")
    if f"metrics/{stage}.json" in dvc_files.graph(paths.root)[stage].outs:
        atomic.write_json(paths.metrics(stage), dict(sorted(metrics.items())))
    if stage in curves.CURVES:
        atomic.write_text(paths.curves(stage), curves.csv_text(history, curves.axis(stage)))


def _print_summary(paths: Paths, stage: Stage, metrics: Mapping[str, float], seconds: float) -> None:
    """One line with the first headlines; all metrics and outs go to the log."""
    names = catalogue.order(stage, metrics)
    if names:
        console.table(f"metrics of {stage}", ["metric", "value"], [(name, metrics[name]) for name in names])
    outs = [path for path in dvc_files.graph(paths.root)[stage].outs if (paths.root / path).exists()]
    console.remark(f"wrote {', '.join(outs)}")
    shown = [f"{name} {console.show(metrics[name])}" for name in names[:SHOWN_METRICS]]
    console.say("  ".join([f"{console.name(stage)}  done in {console.duration(seconds)}", *shown]))
