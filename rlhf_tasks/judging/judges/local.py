"""Judges that are models on this machine: a language model that reads a question, or a ranker.

B batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_tasks.config.judge import LISTED, LocalModel
from rlhf_tasks.data.batches import collate, load_tokenizer, micro_batches
from rlhf_tasks.data.chat import template
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.tokenizer import Ids
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import LETTERS, Question, Reply, fill_prompt, load_prompt
from rlhf_tasks.models.load import fetch_tokenizer, load_causal, load_classifier, place


class ModelComparer(ABC):
    """A `Comparer` that gives the prompt of each question to a model; paths are below `root`.

    Raises:
        UserError: if the prompt cannot be read, or the model cannot compare.
        ContractError: if the model cannot be read.
    """

    load: Callable[[str, str | None], PreTrainedModel]

    def __init__(self, settings: LocalModel, device: torch.device, root: Path, key: str = LISTED) -> None:
        self._settings, self._prompt = settings, load_prompt(settings.prompt, key, root)
        # Only a hub id has a revision.
        source = settings.path if settings.revision is not None else str(root / settings.path)
        self._tokenizer = load_tokenizer(fetch_tokenizer(source, settings.revision))
        self._model = place(self.load(source, settings.revision), device).eval()
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raise UserError for a model that cannot compare."""

    def _ids(self, text: str) -> Ids:
        """The tokens of a filled prompt."""
        ids: Ids = self._tokenizer(text)["input_ids"]
        return ids

    @abstractmethod
    def _probabilities(self, ids: Sequence[Ids]) -> Tensor:
        """(B,) probability that the response shown first is better."""

    @torch.no_grad()
    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        ids = [self._ids(fill_prompt(self._prompt, question)) for question in questions]
        longest = num_readable(self._model, self._tokenizer)
        fits = [i for i, row in enumerate(ids) if len(row) <= longest]
        replies = [Reply.failed(f"longer than the judge's {longest} tokens") for _ in ids]
        for rows in micro_batches([len(ids[i]) for i in fits], self._settings.micro_batch_tokens):
            chosen = [fits[row] for row in rows]
            for i, p in zip(chosen, self._probabilities([ids[i] for i in chosen]).tolist(), strict=True):
                replies[i] = Reply(p, "the judge's logits are NaN" if math.isnan(p) else "", len(ids[i]))
        return replies


class LocalComparer(ModelComparer):
    """A causal model: the prompt is one message of the user, in the chat template if the tokenizer has one.

    The reply is the probability that the next token is A, divided by that of A or B, each with or without a
    space before it. Nothing is sampled.
    """

    load = staticmethod(load_causal)

    def _check(self) -> None:
        self._letters = [_single_tokens(self._tokenizer, letter) for letter in LETTERS]
        if not all(self._letters) or self._letters[0] == self._letters[1]:
            raise UserError(
                f"judge {self._settings.name}: the tokenizer of {self._settings.path} has no tokens A and B, "
                "so it cannot reply; use another model"
            )

    def _ids(self, text: str) -> Ids:
        if self._tokenizer.chat_template is None:
            return super()._ids(text)
        rendered = template(self._tokenizer)([{"role": "user", "content": text}], True)
        ids: Ids = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids

    def _probabilities(self, ids: Sequence[Ids]) -> Tensor:
        # Padded on the left: the reply follows the last column.
        batch = collate(ids, [[] for _ in ids], self._tokenizer.pad_token_id).to(self._model.device)
        out = self._model(
            input_ids=batch.query_response,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=1,
        )
        logits = out.logits[:, -1].float()
        a, b = (logits[:, tokens].logsumexp(dim=1) for tokens in self._letters)
        return torch.sigmoid(a - b)


class RankerComparer(ModelComparer):
    """A sequence classifier that reads the prompt and both responses as one text.

    With one label, its logit is that of the first response being better; with two, label 0 stands for the
    first. Rankers that need code of their own (llm-blender's PairRM) are not supported.
    """

    load = staticmethod(load_classifier)

    def _check(self) -> None:
        num_labels = self._model.config.num_labels
        if num_labels not in (1, 2):
            raise UserError(
                f"judge {self._settings.name}: {self._settings.path} has {num_labels} labels; a ranker has "
                "one (the first response is better) or two (the first, the second); use another model"
            )
        # Decoders that classify find the last token of a row by its pad token.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def _probabilities(self, ids: Sequence[Ids]) -> Tensor:
        # Padded on the right, as encoders are trained.
        rows = [torch.tensor(row, device=self._model.device) for row in ids]
        padded = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        logits = self._model(input_ids=padded, attention_mask=mask).logits.float()
        return torch.sigmoid(logits[:, 0] if logits.shape[1] == 1 else logits[:, 0] - logits[:, 1])


def _single_tokens(tokenizer: PreTrainedTokenizerBase, letter: str) -> Ids:
    """The tokens that are this letter, with or without a space before it."""
    texts = (letter, f" {letter}")
    encoded = {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}
    return sorted({ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id})


def num_readable(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> float:
    """The most tokens that a model can read; infinite where no limit is declared.

    A table of positions with a padding index, as RoBERTa's, counts from behind that index: of 514 rows it
    has 512 for tokens. A tokenizer may declare a lower limit; one without a limit gives a huge number.
    """
    declared = getattr(model.config, "max_position_embeddings", None)
    limits = [math.inf if declared is None else declared, tokenizer.model_max_length]
    for name, module in model.named_modules():
        is_table = name.endswith("position_embeddings") and isinstance(module, nn.Embedding)
        if is_table and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min(limits)
