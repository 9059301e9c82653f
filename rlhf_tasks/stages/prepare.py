"""Stage `prepare`: reads any source, checks and splits its rows, and makes the tokenizer of all stages.

It checks texts, duplicates and leaks, trains the tokenizer on the good train rows (or copies the base
model's), checks lengths, and then reports all problems at once. It writes data/sft, data/preferences,
data/prompts (Parquet by split), data/tokenizer and data/quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import Data, PrepareView, Split
from rlhf_tasks.data import arithmetic, columns, docstrings, files, hub, rows, synthetic, tokenizer
from rlhf_tasks.data.chat import Rendering
from rlhf_tasks.data.rows import HELD_OUT, ROLES, SPLITS, TEXTS, Corpus, Lengths, Problems, Role, Row
from rlhf_tasks.data.splits import cap_train, complete
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic
from rlhf_tasks.project.imports import load_function
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_UNKNOWN_SHARE = 0.01


def run(config: PrepareView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write the data folders and return the counts and lengths.

    Raises:
        UserError: naming every bad row, with data.on_bad_row: fail; or a missing file, column or split.
    """
    data, scratch, problems = config.data, config.model.scratch, Problems()
    # 1. Rows of any source, as the base model's chat template renders them.
    if scratch is None:
        words = tokenizer.ready(config.model, data.chat_date)
        rendering = replace(tokenizer.ready_rendering(words, config.model.base), train_on=config.train_on)
    else:
        rendering = tokenizer.scratch_rendering()
    corpus = _read(paths, config, rendering, problems)
    # 2. What can be checked without token ids.
    rows.check_sizes(corpus, data.max_prompt_tokens, data.max_completion_tokens, problems)
    corpus = rows.without(corpus, problems)  # no step below reads a text that is too long for all of them
    rows.check_texts(corpus, rendering.eos, problems)
    rows.check_duplicates(corpus, problems)
    rows.check_leaks(corpus, problems)
    # 3. The tokenizer, and lengths in its tokens.
    if scratch is not None:
        good = rows.without(corpus, problems)
        train = {role: tables.get("train", []) for role, tables in good.items()}
        texts = (row[name] for role, table in train.items() for row in table for name in TEXTS[role])
        words = tokenizer.train(scratch, texts, data.max_prompt_tokens + data.max_completion_tokens)
    lengths, merged = rows.measure(corpus, lambda *texts: tokenizer.continue_prompts(words, *texts))
    if data.source == "docstrings":  # the source estimates lengths, so a long row is no bad row
        corpus = _within_limits(corpus, lengths, data)
    rows.check_lengths(corpus, lengths, data.max_prompt_tokens, data.max_completion_tokens, problems)
    if problems and data.on_bad_row == "fail":
        advice = "Fix them, or set data.on_bad_row: quarantine to leave them out."
        raise UserError(f"{problems.report()}\n{advice}")
    # 4. The good rows, their numbers and the files.
    good = rows.without(corpus, problems)
    try:
        kept = cap_train(complete(good), data.max_rows, config.seed)
    except UserError as error:
        raise UserError(f"{error}\n{problems.report()}" if problems else str(error)) from None
    metrics = _measure(kept, good, lengths, problems)
    if scratch is not None and scratch.tokenizer == "words":
        merged = set()  # its responses are decoded with a blank before each word
    metrics["tokens/merged_rows"] = float(sum(id(row) in merged for *_, row in rows.every(good)))
    # Unknown tokens in demonstrations that did not train the tokenizer.
    held_out = [row[name] for split in HELD_OUT for row in kept["sft"][split] for name in TEXTS["sft"]]
    metrics["tokens/unknown"] = tokenizer.unknown_share(words, held_out)
    _write(paths, kept, words, problems)
    _say(paths, data.source, kept, metrics, problems)
    for role in ROLES:
        tracker.table(f"examples/{role}", [columns.shown(row) for row in kept[role]["train"][:5]])
    return metrics


