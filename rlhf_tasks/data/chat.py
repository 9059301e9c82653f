"""Conversations as the texts that a model reads and writes, by the chat template of its tokenizer.

The prompt is what the model sees when it answers: the conversation with the template's generation prompt. The
response is what it has to write then. Nothing of a conversation is dropped in silence: what a template does
not write is refused, with the template named as the cause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from rlhf_tasks.data.rows import Reason
from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

LONE_SURROGATE = re.compile("[\ud800-\udfff]")
THOUGHTS = re.compile(r"\s*<think>\n?(.*?)\s*</think>\s*", re.DOTALL)
"""The thoughts at the start of a message, as models write them."""
OPEN_THOUGHTS = re.compile(r"<think>\s*\Z")
OTHER_NAMES = {
    **dict.fromkeys(("human", "prompter", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant"), "assistant"),
    "system": "system",
}
"""Names of roles that no chat template knows."""
DATE = "chat_date"
"""The key of a tokenizer's config that holds the date which its chat template prints."""
DATE_CODES = [f"%{minus}{code}" for minus in ("-", "") for code in "aAbBdmyYHIMSpjHIFTDx"]


class Chat(Protocol):
    """Renders messages as text, and the generation prompt after them if an answer follows.

    Raises:
        ValueError: for messages that the template rejects.
    """

    def __call__(
        self, messages: list[Message], answer_follows: bool, /, tools: Sequence[Any] | None = None
    ) -> str: ...


@dataclass(frozen=True)
class Rendering:
    """How texts become what the model sees.

    bos: put before plain prompts if the tokenizer does so; a chat template writes its own.
    eos: removed from the end of answers, because it is added as a token id.
    chat: None where the tokenizer has no template.
    tokenizer: its name in messages.
    train_on: which turns of the assistant are demonstrations.
    """

    bos: str
    eos: str
    chat: Chat | None
    tokenizer: str
    train_on: Literal["last", "all"] = "last"


class Unusable(ValueError):
    """A conversation that is no row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def template(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The chat template of a tokenizer; today's date, where it prints one, is the tokenizer's DATE."""
    from jinja2 import TemplateError

    source, dates = str(tokenizer.chat_template), dict[str, str]()
    if (frozen := tokenizer.init_kwargs.get(DATE)) is not None:
        today = datetime.fromisoformat(frozen)
        dates["date_string"] = f"{today:%d %b %Y}"
        if "strftime_now" in source:  # transformers passes no functions to a template, which so gets its own
            codes = "".join(f" | replace('{code}', '{today.strftime(code)}')" for code in DATE_CODES)
            source = f"{{% macro strftime_now(format) %}}{{{{ format{codes} }}}}{{% endmacro %}}{source}"

    def render(messages: list[Message], answer_follows: bool, /, tools: Sequence[Any] | None = None) -> str:
        try:
            text: Any = tokenizer.apply_chat_template(
                messages,
                tools=None if tools is None else list(tools),
                chat_template=source,
                tokenize=False,
                add_generation_prompt=answer_follows,
                **cast(Any, dates),
            )
        except (TemplateError, TypeError, AttributeError, KeyError) as error:  # templates expect their fields
            raise ValueError(str(error)) from error
        return str(text)

    return render


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an answer; None if there is none."""
    if not tokenizer.chat_template:
        return None
    mark = "\ue000answer\ue000"  # no text has these characters
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        after = template(tokenizer)(talk, False).partition(mark)[2].lstrip()
    except ValueError:
        return None
    ids = tokenizer(after, add_special_tokens=False)["input_ids"][:1]
    is_special = bool(ids) and ids[0] in tokenizer.added_tokens_decoder and ids[0] != tokenizer.unk_token_id
    return int(ids[0]) if is_special else None


# ------------------------------------------------------------------------------------------------- messages


def message(name: str, number: int, item: Any) -> Message:
    """A message in one form: content as text, arguments of tool calls as objects, no key without a value.

    Raises:
        Unusable: if it has no role, no text and no tool call, or parts that are no text.
    """
    where = f"{name}[{number}]"
    if not isinstance(item, Mapping):
        raise Unusable("malformed", f"{where} is of type {type(item).__name__}, not {{role, content}}")
    found = {key: value for key, value in _without_nulls(item).items() if value not in ([], {})}
    if "role" not in found and "from" in found:  # ShareGPT
        found = {"role": found.pop("from"), "content": found.pop("value", None), **found}
    if not isinstance(found.get("role"), str):
        raise Unusable("malformed", f"{where} has no text under 'role'")
    found["role"] = OTHER_NAMES.get(found["role"].casefold(), found["role"])
    content = found.get("content", "" if "tool_calls" in found else None)
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in content}
        if strange := sorted(str(kind) for kind in kinds - {"text"}):
            raise Unusable("malformed", f"{where}.content has parts of type {', '.join(strange)}, not text")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise Unusable("malformed", f"{where} has no text under 'content'")
    if LONE_SURROGATE.search(content):
        raise Unusable("not_utf8", f"{where}.content is not UTF-8")
    if not isinstance(found.get("tool_calls", []), list):
        raise Unusable("malformed", f"{where}.tool_calls is no list")
    if "tool_calls" in found:
        found["tool_calls"] = [_call(where, call) for call in found["tool_calls"]]
    return found | {"content": content}


def _call(where: str, call: Any) -> Any:
    """A tool call whose arguments are an object: in OpenAI's form they are JSON as text."""
    if not isinstance(call, Mapping):
        raise Unusable("malformed", f"{where}.tool_calls has a {type(call).__name__}, not an object")
    if not isinstance(call.get("function", call), Mapping):
        raise Unusable("malformed", f"{where}.tool_calls: the function is no object")
    function = dict(call.get("function", call))
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError as error:
            raise Unusable("malformed", f"{where}.tool_calls: arguments are not JSON: {error}") from None
    return {**call, "function": function} if "function" in call else function


