"""Checks that a model gives the same numbers whichever way it is computed, before it is trained.

PPO samples a token at a time with a cache, and trains on whole padded rows. If the two passes differ, the
ratio is not 1 before the first step, and training follows an error. A model of any family is checked by
these numbers, not by its name. Everything here runs in the precision of the weights, which is float32.

B batch · R response.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_tasks import console
from rlhf_tasks.data import positions
from rlhf_tasks.data.batches import collate
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError
from rlhf_tasks.models.heads import TokenScores
from rlhf_tasks.models.load import is_reward, load_causal, load_reward, num_bytes, place
from rlhf_tasks.models.logprobs import token_stats
from rlhf_tasks.models.lora import merge_adapter
from rlhf_tasks.models.sampling import GPU_CHECK, Samples, sample
from rlhf_tasks.project import disk

TOLERANCE = 5e-3
"""Nats of a token, or score units: what rounding alone may cause. Errors of models are 0.05 and more."""
NUM_PROMPTS, NUM_NEW = 4, 2 * GPU_CHECK
"""Rows of a check, and tokens sampled for each: enough for rows to leave the batch on a GPU too."""
LONGEST = 24
"""Token ids of the longest random query."""
SMALL = 10**8
"""Parameters up to which a check takes a few seconds, and stage ppo writes a copy and reads it back."""
NO_TOKEN = -1


@dataclass(frozen=True)
class CheckResult:
    """One check: the largest difference between two ways to compute the same numbers."""

    name: str
    deviation: float
    """In nats of a token, or score units; infinite if the model could not be computed at all."""
    tolerance: float
    cause: str
    """The likely cause, if the check fails."""

    @property
    def passed(self) -> bool:
        return self.deviation <= self.tolerance

    def __str__(self) -> str:
        if self.deviation == float("inf"):
            return f"{self.name}: {self.cause}"
        return (
            f"{self.name}: off by {self.deviation:.2g}, where rounding allows {self.tolerance:.2g}; likely "
            f"cause: {self.cause}"
        )


class CheckRows(NamedTuple):
    """Queries with responses to them."""

    queries: Sequence[Ids]
    responses: Sequence[Ids]


def require(results: Sequence[CheckResult], subject: str) -> None:
    """Check that every result has passed.

    Raises:
        UserError: with all that have not.
    """
    if failed := "\n".join(f"  {result}" for result in results if not result.passed):
        raise UserError(
            f"{subject} fails the check before training, because the same input gives different numbers:\n"
            f"{failed}\nuse a model of another family (`model.base`, `sft.from` or `reward.from`); "
            "`rlhf check-model FOLDER` repeats this check"
        )


# ----------------------------------------------------------------------------------------- causal LMs


def check_policy(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    *,
    pad: int,
    temperature: float = 1.0,
    num_new: int = NUM_NEW,
    saves: bool = True,
) -> list[CheckResult]:
    """Check a causal LM on queries of mixed lengths; it draws nothing from torch's global generators.

    At most `num_new` tokens are sampled for each. With `saves` a copy is written to a temporary folder and
    read back. A result that failed to be computed is the last.
    """

    def draw(end: int) -> Samples:
        """The same uniform numbers each time, so that a response is the same up to its end."""
        rng, most = torch.Generator(model.device).manual_seed(0), min(num_new, NUM_NEW)
        return sample(
            model, queries, max_new_tokens=most, temperature=temperature, ends=(end,), pad=pad, generator=rng
        )

    def trained(model: PreTrainedModel, responses: Sequence[Ids]) -> list[Tensor]:
        """Each response's log-probs as PPO's epochs compute them: in one padded batch, with gradients."""
        batch = collate(queries, responses, pad).to(model.device)
        with torch.enable_grad():
            logprobs = token_stats(model, batch, temperature).logprobs.detach()
        return list(logprobs[batch.mask].cpu().split([len(r) for r in responses]))

    def results() -> Iterator[CheckResult]:
        samples = draw(NO_TOKEN)
        responses, expected = samples.responses, trained(model, samples.responses)
        again = trained(model, responses)
        cause = "a part of the model is random even in eval mode"
        yield _compare("two training passes agree", expected, again, cause)
        alone = _logprobs_alone(model, queries, responses, temperature)
        cause = "the model ignores its attention mask or its position ids, or other rows change its positions"
        yield _compare("a padded batch and single rows agree", expected, alone, cause)
        cause = "the model's cache does not hold all that it has read"
        yield _compare("sampling and training agree", samples.logprobs, expected, cause)
        # a stop token that ends at least a quarter of the responses early, and not all of them
        heads = [response[: GPU_CHECK - 1] for response in responses]
        ends = {token: sum(token in head for head in heads) for head in heads for token in head}
        end = next((token for token, count in ends.items() if len(heads) / 4 <= count < len(heads)), None)
        if end is not None:
            ended = draw(end)
            shorter = trained(model, ended.responses)
            cause = "the model's cache does not drop the rows that have ended"
            yield _compare("ended rows do not change the others", ended.logprobs, shorter, cause)
        if saves:
            copy, has_same_weights = _save_and_load(model)
            cause = "the model does not write all of its weights"
            deviation = 0.0 if has_same_weights else 1.0
            yield CheckResult("a saved copy has the same weights", deviation, 0.0, cause)
            cause = "the model's config does not hold all of its settings"
            yield _compare("a saved copy agrees", expected, trained(copy, responses), cause)

    return _collect(model, results())


@torch.no_grad()
def _logprobs_alone(
    model: PreTrainedModel, queries: Sequence[Ids], responses: Sequence[Ids], temperature: float
) -> list[Tensor]:
    """Each response's log-probs from the model's plain logits: one row, no padding, no mask, no positions."""
    logprobs = []
    for query, response in zip(queries, responses, strict=True):
        ids = torch.tensor([query + response], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(query) - 1 : -1].float()
        log_p = (logits / temperature).log_softmax(-1)
        logprobs.append(log_p.gather(1, ids[0, len(query) :, None]).squeeze(1).cpu())
    return logprobs


def _save_and_load(model: PreTrainedModel) -> tuple[PreTrainedModel, bool]:
    """A copy that was written and read back, and whether it has the same weights, bit for bit."""
    merged = merge_adapter(model)
    own = merged.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        with disk.room(Path(folder), lambda: num_bytes(merged)):
            merged.save_pretrained(folder)
        copy = load_causal(Path(folder))
        read = copy.state_dict()
        same = own.keys() == read.keys() and all(torch.equal(own[k].cpu(), read[k]) for k in own)
        return place(copy, model.device), same


# --------------------------------------------------------------------------------------- reward models


def check_scores(scores: TokenScores, rows: CheckRows, *, pad: int) -> list[CheckResult]:
    """Check a reward or value model: the scores of a padded batch are those of each row alone."""

    @torch.no_grad()
    def results() -> Iterator[CheckResult]:
        device = scores.model.device
        padded = scores(collate(*rows, pad).to(device))  # (B, R + 1)
        alone = [scores(collate([q], [r], pad).to(device))[0].cpu() for q, r in zip(*rows, strict=True)]
        own = [row[-len(one) :].cpu() for row, one in zip(padded, alone, strict=True)]
        size = max(1.0, *(float(one.abs().max()) for one in alone))
        name = "scores of a padded batch and of single rows agree"
        cause = "the reward model ignores its attention mask or its position ids"
        yield _compare(name, own, alone, cause, size * TOLERANCE)

    return _collect(scores.model, results())


# -------------------------------------------------------------------------------------- whole sources


def check_source(source: str, revision: str | None = None) -> list[CheckResult]:
    """Check the model of a folder or the hub: a causal LM, or a reward model by its scores.

    Raises:
        ContractError: if it cannot be read.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if is_reward(source, revision):
        scores = load_reward(source, revision).to(device)
        return check_scores(scores, random_rows(scores.model.config), pad=0)
    model = place(load_causal(source, revision), device)
    rows = random_rows(model.config)
    return check_policy(model, rows.queries, pad=0, num_new=_lengths(model.config)[1])


