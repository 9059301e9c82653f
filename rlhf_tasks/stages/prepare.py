"""Stage `prepare`: reads any source, checks and splits its rows, and makes the tokenizer of all stages.

It checks texts, duplicates and leaks, trains the tokenizer on the good train rows (or copies the base
model's), checks lengths, and then reports all problems at once. It writes data/sft, data/preferences,
data/prompts (Parquet by split), data/tokenizer and data/quarantine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_tasks import console
from rlhf_tasks.config import PrepareView, Split
from rlhf_tasks.data import columns, positions, rows, splits, synthetic, tokenizer
from rlhf_tasks.data.readers import files, hub, source
from rlhf_tasks.data.readers.tables import Part, assemble, check_columns
from rlhf_tasks.data.rows import HELD_OUT, ROLES, SET, SPLITS, TEXTS, Corpus, Lengths, Problems, Role
from rlhf_tasks.errors import PROMPTS_ALONE, UserError
from rlhf_tasks.project import atomic
from rlhf_tasks.project.imports import load_function
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.tracking import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_UNKNOWN_SHARE = 0.01
DERIVED: tuple[Role, ...] = ("prompts", "sft", "preferences")
"""Each role can be derived from the next."""


def run(config: PrepareView, paths: Paths, tracker: Tracker) -> dict[str, float]:
    """Write the data folders and return the counts and lengths.

    Raises:
        UserError: naming every bad row, with data.on_bad_row: fail; or a missing file, column or split.
    """
    data, scratch, problems = config.data, config.model.scratch, Problems()
    # 1. Rows of any source, as the base model's chat template renders them.
    if scratch is None:
        words = tokenizer.load_base(config.model, data)
        rendering = replace(tokenizer.ready_rendering(words, config.model.base), train_on=config.train_on)
    else:
        rendering = tokenizer.scratch_rendering()
    plain = Counter[str]()
    parts = _parts(paths, config, problems)
    check_columns(parts)
    corpus = assemble(parts, rendering, problems, plain)
    sizes: dict[Split, int] = {"validation": data.num_validation, "test": data.num_test}
    corpus = splits.fill_splits(corpus, seed=config.seed, sizes=sizes)
    if [*corpus] == ["prompts"]:
        if scratch is not None:
            raise UserError(f"model.base: scratch has no text to learn from. {PROMPTS_ALONE}")
        console.say(f"Note: {PROMPTS_ALONE}")
    # 2. What can be checked without token ids.
    with console.part("checking the rows"):
        rows.check_sizes(corpus, data.max_prompt_tokens, data.max_completion_tokens, problems)
        corpus = rows.without(corpus, problems)  # no step below reads a text that is too long for all of them
        rows.check_texts(corpus, rendering.eos, problems)
        rows.check_duplicates(corpus, problems)
        corpus = rows.without_held_turns(corpus)
        rows.check_leaks(corpus, problems)
    # 3. The tokenizer, and lengths in its tokens.
    num_rows = sum(len(found) for tables in corpus.values() for found in tables.values())
    if scratch is not None:
        good = rows.without(corpus, problems)
        train: Corpus = {
            role: {"train": tables["train"]} for role, tables in good.items() if "train" in tables
        }
        longest = data.max_prompt_tokens + data.max_completion_tokens
        words = tokenizer.train(scratch, _texts(train), longest)
    with console.progress("counting tokens", num_rows, unit="rows", least=rows.BATCH) as meter:
        lengths = rows.measure(corpus, tokenizer.Counts(words), meter.advance)
    rows.check_lengths(corpus, lengths, data.max_prompt_tokens, data.max_completion_tokens, problems)
    if problems and data.on_bad_row == "fail":
        needed = rows.needed_lengths(lengths, data.max_prompt_tokens, data.max_completion_tokens)
        allow = f"allow longer ones ({', '.join(needed)}), " if needed else ""
        advice = f"Fix them, {allow}or set data.on_bad_row: quarantine to leave them out."
        raise UserError(f"{problems.report()}\n{advice}")
    # 4. The good rows, their numbers and the files.
    good = rows.without(corpus, problems)
    weights = {one.name: one.weight for one in data.mix or ()}
    try:
        full = splits.complete(good)
    except UserError as error:
        raise UserError(f"{error}\n{problems.report()}" if problems else str(error)) from None
    kept = splits.mix_train(full, weights, data.max_rows, config.seed)
    metrics = _measure(kept, good, lengths, problems)
    if rendering.chat is not None:
        metrics["rows/as_turns"] = float(plain["turns"])
    # Responses of a tokenizer of words are decoded with a blank before each word.
    joins = scratch is not None and scratch.tokenizer == "words"
    merged = sum(int(lengths[batch.role].merged[batch.numbers].sum()) for batch in rows.batches(good))
    metrics["tokens/merged_rows"] = 0.0 if joins else float(merged)
    # Unknown tokens in demonstrations that did not train the tokenizer.
    held_out: Corpus = {"sft": {split: kept["sft"][split] for split in HELD_OUT}}
    metrics["tokens/unknown"] = tokenizer.unknown_share(words, _texts(held_out))
    _check_positions(config, kept, lengths)
    # Who judges or selects by some of the held-out rows takes the first. Synthetic ones are in no order.
    written = kept if data.source == "synthetic" else splits.shuffle_heldout(kept, config.seed)
    _write(paths, written, words, problems)
    _say(paths, data.source, kept, metrics, problems)
    if weights:
        _say_mixture(full, kept, weights)
    for role in ROLES:
        tracker.table(f"examples/{role}", [columns.shown(row) for row in kept[role]["train"][:5]])
    return metrics


def _parts(paths: Paths, config: PrepareView, problems: Problems) -> list[Part]:
    """What is read: files, hub sets, all sets of a mixture, or the rows of a function."""
    data, sizes = config.data, config.prepare

    def function(named: str | None, key: str) -> Any:
        return load_function(named, key, paths.root) if named is not None and ":" in named else None

    if data.source == "synthetic":
        generated = synthetic.generate(
            config.seed,
            num_prompts=sizes.synthetic_prompt_rows,
            num_sft=sizes.synthetic_sft_rows,
            num_preferences=sizes.synthetic_preference_rows,
            num_validation=data.num_validation,
            num_test=data.num_test,
            facts=synthetic.SLOTS,
        )
        listed = {
            role: [row | {"split": split} for split, some in tables.items() for row in some]
            for role, tables in generated.items()
        }
        return [Part((), data, readings=source.readings(data, listed))]
    if (rows_function := function(data.source, "data.source")) is not None:
        with console.part(f"calling {data.source}"):
            returned = source.rows_of(rows_function, data, config.seed)
        return [Part((), data, readings=source.readings(data, returned))]
    if data.shapes is not None:
        data = data.model_copy(update={"shapes": str(paths.root / data.shapes)})
    if data.source == "files":
        tables = files.tables_of(paths.root / data.path, problems)
        return [Part(tables, data, function(data.format, "data.format"))]
    if data.source == "hub":
        assert data.hub is not None  # by a rule of config
        sets = [(role, data.hub.by_role[role]) for role in ROLES if role in data.hub.by_role]
        tables = [(role, *found) for role, one in sets for found in hub.tables_of_set(one, role)]
        return [Part(tables, data, function(data.format, "data.format"))]
    parts = []
    for one in data.mix or ():
        own = data.model_copy(update={"format": one.format or data.format})
        if one.path is not None:
            tables = files.tables_of(paths.root / one.path, problems)
        else:
            assert one.hub is not None  # by a rule of config
            tables = [(None, split, table) for split, table in hub.tables_of_set(one.hub, None)]
        parts.append(Part(tables, own, function(own.format, f"data.mix.{one.name}.format"), one.name))
    return parts


def _texts(corpus: Corpus) -> Iterator[str]:
    """The texts of all rows; prompts alone have no reference."""
    for batch in rows.batches(corpus):
        for name in TEXTS[batch.role]:
            yield from (text for text in batch.column(name) if text is not None)


@console.part("writing the rows")
def _write(paths: Paths, corpus: Corpus, words: PreTrainedTokenizerBase, problems: Problems) -> None:
    for role in ROLES:
        with atomic.whole(paths.rows(role)) as folder:
            for split in SPLITS:
                rows.write(corpus[role][split], folder / f"{split}.parquet")
    with atomic.whole(paths.tokenizer) as folder:
        tokenizer.save(words, folder)
    with atomic.whole(paths.quarantine.parent) as folder:
        lines = "".join(f"{line}\n" for line in problems.lines())
        (folder / "rows.jsonl").write_text(lines, encoding="utf-8")


def _measure(
    corpus: Corpus, good: Corpus, lengths: Mapping[Role, Lengths], problems: Problems
) -> dict[str, float]:
    """Counts of the written rows; token counts of all good rows that were read, EOS included."""
    counts = problems.counts()
    metrics: dict[str, float] = {
        **{f"rows/{role}/{split}": float(len(corpus[role][split])) for role in ROLES for split in SPLITS},
        "duplicates": float(counts["duplicate"]),
        "quarantined": float(len(problems)),
        **{f"quarantined/{reason}": float(count) for reason, count in counts.items()},
    }
    tokens = {
        role: lengths[role].tokens[np.concatenate([found.numbers for found in tables.values()])]
        for role, tables in good.items()
        if role in lengths
    }
    prompts = np.concatenate([found[:, 0] for found in tokens.values()])
    answers = np.concatenate([found[:, 1:].ravel() for found in tokens.values()])
    for name, counted in {"prompt": prompts, "completion": answers[answers >= 0]}.items():
        if counted.size:
            metrics[f"tokens/{name}_mean"] = int(counted.sum(dtype=np.int64)) / counted.size
            metrics[f"tokens/{name}_max"] = float(counted.max())
    return metrics


def _check_positions(config: PrepareView, corpus: Corpus, lengths: Mapping[Role, Lengths]) -> None:
    """Check that the base model has positions for these rows and for PPO's; warn where it computes them.

    Raises:
        UserError: naming the longest row, and how many positions there are.
    """

    def longest(role: Role, splits: Sequence[Split] = SPLITS) -> tuple[int, int]:
        """The tokens of the longest prompt and of the longest row, maybe derived from another role's."""
        measured = next(one for one in DERIVED[DERIVED.index(role) :] if one in lengths)
        tokens = lengths[measured].tokens[np.concatenate([corpus[role][split].numbers for split in splits])]
        prompts, answers = tokens[:, 0], tokens[:, 1:].max(axis=1)
        return int(prompts.max(initial=0)), int((prompts + answers).max(initial=0))

    roles = [role for role in ROLES if any(map(len, corpus[role].values()))]
    taught = [longest(role, ("train", "validation"))[0] for role in roles if role != "prompts"]
    model = positions.read_config(config.model, max(taught, default=1))
    if model is not None:
        name = "model.scratch" if config.model.scratch is not None else f"model.base={config.model.base}"
        rollout = longest("prompts")[0] + config.response_length
        # As preferences and judge sample, and as reward models read it: with EOS, where it was cut off.
        judged = longest("prompts")[0] + config.data.max_completion_tokens + 1
        warning = positions.check(model, rollout, name, max(judged, *(longest(role)[1] for role in roles)))
        if warning and config.model.scratch is None:  # a new model learns all the positions of its data
            console.say(warning)