def _without_nulls(value: Any) -> Any:
    """The value without keys that hold null: `datasets` and pandas give every row the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def tools_of(value: Any) -> list[Any] | None:
    """The tools that a row lists, or gives as JSON; None for none.

    Raises:
        Unusable: if it is no list of objects.
    """
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise Unusable("malformed", f"tools is text that is not JSON: {error}") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(
        isinstance(tool, Mapping) and isinstance(tool.get("function", tool), Mapping) for tool in value
    ):
        raise Unusable("malformed", "tools is not a list of objects")
    return [_without_nulls(tool) for tool in value]


def common_start(first: list[Message], second: list[Message]) -> list[Message]:
    """The messages with which both conversations begin, but for their last one."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if shared == len(first) == len(second):
        shared -= 1  # chosen equals rejected: reported later
    return first[:shared]


# ---------------------------------------------------------------------------------------------- as the model


def rendered(
    prompt: list[Message],
    answers: Mapping[str, str | list[Message]],
    tools: list[Any] | None,
    rendering: Rendering,
    table: str,
) -> dict[str, str]:
    """`prompt`, and each answer by its name, as texts.

    Raises:
        UserError: if the tokenizer has no template, or one that knows no tools.
        Unusable: if the template cannot render this conversation.
    """
    if rendering.chat is None:
        raise UserError(
            f"{table} holds messages, but {rendering.tokenizer} has no chat template to render them; "
            "use a model whose tokenizer has one, or give plain texts"
        )
    if not any(turn["content"].strip() for turn in prompt):
        raise Unusable("empty", "prompt is empty")
    turns = {
        name: [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for name, answer in answers.items()
    }
    try:
        head = rendering.chat(prompt, True, tools)
        _check_all_is_written(head, prompt, tools, rendering, table)
        return {"prompt": head} | {
            name: _answer(prompt, following, name, head, tools, rendering, table)
            for name, following in turns.items()
        }
    except Unusable:
        raise
    except ValueError as error:
        detail = f"the chat template of {rendering.tokenizer} rejects it: {error}"
        raise Unusable("malformed", detail) from None


def _answer(
    prompt: list[Message],
    turns: list[Message],
    name: str,
    head: str,
    tools: list[Any] | None,
    rendering: Rendering,
    table: str,
) -> str:
    """What the model writes after `head`, the rendering of the prompt; without EOS."""
    assert rendering.chat is not None
    if turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    if not any(turn["content"].strip() or "tool_calls" in turn for turn in turns):
        raise Unusable("empty", f"{name} is empty")
    full = rendering.chat([*prompt, *turns], False, tools)
    opened = OPEN_THOUGHTS.search(head)  # the generation prompt may begin the model's thoughts
    begins = head if opened is None or full.startswith(head) else head[: opened.start()]
    if not full.startswith(begins):
        detail = f"renders the prompt differently when the {name} follows it"
        raise Unusable("malformed", f"the chat template of {rendering.tokenizer} {detail}")
    text = full[len(begins) :]
    _check_all_is_written(text, turns, None, rendering, table)
    # The thoughts of the first turn, where the template leaves them out: the model has to write them.
    given = THOUGHTS.match(turns[0]["content"])
    thoughts = turns[0].get("reasoning_content") or (given.group(1) if given else "")
    if begins != head:
        text = f"{thoughts}\n</think>\n\n{THOUGHTS.sub('', text, count=1).lstrip()}"
    elif thoughts and thoughts.strip() not in text:
        text = f"<think>\n{thoughts}\n</think>\n\n{text.lstrip()}" if opened is None else text
    bare = text.rstrip()
    return bare.removesuffix(rendering.eos) if bare.endswith(rendering.eos) else text


def _check_all_is_written(
    text: str, turns: Sequence[Message], tools: list[Any] | None, rendering: Rendering, table: str
) -> None:
    """Check that the rendering has every content, tool call and tool.

    Raises:
        UserError: for tools: no row with tools could be rendered.
        Unusable: for a message that is left out.
    """
    calls = [call.get("function", call) for turn in turns for call in turn.get("tool_calls", ())]
    named = [tool.get("function", tool).get("name", "") for tool in tools or ()]
    if any(str(one) not in text for one in (*named, *(call.get("name", "") for call in calls))):
        raise UserError(
            f"{table} has `tools` or `tool_calls`, which the chat template of {rendering.tokenizer} does not "
            "write; use a model whose template knows tools, or leave these rows out"
        )
    for number, turn in enumerate(turns):
        content = THOUGHTS.sub("", turn["content"], count=1).strip()
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # as templates write what a tool returns
        if content not in text and as_json not in text:
            detail = f"leaves out message {number} (role {turn['role']})"
            raise Unusable("malformed", f"the chat template of {rendering.tokenizer} {detail}")
