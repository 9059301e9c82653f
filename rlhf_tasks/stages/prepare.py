"""Stage `prepare`: reads any source, checks and splits its rows, and makes the tokenizer of all stages.

It checks texts, duplicates and leaks, trains the tokenizer on the good train rows (or copies the base
model's), checks lengths, and then reports all problems at once. It writes data/sft, data/preferences,
data/prompts (Parquet by split), data/tokenizer and data/quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_tasks import console
from rlhf_tasks.config import Data, Model, PrepareView, Split
from rlhf_tasks.data import columns, rows, tokenizer
from rlhf_tasks.data.rows import HELD_OUT, ROLES, SPLITS, TEXTS, Corpus, Lengths, Problems, Role, Row
from rlhf_tasks.data.splits import cap_train, complete
from rlhf_tasks.data.tables import Rendering
from rlhf_tasks.errors import UserError
from rlhf_tasks.project import atomic
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
    data: Data = config.data
    ready = _ready_tokenizer(config.model)
    rendering = _rendering(config.model, ready)
    problems = Problems()
    corpus = _read(paths, config, rendering, problems)
    rows.check_sizes(corpus, data.max_prompt_tokens, data.max_completion_tokens, problems)
    corpus = rows.without(corpus, problems)  # no step below reads a text that is too long for all of them
    rows.check_texts(corpus, rendering.eos, problems)
    rows.check_duplicates(corpus, problems)
    rows.check_leaks(corpus, problems)
    words = ready or _train_tokenizer(config.model, data, rows.without(corpus, problems))
    lengths = rows.measure(corpus, lambda texts: tokenizer.count_tokens(words, texts))
    if data.source == "docstrings":
        corpus = _fitting(corpus, lengths, data)
    rows.check_lengths(corpus, lengths, data.max_prompt_tokens, data.max_completion_tokens, problems)
    if problems and data.on_bad_row == "fail":
        advice = "Fix them, or set data.on_bad_row: quarantine to leave them out."
        raise UserError(f"{problems.report()}\n{advice}")
    good = rows.without(corpus, problems)
    kept = cap_train(_complete(good, problems), data.max_rows, config.seed)
    metrics = _metrics(kept, good, lengths, problems) | {"tokens/unknown": _unknown_share(words, kept)}
    _write(paths, kept, words, problems)
    _say(paths, data.source, kept, metrics, problems)
    for role in ROLES:
        tracker.table(f"examples/{role}", [columns.shown(row) for row in kept[role]["train"][:5]])
    return metrics


# ---------------------------------------------------------------------------------------- reading


def _read(paths: Paths, config: PrepareView, rendering: Rendering, problems: Problems) -> Corpus:
    data: Data = config.data
    sizes: dict[Split, int] = {"validation": data.num_validation, "test": data.num_test}
    if data.source == "synthetic":
        from rlhf_tasks.data import synthetic

        tables = synthetic.generate(
            config.seed,
            num_prompts=config.prepare.synthetic_prompt_rows,
            num_sft=config.prepare.synthetic_sft_rows,
            num_preferences=config.prepare.synthetic_preference_rows,
            num_validation=data.num_validation,
            num_test=data.num_test,
            keep=_available(data, synthetic.SLOTS),
        )
        return cast(Corpus, tables)
    if data.source == "arithmetic":
        from rlhf_tasks.data import arithmetic

        generated = arithmetic.generate(
            config.seed,
            num_prompts=config.prepare.synthetic_prompt_rows,
            num_sft=config.prepare.synthetic_sft_rows,
            num_validation=data.num_validation,
            num_test=data.num_test,
            keep=_available(data, arithmetic.COLUMNS),
        )
        return cast(Corpus, generated)
    if data.source == "docstrings":
        from rlhf_tasks.data import docstrings

        _available(data, ())
        pairs = config.prepare.docstrings_max_pairs
        prompt_tokens = data.max_prompt_tokens
        return docstrings.load(config.seed, max_prompt_tokens=prompt_tokens, max_pairs=pairs, sizes=sizes)
    if data.source == "files":
        from rlhf_tasks.data import files

        return files.load(
            paths.root / data.path, data.columns, rendering, problems, seed=config.seed, sizes=sizes
        )
    from rlhf_tasks.data import hub

    assert data.hub is not None  # by a rule of config
    return hub.load(data.hub, data.columns, rendering, problems, seed=config.seed, sizes=sizes)


def _available(data: Data, columns: Sequence[str]) -> tuple[str, ...]:
    """`data.columns.keep` for a generated source that has these columns.

    Raises:
        UserError: if the source lacks one.
    """
    lost = [name for name in data.columns.keep if name not in columns]
    if lost:
        raise UserError(
            f"data.columns.keep: the rows of data.source={data.source} have no column {', '.join(lost)}; "
            f"they have {', '.join(columns) or 'none'}"
        )
    return data.columns.keep


def _complete(good: Corpus, problems: Problems) -> Corpus:
    try:
        return complete(good)
    except UserError as error:
        raise UserError(f"{error}\n{problems.report()}" if problems else str(error)) from None


def _fitting(corpus: Corpus, lengths: Lengths, data: Data) -> Corpus:
    """The rows within the limits; the source estimated the lengths, so the others are no bad rows."""
    return {
        role: {
            split: [
                row
                for row in table
                if all(n <= most for n, most in zip(lengths[id(row)], bounds, strict=True))
            ]
            for split, table in tables.items()
        }
        for role, tables in corpus.items()
        for bounds in [rows.limits(role, data.max_prompt_tokens, data.max_completion_tokens)]
    }


# -------------------------------------------------------------------------------------- tokenizer


def _ready_tokenizer(model: Model) -> PreTrainedTokenizerBase | None:
    return None if model.scratch is not None else tokenizer.ready(model)


def _rendering(model: Model, ready: PreTrainedTokenizerBase | None) -> Rendering:
    if ready is None:
        return tokenizer.scratch_rendering()
    return tokenizer.ready_rendering(ready, model.base)


def _train_tokenizer(model: Model, data: Data, good: Corpus) -> PreTrainedTokenizerBase:
    assert model.scratch is not None
    texts = (
        row[name] for role, tables in good.items() for row in tables.get("train", []) for name in TEXTS[role]
    )
    return tokenizer.train(model.scratch, texts, data.max_prompt_tokens + data.max_completion_tokens)


def _unknown_share(words: PreTrainedTokenizerBase, corpus: Corpus) -> float:
    """The share of unknown tokens in held-out demonstrations, which did not train the tokenizer."""
    texts = [row[name] for split in HELD_OUT for row in corpus["sft"][split] for name in TEXTS["sft"]]
    return tokenizer.unknown_share(words, texts)


# ---------------------------------------------------------------------------------------- writing


def _write(paths: Paths, corpus: Corpus, words: PreTrainedTokenizerBase, problems: Problems) -> None:
    for role in ROLES:
        with atomic.whole(paths.rows(role)) as folder:
            for split in SPLITS:
                pq.write_table(_arrow(role, corpus[role][split]), folder / f"{split}.parquet")
    with atomic.whole(paths.tokenizer) as folder:
        tokenizer.save(words, folder)
    with atomic.whole(paths.quarantine.parent) as folder:
        (folder / "rows.jsonl").write_text(
            "".join(f"{line}\n" for line in problems.lines()), encoding="utf-8"
        )


def _arrow(role: Role, table: list[Row]) -> pa.Table:
    kept = (columns.KEY,) if role == "prompts" and table and columns.KEY in table[0] else ()
    names = (*TEXTS[role], "source", *kept)
    schema = pa.schema([(name, pa.string()) for name in names])
    written = [columns.encoded(row) for row in table]
    return pa.table({name: [row[name] for row in written] for name in names}, schema=schema)


# -------------------------------------------------------------------------------------- reporting


def _metrics(corpus: Corpus, good: Corpus, lengths: Lengths, problems: Problems) -> dict[str, float]:
    """Counts of the written rows; token counts of all good rows that were read, EOS included."""
    metrics: dict[str, float] = {
        f"rows/{role}/{split}": float(len(corpus[role][split])) for role in ROLES for split in SPLITS
    }
    counts = problems.counts()
    metrics["duplicates"] = float(counts["duplicate"])
    metrics["quarantined"] = float(len(problems))
    metrics |= {f"quarantined/{reason}": float(count) for reason, count in counts.items()}
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
    if metrics["tokens/unknown"] > MAX_UNKNOWN_SHARE:
        console.say(
            f"Note: {metrics['tokens/unknown']:.1%} of the tokens are unknown words; raise "
            "model.scratch.vocab_size, or set model.scratch.tokenizer to bpe, to keep them."
        )
