"""Comparisons by models of this machine: a language model asked in words, or a ranker.

B batch · T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config.judge import LISTED, LocalJudge, PairRmJudge
from rlhf_tasks.data.batches import Batch, Ids, collate, load_tokenizer, micro_batches
from rlhf_tasks.errors import UserError
from rlhf_tasks.evaluation.judges import prompts
from rlhf_tasks.evaluation.judges.comparing import Question, Reply
from rlhf_tasks.evaluation.judges.prompts import LETTERS
from rlhf_tasks.modeling import models


class Local:
    """A `Comparer`: the prompt as one message of the user, through the chat template if there is one.

    The verdict is the probability that the next token is A, over that of A or B, with or without a space
    before; nothing is sampled.
    """

    def __init__(self, settings: LocalJudge, device: torch.device, key: str = LISTED) -> None:
        self._name, self._max_tokens = settings.name, settings.micro_batch_tokens
        self._prompt = prompts.load(settings.prompt, key)
        folder = models.local_tokenizer(settings.path, settings.revision)
        self._tokenizer = load_tokenizer(folder)
        self._model = models.place(models.load_causal(settings.path, settings.revision), device).eval()
        self._letters = [_single_tokens(self._tokenizer, letter) for letter in LETTERS]
        if not all(self._letters) or self._letters[0] == self._letters[1]:
            raise UserError(
                f"judge {settings.name}: the tokenizer of {settings.path} has no tokens A and B, so that it "
                "cannot give a verdict"
            )

    def __call__(self, questions: Sequence[Question], max_failures: float) -> list[Reply]:
        ids = [self._ids(prompts.filled(self._prompt, question)) for question in questions]
        longest = num_readable(self._model, self._tokenizer)
        return _judged(ids, longest, self._model, self._max_tokens, self._batch, self._probabilities)

    def _batch(self, ids: Sequence[Ids]) -> Batch:
        """Padded on the left: the last column is what the verdict follows."""
        return collate(ids, [[] for _ in ids], self._tokenizer.pad_token_id)

    def _ids(self, text: str) -> Ids:
        if self._tokenizer.chat_template is None:
            found: Ids = self._tokenizer(text)["input_ids"]
            return found
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        templated: Ids = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return templated

    def _probabilities(self, batch: Batch) -> Tensor:
        """(B,) probability of A."""
        out = self._model(
            input_ids=batch.query_response, attention_mask=batch.attention_mask,
            position_ids=batch.position_ids, use_cache=False, logits_to_keep=1,
        )  # fmt: skip
        logits = out.logits[:, -1].float()
        a, b = (logits[:, tokens].logsumexp(dim=1) for tokens in self._letters)
        probability: Tensor = (a - b).sigmoid()
        return probability


class Ranker:
    """A `Comparer`: a sequence classifier that reads prompt and answers as one text.

    With one label, its logit is that of the first answer being better; with two, label 0 stands for the
    first. A ranker that needs code of its own (llm-blender's PairRM) is not of this kind.
    """

    def __init__(self, settings: PairRmJudge, device: torch.device, key: str = LISTED) -> None:
        self._max_tokens, self._prompt = settings.micro_batch_tokens, prompts.load(settings.prompt, key)
        self._tokenizer = load_tokenizer(models.local_tokenizer(settings.path, settings.revision))
        model = models.load_classifier(settings.path, settings.revision)
        if model.config.num_labels not in (1, 2):
            raise UserError(
                f"judge {settings.name}: {settings.path} has {model.config.num_labels} labels; a ranker has "
                "one (the first answer is better) or two (the first, the second)"
            )
        # decoders that classify find a row's last token by its pad token
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = models.place(model, device).eval()

    def __call__(self, questions: Sequence[Question], max_failures: float) -> list[Reply]:
        texts = [prompts.filled(self._prompt, question) for question in questions]
        ids: list[Ids] = self._tokenizer(texts)["input_ids"]
        longest = num_readable(self._model, self._tokenizer)
        return _judged(ids, longest, self._model, self._max_tokens, self._batch, self._probabilities)

    def _batch(self, ids: Sequence[Ids]) -> Batch:
        """Padded on the right, as encoders are trained."""
        return collate([[] for _ in ids], ids, self._tokenizer.pad_token_id)

    def _probabilities(self, batch: Batch) -> Tensor:
        """(B,) probability that the first answer is better."""
        logits = self._model(
            input_ids=batch.query_response, attention_mask=batch.attention_mask
        ).logits.float()
        lead: Tensor = logits[:, 0] if logits.shape[1] == 1 else logits[:, 0] - logits[:, 1]
        return lead.sigmoid()


def _single_tokens(tokenizer: PreTrainedTokenizerBase, letter: str) -> Ids:
    """The tokens that are this letter, with or without a space before it."""
    found = {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (letter, f" {letter}")}
    return sorted({ids[0] for ids in found if len(ids) == 1 and ids[0] != tokenizer.unk_token_id})


def num_readable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """Tokens of the longest text that a model can read; infinite where nothing says so.

    A table of positions with a padding index, as RoBERTa's, counts from behind that index: of 514 rows it
    has 512 for tokens. A tokenizer may know of a lower limit; one that knows none gives a huge number.
    """
    declared = getattr(model.config, "max_position_embeddings", None)
    limits = [math.inf if declared is None else declared, tokenizer.model_max_length]
    for name, module in model.named_modules():
        is_table = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if is_table and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits)


@torch.no_grad()
def _judged(
    ids: Sequence[Ids],
    longest: float,
    model: PreTrainedModel,
    max_tokens: int,
    batched: Callable[[Sequence[Ids]], Batch],
    probabilities: Callable[[Batch], Tensor],
) -> list[Reply]:
    fits = [i for i, row in enumerate(ids) if len(row) <= longest]
    replies = [Reply.failed(f"longer than the judge's {longest} tokens") for _ in ids]
    device = next(model.parameters()).device
    for rows in micro_batches([(0, len(ids[i])) for i in fits], max_tokens):
        chosen = [fits[row] for row in rows]
        found = probabilities(batched([ids[i] for i in chosen]).to(device)).tolist()
        for i, p in zip(chosen, found, strict=True):
            replies[i] = Reply(p, "the judge's logits are NaN" if math.isnan(p) else "", len(ids[i]))
    return replies