def _read(paths: Paths, config: PrepareView, rendering: Rendering, problems: Problems) -> Corpus:
    data, settings, seed = config.data, config.prepare, config.seed
    sizes: dict[Split, int] = {"validation": data.num_validation, "test": data.num_test}
    generated = {
        "synthetic": tuple(synthetic.SLOTS),
        "arithmetic": tuple(arithmetic.COLUMNS),
        "docstrings": (),
    }
    if lost := [name for name in data.columns.keep if name not in generated.get(data.source, (name,))]:
        raise UserError(
            f"data.columns.keep: the rows of data.source={data.source} have no column {', '.join(lost)}; "
            f"they have {', '.join(generated[data.source]) or 'none'}"
        )
    counts: dict[str, Any] = {
        "num_prompts": settings.synthetic_prompt_rows,
        "num_sft": settings.synthetic_sft_rows,
        "num_validation": data.num_validation,
        "num_test": data.num_test,
        "keep": data.columns.keep,
    }
    own = None
    if data.format is not None and ":" in data.format:
        own = load_function(data.format, "data.format", paths.root)
    match data.source:
        case "synthetic":
            pairs = settings.synthetic_preference_rows
            return cast(Corpus, synthetic.generate(seed, num_preferences=pairs, **counts))
        case "arithmetic":
            return cast(Corpus, arithmetic.generate(seed, **counts))
        case "docstrings":
            most = settings.docstrings_max_pairs
            return docstrings.load(
                seed, max_prompt_tokens=data.max_prompt_tokens, max_pairs=most, sizes=sizes
            )
        case "files":
            path = paths.root / data.path
            return files.load(path, data, rendering, problems, own, seed=seed, sizes=sizes)
    assert data.hub is not None  # by a rule of config
    return hub.load(data.hub, data, rendering, problems, own, seed=seed, sizes=sizes)


def _within_limits(corpus: Corpus, lengths: Lengths, data: Data) -> Corpus:
    """The rows whose texts are within the limits of data."""

    def fits(role: Role, row: Row) -> bool:
        most = rows.limits(role, data.max_prompt_tokens, data.max_completion_tokens)
        return all(n <= limit for n, limit in zip(lengths[id(row)], most, strict=True))

    return {
        role: {split: [row for row in table if fits(role, row)] for split, table in tables.items()}
        for role, tables in corpus.items()
    }


def _write(paths: Paths, corpus: Corpus, words: PreTrainedTokenizerBase, problems: Problems) -> None:
    for role in ROLES:
        with atomic.whole(paths.rows(role)) as folder:
            for split in SPLITS:
                pq.write_table(_arrow(role, corpus[role][split]), folder / f"{split}.parquet")
    with atomic.whole(paths.tokenizer) as folder:
        tokenizer.save(words, folder)
    with atomic.whole(paths.quarantine.parent) as folder:
        lines = "".join(f"{line}\n" for line in problems.lines())
        (folder / "rows.jsonl").write_text(lines, encoding="utf-8")


def _arrow(role: Role, table: Sequence[Row]) -> pa.Table:
    kept = (columns.KEY,) if role == "prompts" and table and columns.KEY in table[0] else ()
    schema = pa.schema([(name, pa.string()) for name in (*TEXTS[role], "source", *kept)])
    written = [columns.encoded(row) for row in table]
    return pa.table({name: [row[name] for row in written] for name in schema.names}, schema=schema)


def _measure(corpus: Corpus, good: Corpus, lengths: Lengths, problems: Problems) -> dict[str, float]:
    """Counts of the written rows; token counts of all good rows that were read, EOS included."""
    counts = problems.counts()
    metrics: dict[str, float] = {
        **{f"rows/{role}/{split}": float(len(corpus[role][split])) for role in ROLES for split in SPLITS},
        "duplicates": float(counts["duplicate"]),
        "quarantined": float(len(problems)),
        **{f"quarantined/{reason}": float(count) for reason, count in counts.items()},
    }
    measured = [lengths[id(row)] for _, _, _, row in rows.every(good)]
    groups = {"prompt": [m[0] for m in measured], "completion": [n for m in measured for n in m[1:]]}
    for name, counted in groups.items():
        metrics[f"tokens/{name}_mean"] = sum(counted) / len(counted)
        metrics[f"tokens/{name}_max"] = float(max(counted))
    return metrics


def _say(paths: Paths, source: str, corpus: Corpus, metrics: Mapping[str, float], problems: Problems) -> None:
    table: list[list[Any]] = [[role, *(len(corpus[role][split]) for split in SPLITS)] for role in ROLES]
    console.table(f"Rows from {source}", ["role", *SPLITS], table)
    console.say(
        "Tokens, mean and maximum: "
        f"prompts {metrics['tokens/prompt_mean']:.1f}, {metrics['tokens/prompt_max']:.0f}; "
        f"responses {metrics['tokens/completion_mean']:.1f}, {metrics['tokens/completion_max']:.0f}."
    )
    if problems:
        console.say(f"{problems.report()}\nThey are left out, and written to {paths.quarantine}.")
    if metrics["tokens/merged_rows"]:
        console.say(
            f"Note: in {metrics['tokens/merged_rows']:.0f} rows the tokenizer would join the end of the "
            "prompt and the start of a response in one token. Generation cannot write it, so these responses "
            "have the tokens that they have by themselves. Prompts without a blank at the end, and responses "
            "with one at the start, avoid it."
        )
    if metrics["tokens/unknown"] > MAX_UNKNOWN_SHARE:
        console.say(
            f"Note: {metrics['tokens/unknown']:.1%} of the tokens are unknown words; raise "
            "model.scratch.vocab_size, or set model.scratch.tokenizer to bpe, to keep them."
        )
