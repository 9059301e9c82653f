"""Checks that a model answers the same whichever way it is computed, before it is trained.

PPO samples a token at a time with a cache, and trains on whole padded rows. If the two passes differ, the
ratio is not 1 before the first step, and training follows an error. A model of any family is checked by
these numbers, not by its name. Everything here runs in the precision of the weights, which is float32.

B batch · Q query · R response.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rlhf_tasks.data.batches import Batch, Ids, collate
from rlhf_tasks.modeling.classifiers import SUFFIX
from rlhf_tasks.modeling.contracts import ContractError
from rlhf_tasks.modeling.generation import GPU_CHECK, Samples, sample
from rlhf_tasks.modeling.logprobs import token_stats
from rlhf_tasks.modeling.models import TokenScores, load_causal, load_reward, merged, place
from rlhf_tasks.modeling.positions import ModelFault
from rlhf_tasks.project import disk

TOLERANCE = {torch.float32: 5e-3}
"""Nats of a token, or score units: what rounding alone may cause. Errors of models are 0.05 and more."""
COARSE = 0.25
"""The same for weights of 16 bits."""
NUM_PROMPTS, NUM_NEW = 4, 2 * GPU_CHECK
"""Rows of a check, and tokens sampled for each: enough for rows to leave the batch on a GPU too."""
LONGEST = 24
"""Token ids of the longest random query."""
SMALL = 10**8
"""Parameters up to which stage ppo writes a copy and reads it back, in about a second."""
NO_TOKEN = -1


@dataclass(frozen=True)
class Result:
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


class Rows(NamedTuple):
    """Queries with responses to them."""

    queries: Sequence[Ids]
    responses: Sequence[Ids]


# ----------------------------------------------------------------------------------------- causal LMs


def check_policy(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    *,
    pad: int,
    temperature: float = 1.0,
    num_new: int = NUM_NEW,
    saves: bool = True,
) -> list[Result]:
    """Check a causal LM on queries of mixed lengths; it draws nothing from torch's global generators.

    At most `num_new` tokens are sampled for each. With `saves` a copy is written to a temporary folder and
    read back. A result that failed to be computed is the last.
    """
    sampler = _Sampler(model, queries, pad, temperature, min(num_new, NUM_NEW))
    return _until_failure(model, _policy_results(model, queries, sampler, saves))


class _Sampler(NamedTuple):
    """Samples with the same uniform numbers each time, so that a response is the same up to its end."""

    model: PreTrainedModel
    queries: Sequence[Ids]
    pad: int
    temperature: float
    num_new: int

    def __call__(self, stop: int) -> Samples:
        return sample(
            self.model, self.queries, max_new_tokens=self.num_new, temperature=self.temperature, stop=stop,
            pad=self.pad, generator=torch.Generator(self.model.device).manual_seed(0),
        )  # fmt: skip


def _policy_results(
    model: PreTrainedModel, queries: Sequence[Ids], sampler: _Sampler, saves: bool
) -> Iterator[Result]:
    limit, pad, temperature = _tolerance(model), sampler.pad, sampler.temperature
    samples = sampler(NO_TOKEN)
    rows = Rows(queries, samples.responses)
    trained = _trained(model, rows, pad, temperature)
    yield Result(
        "two training passes agree", _difference(trained, _trained(model, rows, pad, temperature)), limit,
        "a part of the model is random even in eval mode",
    )  # fmt: skip
    yield Result(
        "a padded batch and single rows agree", _difference(trained, _alone(model, rows, temperature)),
        limit, "the model ignores its attention mask or its position ids, or other rows change its positions",
    )  # fmt: skip
    yield Result(
        "sampling and training agree", _difference(samples.logprobs, trained), limit,
        "the model's cache does not hold all that it has read",
    )  # fmt: skip
    stop = _splitting_token(samples.responses)
    if stop is not None:
        rest = sampler(stop)
        rows = Rows(queries, rest.responses)
        yield Result(
            "ended rows do not change the others",
            _difference(rest.logprobs, _trained(model, rows, pad, temperature)), limit,
            "the model's cache does not drop the rows that have ended",
        )  # fmt: skip
    if saves:
        yield Result(
            "a saved copy has the same logits", _after_saving(model, rows, pad), 0.0,
            "the model does not write all of its weights, or reads them otherwise",
        )  # fmt: skip


def _splitting_token(responses: Sequence[Ids]) -> int | None:
    """A token that, as the stop token, ends at least a quarter of the responses early and not all of them."""
    for token in [token for response in responses for token in response[: GPU_CHECK - 1]]:
        early = sum(token in response[: GPU_CHECK - 1] for response in responses)
        if len(responses) / 4 <= early < len(responses):
            return token
    return None


def _trained(model: PreTrainedModel, rows: Rows, pad: int, temperature: float) -> list[Tensor]:
    """Each response's log-probs as the optimiser computes them: in one padded batch, with gradients."""
    batch = collate(rows.queries, rows.responses, pad).to(model.device)
    with torch.enable_grad():
        found = token_stats(model, batch, temperature).logprobs.detach()
    return _split(found, rows)


