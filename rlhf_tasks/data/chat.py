"""Conversations as the texts that a model reads and writes, by the chat template of its tokenizer.

The prompt is what the model sees when it answers: the conversation with the template's generation prompt. The
response is what it has to write then. Nothing of a conversation is dropped in silence: what a template does
not write is refused, with the template named as the cause. Whether it writes a text is seen by rendering the
conversation again, with a mark in place of each text.

A plain prompt is a user's turn where the tokenizer has a template (`data.chat`), unless it holds marks of the
template: then it was rendered before. The tokenizers of data and models keep the setting, so that whoever
reads a prompt later does the same.

A template that marks what is to be trained on (`{% generation %}`) decides what a demonstration is: a turn
without marks is none, and what stands before the marks belongs to the prompt. EOS is trained on always.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlhf_tasks import console
from rlhf_tasks.data.rows import Reason
from rlhf_tasks.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

LEADING_BLANK = re.compile(r"\A (?=\S)")
"""With which plain answers follow their prompt; it is no part of a turn."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
THOUGHTS = re.compile(r"\s*<think>\n?(.*?)\s*</think>\s*", re.DOTALL)
"""The thoughts at the start of a message, as models write them."""
OPEN_THOUGHTS = re.compile(r"<think>\s*\Z")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Where a message may hold its thoughts; transformers gives them to templates under the first two."""
TAGS = re.compile(r"(</?(?:think|tool_response)>)")
"""What templates look for in a content."""
GENERATION = re.compile(r"\{%-?\s*generation\b")
MARK = re.compile(r"mark(\d+)(text|thought|call|tool)\d+end")
"""Stands for a text of the message with this number, or for the name of a tool."""
WHO, WHAT = ("role", "from", "speaker"), ("content", "value", "text")
"""The keys of a message's role and text; the first ones are ours, the second ones are ShareGPT's."""
OTHER_NAMES = {
    **dict.fromkeys(("human", "prompter", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "assistant"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool"), "tool"),
    "system": "system",
}
"""Names of roles that no chat template knows."""
CALL = "function_call"
"""The role, in LLaMA-Factory's data, of a message that is the JSON of the assistant's tool calls."""
DATE = "chat_date"
"""The key of a tokenizer's config that holds the date which its chat template prints."""
PLAIN = "data_chat"
"""The key of a tokenizer's config that holds `data.chat`."""
DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")

Spans = Callable[[list[Message], Sequence[Any] | None], list[tuple[int, int]]]
"""Where a rendered conversation holds what its template marks, as the first character and the one after."""


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
    special: names of special tokens; where a template writes no EOS after an answer, the last of them is its
        end, such as `<|eom_id|>` after a tool call.
    spans: where the template marks what is to be trained on; None where it marks nothing.
    plain: whether plain prompts become a user's turn, as in `data.chat`.
    marks: texts of which a prompt that the template has rendered holds one.
    """

    bos: str
    eos: str
    chat: Chat | None
    tokenizer: str
    train_on: Literal["last", "all"] = "last"
    special: Sequence[str] = ()
    spans: Spans | None = None
    plain: Literal["auto", "always", "never"] = "never"
    marks: Sequence[str] = ()

    @property
    def renders_plain(self) -> bool:
        """Whether plain prompts, and dialogues in marked text, become messages."""
        return self.chat is not None and self.plain != "never"

    def plain_kind(self, prompt: str) -> Literal["turns", "marked", "plain"]:
        """What a plain prompt is: to become a turn, rendered already, or to stay as it is."""
        if not self.renders_plain:
            return "plain"
        is_marked = self.plain == "auto" and any(mark in prompt for mark in self.marks)
        return "marked" if is_marked else "turns"

    @functools.cached_property
    def bos_of_marked(self) -> str:
        """The BOS of prompts that the template has rendered: it begins with it, or has none."""
        assert self.chat is not None
        return self.bos if self.chat([{"role": "user", "content": "."}], True).startswith(self.bos) else ""


class Unusable(ValueError):
    """A conversation that is no row."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Unmarked(Unusable):
    """An answer of which the chat template marks nothing for training."""


