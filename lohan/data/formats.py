"""What a row is, by its columns, and the sample that is read from it.

    input_ids [labels]                     tokens as they are; a label of -100 is no target
    messages [tools]                       a conversation: role and content
    conversations [tools]                  the same as ShareGPT writes it: from and value
    prompt, completion [tools]             two texts, or two conversations of which the second continues the first
    instruction, output [input]            Alpaca: becomes a prompt and its completion
    text (or `dataset_text_field`)         plain text

The first format whose columns are all there is taken, in this order. Every row is checked against it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from lohan.data.rows import Row, named
from lohan.errors import OptionError

Message = dict[str, Any]

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "observation": "tool"}
"""how ShareGPT names a speaker -> the role that templates know"""
ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""the prompt of Stanford Alpaca, for tokenizers without a chat template"""
_PAIRED = ", paired with an input that provides further context"
_CHAT_EXAMPLE = 'Write messages like [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. `num_given` messages of it are a prompt."""

    messages: list[Message]
    num_given: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """what else the template is given: tools, and the row's `chat_template_kwargs`"""


@dataclass(frozen=True, slots=True)
class Completion:
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    input_ids: Sequence[int]
    labels: Sequence[int]


Sample = Text | Chat | Completion | Tokens


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write rows."""

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Row, bool], Sample]
    """the row, and whether there is a chat template"""
    has_prompt: bool = False


def recognise(columns: Sequence[str], source: str, text_field: str = "text") -> Format:
    """The format of rows with these columns. A text field of one's own is wanted, so it comes first."""
    text = Format("text", (text_field,), (), lambda row, _: Text(_string(row, text_field)))
    known = [text, *_FORMATS] if text_field != "text" else [*_FORMATS, text]
    for one in known[:1] if text_field != "text" else known:
        if all(column in columns for column in one.needed):
            return one
    if text_field != "text":
        raise OptionError(
            "dataset_text_field", text_field, f"{source} has the columns {', '.join(columns)}", "Name one of these"
        )
    raise OptionError("dataset_name", source, f"its columns are {', '.join(columns) or 'none'}", _advice(columns, known))


def _advice(columns: Sequence[str], known: Sequence[Format]) -> str:
    """What to do about columns that fit nothing: the nearest right name, the missing one, or all that is known."""
    names = dict.fromkeys(name for one in known for name in one.needed)
    part = next((one for one in known if any(name in columns for name in one.needed)), None)
    hint = ""
    for column in columns:
        near = get_close_matches(column.lower(), names, 1)
        if near and column not in names:
            hint = f"Did you mean {near[0]!r} where it says {column!r}? "
            break
    if not hint and part is not None:
        missing = ", ".join(repr(name) for name in part.needed if name not in columns)
        hint = f"{missing} is missing for {part.name}. "
    kinds = "; ".join("+".join(one.needed) for one in known)
    return f"{hint}Known are {kinds}; dataset_text_field names another column of text"


# ---------------------------------------------------------------- reading


def _tokens(row: Row, _: bool) -> Tokens:
    ids = _integers(row, "input_ids", 0)
    labels = ids if row.values.get("labels") is None else _integers(row, "labels", -100)
    if len(labels) != len(ids):
        row.refuse(
            f"{len(ids)} input_ids, but {len(labels)} labels", "Give one label for each token, -100 where there is no target"
        )
    return Tokens(ids, labels)


def _messages(row: Row, _: bool) -> Chat:
    return Chat(_conversation(row, "messages"), options=_options(row))


def _sharegpt(row: Row, _: bool) -> Chat:
    return Chat(_conversation(row, "conversations"), options=_options(row))


def _completion(row: Row, _: bool) -> Sample:
    if all(isinstance(row.values.get(name), str) for name in ("prompt", "completion")):
        return Completion(row.values["prompt"], row.values["completion"])
    prompt = _turn(row, "prompt", "user")
    return Chat(prompt + _turn(row, "completion", "assistant"), len(prompt), _options(row))


