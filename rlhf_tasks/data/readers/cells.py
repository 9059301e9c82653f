"""What a value of a record is: its type, a conversation in a form that people have, a rating, a verdict."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_tasks.data.chat import CALL, OTHER_NAMES, WHAT, WHO, Message

TABLE: Mapping[str, Any] = YAML(typ="safe").load(Path(__file__).with_name("shapes.yaml"))
"""The table of shapes, as it is written."""
NAMES: Mapping[str, list[Any]] = TABLE["names"]
RATINGS: tuple[str, ...] = tuple(NAMES["score"])
ANSWER_TEXTS: tuple[str, ...] = tuple(NAMES["rated text"])
"""The keys of the rating and the text in an object that is an answer."""
QUESTIONS = ("full_text", "text", "content", *NAMES["prompt"])
"""The keys of the text in an object that is a prompt."""
TURNS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("prompt", "response"))
"""The keys of a list of objects that holds a conversation, question and answer in each."""
ROLES = {*OTHER_NAMES.values(), CALL, "developer"}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant|System): ?")
ANSWER_BEGINS = re.compile(r"(\n\nAssistant: ?|\n?<extra_id_1>Assistant\n)?\Z")
"""The mark at the end of a prompt after which the answer begins, or nothing."""
EXTRA_ID = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")
FINAL = re.compile(r"^####\s*(\S.*?)\s*$", re.MULTILINE)
"""The line of a solution that has the answer."""
GOOD = ("true", "1", "good", "chosen", "positive", "thumbs_up", "thumbs up", "up", "desirable")
BAD = ("false", "0", "-1", "bad", "rejected", "negative", "thumbs_down", "thumbs down", "down", "undesirable")
VERDICT = re.compile(
    r"((overall|final|human|annotation|record|response|review|pair|winner|is)[_-])?(status|verdict|winner"
    r"|vote|choice|preference|preferred|outcome|result|decision|label|chosen_by|tie|tied)|preference_strength"
)
"""Columns beside a pair that may say that neither side was chosen, such as Argilla's `status`."""
TIE = re.compile(r"tie( .*)?|tied|both( are)?( ?(good|bad)| equal.*)?|draw|equal|same")
UNCHOSEN = re.compile(
    r"neither|nobody|no (one|winner|preference|choice|votes?|majority|agreement|consensus)|not chosen"
    r"|un(chosen|decided|resolved|labell?ed|annotated|rated|judged)|inconclusive|abstain(ed)?|pending|draft"
    r"|discarded|skipped|invalid"
)
BASIC: Mapping[Any, str] = {str: "text", bool: "flag", int | float: "number", Mapping: "object"}


def kind(value: Any) -> str:
    """text, flag, number, object, messages, objects, list; `nothing` is an empty list."""
    if known := next((name for types, name in BASIC.items() if isinstance(value, types)), None):
        return known
    if not isinstance(value, list) or not value:
        return "nothing" if value == [] else type(value).__name__
    if not all(isinstance(item, Mapping) for item in value):
        return "list"
    keys = set(value[0])
    is_talk = {"role", "content"} <= keys or {"from", "value"} <= keys
    if not is_talk and keys & {*WHO} and keys & {*WHAT}:  # else rated answers, or sources
        is_talk = all(role(item) in ROLES and not {*RATINGS} & item.keys() for item in value)
    return "messages" if is_talk else "objects"


def role(turn: Any) -> str:
    """Whose message it is, as chat templates call it; empty for what is none."""
    who = (turn[key] for key in WHO if key in turn) if isinstance(turn, Mapping) else ()
    name = str(next(iter(who), "")).casefold()
    return OTHER_NAMES.get(name, name)


def is_answer(value: Any) -> bool:
    """Whether messages begin with one that is not the user's or the system's."""
    return isinstance(value, list) and bool(value) and role(value[0]) not in ("", "user", "system")


# --------------------------------------------------------------------------------------- conversations


def dialogue(text: str) -> list[Message] | None:
    """The turns of a text in which marks begin them; None if it is no such text.

    The marks are `Human:` and `Assistant:` after an empty line (Anthropic's hh-rlhf), or `<extra_id_1>User`
    (HelpSteer2). A last turn without text is a generation prompt and is left out.
    """
    first, *others = EXTRA_ID.split(text)
    if others:
        turns = [("User", first), *zip(others[::2], others[1::2], strict=True)]
    elif text.startswith(("\n\nHuman:", "Human:", "\n\nSystem:")):
        parts = TURN.split(text)[1:]
        turns = list(zip(parts[::2], parts[1::2], strict=True))
        if turns and not turns[-1][1].strip():
            turns.pop()
    else:
        return None
    return [{"role": OTHER_NAMES[mark.lower()], "content": content} for mark, content in turns]