def template(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The chat template of a tokenizer; today's date, where it prints one, is the tokenizer's DATE."""
    render = _renderer(tokenizer)
    return lambda messages, answer_follows, /, tools=None: render(messages, answer_follows, tools)[0]


def template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the chat template; of several, which some models have, that named `default`.

    Raises:
        UserError: if none of several is named so.
    """
    templates: Any = tokenizer.chat_template
    if not isinstance(templates, dict):
        return str(templates)
    if "default" not in templates:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} has several chat templates ({', '.join(templates)}), "
            "and none is named default; keep the one that prompts are to have"
        )
    return str(templates["default"])


def generated_spans(tokenizer: PreTrainedTokenizerBase) -> Spans | None:
    """Where its chat template marks what is to be trained on; None for a template without such marks."""
    if not GENERATION.search(template_source(tokenizer)):
        return None
    render = _renderer(tokenizer, return_assistant_tokens_mask=True)
    return lambda messages, tools: render(messages, False, tools)[1]


def _renderer(tokenizer: PreTrainedTokenizerBase, **how: bool) -> Callable[..., tuple[str, Any]]:
    """Renders messages: the text, and the spans that the template marks, if they are asked for."""
    from transformers.utils.chat_template_utils import render_jinja_template

    source = template_source(tokenizer)
    names: dict[str, Any] = dict(tokenizer.special_tokens_map)
    if (frozen := tokenizer.init_kwargs.get(DATE)) is not None:
        today = datetime.fromisoformat(frozen)
        source = DATE_CALL.sub(lambda call: json.dumps(today.strftime(call[2])), source)

    def render(messages: list[Message], answer_follows: bool, tools: Sequence[Any] | None) -> tuple[str, Any]:
        given = None if tools is None else list(tools)
        settings: Any = {"chat_template": source, "add_generation_prompt": answer_follows, **how, **names}
        try:
            result: Any = render_jinja_template([messages], given, **settings)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it expects fields, and may divide by 0
            raise ValueError(str(error)) from error
        [text], spans = result  # its annotation is wrong
        return text, spans[0] if spans else []

    return render


def marks_of(tokenizer: PreTrainedTokenizerBase, chat: Chat) -> list[str]:
    """What a chat template writes around a user's turn: special tokens, or else the lines next to it.

    BOS is no mark: plain prompts have it too.

    Raises:
        ValueError: if the template rejects a user's turn alone.
    """
    mark = "\ue000prompt\ue000"  # no text has these characters
    before, _, after = chat([{"role": "user", "content": mark}], True).partition(mark)
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if found := [token for token in special - {tokenizer.bos_token} if token in before + after]:
        return sorted(found)
    before = before.removeprefix(str(tokenizer.bos_token))
    return [*before.strip().splitlines()[-1:], *after.strip().splitlines()[:1]]


