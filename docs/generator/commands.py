"""cli.md, from the commands of `rlhf`."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from docs.generator.text import Lines, sentence
from rlhf_tasks.cli import main as cli


def commands() -> Lines:
    """The lines of the page: a section per group, and in it one per command."""
    yield "# Commands"
    yield ""
    yield (
        "`rlhf COMMAND --help` prints the same text. The page [Files](files.md) lists the exit statuses. "
        "Square brackets mark what may be left out, and `…` what may be repeated."
    )
    known = cli.parser().commands
    for title, group in itertools.groupby(known, lambda name: known[name].rich_help_panel):
        yield ""
        yield f"## {title.partition(' (')[0]}"
        for name in group:
            yield ""
            yield f"### `rlhf {name}`"
            yield ""
            yield from _command(name, known[name])


def _command(name: str, command: Any) -> Lines:
    params = [param for param in command.params if not param.hidden]
    yield sentence(" ".join(inspect.cleandoc(command.help or "").split()))
    yield ""
    yield "```text"
    yield " ".join([f"rlhf {name}", *(_use(param) for param in params)])
    yield "```"
    if params:
        yield ""
    for param in params:
        default = f" (default: {param.default})" if param.default not in (None, False) else ""
        yield f"- `{_use(param).strip('[]')}`: {sentence((param.help or '') + default)}"


def _use(param: Any) -> str:
    """An argument as the usage line shows it."""
    choices = param.type_descriptor.choices
    value = param.metavar or ("{" + ",".join(map(str, choices)) + "}" if choices else param.name.upper())
    if param.param_type_name == "argument":
        text = value + "…" * (param.nargs == -1)
    else:
        text = param.opts[0] if param.is_flag else f"{param.opts[0]} {value}" + "…" * param.multiple
    return text if param.required else f"[{text}]"
