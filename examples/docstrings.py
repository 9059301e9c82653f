"""Functions and their one-line summaries, mined from the installed code: `rlhf preset docstrings`.

    data:
      source: "examples.docstrings:docstrings"
      options: {max_pairs: 5000}
      columns: {keep: [package, summary]}
      on_bad_row: quarantine

Files are parsed, never imported: those of the standard library and of the installed distributions. A
prompt is a function without its docstring, cut by whole lines to a budget of characters. Its completion
is the first sentence of the docstring. Splits are by package (top-level module), so that test code comes
from packages that training has not seen. The rows depend only on the environment and the seed.

The budget is in characters because a tokenizer may be trained on the mined texts. The few pairs that are too
long in tokens are bad rows, which stage prepare leaves out with `on_bad_row: quarantine`.
"""

import ast
import gc
import importlib.metadata
import re
import sys
import sysconfig
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_tasks.data.rows import prompt_key
from rlhf_tasks.data.splits import hash_rank

CHARS_PER_TOKEN = 2.8  # of code, under a BPE of 4,096 tokens: 3.2 measured; a lower value drops fewer pairs
CHARS_PER_PROMPT_MIN = 60
WORDS_MIN, WORDS_MAX = 3, 20
MAX_PAIRS_PER_PACKAGE = 1000
DEMONSTRATED = 0.6
MAX_FILE_BYTES = 300_000
SUFFIX = "\n# Summary:"

_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "testing", "idle_test", "examples", "benchmarks", "lib2to3", "flows"}
    | {"rlhf_tasks", "rlhf_examples"}
    | {"_vendor", "vendor", "vendored", "_vendored", "third_party", "externals", "extern", "node_modules"}
    | {"site-packages", "dist-packages"}
)
_BOILERPLATE = re.compile(
    r"deprecat|todo|fixme|http|copyright|>>>|docstring|^(see|test|tests|args?|arguments|parameters?|params|returns|raises|"
    r"notes?|warning|example|examples|usage|alias|same as|internal|private|overrides?|inherited|wrapper)\b",
    re.IGNORECASE,
)
_FILLER = frozenset(
    {"a", "an", "the", "of", "to", "for", "from", "in", "on", "with", "and", "or", "is", "this", "that", "it"}
    | {"its", "self", "return", "returns", "get", "gets", "set", "sets"}
)


class Package(NamedTuple):
    """A top-level module and its source files: (path shown in `source`, file), in the order to mine them."""

    name: str
    files: Sequence[tuple[str, Path]]


class Pair(NamedTuple):
    package: str
    source: str
    prompt: str
    summary: str


def docstrings(
    seed: int, num_validation: int, num_test: int, max_prompt_tokens: int, max_pairs: int = 40_000
) -> dict[str, list[dict[str, Any]]]:
    """Demonstrations, and prompts with the authors' summaries as references; at most `max_pairs` for train.

    In the train split, the share DEMONSTRATED of the functions are demonstrations; the others are prompts: a
    reward model starts as the SFT policy, and should not take a text that it has seen for a good one. The
    held-out functions serve both roles.
    """
    budget = int(CHARS_PER_TOKEN * max_prompt_tokens)
    sizes = {"test": num_test, "validation": num_validation}

    def enough(counts: Counter[str]) -> bool:
        # a split takes up to 1.25 times its size, and two may take the same packages
        fills = [sum(n for n in counts.values() if _fits(n, size)) >= 3 * size for size in sizes.values()]
        return counts.total() >= max_pairs + 2 * sum(sizes.values()) and all(fills)

    pairs = mine(installed_packages(seed), budget, enough)
    parts = split_by_package(pairs, seed, sizes)
    train = sorted(parts.pop("train"), key=lambda pair: hash_rank(seed, pair.prompt))[:max_pairs]
    cut = int(DEMONSTRATED * len(train))
    return {
        "sft": _rows("completion", {"train": train[:cut], **parts}),
        "prompts": _rows("reference", {"train": train[cut:], **parts}),
    }


def _rows(column: str, parts: Mapping[str, Sequence[Pair]]) -> list[dict[str, Any]]:
    return [
        pair._asdict() | {column: f" {pair.summary}", "split": split}
        for split, pairs in parts.items()
        for pair in pairs
    ]


