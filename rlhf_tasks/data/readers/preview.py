"""`rlhf data PATH`: what a file, folder or hub set is read as, from a sample, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_tasks import console
from rlhf_tasks.config import Data, Split, is_hub_id
from rlhf_tasks.data import rows
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.columns import KEY
from rlhf_tasks.data.readers import files, hub, tables
from rlhf_tasks.data.rows import CONVERSATION, SPLITS, TEXTS, Corpus, Problems, Role, Rows
from rlhf_tasks.errors import UserError

SHOWN = 3  # rows
SAMPLE = 1000  # rows of a file
MOST_CHARACTERS = 600  # of a text
Tokens = Callable[[str, str], tuple[Sequence[str], Sequence[str]]]
"""Prompt and response → the tokens of each, as texts."""


def show(
    path: Path,
    data: Data,
    rendering: Rendering,
    split: Tokens,
    own: Callable[[dict[str, Any]], Any] | None = None,
    *,
    whole: bool = False,
) -> Corpus:
    """Say what is there and how it is read; return the rows.

    Args:
        split: How the model's tokenizer splits a prompt and a response after it.
        whole: Read all rows, and not a sample of each file.

    Raises:
        UserError: as stage prepare would, if the data cannot be read as it is, or if no row can be used.
    """
    problems = Problems()
    if is_hub_id(str(path)):
        console.say(f"reading {path} from the hub")
        given, whole = hub.sample(str(path), SAMPLE), False
    else:
        given = files.tables_of(path, problems, None if whole else SAMPLE)
    sample = "" if whole else f", at most {SAMPLE} rows of each; --all reads all"
    console.table(
        f"{path}: {len(given)} file(s) or split(s){sample}",
        ["file", "role by name", "split", "rows"],
        [[table.name, role or "none", part, len(table.lines)] for role, part, table in given],
    )
    part = tables.Part(given, data, own)
    try:
        tables.check_columns([part])
    except UserError as error:  # `path` may be one of several sets
        console.say(f"Note: {error}")
    corpus = tables.assemble([part], rendering, problems)
    rows.check_texts(corpus, rendering.eos, problems)
    rows.check_duplicates(corpus, problems)
    for role, parts in corpus.items():
        _show(role, parts, data, split)
    if problems:
        console.say(problems.report())
    if not any(len(part) for parts in rows.without(corpus, problems).values() for part in parts.values()):
        raise UserError(f"no row of {path} can be used; the lines above say why")
    return corpus


def _show(role: Role, parts: Mapping[Split, Rows], data: Data, split: Tokens) -> None:
    """Counts, three rows as the model sees them, and the lengths in its tokens."""
    counts = ", ".join(f"{len(parts[name])} {name}" for name in SPLITS if parts.get(name))
    console.say(f"\n{role}: {counts or 'no rows'}")
    answers = [name for name in TEXTS[role] if name != "prompt"]
    sizes: dict[str, list[int]] = {"prompt": [], "completion": []}
    for number, row in enumerate(row for name in SPLITS if name in parts for row in parts[name]):
        is_shown = number < SHOWN
        if is_shown:
            console.say(f"  {row['source']}")
        for name in answers:
            prompt, response = split(row["prompt"], row[name] or "")
            if name == answers[0]:
                sizes["prompt"].append(len(prompt))
                if is_shown:
                    console.say(f"    prompt ({len(prompt)} tokens): {_tokens(prompt)}")
            if row[name] is not None:  # as in prompts alone and unpaired labels
                sizes["completion"].append(len(response))
                if is_shown:
                    console.say(f"    {name} ({len(response)} tokens): {_tokens(response)}")
    for name, title in {"prompt": "prompt", "completion": "response"}.items():
        if counted := sizes[name]:
            most = getattr(data, f"max_{name}_tokens")
            over = sum(size > most for size in counted)
            mean = f"{min(counted)} to {max(counted)}, mean {sum(counted) / len(counted):.1f}"
            console.say(f"  {title} tokens {mean}; {over or 'none'} over data.max_{name}_tokens={most}")


def _tokens(parts: Sequence[str]) -> str:
    """Tokens with their boundaries, in one line."""
    text = "|".join(part.replace("\n", "⏎") for part in parts)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def words(prompt: str, response: str) -> tuple[Sequence[str], Sequence[str]]:
    return prompt.split(), response.split()


def write(corpus: Corpus, out: Path) -> None:
    """Write the rows into OUT/ROLE/SPLIT.parquet, or .jsonl with the kept columns; `data.path: OUT` reads it.

    Earlier turns of conversations are left out: as rows of their own they would become prompts of PPO.

    Raises:
        UserError: if OUT holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--write {out}: the folder is not empty; name a new one")
    num_earlier = 0
    for role, parts in corpus.items():
        for name, some in parts.items():
            last = some.take(np.array([talk is None for talk in some.texts(CONVERSATION)], bool))
            num_earlier += len(some) - len(last)
            if not len(last):
                continue
            (out / role).mkdir(parents=True, exist_ok=True)
            if KEY not in last[0]:
                rows.write(last, out / role / f"{name}.parquet")
                continue
            with (out / role / f"{name}.jsonl").open("w", encoding="utf-8") as file:
                for row in last:
                    kept = row.pop(KEY)
                    file.write(json.dumps({**row, **kept}, ensure_ascii=False) + "\n")
    console.say(f"wrote {out}" + (f" without {num_earlier:,} earlier turns" if num_earlier else ""))
