"""Which architectures PPO can train: `python -m benchmarks.architectures [FAMILY …]`.

It makes a tiny random model of every family of the installed transformers that has a causal LM, runs the
check of stage ppo on it, and writes docs/results/architectures.md. With families it only prints them. Each
family has a process of its own, and a minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_tasks.models import checks
from rlhf_tasks.models.checks import Result
from rlhf_tasks.models.load import TokenScores
from tests import families

PAGE = Path(__file__).parents[1] / "docs/results/architectures.md"
SECONDS = 60
RIGHT, NOTED, REFUSED, UNTRIED = "right", "right with a note", "refused", "not tried"
MEANINGS: Mapping[str, str] = {
    RIGHT: "policy, reward model and separate critic pass every check",
    NOTED: "the policy passes every check; read the note",
    REFUSED: "stage ppo ends with this message before it trains",
    UNTRIED: "no tiny model of it could be made here; stage ppo checks the real one",
}


class Outcome(NamedTuple):
    family: str
    kind: str
    deviation: float | None = None
    """The largest difference in nats of a token."""
    note: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="only print these")
    given = parser.parse_args(arguments).families
    outcome("granite")  # imports here, once, what a save and a missing classifier import
    outcomes = []
    for family in given or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        outcomes.append(tried(family))
        print(*outcomes[-1], sep=" | ", flush=True)
    if not given:
        PAGE.write_text(page(outcomes), encoding="utf-8")


def tried(family: str, seconds: float = SECONDS) -> Outcome:
    """The outcome on a family, by a process of its own: a crash or an endless loop ends only that one."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(family, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(seconds):
            found: Outcome = receiving.recv()
            return found
        return Outcome(family, UNTRIED, note=f"took longer than {seconds:.0f} seconds")
    except EOFError:
        return Outcome(family, UNTRIED, note="the process crashed")
    finally:
        process.kill()
        process.join()


def _send(family: str, sending: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sending.send(outcome(family))


def outcome(family: str) -> Outcome:
    """Check a tiny random model of the family in this process."""
    text = CONFIG_MAPPING[family].sub_configs.get("text_config")
    if text is not None:
        inner = getattr(text, "model_type", "")
        note = f"see {inner}" if inner in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else "takes images or sound too"
        return Outcome(family, UNTRIED, note=note)
    try:
        model = families.causal(family)
    except Exception as error:  # a family can refuse its small config in any way
        return Outcome(family, UNTRIED, note=_first_line(error))
    results = checks.check_policy(model, checks.random_rows(model.config).queries, pad=0)
    failed = [result for result in results if not result.passed]
    if failed:
        return Outcome(family, REFUSED, _largest(results), _brief(failed[0]))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            scores = TokenScores.from_policy(Path(folder), torch.Generator().manual_seed(1))
        except Exception as error:  # the same here
            note = f"no reward model of it, and no separate critic: {_first_line(error)}"
            return Outcome(family, NOTED, _largest(results), note)
    of_scores = checks.check_scores(scores, checks.random_rows(scores.model.config), pad=0)
    wrong = [result for result in of_scores if not result.passed]
    if wrong:
        return Outcome(family, NOTED, _largest(results), f"as a reward model: {_brief(wrong[0])}")
    return Outcome(family, RIGHT, _largest(results))


def _largest(results: Sequence[Result]) -> float | None:
    finite = [result.deviation for result in results if result.deviation < float("inf")]
    return max(finite, default=None)


def _brief(result: Result) -> str:
    if result.deviation == float("inf"):
        return result.cause[:160]
    return f"{result.name}: off by {result.deviation:.2g}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:120]


def page(outcomes: Sequence[Outcome]) -> str:
    """The page of the documentation."""
    counts = {kind: sum(v.kind == kind for v in outcomes) for kind in MEANINGS}
    lines = [
        "# Which architectures PPO can train", "",
        "```sh", "python -m benchmarks.architectures", "```", "",
        "Stage ppo checks a model before it trains it "
        "([what it compares](../explanation/ppo.md#what-is-checked-before-training)). This page shows the",
        f"result for a tiny random model of every family of transformers {transformers.__version__} that has "
        "a causal LM. A family passes if",
        f"no log-probability differs by more than {checks.TOLERANCE:g} in float32. Your own "
        "model may differ, so run `rlhf check-model FOLDER`.", "",
        "| Result | Families | Meaning |", "|---|---|---|",
        *(f"| {kind} | {counts[kind]} | {meaning} |" for kind, meaning in MEANINGS.items()),
    ]  # fmt: skip
    for kind in MEANINGS:
        rows = [v for v in outcomes if v.kind == kind]
        lines += ["", f"## {kind.capitalize()}", ""]
        if kind == RIGHT:
            lines += [", ".join(f"{v.family} ({v.deviation:.0e})" for v in rows) + ".", ""]
            lines += ["In brackets: the largest difference of a log-probability, in nats."]
            continue
        lines += ["| Family | Note |", "|---|---|"]
        lines += [f"| {v.family} | {v.note.replace('|', '/')} |" for v in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