def reads() -> dict[str, str]:
    """The versions of all installed packages: stage prepare runs again when one changes."""
    return {one.name: one.version.partition("+")[0] for one in importlib.metadata.distributions() if one.name}


# -------------------------------------------------------------------------------- installed files


def installed_packages(seed: int) -> list[Package]:
    """The standard library's modules and the installed distributions' packages, both in hashed order."""
    files = dict(_library_files())
    for name, found in _distribution_files():
        files.setdefault(name, found)
    grouped: dict[str, list[tuple[str, Path]]] = {}
    for relative, (shown, file) in files.items():
        top = relative.split("/", 1)[0].removesuffix(".py")
        grouped.setdefault(top, []).append((shown, file))
    return [
        Package(name, sorted(grouped[name], key=lambda item: hash_rank(seed, item[0])))
        for name in sorted(grouped, key=lambda name: hash_rank(seed, name))
    ]


def _library_files() -> Iterator[tuple[str, tuple[str, Path]]]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root).as_posix()
        top = relative.split("/", 1)[0].removesuffix(".py")
        if top in sys.stdlib_module_names and _is_mined(relative):
            yield relative, (relative, file)


def _distribution_files() -> Iterator[tuple[str, tuple[str, Path]]]:
    """Files in the RECORD of each distribution; a file of two distributions belongs to the first by name."""
    named = [
        (d.name.lower(), f"{d.name}=={d.version}", d) for d in importlib.metadata.distributions() if d.name
    ]
    for _, title, distribution in sorted(named, key=lambda item: item[:2]):
        for line in (distribution.read_text("RECORD") or "").splitlines():
            relative = line.split(",", 1)[0]
            if relative.endswith(".py") and _is_mined(relative):
                file = Path(str(distribution.locate_file(relative)))
                yield relative, (f"{title} {relative}", file)


def _is_mined(relative: str) -> bool:
    *folders, name = relative.split("/")
    if '"' in relative or ".." in folders or _SKIPPED_FOLDERS.intersection(folders):
        return False
    generated = name.endswith(("_pb2.py", "_pb2_grpc.py"))
    return not generated and not re.match(r"(test_.*|.*_test|conftest|setup|rlhf_tasks)\.py$", name)


# ---------------------------------------------------------------------------------------- mining


def mine(packages: Iterable[Package], max_chars: int, enough: Callable[[Counter[str]], bool]) -> list[Pair]:
    """Clean pairs, package by package, until `enough` accepts the counts.

    No prompt occurs twice, and no summary occurs twice in a package.
    """
    prompts: set[str] = set()
    counts: Counter[str] = Counter()
    pairs: list[Pair] = []
    collecting = gc.isenabled()
    gc.disable()  # syntax trees hold no reference cycles; searching them would double the time
    try:
        for package in packages:
            mined = list(_mine_package(package, max_chars, prompts))
            counts[package.name] = len(mined)
            pairs += mined
            if enough(counts):
                break
    finally:
        if collecting:
            gc.enable()
    return pairs


def _mine_package(package: Package, max_chars: int, prompts: set[str]) -> Iterator[Pair]:
    summaries: set[str] = set()
    for shown, file in package.files:
        for name, function, lines in _functions(file):
            summary = clean_summary(ast.get_docstring(function) or "", function.name)
            if summary is None or summary.lower() in summaries:
                continue
            prompt = _prompt(function, lines, max_chars)
            if prompt is None or prompt_key(prompt) in prompts:
                continue
            prompts.add(prompt_key(prompt))
            summaries.add(summary.lower())
            yield Pair(package.name, f"{shown}:{name}", prompt, summary)
            if len(summaries) == MAX_PAIRS_PER_PACKAGE:
                return


def _functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[str]]]:
    """(qualified name, definition, the file's lines) of the documented functions of modules and classes."""
    try:
        raw = file.read_bytes()
        if len(raw) > MAX_FILE_BYTES or b"def " not in raw or (b'"""' not in raw and b"'''" not in raw):
            return
        text = raw.decode("utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning and DeprecationWarning of the mined code
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # a stale RECORD, the syntax of another Python, another encoding
    lines = text.splitlines() if "\f" not in text else text.replace("\f", " ").splitlines()
    owners: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    for prefix, owner in owners:
        for node in owner.body:
            if isinstance(node, ast.ClassDef):
                owners.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
                node, clean=False
            ):
                yield f"{prefix}{node.name}", node, lines


