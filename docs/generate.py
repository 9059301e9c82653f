"""Write the reference pages from the code: `python docs/generate.py`; `--check` only compares.

parameters.md comes from the config types and params.yaml, metrics.md from the catalogue of metrics, cli.md
from the parser of `rlhf`, stages.md from dvc.yaml. The section `plots:` of dvc.yaml comes from the
catalogue too. The pages name no version and no path of a machine, so that the same code gives the same text.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rlhf_tasks.cli import main as cli  # noqa: E402
from rlhf_tasks.config import STAGES, Config, Section, Stage  # noqa: E402
from rlhf_tasks.tracking import catalogue, curves  # noqa: E402
from rlhf_tasks.tracking.catalogue import Metric  # noqa: E402

NOTICE = "<!-- Written by `python docs/generate.py`. Do not edit this page: edit the code it describes. -->"
CODE = ("rlhf_tasks/", "flows/")
BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", "≥"), (Lt, "lt", "<"), (Le, "le", "≤"))
Lines = Iterator[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every page that differs; with `--check` name them and return 1."""
    parser = argparse.ArgumentParser(description="Write the reference pages from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    check = parser.parse_args(arguments).check
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(pages()[path], encoding="utf-8")
    if check and stale:
        print("run `python docs/generate.py`", file=sys.stderr)
    return int(check and bool(stale))


def pages() -> dict[Path, str]:
    """Every generated file with its text."""
    folder = ROOT / "docs" / "reference"
    texts = {"parameters": parameters(), "metrics": metrics(), "cli": commands(), "stages": stages()}
    written = {folder / f"{name}.md": _page(lines) for name, lines in texts.items()}
    return written | {ROOT / "dvc.yaml": dvc_yaml()}


def _page(lines: Lines) -> str:
    text = "\n".join([*lines, "", NOTICE, ""])
    return re.sub(r"\n{3,}", "\n\n", text)


def _yaml(path: str) -> Any:
    return YAML(typ="safe", pure=True).load((ROOT / path).read_text(encoding="utf-8"))


def _sentence(text: str) -> str:
    """A description as one line: a full stop, a capital unless it starts with a name or a formula."""
    text = " ".join(text.split())
    capital = text[:1].upper() if re.match(r"[a-z-]+[ ,:]", text) else text[:1]
    return f"{capital}{text[1:].rstrip('.')}."


@cache
def descriptions(section: type[Section]) -> Mapping[str, str]:
    """The docstrings below the fields of a section, by field; Python does not keep them at run time."""
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, Section):
            body = ast.parse(inspect.getsource(owner)).body[0].body  # type: ignore[attr-defined]
            for field, below in pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(below.value)
    return found