def pick_prompts(queries: Sequence[Ids]) -> list[Ids]:
    """A few of them, from the shortest to the longest."""
    lengths = [len(query) for query in queries]
    order = sorted(range(len(queries)), key=lengths.__getitem__)
    return [queries[order[round(i * (len(order) - 1) / (NUM_PROMPTS - 1))]] for i in range(NUM_PROMPTS)]


def random_rows(config: PretrainedConfig) -> CheckRows:
    """Rows of token ids, drawn with a fixed seed, that fit the positions and tokens of a model."""
    vocab_size = int(config.get_text_config(decoder=True).vocab_size)
    longest, num_new = _lengths(config)
    rng, queries = torch.Generator().manual_seed(0), list[Ids]()
    for part in range(1, NUM_PROMPTS + 1):
        size = (max(1, longest * part // NUM_PROMPTS),)
        queries.append(torch.randint(min(3, vocab_size - 1), vocab_size, size, generator=rng).tolist())
    return add_responses(queries, num_new)


def add_responses(queries: Sequence[Ids], num_new: int = NUM_NEW) -> CheckRows:
    """Queries with parts of themselves as responses, of mixed lengths, so that a batch of them is padded."""
    step = max(1, min(num_new, NUM_NEW) // NUM_PROMPTS)
    return CheckRows(queries, [query[: step * number] for number, query in enumerate(queries, start=1)])


def _lengths(config: PretrainedConfig) -> tuple[int, int]:
    """The longest query and the number of new tokens, so that both together fit a model of few positions."""
    most = LONGEST + NUM_NEW
    total = min(most, positions.max_positions(config) or most)
    longest = max(1, total * LONGEST // most)
    return longest, max(1, total - longest)


def _collect(model: PreTrainedModel, results: Iterator[CheckResult]) -> list[CheckResult]:
    """The results; a model that cannot be computed in one of these ways ends them with a failed one."""
    name = type(model).__name__
    found: list[CheckResult] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), console.part(f"checking {name}"):
        try:
            found.extend(results)
        except (torch.OutOfMemoryError, disk.DiskFullError):  # of the machine, not of the model
            raise
        except Exception as error:  # a family can raise anything: its name and words are the message
            words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            found.append(CheckResult(f"{name} could not be computed", float("inf"), 0.0, words))
    return found


def _compare(
    name: str, first: Sequence[Tensor], second: Sequence[Tensor], cause: str, tolerance: float = TOLERANCE
) -> CheckResult:
    """The largest absolute difference; NaN, which passes no check, where a number is NaN."""
    difference = torch.stack([(a - b).abs().max() for a, b in zip(first, second, strict=True)]).max()
    return CheckResult(name, float(difference), tolerance, cause)