def _prompt(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str], max_chars: int) -> str | None:
    """Signature and body without the docstring, cut by lines; None for a body without content."""
    docstring, *body = function.body
    if not body or docstring.lineno == function.lineno or function.name.startswith("__"):
        return None
    if len(body) == 1 and isinstance(body[0], ast.Pass | ast.Raise):
        return None
    if len(body) == 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        return None  # `...`
    head = lines[function.lineno - 1 : docstring.lineno - 1]
    rest = lines[docstring.end_lineno : function.end_lineno]
    code = textwrap.dedent("\n".join(line.rstrip() for line in [*head, *rest] if line.strip()))
    while len(code) + len(SUFFIX) > max_chars and "\n" in code:
        code = code.rpartition("\n")[0]
    fits = CHARS_PER_PROMPT_MIN <= len(code) <= max_chars - len(SUFFIX)
    shows_body = code.count("\n") >= len(head)  # at least a line of the body is left
    return code + SUFFIX if fits and shows_body and code.isascii() else None


def clean_summary(docstring: str, name: str) -> str | None:
    """The first sentence as one line of plain words, ending in a period; None for another text."""
    paragraph = " ".join(docstring.strip().split("\n\n", 1)[0].split())
    paragraph = re.sub(r":[\w:]+:`~?(?:[^`<]*\.)?([^`<.]+)[^`]*`", r"`\1`", paragraph).replace("``", "`")
    sentence = re.split(r"(?<=[^.]\w|[\w`)\]'\"][`)\]'\"])\.(?:\s|$)|:$", paragraph, maxsplit=1)[0].rstrip(
        " .:"
    )
    words = sentence.split()
    if not WORDS_MIN <= len(words) <= WORDS_MAX or not sentence.isascii() or not sentence[0].isalpha():
        return None
    if _BOILERPLATE.search(sentence) or re.search(r"[|{}\\=<>@#*]|\.\.\.|:[a-z]+:|::|--", sentence):
        return None
    if sentence.count("`") % 2 or sentence.count("(") != sentence.count(")"):
        return None
    words_used = {word.lower() for word in re.findall(r"[A-Za-z]+", sentence)} - _FILLER
    named = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    if all(any(word.startswith(part[:4]) for part in named) for word in words_used):
        return None  # only repeats the name
    return f"{sentence[0].upper()}{sentence[1:]}."


# ---------------------------------------------------------------------------------------- splits


def split_by_package(pairs: Sequence[Pair], seed: int, sizes: Mapping[str, int]) -> dict[str, list[Pair]]:
    """Packages in hashed order fill the splits of `sizes`, one after the other.

    A held-out package has a tenth to a quarter of its split's pairs, so that none dominates, and a judge that
    looks for a function in its package has many to choose from. All others go to train. Pairs beyond the size
    of a split are dropped, not trained on.
    """
    counts = Counter(pair.package for pair in pairs)
    order = sorted(counts, key=lambda package: hash_rank(seed, package))
    split_of: dict[str, str] = {}
    for split, size in sizes.items():
        room = size
        for package in order:
            if room > 0 and package not in split_of and _fits(counts[package], size):
                split_of[package] = split
                room -= counts[package]
        if room > 0:
            raise ValueError(
                f"data.num_{split}={size}, but the installed packages of {size // 10} to {max(size // 4, 1)} "
                f"pairs, of which it is made, give only {size - room}; set another number, or install more "
                "packages"
            )
    parts: dict[str, list[Pair]] = {"train": [], **{split: [] for split in sizes}}
    for pair in pairs:
        parts[split_of.get(pair.package, "train")].append(pair)
    for split, size in sizes.items():
        parts[split] = sorted(parts[split], key=lambda pair: hash_rank(seed, pair.prompt))[:size]
    return parts


def _fits(count: int, size: int) -> bool:
    """Whether a package of `count` pairs may be held out in a split of `size` pairs."""
    return size // 10 <= count <= max(size // 4, 1)
