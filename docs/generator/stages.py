"""stages.md, from dvc.yaml; and dvc.yaml's own section `plots:`, from the catalogue of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from docs.generator.text import ROOT, Lines, load_yaml, sentence
from rlhf_tasks.config import STAGES, VIEWS, Stage
from rlhf_tasks.tracking import catalogue, curves

CODE = ("rlhf_tasks/", "flows/")


def stages() -> Lines:
    yield "# Stages"
    yield ""
    yield (
        "`dvc.yaml` declares the stages, in the order below. A stage runs again when its parameters, its "
        "data or its code changed. `dvc repro` runs all stages that have to run. `inputs` always runs, and "
        "takes about a second."
    )
    for name, stage in load_yaml("dvc.yaml")["stages"].items():
        yield ""
        yield f"## {name}"
        yield ""
        yield sentence(stage["desc"])
        yield ""
        yield f"Command: `{stage['cmd']}`"
        parts = {
            "Parameters": [_parameter_link(key) for key in _parameters(name)],
            "Reads": [f"`{path}`" for path in stage.get("deps", []) if not path.startswith(CODE)],
            "Code": [f"`{path}`" for path in stage.get("deps", []) if path.startswith(CODE)],
            "Writes": [f"`{path}`" for path in _outs(stage.get("outs", []))],
            "Metrics": [_metrics_link(name, path) for path in _outs(stage.get("metrics", []))],
            "Curves": [_metrics_link(name, path) for path in _outs(stage.get("plots", []))],
        }
        for title, those in parts.items():
            if those:
                yield ""
                yield f"{title}: {', '.join(those)}"


def _parameters(stage: str) -> Sequence[str]:
    return next((view.reads() for name, view in VIEWS.items() if name == stage), ())


def _parameter_link(key: str) -> str:
    anchor = "".join(key.split(".")[:2])  # the keys of kinds have no heading of their own
    return f"[`{key}`](parameters.md#{anchor})"


def _metrics_link(stage: str, path: str) -> str:
    """A link to the metrics of a stage, where the catalogue has some."""
    described = stage in STAGES and catalogue.metrics(stage)
    return f"[`{path}`](metrics.md#{stage})" if described else f"`{path}`"


def _outs(outs: Sequence[Any]) -> list[str]:
    return [path for out in outs for path in (out if isinstance(out, Mapping) else [out])]


def dvc_yaml() -> str:
    """dvc.yaml with the section `plots:`, its last one, from the catalogue."""
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    before, heading, _ = text.partition("\nplots:")
    assert heading, "dvc.yaml has no section `plots:`"
    return f"{before}{heading} # by `python -m docs.generator`, from rlhf_tasks/tracking/metrics/*.toml\n" + (
        "\n".join(line for stage in STAGES if stage in curves.CURVES for line in _plots(stage)) + "\n"
    )


def _plots(stage: Stage) -> Lines:
    """A figure per panel, with the curves that the shipped parameters log."""
    for panel in catalogue.panels(stage):
        shipped = [one for one in panel.metrics if one.shipped and not one.placeholders]
        names = [name for one in shipped for name in ([one.name, f"heldout/{one.name}"][: 1 + one.heldout])]
        if names:
            curves_shown = f"plots/{stage}.csv: [{', '.join(names)}]"
            yield (f"  - {panel.title}: {{template: linear, x: {curves.axis(stage)}, y: {{{curves_shown}}}}}")