def _turn(row: Row, column: str, role: str) -> list[Message]:
    """A side of a prompt and its completion, of which the other is a conversation."""
    value = row.values.get(column)
    return [{"role": role, "content": value}] if isinstance(value, str) else _conversation(row, column)


def _alpaca(row: Row, has_template: bool) -> Sample:
    instruction, answer = _string(row, "instruction"), _string(row, "output")
    context = _string(row, "input") if row.values.get("input") is not None else ""
    if has_template:
        question = f"{instruction}\n\n{context}" if context else instruction
        return Chat([{"role": "user", "content": question}, {"role": "assistant", "content": answer}], 1)
    shown = f"### Input:\n{context}\n\n" if context else ""
    return Completion(ALPACA.format(paired=_PAIRED if context else "", instruction=instruction, input=shown), answer)


_FORMATS = (
    Format("tokens", ("input_ids",), ("labels",), _tokens),
    Format("messages", ("messages",), ("tools", "chat_template_kwargs"), _messages),
    Format("ShareGPT", ("conversations",), ("tools", "chat_template_kwargs"), _sharegpt),
    Format("prompt and completion", ("prompt", "completion"), ("tools", "chat_template_kwargs"), _completion, has_prompt=True),
    Format("Alpaca", ("instruction", "output"), ("input",), _alpaca, has_prompt=True),
)


# ---------------------------------------------------------------- checking


def _string(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        what = f"is {named(value)}" if column in row.values else "is missing"
        row.refuse(f"`{column}` {what}, not a string", "Mend that row, or remove it")
    return value


def _integers(row: Row, column: str, lowest: int) -> list[int]:
    value = row.values.get(column)
    if value is not None and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list) or not all(type(one) is int and (one >= 0 or one == lowest) for one in value):
        allowed = "numbers of tokens" + (f", or {lowest}" if lowest else "")
        row.refuse(f"`{column}` is not an array of {allowed}", "Mend that row, or remove it")
    return value


def _conversation(row: Row, column: str) -> list[Message]:
    value = row.values.get(column)
    if not isinstance(value, list) or not value:
        row.refuse(f"`{column}` is {named(value) if value != [] else 'empty'}, not an array of messages", _CHAT_EXAMPLE)
    return [_message(row, f"{column}[{number}]", message) for number, message in enumerate(value)]


def _message(row: Row, place: str, message: object) -> Message:
    """Role and content under the names that templates know; what else a message has is kept."""
    if not isinstance(message, Mapping):
        row.refuse(f"`{place}` is {named(message)}, not an object with role and content", _CHAT_EXAMPLE)
    rest = {
        key: value for key, value in message.items() if key not in ("role", "content", "from", "value") and value is not None
    }
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str):
        keys = ", ".join(map(str, message)) or "nothing"
        row.refuse(f"`{place}` has no role (it has {keys})", _CHAT_EXAMPLE)
    if content is None and "tool_calls" in rest:
        return {"role": ROLES.get(role, role), **rest}
    if isinstance(content, list):
        content = _joined(row, place, content)
    if not isinstance(content, str):
        row.refuse(f"the content of `{place}` is {named(content)}, not a string", _CHAT_EXAMPLE)
    return {"role": ROLES.get(role, role), "content": content, **rest}


def _joined(row: Row, place: str, parts: Sequence[object]) -> str:
    """Content that comes in parts, which have to be text."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        row.refuse(
            f"the content of `{place}` has a part that is not text", "Only text is trained on; remove images and the like"
        )
    return "".join(map(str, texts))


def _options(row: Row) -> dict[str, Any]:
    tools, more = row.values.get("tools"), row.values.get("chat_template_kwargs") or {}
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            row.refuse(f"`tools` is a string that is not JSON ({error.msg})", "Write tools as an array of JSON schemas")
    if not isinstance(more, Mapping):
        row.refuse(f"`chat_template_kwargs` is {named(more)}, not an object", 'Write it like {"enable_thinking": false}')
    return {**({"tools": tools} if tools else {}), **more}