def _say(paths: Paths, source: str, corpus: Corpus, metrics: Mapping[str, float], problems: Problems) -> None:
    table: list[list[Any]] = [[role, *(len(corpus[role][split]) for split in SPLITS)] for role in ROLES]
    console.table(f"Rows from {source}", ["role", *SPLITS], table)
    measured = (
        f"{title} {metrics[f'tokens/{name}_mean']:.1f}, {metrics[f'tokens/{name}_max']:.0f}"
        for name, title in {"prompt": "prompts", "completion": "responses"}.items()
        if f"tokens/{name}_mean" in metrics
    )
    console.remark(f"Tokens, mean and maximum: {'; '.join(measured)}.")
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


def _say_mixture(full: Corpus, kept: Corpus, weights: Mapping[str, float]) -> None:
    """How often each set's rows are in the train rows, and its held-out rows."""

    def count(found: rows.Rows) -> Counter[str]:
        return Counter(name for batch in found.batches() for name in batch.column(SET))

    lines: list[list[Any]] = []
    for role in ROLES:
        counts = {split: count(found) for split, found in kept[role].items()}
        given, total = count(full[role]["train"]), counts["train"].total()
        for name in weights:
            own, mixed = given[name], counts["train"][name]
            if own and total:
                shares = f"{mixed / total:.1%}", f"{mixed / own:.2g}"
                held_out = counts["validation"][name], counts["test"][name]
                lines.append([role, name, f"{weights[name]:g}", own, mixed, *shares, *held_out])
    heads = ["role", "set", "weight", "train rows", "in the mixture", "share", "times each"]
    console.table("Mixture (a weight is a share of the train rows)", [*heads, "validation", "test"], lines)
