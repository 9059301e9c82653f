"""Pure sampling that keeps the log-probs; used by PPO, the judge and `rlhf generate`.

There is no top-k, top-p, minimum length or repetition penalty. With them the responses would not be
samples of the distribution that the log-probs describe, and the KL estimate would turn negative.

B batch · Q query · R response · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.data.batches import Ids, collate, encode, load_tokenizer, text_of
from rlhf_tasks.modeling.models import load_causal, place
from rlhf_tasks.modeling.tensors import NonFiniteError


@dataclass(frozen=True)
class Samples:
    """Responses cut after the stop token, and the log-prob of each of their tokens under the sampler."""

    responses: list[Ids]
    logprobs: list[Tensor]
    """One (length,) float32 tensor per response."""


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    queries: Sequence[Ids],
    *,
    max_new_tokens: int,
    temperature: float,
    stop: int,
    pad: int,
    generator: torch.Generator,
) -> Samples:
    """Sample one response to each query from softmax(logits / temperature).

    A row ends when it draws `stop`, which is kept as its last token, or reaches `max_new_tokens`.

    Raises:
        NonFiniteError: if the model's logits are NaN or infinite.
    """
    batch = collate(queries, [[] for _ in queries], pad).to(model.device)
    ids, mask, positions = batch.query_response, batch.attention_mask, batch.position_ids
    cache = DynamicCache(config=model.config)
    rows = torch.arange(len(queries), device=model.device)
    tokens = torch.full((len(queries), max_new_tokens), pad, device=model.device)
    logprobs = torch.zeros((len(queries), max_new_tokens), device=model.device)
    lengths = torch.full((len(queries),), max_new_tokens, device=model.device)
    for t in range(max_new_tokens):
        out = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        )  # fmt: skip
        log_p = (out.logits[:, -1].float() / temperature).log_softmax(-1)
        if bool(log_p.isnan().any()):
            raise NonFiniteError("the model's logits are NaN or infinite")
        drawn = torch.multinomial(log_p.exp(), 1, generator=generator)
        tokens[rows, t] = drawn.squeeze(1)
        logprobs[rows, t] = log_p.gather(1, drawn).squeeze(1)
        stopped = drawn.squeeze(1) == stop
        lengths[rows[stopped]] = t + 1
        alive = (~stopped).nonzero().squeeze(1)
        if len(alive) == 0:
            break
        if len(alive) < len(rows):
            rows, drawn, mask, positions = rows[alive], drawn[alive], mask[alive], positions[alive]
            cache.batch_select_indices(alive)
        ids = drawn
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        positions = positions[:, -1:] + 1
    counts = lengths.tolist()
    return Samples(
        responses=[row[:n] for row, n in zip(tokens.tolist(), counts, strict=True)],
        logprobs=[row[:n] for row, n in zip(logprobs.cpu(), counts, strict=True)],
    )


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop: int | None = None,
    batch_size: int = 256,
) -> list[Ids]:
    """Sample one response to each prompt, in the prompts' order; `seed` decides all draws.

    A response ends with its stop token, or at `max_new_tokens` without it. `stop` is by default the token
    that the checkpoint's generation config names, else EOS. Prompts of similar length share a batch, so
    that little is padded.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    queries = encode(tokenizer, prompts)
    order = sorted(range(len(queries)), key=lambda i: (len(queries[i]), i))
    responses: list[Ids] = [[] for _ in queries]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        samples = sample(
            model, [queries[i] for i in rows], max_new_tokens=max_new_tokens, temperature=temperature,
            stop=stop_of(model, tokenizer) if stop is None else stop, pad=tokenizer.pad_token_id,
            generator=generator,
        )  # fmt: skip
        for i, response in zip(rows, samples.responses, strict=True):
            responses[i] = response
    return responses


def stop_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends this model's responses."""
    config = model.generation_config
    named = None if config is None else config.eos_token_id
    return named if isinstance(named, int) else int(tokenizer.eos_token_id)


def respond(
    model_path: Path,
    prompts: list[str],
    *,
    temperature: float,
    max_new_tokens: int,
    num_samples: int,
    seed: int,
) -> list[list[str]]:
    """Sample `num_samples` texts from a checkpoint for each prompt."""
    model = load_causal(model_path).eval()
    if torch.cuda.is_available():
        model = place(model, torch.device("cuda"))
    tokenizer = load_tokenizer(model_path)
    repeated = [p for p in prompts for _ in range(num_samples)]
    responses = answer(
        model, tokenizer, repeated, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )  # fmt: skip
    texts = [text_of(tokenizer, response) for response in responses]
    return [texts[i : i + num_samples] for i in range(0, len(texts), num_samples)]