def in_words(tokenizer: PreTrainedTokenizerBase) -> str:
    """How prompts reach the models of this tokenizer, for their cards; "" without a chat template."""
    if not tokenizer.chat_template:
        return ""
    plain = tokenizer.init_kwargs.get(PLAIN, "auto")
    turn = "stays as it is" if plain == "never" else "is a user's turn"
    return (
        "\n## Prompts\nMessages are rendered by the chat template; "
        f"a plain prompt {turn} (`data.chat: {plain}`).\n"
    )


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after an answer; None if there is none."""
    if not tokenizer.chat_template:
        return None
    mark, chat = "\ue000answer\ue000", template(tokenizer)  # no text has these characters
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        try:
            text = chat(talk, False)
        except ValueError:
            text = chat([{"role": "system", "content": "a"}, *talk], False)
    except ValueError as error:
        _say_once(
            f"Warning: the chat template of {tokenizer.name_or_path} rejects a question with its answer "
            f"({error}), so that what ends an answer in it is unknown: EOS ({tokenizer.eos_token}) does"
        )
        return None
    ids = tokenizer(text.partition(mark)[2].lstrip(), add_special_tokens=False)["input_ids"][:1]
    is_special = bool(ids) and ids[0] in tokenizer.added_tokens_decoder and ids[0] != tokenizer.unk_token_id
    return int(ids[0]) if is_special else None


_say_once = functools.cache(console.say)


def end_with_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make what the chat template writes after an answer the tokenizer's EOS, in place.

    So what ends an answer ends a demonstration; models/stop_tokens.py keeps the other end. Where the
    template names EOS, it goes on to write the model's own.
    """
    turn, own = end_of_turn(tokenizer), tokenizer.eos_token
    if turn is None or turn == tokenizer.eos_token_id:
        return
    if "eos_token" in (source := template_source(tokenizer)):
        set_own = f"{{% set eos_token = {json.dumps(own, ensure_ascii=False)} %}}\n"
        tokenizer.chat_template = set_own + source
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(turn)


# ------------------------------------------------------------------------------------------------- messages


