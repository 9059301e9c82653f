"""cli.md, from the parser of `rlhf`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from docs.generator.text import Lines, sentence
from rlhf_tasks.cli import main as cli


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
    yield sentence(" ".join((parser.description or "").split()))
    yield ""
    yield "```text"
    yield " ".join([parser.prog, *(_use(action) for action in actions)])
    yield "```"
    if actions:
        yield ""
    for action in actions:
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        yield f"- `{_use(action).strip('[]')}`: {sentence(' '.join(text.split()))}"
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