def _described(section: type[Section], key: str) -> str:
    """A parameter's description as a sentence, `null` as code."""
    pieces = _sentence(descriptions(section)[key]).split("`")
    pieces[::2] = [re.sub(r"\bnull\b", "`null`", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _prose(item: object) -> str:
    """A docstring as paragraphs of one line each."""
    parts = (inspect.getdoc(item) or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


# ------------------------------------------------------------------------------------- parameters


def parameters() -> Lines:
    values = _yaml("params.yaml")
    yield "# Parameters"
    yield ""
    yield (
        "`params.yaml` holds every value of the pipeline, one section per stage. Each key below has its "
        "type, its value in the shipped `params.yaml`, and its meaning. A section that may be `null` is an "
        "optional feature, and `null` turns it off. Unknown keys, missing keys and wrong types are errors."
    )
    for name, field in Config.model_fields.items():
        section = next(_sections(field.annotation), None)
        yield ""
        yield f"## {name}"
        yield ""
        if section is None:
            yield from _entry(Config, name, values[name])
            continue
        yield _prose(section)
        if NoneType in get_args(field.annotation):
            yield ""
            yield _described(Config, name)
        for key, inner in section.model_fields.items():
            shown = inner.alias or key
            yield ""
            yield f"### `{name}.{shown}`"
            yield ""
            yield from _entry(section, key, (values[name] or {}).get(shown))


def _entry(owner: type[Section], key: str, value: Any) -> Lines:
    """One parameter: meaning, type, shipped value, and what is inside it."""
    field = owner.model_fields[key]
    yield _described(owner, key)
    inside = [*_sections(field.annotation)]
    if field.annotation not in inside:
        shipped = f" Shipped value: `{_value(value)}`." if value is None or not inside else ""
        yield ""
        yield f"Type: {_type(field.annotation, field.metadata)}.{shipped}"
    for section in inside:
        kinds = [f"**`kind: {kind}`**" for kind in _kinds(section)]
        yield ""
        yield f"{' or '.join(kinds)}: {_prose(section)}" if kinds else _prose(section)
        yield ""
        yield from _bullets(section, value if not kinds and isinstance(value, Mapping) else {})


def _bullets(section: type[Section], values: Mapping[str, Any]) -> Lines:
    """The fields of a nested section, one bullet each."""
    for key, field in section.model_fields.items():
        if key == "kind" and len(_kinds(section)) == 1:
            continue
        shipped = f" Shipped value: `{_value(values[key])}`." if key in values else ""
        kind = f"Type: {_type(field.annotation, field.metadata)}."
        yield f"- `{key}`: {_described(section, key)} {kind}{shipped}"
        for inner in _sections(field.annotation):
            if not _kinds(inner):
                yield from (f"  {line}" for line in _bullets(inner, values.get(key) or {}))


def _kinds(section: type[Section]) -> Sequence[str]:
    """The values of `kind` that identify this section in a list; empty for other sections."""
    field = section.model_fields.get("kind")
    return () if field is None else get_args(field.annotation)


def _sections(annotation: Any) -> Iterator[type[Section]]:
    """The section types directly in a type, in order."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    else:
        for inner in get_args(annotation):
            yield from _sections(inner)


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words, with its bounds."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return _either([f"`{_value(value)}`" for value in arguments])
    if origin in (Union, UnionType):
        sections = [*_sections(annotation)]
        others = [part for part in arguments if part is not NoneType and not [*_sections(part)]]
        parts = ["section"] * bool(sections)
        parts += [f"`{value}`" for part in others for value in get_args(part) if get_origin(part) is Literal]
        parts += [_type(part, metadata) for part in others if get_origin(part) is not Literal]
        return _either(parts + ["`null`"] * (NoneType in arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return "list of sections" if [*_sections(annotation)] else "list of texts"
        return f"list of {len(arguments)}: {_type(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    names = {bool: "`true` or `false`", int: "whole number", float: "number", str: "text"}
    return " ".join([names.get(annotation, "mapping"), *_bounds(metadata)])


def _bounds(metadata: Sequence[Any]) -> list[str]:
    """The bounds of a number, as `≥ 0 and < 1`."""
    parts = [inner for one in metadata for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
    bounds = [
        f"{sign} {getattr(part, name):g}"
        for part in parts
        for kind, name, sign in BOUNDS
        if isinstance(part, kind)
    ]
    return [" and ".join(bounds)] if bounds else []


def _either(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _value(value: Any) -> str:
    """A value as YAML holds it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------------------------- metrics


def metrics() -> Lines:
    yield "# Metrics"
    yield ""
    yield (
        "Each stage writes its final values to `metrics/STAGE.json` and its curves, where it has any, to "
        "`plots/STAGE.csv`. MLflow holds both under the same names. In MLflow, `final/NAME` is a final value "
        "that differs from the last point of its curve."
    )
    yield ""
    yield "Words in capitals stand for a part of the name:"
    yield ""
    yield from (f"- `{word}`: {meaning}" for word, (_, meaning) in catalogue.PLACEHOLDERS.items())
    for stage in STAGES:
        own = catalogue.metrics(stage)
        if own:
            yield ""
            yield f"## {stage}"
            yield from _metrics_of(stage, own)


def _metrics_of(stage: Stage, own: Sequence[Metric]) -> Lines:
    for panel in catalogue.panels(stage):
        band = "" if panel.band is None else f" Usual range: {panel.band[0]:g} to {panel.band[1]:g}."
        yield ""
        yield f"### {panel.title}"
        if len(panel.metrics) > 1:
            yield ""
            yield panel.note + band
        yield ""
        yield from (_metric(metric) for metric in panel.metrics)
    rest = {
        "Other curves": [metric for metric in own if metric.curve and metric.panel is None],
        "Final values": [metric for metric in own if not metric.curve],
    }
    for title, those in rest.items():
        if those:
            yield ""
            yield f"### {title} of {stage}"
            yield ""
            yield from (_metric(metric) for metric in those)


def _metric(metric: Metric) -> str:
    unit = f" ({metric.unit})" if metric.unit else ""
    parts = [f"- **`{metric.name}`**{unit}: {_sentence(metric.formula)}", metric.reading]
    if metric.when:
        parts.append(f"Condition: {metric.when}.")
    if metric.interval:
        parts.append(f"`{metric.name}/low` and `{metric.name}/high` are its 95% interval.")
    if metric.heldout:
        parts.append(f"`heldout/{metric.name}` is the same for models/reward_heldout.")
    return " ".join(part for part in parts if part)


# --------------------------------------------------------------------------------------- commands


def commands() -> Lines:
    known = dict(_subcommands(cli.parser()))
    yield "# Commands"
    yield ""
    yield (
        "`rlhf COMMAND --help` prints the same text. The page [Files](files.md) lists the exit statuses. "
        "Square brackets mark what may be left out, and `…` what may be repeated."
    )
    for title, names in cli.GROUPS.items():
        yield ""
        yield f"## {title.partition(' (')[0]}"
        for name in names:
            if name in known:  # a command of two groups is described in the first one
                yield ""
                yield f"### `rlhf {name}`"
                yield ""
                yield from _command(known.pop(name))


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    return next(a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction))


def _command(parser: argparse.ArgumentParser) -> Lines:
    actions = [action for action in parser._actions if action.dest != "help"]
    yield _sentence(" ".join((parser.description or "").split()))
    yield ""
    yield "```text"
    yield " ".join([parser.prog, *(_use(action) for action in actions)])
    yield "```"
    if actions:
        yield ""
    for action in actions:
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"- `{_use(action).strip('[]')}`: {_sentence(' '.join(text.split()))}"
    if parser.epilog:
        yield ""
        yield " ".join(parser.epilog.split())


def _use(action: argparse.Action) -> str:
    """An argument as the usage line shows it."""
    value = action.metavar or action.dest.upper()
    value = " ".join(value) if isinstance(value, tuple) else value
    if action.choices is not None and action.metavar is None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    value = {"*": f"[{value}…]", "+": f"{value}…", "?": f"[{value}]", 0: ""}.get(action.nargs or "", value)
    if action.nargs == 0:
        value = ""
    if action.option_strings:
        text = f"{action.option_strings[-1]} {value}".strip()
        return text if action.required else f"[{text}]"
    return value


# ----------------------------------------------------------------------------------------- stages


def stages() -> Lines:
    yield "# Stages"
    yield ""
    yield (
        "`dvc.yaml` declares the stages, in the order below. A stage runs again when its parameters, its "
        "data or its code changed. `dvc repro` runs all stages that have to run."
    )
    for name, stage in _yaml("dvc.yaml")["stages"].items():
        yield ""
        yield f"## {name}"
        yield ""
        yield _sentence(stage["desc"])
        yield ""
        yield f"Command: `{stage['cmd']}`"
        parts = {
            "Parameters": [_parameter_link(key) for key in stage.get("params", [])],
            "Reads": [f"`{path}`" for path in stage["deps"] if not path.startswith(CODE)],
            "Writes": [f"`{path}`" for path in _outs(stage.get("outs", []))],
            "Metrics": [f"[`{path}`](metrics.md#{name})" for path in _outs(stage.get("metrics", []))],
            "Curves": [f"[`{path}`](metrics.md#{name})" for path in _outs(stage.get("plots", []))],
        }
        for title, those in parts.items():
            if those:
                yield ""
                yield f"{title}: {', '.join(those)}"


def _parameter_link(key: str) -> str:
    section, _, rest = key.partition(".")
    anchor = f"{section}{rest}" if rest else section
    return f"[`{key}`](parameters.md#{anchor})"


def _outs(outs: Sequence[Any]) -> list[str]:
    return [path for out in outs for path in (out if isinstance(out, Mapping) else [out])]


# ------------------------------------------------------------------------------------- DVC's plots


def dvc_yaml() -> str:
    """dvc.yaml with the section `plots:`, its last one, from the catalogue."""
    text = (ROOT / "dvc.yaml").read_text(encoding="utf-8")
    before, heading, _ = text.partition("\nplots:")
    assert heading, "dvc.yaml has no section `plots:`"
    return f"{before}{heading} # by `python docs/generate.py`, from rlhf_tasks/tracking/metrics/*.toml\n" + (
        "\n".join(line for stage in curves.CURVES for line in _plots(stage)) + "\n"
    )


def _plots(stage: Stage) -> Lines:
    """A figure per panel, with the curves that the shipped parameters log."""
    for panel in catalogue.panels(stage):
        shipped = [one for one in panel.metrics if one.shipped and not one.placeholders]
        names = [name for one in shipped for name in ([one.name, f"heldout/{one.name}"][: 1 + one.heldout])]
        if names:
            yield f"  - {panel.title}:"
            yield "      template: linear"
            yield f"      x: {curves.axis(stage)}"
            yield "      y:"
            yield f"        plots/{stage}.csv: [{', '.join(names)}]"


if __name__ == "__main__":
    sys.exit(main())