def message(name: str, number: int, item: Any) -> Message:
    """A message in one form: content as text, arguments of tool calls as objects, no key without a value.

    Raises:
        Unusable: if it has no role, no text and no tool call, or parts that are no text.
    """
    where = f"{name}[{number}]"
    if not isinstance(item, Mapping):
        raise Unusable("malformed", f"{where} is of type {type(item).__name__}, not {{role, content}}")
    found = {key: value for key, value in _drop_nulls(item).items() if value not in ([], {})}
    for ours, *others in (WHAT, WHO):
        known = item if ours == "content" and "role" in found else found  # beside a call content may be null
        key = next((name for name in others if name in item), "")
        if ours not in known and key in found:
            found = {ours: found.pop(key), **found}
    if not isinstance(found.get("role"), str):
        raise Unusable("malformed", f"{where} has no text under 'role'")
    if found["role"] == CALL:
        try:
            calls = json.loads(str(found.pop("content", "")))
        except ValueError as error:
            raise Unusable("malformed", f"{where} is a {CALL} that is not JSON: {error}") from None
        found |= {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
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
    for name in THOUGHT_KEYS:
        if isinstance(found.get(name), str):
            found.setdefault(THOUGHT_KEYS[0], found[name])
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


def _drop_nulls(value: Any) -> Any:
    """The value without keys that hold null: `datasets` and pandas give every row the keys of all rows."""
    if isinstance(value, Mapping):
        return {key: _drop_nulls(part) for key, part in value.items() if part is not None}
    return [_drop_nulls(part) for part in value] if isinstance(value, list) else value


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
    return [_drop_nulls(tool) for tool in value]


def common_start(first: list[Message], second: list[Message]) -> list[Message]:
    """The messages with which both conversations begin, but for their last one."""
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if shared == len(first) == len(second):
        shared -= 1  # chosen equals rejected: reported later
    return first[:shared]


# ---------------------------------------------------------------------------------------------- as the model


def plain_row(
    prompt: str, answers: Mapping[str, str], rendering: Rendering, table: str = "the data"
) -> dict[str, str]:
    """`prompt`, and each answer by its name, as texts; a user's turn and the assistant's where that is asked.

    Raises:
        Unusable: if the template cannot render the turns.
    """
    if prompt.strip() and rendering.plain_kind(prompt) == "turns":
        turns = {name: LEADING_BLANK.sub("", text) for name, text in answers.items()}
        given = {name: [{"role": "assistant", "content": text}] for name, text in turns.items()}
        return render_turns([{"role": "user", "content": prompt}], given, None, rendering, table)
    bos = rendering.bos_of_marked if rendering.plain_kind(prompt) == "marked" else rendering.bos
    if prompt.strip() and not prompt.startswith(bos.rstrip()):
        prompt = bos + prompt
    return {"prompt": prompt} | {name: _remove_eos(text, rendering.eos) for name, text in answers.items()}


def _remove_eos(text: str, eos: str) -> str:
    bare = text.rstrip()
    return bare.removesuffix(eos) if bare.endswith(eos) else text


def render_turns(
    prompt: list[Message],
    answers: Mapping[str, list[Message]],
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
    try:
        head = rendering.chat(prompt, True, tools)
        marked_prompt, marked_tools = _mark_turns(prompt), _mark_tools(tools)
        marked = rendering.chat(marked_prompt, True, marked_tools)
        _check_all_is_written(marked, marked_prompt, marked_tools, rendering, table)
        row = {"prompt": head}
        for name, following in answers.items():
            before, row[name] = _render_answer(prompt, following, name, head, tools, rendering, table)
            row["prompt"] += before
        return row
    except Unusable:
        raise
    except ValueError as error:
        detail = f"the chat template of {rendering.tokenizer} rejects it: {error}"
        raise Unusable("malformed", detail) from None


def _render_answer(
    prompt: list[Message],
    turns: list[Message],
    name: str,
    head: str,
    tools: list[Any] | None,
    rendering: Rendering,
    table: str,
) -> tuple[str, str]:
    """What the template writes after `head`, the rendering of the prompt, in two parts.

    The first is not trained on. The second has no EOS, and begins with the thoughts of the first turn, since
    the model has to write them.
    """
    assert rendering.chat is not None
    whose = f"the chat template of {rendering.tokenizer}"
    if turns[: len(prompt)] == prompt:
        turns = turns[len(prompt) :]
    if not any(turn["content"].strip() or "tool_calls" in turn for turn in turns):
        raise Unusable("empty", f"{name} is empty")
    full = rendering.chat([*prompt, *turns], False, tools)
    opened = OPEN_THOUGHTS.search(head)  # the generation prompt may begin the model's thoughts
    begins = head if opened is None or full.startswith(head) else head[: opened.start()]
    if not full.startswith(begins):
        raise Unusable("malformed", f"{whose} renders the prompt differently when the {name} follows it")

    # 1. All of it is written, and ends at the first end after its last text.
    marked_turns = _mark_turns([*prompt, *turns])
    marked = rendering.chat(marked_turns, False, _mark_tools(tools))
    _check_all_is_written(marked, marked_turns, None, rendering, table)
    marks = (mark for mark in MARK.finditer(marked) if mark[2] != "tool" and int(mark[1]) >= len(prompt))
    last = max((mark.end() for mark in marks), default=0)
    tail = marked[last:] if last else full[len(begins) :]
    if not full.endswith(tail):
        raise Unusable("malformed", f"{whose} ends the {name} in another way than other texts")
    stop = len(full) - len(tail) + _find_end(tail, rendering)

    # 2. What the template marks for training, where it marks something.
    start = len(begins)
    if name == "completion" and rendering.spans is not None:
        spans = [
            (max(first, start), min(end, stop))
            for first, end in rendering.spans([*prompt, *turns], tools)
            if first < stop and end > start
        ]
        if not spans:
            raise Unmarked("malformed", f"{whose} marks nothing of the {name} for training")
        start = spans[0][0]
        are_the_end = [end for _, end in spans] == [*(first for first, _ in spans[1:]), stop]
        if not are_the_end or start > len(begins) != len(head):
            detail = f"{whose} marks parts of the {name} for training that are not its end"
            raise Unusable("malformed", detail)
    before, text = full[len(begins) : start], full[start:stop]

    # 3. The thoughts of the first turn, where the template leaves them out.
    written = THOUGHTS.match(turns[0]["content"])
    thoughts = turns[0].get(THOUGHT_KEYS[0]) or (written.group(1) if written else "")
    is_left_out = bool(thoughts.strip()) and f"mark{len(prompt)}thought" not in marked
    if is_left_out and begins == head and opened is not None:
        raise Unusable("malformed", f"{whose} leaves out the thoughts of the {name}")
    if is_left_out or begins != head:
        start_tag = "<think>\n" if begins == head else ""
        text = f"{start_tag}{thoughts}\n</think>\n\n{THOUGHTS.sub('', text, count=1).lstrip()}"
    return before, text


def _find_end(tail: str, rendering: Rendering) -> int:
    """Where an answer ends in what follows its last text: at EOS, or else at the last special token."""
    if rendering.eos in tail:
        return tail.index(rendering.eos)
    bare = tail.rstrip()
    ends = [len(bare) - len(name) for name in rendering.special if bare.endswith(name)]
    return min(ends, default=len(tail))


def _mark_turns(turns: Sequence[Message]) -> list[Message]:
    """The messages with MARKs in place of their texts; TAGS stay, since templates act on them."""
    marked = []
    for number, turn in enumerate(turns):
        count, parts = itertools.count(), TAGS.split(turn["content"])
        num_thoughts = parts.index("</think>") if THOUGHTS.match(turn["content"]) else 0
        kinds = ["thought" if i < num_thoughts else "text" for i in range(len(parts))]
        content = [
            part if TAGS.fullmatch(part) else _mark(part, f"{number}{kind}", count)
            for part, kind in zip(parts, kinds, strict=True)
        ]
        one = turn | {"content": "".join(content)}
        one |= {key: _mark(turn[key], f"{number}thought", count) for key in THOUGHT_KEYS if key in turn}
        if "tool_calls" in turn:
            one["tool_calls"] = [_mark_function(call, f"{number}call", count) for call in turn["tool_calls"]]
        marked.append(one)
    return marked


def _mark_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools with MARKs in place of their names."""
    count = itertools.count()
    return None if tools is None else [_mark_function(tool, "0tool", count) for tool in tools]


def _mark_function(call: Mapping[str, Any], name: str, count: Iterator[int]) -> dict[str, Any]:
    function = call.get("function", call)
    marks = {key: _mark(function[key], name, count) for key in ("name", "arguments") if key in function}
    return {**call, "function": {**function, **marks}} if "function" in call else {**function, **marks}


def _mark(value: Any, name: str, count: Iterator[int]) -> Any:
    if isinstance(value, str):
        return f"mark{name}{next(count)}end" if value.strip() else value
    if isinstance(value, Mapping):
        return {key: _mark(part, name, count) for key, part in value.items()}
    return [_mark(part, name, count) for part in value] if isinstance(value, list) else value


def _check_all_is_written(
    text: str, marked: Sequence[Message], tools: Sequence[Any] | None, rendering: Rendering, table: str
) -> None:
    """Check that the rendering of marked messages has every content, tool call and tool; thoughts may lack.

    Raises:
        UserError: for a template that knows no tools: no row with tools could be rendered.
        Unusable: for a message that is left out.
    """
    marks = [mark for mark in MARK.finditer(str([marked, tools])) if mark[2] != "thought"]
    lost = [mark for mark in marks if mark[0] not in text]
    calls = [mark for mark in marks if mark[2] == "call"]
    if any(mark[2] == "tool" for mark in lost) or (calls and all(mark in lost for mark in calls)):
        raise UserError(
            f"{table} has `tools` or `tool_calls`, which the chat template of {rendering.tokenizer} does not "
            "write; use a model whose template knows tools, or leave these rows out"
        )
    if lost:
        number, part = int(lost[0][1]), "a tool call of " if lost[0][2] == "call" else ""
        detail = f"leaves out {part}message {number} (role {marked[number]['role']})"
        raise Unusable("malformed", f"the chat template of {rendering.tokenizer} {detail}")