@torch.no_grad()
def _alone(model: PreTrainedModel, rows: Rows, temperature: float) -> list[Tensor]:
    """Each response's log-probs from the model's plain logits: one row, no padding, no mask, no positions."""
    found = []
    for query, response in zip(*rows, strict=True):
        ids = torch.tensor([query + response], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, len(query) - 1 : -1].float()
        log_p = (logits / temperature).log_softmax(-1)
        found.append(log_p.gather(1, ids[0, len(query) :, None]).squeeze(1).cpu())
    return found


@torch.no_grad()
def _after_saving(model: PreTrainedModel, rows: Rows, pad: int) -> float:
    batch = collate(rows.queries, rows.responses, pad).to(model.device)
    with tempfile.TemporaryDirectory() as folder:
        needed = sum(p.numel() * p.element_size() for p in model.parameters())
        with disk.room(Path(folder), lambda: needed):
            merged(model).save_pretrained(folder)
        copy = load_causal(Path(folder))
        nn.Module.to(copy, model.device)
        return _difference([_logits(model, batch)], [_logits(copy, batch)])


def _logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    logits: Tensor = model(
        input_ids=batch.query_response, attention_mask=batch.attention_mask, position_ids=batch.position_ids,
        use_cache=False,
    ).logits[batch.attention_mask.bool()]  # fmt: skip
    return logits.cpu()


# --------------------------------------------------------------------------------------- reward models


def check_scores(scores: TokenScores, rows: Rows, *, pad: int) -> list[Result]:
    """Check a reward or value model: the scores of a padded batch are those of each row alone."""
    return _until_failure(scores.model, _score_results(scores, rows, pad))


@torch.no_grad()
def _score_results(scores: TokenScores, rows: Rows, pad: int) -> Iterator[Result]:
    device = scores.model.device
    padded = scores(collate(*rows, pad).to(device))
    alone = [scores(collate([q], [r], pad).to(device))[0].cpu() for q, r in zip(*rows, strict=True)]
    own = [row[-len(one) :].cpu() for row, one in zip(padded, alone, strict=True)]
    size = max(1.0, *(float(one.abs().max()) for one in alone))
    yield Result(
        "scores of a padded batch and of single rows agree", _difference(own, alone),
        size * _tolerance(scores.model),
        "the reward model ignores its attention mask or its position ids",
    )  # fmt: skip


# -------------------------------------------------------------------------------------- whole sources


