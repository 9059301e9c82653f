"""Which architectures PPO can train: `python -m benchmarks.architectures [FAMILY …]`.

It makes a tiny random model of every family of the installed transformers that has a causal LM, runs the
check of stage ppo on it, without and with LoRA, and prints the tables of docs/results/architectures.md. Each
family has a process of its own, and a minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_tasks.config import Lora
from rlhf_tasks.data import positions
from rlhf_tasks.data.batches import collate
from rlhf_tasks.models import checks
from rlhf_tasks.models.checks import CheckResult
from rlhf_tasks.models.load import add_score_head
from rlhf_tasks.models.logprobs import token_stats
from rlhf_tasks.models.lora import add_lora
from tests import families

SECONDS = 60
RIGHT, NOTED, REFUSED, UNTRIED = "right", "right with a note", "refused", "not tried"


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
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="default: all")
    given = parser.parse_args(arguments).families
    outcome("granite")  # imports here, once, what a save and a missing classifier import
    outcomes = []
    for family in given or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        outcomes.append(tried(family))
        print(*outcomes[-1], sep=" | ", flush=True)
    print(f"\ntransformers {transformers.__version__}, tolerance {checks.TOLERANCE:g}")
    for kind in (RIGHT, NOTED, REFUSED, UNTRIED):
        own = [one for one in outcomes if one.kind == kind]
        print(f"\n## {kind.capitalize()}: {len(own)}\n")
        if kind == RIGHT:
            print(", ".join(f"{one.family} ({one.deviation:.0e})" for one in own) + ".")
        else:
            print("| Family | Note |", "|---|---|", sep="\n")
            print(*(f"| {one.family} | {one.note.replace('|', '/')} |" for one in own), sep="\n")


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
    queries, notes = checks.random_rows(model.config).queries, list[str]()
    results = checks.check_policy(model, queries, pad=0)
    failed = [result for result in results if not result.passed]
    own = model.config.get_text_config(decoder=True)
    limits = [name for name in positions.BATCH_SETTINGS if getattr(own, name, None) is not None]
    if failed and limits:
        notes.append(f"rows longer than its {', '.join(limits)} are refused, where {_brief(failed[0])}")
        model = families.causal(family, **dict.fromkeys(limits, checks.LONGEST + checks.NUM_NEW))
        results = checks.check_policy(model, queries, pad=0)
        failed = [result for result in results if not result.passed]
    if failed:
        return Outcome(family, REFUSED, _largest(results), _brief(failed[0]))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            scores = add_score_head(Path(folder), torch.Generator().manual_seed(1))
        except Exception as error:  # the same here
            note = f"no reward model of it, and no separate critic: {_first_line(error)}"
            return Outcome(family, NOTED, _largest(results), note)
    of_scores = checks.check_scores(scores, checks.random_rows(scores.model.config), pad=0)
    wrong = [result for result in of_scores if not result.passed]
    if wrong:
        return Outcome(family, NOTED, _largest(results), f"as a reward model: {_brief(wrong[0])}")
    if fault := _wrong_with_lora(model):
        notes.append(fault)
    return Outcome(family, NOTED if notes else RIGHT, _largest(results), "; ".join(notes))


def _wrong_with_lora(model: PreTrainedModel) -> str:
    """What is wrong with adapters that are not zero: whether each learns, and all checks, merged too."""
    rows = checks.random_rows(model.config)
    try:
        add_lora(model, Lora(r=3, alpha=3.0), seed=1)
        adapters = {name: w for name, w in model.named_parameters() if "lora_B" in name}
        for number, weight in enumerate(adapters.values()):
            weight.data.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(number))
        token_stats(model, collate(rows.queries, rows.responses, 0)).logprobs.sum().backward()
    except Exception as error:
        return f"no LoRA: {_first_line(error)}"
    if idle := [name for name, weight in adapters.items() if weight.grad is None]:
        return f"with LoRA: {len(idle)} adapters do not learn, such as {idle[0]}"
    results = checks.check_policy(model, rows.queries, pad=0)
    wrong = [result for result in results if not result.passed]
    return f"with LoRA: {_brief(wrong[0])}" if wrong else ""


def _largest(results: Sequence[CheckResult]) -> float | None:
    finite = [result.deviation for result in results if result.deviation < float("inf")]
    return max(finite, default=None)


def _brief(result: CheckResult) -> str:
    if result.deviation == float("inf"):
        return result.cause[:160]
    return f"{result.name}: off by {result.deviation:.2g}"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:120]


if __name__ == "__main__":
    main()