def cut_dialogues(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt and answers of two marked dialogues, parted after the last `Assistant:` that both share."""
    ends = [match.end() - (match[0][-1] == " ") for match in TURN.finditer(chosen) if match[1] == "Assistant"]
    end = max((end for end in ends if rejected.startswith(chosen[:end])), default=0)
    return chosen[:end], chosen[end:], rejected[end:]


def by_turns(texts: Iterable[str]) -> list[Message]:
    """The messages of texts by the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def messages_before(history: Any) -> list[Message]:
    """The messages of a list of (question, answer); empty for any other value."""
    if not isinstance(history, list) or not all(
        isinstance(turn, list) and [*map(type, turn)] == [str, str] for turn in history
    ):
        return []
    return by_turns(itertools.chain.from_iterable(history))


def unfold(value: Any, slot: str) -> Any:
    """The list or object that a value of another form stands for; None for one that stays as it is.

    The forms are JSON in a text, as in the cells of a CSV file; a list with a question and its answer in
    each object; one message (LLaMA-Factory), or an object with messages (OpenAI); for `messages`, texts by
    turns (LIMA). What is read as text (`slot`: prompt, completion, text) may be JSON itself, and stays so
    unless it is a conversation, an object with the text of a prompt and numbers, or a list of rated answers.
    """
    if isinstance(value, Mapping):
        return _from_object(value)
    if isinstance(value, list):
        is_texts = slot == "messages" and all(isinstance(text, str) for text in value)
        return by_turns(value) if is_texts else _from_turns(value)
    try:
        is_json = isinstance(value, str) and value.lstrip().startswith(("[{", '{"'))
        whole = json.loads(value) if is_json else None
    except (ValueError, RecursionError):
        return None
    if slot in ("", "messages"):
        return _from_turns(whole) or whole
    is_list = isinstance(whole, list)
    items: Any = whole
    if isinstance(whole, Mapping):
        texts = [key for key, item in whole.items() if isinstance(item, str | list | Mapping)]
        if slot == "prompt" and (isinstance(whole.get("full_text"), str) or texts in (["text"], ["content"])):
            return whole
        items = _from_object(whole)
    is_talk = kind(items) == "messages" and any(role(item) in ROLES for item in items)
    if slot != "completion" or (is_talk and is_answer(items)):
        return items if is_talk else None
    is_objects = is_list and kind(items) in ("messages", "objects")
    is_rated = is_objects and any({*RATINGS} & {*item} for item in items)
    return items if is_rated and all({*ANSWER_TEXTS} & {*item} for item in items) else None


def _from_turns(value: Any) -> list[Message] | None:
    """The messages of a list with a question and an answer in each object."""
    if kind(value) not in ("messages", "objects"):
        return None
    keys = next((two for two in TURNS if all({*two} <= turn.keys() for turn in value)), ())
    texts = [turn[key] for turn in value for key in keys]
    return by_turns(texts) if texts and all(isinstance(text, str) for text in texts) else None


def _from_object(value: Mapping[str, Any]) -> list[Any] | None:
    """A message as a list of one, or the messages of an object without tools."""
    parts = [part for key, part in value.items() if key not in (*WHAT, "tool_calls")]
    holds_more = any(kind(part) in ("messages", "objects") for part in parts)  # the replies of a tree, say
    if kind([value]) == "messages" and not holds_more:
        return [value]
    talk = value.get("messages")
    return talk if kind(talk) == "messages" and not value.get("tools") else None


def turns_in_text(value: Any) -> list[Any] | None:
    """The texts and nulls of a list that is JSON in a text (the Chatbot Arena's); None for another value."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, str | None) for one in found) else None


# ------------------------------------------------------------------------------------ ratings, verdicts


def number(value: Any) -> float | None:
    """A finite number, which may be a text; None for any other value."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def word(value: Any) -> str:
    """A vote or label as text: `1` for 1.0."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).casefold()


def is_good(value: Any) -> bool | None:
    """Whether a label says good; None for one that says nothing."""
    return True if word(value) in GOOD else False if word(value) in BAD else None


def flag(value: Any) -> bool | None:
    """`is_good` of a number too that is a text, as `1.0` in a CSV file."""
    found = number(value)
    return is_good(value if found is None else found)


def unchosen(column: str, value: Any) -> str | None:
    """Why a verdict is for neither side: a word, a flag of a tie, a strength of 0; None if it is not."""
    said = " ".join(re.split(r"[\W_]+", value.casefold())).strip() if isinstance(value, str) else ""
    known = column.casefold()
    is_strength = known in NAMES["strength"]
    is_tie = number(value) == 0 if is_strength else known.endswith(("tie", "tied")) and flag(value)
    if is_tie or TIE.fullmatch(said):
        return "a tie"
    is_nobody = said == "none" and not known.endswith(("status", "label"))
    return f"{column} is {value!r}" if is_nobody or UNCHOSEN.fullmatch(said) else None