def check_source(source: str, revision: str | None = None) -> list[Result]:
    """Check the model of a folder or the hub: a causal LM, or a reward model by its scores.

    Raises:
        ContractError: if it cannot be read.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if _is_classifier(config_of(source, revision)):
        scores = load_reward(source, revision).to(device)
        return check_scores(scores, rows_for(scores.model), pad=0)
    model = place(load_causal(source, revision), device)
    longest, num_new = _lengths(model.config)
    return check_policy(model, random_rows(_vocabulary(model), longest).queries, pad=0, num_new=num_new)


def config_of(source: str, revision: str | None) -> PretrainedConfig:
    """The config of a folder or the hub."""
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise ContractError(f"cannot load a model from {source}: {str(error).splitlines()[0]}") from error
    return found


def _is_classifier(config: PretrainedConfig) -> bool:
    heads = ("ForSequenceClassification", SUFFIX)
    return any(name.endswith(heads) for name in config.architectures or ())


def _lengths(config: PretrainedConfig) -> tuple[int, int]:
    """The longest query and the number of new tokens, so that both together fit a model of few positions."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    whole = min(LONGEST + NUM_NEW, positions or LONGEST + NUM_NEW)
    longest = max(1, whole * LONGEST // (LONGEST + NUM_NEW))
    return longest, max(1, whole - longest)


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


# --------------------------------------------------------------------------------------------- shared


def require(results: Sequence[Result], subject: str) -> None:
    """Check that every result has passed.

    Raises:
        ModelFault: with all that have not.
    """
    failed = [str(result) for result in results if not result.passed]
    if failed:
        lines = "\n".join(f"  {line}" for line in failed)
        raise ModelFault(
            f"{subject} fails the check before training, because the same input gives different numbers:\n"
            f"{lines}\nuse a model of another family (`model.base`, `sft.from` or `reward.from`); "
            "`rlhf check-model FOLDER` repeats this check"
        )


def prompts_of_mixed_lengths(queries: Sequence[Ids]) -> list[Ids]:
    """A few of them, from the shortest to the longest."""
    order = sorted(queries, key=len)
    last = len(order) - 1
    places = [round(i * last / (NUM_PROMPTS - 1)) for i in range(NUM_PROMPTS)]
    return [order[place] for place in places]


def random_rows(vocab_size: int, longest: int = LONGEST, num_new: int = NUM_NEW) -> Rows:
    """Queries of up to `longest` token ids, drawn with a fixed seed, and responses of up to `num_new`."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> Ids:
        return torch.randint(min(3, vocab_size - 1), vocab_size, (length,), generator=generator).tolist()

    queries = [ids(max(1, longest * part // NUM_PROMPTS)) for part in range(1, NUM_PROMPTS + 1)]
    return rows_of(queries, num_new)


def rows_for(model: PreTrainedModel) -> Rows:
    """Random rows that a model can read, however few positions and tokens it has."""
    return random_rows(_vocabulary(model), *_lengths(model.config))


def rows_of(queries: Sequence[Ids], num_new: int = NUM_NEW) -> Rows:
    """Queries with parts of themselves as responses, of mixed lengths, so that a batch of them is padded."""
    step = max(1, min(num_new, NUM_NEW) // NUM_PROMPTS)
    return Rows(queries, [query[: step * number] for number, query in enumerate(queries, start=1)])


def _until_failure(model: PreTrainedModel, results: Iterator[Result]) -> list[Result]:
    """The results; a model that cannot be computed in one of these ways ends them with a failed one."""
    found: list[Result] = []
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            found.extend(results)
        except (torch.OutOfMemoryError, disk.DiskFullError):  # of the machine, not of the model
            raise
        except Exception as error:  # a family can raise anything: its name and words are the message
            words = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            family = type(model).__name__
            found.append(Result(f"{family} could not be computed", float("inf"), 0.0, words))
    return found


def _tolerance(model: PreTrainedModel) -> float:
    return TOLERANCE.get(model.dtype, COARSE)


def _split(padded: Tensor, rows: Rows) -> list[Tensor]:
    return [row[-len(r) :].cpu() for row, r in zip(padded, rows.responses, strict=True)]


def _difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """The largest absolute difference; NaN, which passes no check, where a number is NaN."""
    return float(torch.stack([(a - b).abs().max() for a, b in zip(first, second, strict=True)]).max())
