"""Responses as a reward model of another tokenizer and chat template reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.data.batches import Ids, encode, sizes, text_of
from rlhf_tasks.data.columns import NONE, Columns
from rlhf_tasks.data.tables import Chat, Message
from rlhf_tasks.data.tokenizer import ready_rendering
from rlhf_tasks.errors import UserError

MARKS = tuple(f"\ue000{name}\ue000" for name in ("system", "first", "answer", "second"))
"""Stand for the contents of messages; their characters are for private use, and no text has them."""


class Retokenised:
    """A scorer that receives the policy's token ids, and gives another model its own ids of the same texts.

    Where both tokenizers have the same chat template, or the model has none, the model reads the prompt as
    the policy does, and then the response. Where its template differs, it reads the conversation in its own
    template. A prompt that is no conversation in the policy's template is one message of the user.

    No answer can write the model's special tokens: they are removed from messages, and otherwise read as
    plain text. A query that is too long loses its start.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Ids], Sequence[Ids]], Tensor],
        own: PreTrainedTokenizerBase,
        policy: PreTrainedTokenizerBase,
        folder: Path,
        longest: int | None = None,
    ) -> None:
        """`longest`: the number of tokens that the model can read; None: no limit."""
        self._score, self._own, self._policy = score, own, policy
        self._folder, self._longest = folder, longest
        self._reads, self._given = ready_rendering(own, str(folder)), ready_rendering(policy, "the policy")
        self._has_own_template = own.chat_template not in (None, policy.chat_template)
        self._special, self._has_cut = special_names(own), False

    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        """(B,) float32 on the CPU, in the order of the rows.

        Raises:
            UserError: for a response that is longer than the model can read.
        """
        prompts = [str(self._policy.decode(query, skip_special_tokens=False)) for query in queries]
        answers = [text_of(self._policy, response) for response in responses]
        if self._has_own_template:
            texts = [self._conversation(*row) for row in zip(prompts, answers, strict=True)]
            own = conversation_ids(self._own, texts)
        else:
            own = self._bare(prompts, answers, responses)
        excess = 0 if self._longest is None else max(sizes(*own), default=0) - self._longest
        return self._score(*(self._cut(*own, answers) if excess > 0 else own))

    def _cut(
        self, queries: list[Ids], responses: list[Ids], answers: Sequence[str]
    ) -> tuple[list[Ids], list[Ids]]:
        """Rows that the model can read, in which the whole response is left."""
        assert self._longest is not None
        wholes = responses
        if self._has_own_template:  # the rows are whole conversations: what must be left is the answer's turn
            plain = [without(answer, self._special) + self._end_of_turn() for answer in answers]
            wholes = encode(self._own, plain)
        most = max(map(min, map(len, wholes), sizes(queries, responses)))
        if most > self._longest:
            raise UserError(
                f"ppo.scorers: {self._folder} can read {self._longest} tokens, and a response has {most} in "
                "its tokenizer; lower ppo.response_length"
            )
        if not self._has_cut:
            self._has_cut = True
            console.say(
                f"ppo.scorers: {self._folder} can read {self._longest} tokens; where a prompt with its "
                "response has more, it reads the end of the prompt only"
            )
        rows = zip(queries, responses, strict=True)
        return [q[max(0, len(q) + len(r) - self._longest) :] for q, r in rows], responses

    def _end_of_turn(self) -> str:
        """What the model's template writes after an answer."""
        assert self._reads.chat is not None
        mark = MARKS[2]
        return self._reads.chat(_chat_of([MARKS[1], mark], []), False).partition(mark)[2]

    def _bare(
        self, prompts: Sequence[str], answers: Sequence[str], responses: Sequence[Ids]
    ) -> tuple[list[Ids], list[Ids]]:
        """The prompts as the policy reads them, and the answers as plain text."""
        bare = [self._reads.bos + prompt.removeprefix(self._given.bos) for prompt in prompts]
        ends = [response[-1:] == [self._policy.eos_token_id] for response in responses]
        ids = [
            row + [int(self._own.eos_token_id)] * end
            for row, end in zip(encode(self._own, answers, split_special_tokens=True), ends, strict=True)
        ]
        return encode(self._own, bare), ids

    def _conversation(self, prompt: str, answer: str) -> str:
        """The conversation in the model's own template."""
        assert self._reads.chat is not None
        found = None if self._given.chat is None else messages_of(prompt, self._given.chat)
        messages = found or [{"role": "user", "content": prompt.removeprefix(self._given.bos)}]
        turns = [*messages, {"role": "assistant", "content": answer}]
        plain = [turn | {"content": without(str(turn["content"]), self._special)} for turn in turns]
        return self._reads.chat(plain, False)


def special_names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The names of a tokenizer's special tokens, of which its template makes turns."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset(name for name in (*tokenizer.all_special_tokens, *added) if name)


def without(text: str, names: Collection[str]) -> str:
    """The text without any of the names, and without those that a removal would leave."""
    if not names:
        return text
    pattern, before = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))), ""
    while text != before:
        before, text = text, pattern.sub("", text)
    return text


def conversation_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[list[Ids], list[Ids]]:
    """Whole conversations as queries and responses: a reward model scores the last token alone."""
    ids = encode(tokenizer, texts)
    return [row[:-1] for row in ids], [row[-1:] for row in ids]


def messages_of(prompt: str, chat: Chat) -> list[Message] | None:
    """The messages that a chat template rendered as `prompt`; None if it did not.

    What a template writes between the messages is found by rendering marks. The messages found are rendered
    again, and must give the prompt.
    """
    for roles in (("user",), ("system", "user")):
        try:
            messages = _parsed(prompt, chat, has_system="system" in roles)
            if messages is not None and chat(messages, True) == prompt:
                return messages
        except (ValueError, TemplateError):  # the template allows no such conversation
            continue
    return None


def _parsed(prompt: str, chat: Chat, *, has_system: bool) -> list[Message] | None:
    system, first, answer, second = MARKS
    shape = _chat_of([first, answer, second], [system] if has_system else [])
    text = chat(shape, True)
    pieces = []
    for mark in (*([system] if has_system else []), first, answer, second):
        before, found, text = text.partition(mark)
        if not found:
            return None
        pieces.append(before)
    *heads, after_user, after_answer = pieces
    end, contents, rest = text, [], prompt
    for head, following in zip(heads, [*heads[1:], None], strict=True):
        if not rest.startswith(head):
            return None
        rest = rest.removeprefix(head)
        if following is not None:
            content, _, rest = rest.partition(following)
            contents, rest = [content], following + rest
    if not rest.endswith(end) or not after_user or not after_answer:
        return None
    first_turn, *more = rest.removesuffix(end).split(after_user)
    turns = [first_turn] + [part for pair in more for part in pair.split(after_answer, 1)]
    return _chat_of(turns, contents)


def _chat_of(turns: Sequence[str], system: Sequence[str]) -> list[Message]:
    """Messages of user and assistant in turn, after those of the system."""
    return [{"role": "system", "content": text} for text in system] + [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)
    ]
