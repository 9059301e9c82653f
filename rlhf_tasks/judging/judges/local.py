"""A judge that is a language model on this machine. B batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.config.judge import LISTED, LocalJudge
from rlhf_tasks.data.batches import collate, micro_batches
from rlhf_tasks.data.chat import template
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.positions import max_positions
from rlhf_tasks.data.tokenizer import Ids, load_tokenizer
from rlhf_tasks.errors import UserError
from rlhf_tasks.judging.judges.comparisons import LETTERS, PROMPTS, Question, Reply
from rlhf_tasks.models import contracts
from rlhf_tasks.models.load import fetch_tokenizer, load_causal, place
from rlhf_tasks.scoring.retokenize import remove_names, special_names
from rlhf_tasks.scoring.templates import fill_template, load_template

LEAST_SHARE = 0.01
"""The least probability that a reply is A or B: of one that begins otherwise the rest says little."""


class LocalComparer:
    """A `Comparer`: a causal model, whose prompt is below `root`.

    The prompt is one message of the user, in the chat template if the tokenizer has one. The reply is the
    probability that the next token is A, divided by that of A or B, each with or without a space before it.
    Nothing is sampled.

    Raises:
        UserError: if the prompt cannot be read, or the tokenizer has no tokens A and B.
        ContractError: if the model cannot be read.
    """

    def __init__(self, settings: LocalJudge, device: torch.device, root: Path, key: str = LISTED) -> None:
        self._settings = settings
        self._prompt = load_template(settings.prompt, key, root, PROMPTS, Question._fields)
        # Only a hub id has a revision.
        source = settings.path if settings.revision is not None else str(root / settings.path)
        self._tokenizer = load_tokenizer(fetch_tokenizer(source, settings.revision))
        self._model = place(load_causal(source, settings.revision), device).eval()
        contracts.check_fits(self._model, self._tokenizer, f"judge {settings.name}: {settings.path}")
        self._special = special_names(self._tokenizer)
        self._letters = [_single_tokens(self._tokenizer, letter) for letter in LETTERS]
        if not all(self._letters) or self._letters[0] == self._letters[1]:
            raise UserError(
                f"judge {settings.name}: the tokenizer of {settings.path} has no tokens A and B, so it "
                "cannot reply; use another model"
            )

    @torch.no_grad()
    def __call__(
        self, questions: Sequence[Question], max_failures: float, columns: Columns = NONE
    ) -> list[Reply]:
        is_chat, ids = self._tokenizer.chat_template is not None, list[Ids]()
        for question in questions:
            # a special token of the policy's template, or of a response, would end the judge's turn
            text = remove_names(fill_template(self._prompt, question._asdict()), self._special)
            if is_chat:
                text = template(self._tokenizer)([{"role": "user", "content": text}], True)
            ids.append(self._tokenizer(text, add_special_tokens=not is_chat)["input_ids"])
        declared = max_positions(self._model.config) or math.inf
        longest = min(declared, self._tokenizer.model_max_length)  # without a limit it is a huge number
        fits = [i for i, row in enumerate(ids) if len(row) <= longest]
        replies = [Reply.failed(f"longer than the judge's {longest} tokens") for _ in ids]
        with console.part("reading", len(fits), "questions") as meter:
            for rows in micro_batches([len(ids[i]) for i in fits], self._settings.micro_batch_tokens):
                chosen = [fits[row] for row in rows]
                read = self._probabilities([ids[i] for i in chosen])
                for i, p, share in zip(chosen, *(values.tolist() for values in read), strict=True):
                    problem = "the judge's logits are NaN" if math.isnan(p) else ""
                    if share < LEAST_SHARE:
                        problem = f"its reply begins with A or B with a probability of {share:.1e} only"
                    replies[i] = Reply(math.nan if problem else p, problem, len(ids[i]))
                meter.advance(len(rows))
        return replies

    def _probabilities(self, ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """(B,) probability that the response shown first is better, and (B,) that the reply is A or B."""
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
        return torch.sigmoid(a - b), (torch.logaddexp(a, b) - logits.logsumexp(dim=1)).exp()


def _single_tokens(tokenizer: PreTrainedTokenizerBase, letter: str) -> Ids:
    """The tokens that are this letter, with or without a space before it."""
    texts = (letter, f" {letter}")
    encoded = {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts}
    return sorted({ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.unk_token_id})
