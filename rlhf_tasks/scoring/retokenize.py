"""Responses in the token ids of a reward model with another tokenizer or chat template than the policy."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlhf_tasks import console
from rlhf_tasks.data.batches import sizes
from rlhf_tasks.data.chat import DATE, Chat, Message, end_of_turn, template_source
from rlhf_tasks.data.tokenizer import Ids, continue_prompts, encode, ready_rendering
from rlhf_tasks.errors import UserError
from rlhf_tasks.scoring.protocol import Responses

MARKS = tuple(f"\ue000{name}\ue000" for name in ("system", "first", "answer", "second"))
"""Stand for the contents of messages; their characters are for private use, and no text has them."""


class Retokenizer:
    """Gives a reward model its own ids of the policy's texts.

    Where both tokenizers have the same chat template, or the model has none, the model reads the prompt as
    the policy does, and then the response. Where its template differs, it reads the conversation in its own
    template. A prompt that is no conversation in the policy's template is one message of the user. A template
    prints the date that the policy's prints.

    No response can write the model's special tokens: they are removed from messages, and otherwise read as
    plain text. A query that is too long loses its start.
    """

    def __init__(
        self,
        own: PreTrainedTokenizerBase,
        policy: PreTrainedTokenizerBase,
        folder: Path,
        longest: int | None = None,
    ) -> None:
        """`longest`: the number of tokens that the model can read; None: no limit."""
        self._own, self._policy, self._folder, self._longest = own, policy, folder, longest
        self._said = set[str]()
        if (date := policy.init_kwargs.get(DATE)) is not None:
            own.init_kwargs[DATE] = date
        self._reads, self._given = ready_rendering(own, str(folder)), ready_rendering(policy, "the policy")
        turn = end_of_turn(own)
        self._end = int(own.eos_token_id) if turn is None else turn
        theirs, ours = (template_source(one) if one.chat_template else None for one in (policy, own))
        self._chat = None if ours in (None, theirs) else self._reads.chat
        self._special = special_names(own)

    def __call__(self, rows: Responses) -> tuple[list[Ids], list[Ids]]:
        """Queries and responses in the model's ids; a conversation's response is its last token alone.

        Raises:
            UserError: for a response that is longer than the model can read.
        """
        if self._chat is not None:
            pairs = zip(rows.prompts, rows.texts, strict=True)
            ids = encode(self._own, [self._conversation(self._chat, *pair) for pair in pairs])
            queries, responses = [row[:-1] for row in ids], [row[-1:] for row in ids]  # whose score is read
        else:
            prompts = [self._begin(prompt) for prompt in rows.prompts]
            queries, plain, _ = continue_prompts(
                self._own, prompts, rows.texts, eos=False, split_special_tokens=True
            )
            responses = [ids + [self._end] * ended for ids, ended in zip(plain, rows.ended, strict=True)]
        lengths = sizes(queries, responses)
        if self._longest is None or max(lengths, default=0) <= self._longest:
            return queries, responses
        wholes = responses
        if self._chat is not None:
            # What must be left of a conversation is the response with what the template writes after it.
            end = self._chat(_conversation_of(MARKS[1:3]), False).partition(MARKS[2])[2]
            wholes = encode(self._own, [remove_names(text, self._special) + end for text in rows.texts])
        most = max(map(min, map(len, wholes), lengths))
        if most > self._longest:
            raise UserError(
                f"{self._folder} can read {self._longest} tokens, and a response has {most} in its "
                "tokenizer; lower ppo.response_length"
            )
        self._say_once(
            f"{self._folder} can read {self._longest} tokens; where a prompt with its response has more, it "
            "reads the end of the prompt only"
        )
        excesses = [max(0, length - self._longest) for length in lengths]
        return [query[excess:] for query, excess in zip(queries, excesses, strict=True)], responses

    def _begin(self, prompt: str) -> str:
        """The prompt with the model's BOS in place of the policy's; the same template writes both or none."""
        written = str(self._policy.bos_token or "")
        if self._reads.chat is None:
            bare = prompt.removeprefix(self._given.bos)
            return self._reads.bos + (bare.removeprefix(written) if bare == prompt else bare)
        has_bos = bool(written) and prompt.startswith(written)
        return str(self._own.bos_token or "") * has_bos + prompt.removeprefix(written)

    def _conversation(self, chat: Chat, prompt: str, response: str) -> str:
        """The conversation in the model's own template, `chat`."""
        found = None if self._given.chat is None else messages_of(prompt, self._given.chat)
        if found is None and self._given.chat is not None:
            self._say_once(
                f"Warning: ppo.scorers: {self._folder} has a chat template of its own, and some prompts are "
                "no conversation in the policy's; it reads each of them as one message of the user"
            )
        messages = found or [{"role": "user", "content": prompt.removeprefix(self._given.bos)}]
        turns = [*messages, {"role": "assistant", "content": response}]
        plain = [turn | {"content": remove_names(str(turn["content"]), self._special)} for turn in turns]
        return chat(plain, False)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            console.say(text)


def special_names(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The texts of all special tokens."""
    added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {name for name in (*tokenizer.all_special_tokens, *added) if name}


def remove_names(text: str, names: Collection[str]) -> str:
    """The text without any of the names, and without those that a removal would leave."""
    if not names:
        return text
    pattern, before = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))), ""
    while text != before:
        before, text = text, pattern.sub("", text)
    return text


def messages_of(prompt: str, chat: Chat) -> list[Message] | None:
    """The messages that a chat template rendered as `prompt`; None if it did not.

    What a template writes between the messages is found by rendering marks. The messages found are rendered
    again, and must give the prompt.
    """
    for num_system in (0, 1):
        try:
            messages = _parse(prompt, chat, num_system)
            if messages is not None and chat(messages, True) == prompt:
                return messages
        except (ValueError, TemplateError):  # the template allows no such conversation
            continue
    return None


def _parse(prompt: str, chat: Chat, num_system: int) -> list[Message] | None:
    marks = MARKS[1 - num_system :]
    text, any_mark = chat(_conversation_of(MARKS[1:], MARKS[:num_system]), True), "|".join(marks)
    if re.findall(any_mark, text) != list(marks):
        return None
    *heads, after_user, after_response, end = re.split(any_mark, text)
    whole = "(.*?)".join(map(re.escape, heads)) + "(.*)" + re.escape(end)
    match = re.fullmatch(whole, prompt, re.DOTALL)
    if match is None or not after_user or not after_response:
        return None
    *system, rest = match.groups()
    first, *pairs = rest.split(after_user)
    return _conversation_of([first, *(x for pair in pairs for x in pair.split(after_response, 1))], system)


def _conversation_of(turns: Sequence[str], system: Sequence[str] = ()) -> list[Message]:
    """Messages of user and assistant in turn, after those of the system."""
    return [{"role": "system", "content": text} for text in system] + [
        {"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)
    ]
