"""A tokenizer's chat template: conversations become text and tokens, and it is told which of them the assistant wrote.

A template that marks what the assistant writes ({% generation %} ... {% endgeneration %}) says so itself. Of any other, each
turn of the assistant is found by comparing three texts:

    before    the conversation up to that turn, with the template's prompt for an answer
    after     the conversation up to that turn, and the turn
    whole     the whole conversation

If `before` begins `after`, and `after` begins `whole`, then what is between them is what the assistant adds to what it is
given, in training as in use. A template that writes a turn differently once others follow (one that takes out thoughts, say)
breaks this, and is refused: which tokens the assistant wrote is then not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

from lohan.data.formats import Chat
from lohan.data.rows import Row
from lohan.errors import OptionError

_GENERATION = re.compile(r"\{%-?\+?\s*generation\s*-?\+?%\}")
_REMEDY = (
    "Put {% generation %} and {% endgeneration %} around what the assistant writes in the template (chat_template_path), "
    "or set assistant_only_loss to false"
)


class Tokenizer(Protocol):
    """What is used of a tokenizer of Transformers."""

    chat_template: Any
    eos_token: Any
    eos_token_id: Any

    def __call__(self, text: Any, *, add_special_tokens: bool = ...) -> Any: ...
    def get_chat_template(self, chat_template: str | None = ..., tools: Any = ...) -> str: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...
    def decode(self, token_ids: Any, **options: Any) -> Any: ...
    def get_vocab(self) -> dict[str, int]: ...


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class ChatTemplate:
    """The template of a tokenizer that has one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise OptionError(
                "chat_template_path",
                None,
                "the rows are conversations, and the tokenizer has no chat template",
                "Set it to a Jinja file, take the tokenizer of an instruct model, or give `text`, or `prompt` and `completion`",
            )
        self._tokenizer = tokenizer

    def tokens(self, row: Row, chat: Chat, num_messages: int, *, ask: bool) -> list[int]:
        """The first messages; with `ask`, and the prompt for an answer."""
        return self._ids(self._text(row, chat, num_messages, ask=ask))

    def tokens_and_spans(self, row: Row, chat: Chat) -> tuple[list[int], list[range], bool]:
        """The whole conversation, where the assistant wrote, and whether a token reaches across the beginning of a turn."""
        if _GENERATION.search(self._tokenizer.get_chat_template(tools=chat.options.get("tools"))):
            ids, mask = self._marked(row, chat)
            return ids, [range(at, at + 1) for at, written in enumerate(mask) if written], False
        return self._compared(row, chat)

    def _marked(self, row: Row, chat: Chat) -> tuple[list[int], list[int]]:
        result = self._apply(row, chat, chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return list(result["input_ids"]), list(result["assistant_masks"])

    def _compared(self, row: Row, chat: Chat) -> tuple[list[int], list[range], bool]:
        whole = self._text(row, chat, len(chat.messages), ask=False)
        ids, spans, crossed = self._ids(whole), [], False
        for turn, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before, after = self._around(row, chat, turn, whole)
            given = self._ids(before)
            start = common_prefix(given, ids)
            crossed |= start < len(given)
            spans.append(range(start, common_prefix(self._ids(after), ids)))
        return ids, spans, crossed

    def _around(self, row: Row, chat: Chat, turn: int, whole: str) -> tuple[str, str]:
        if not turn:
            self._refuse(row, "the conversation begins with the assistant, who then has nothing to answer to")
        before = self._text(row, chat, turn, ask=True)
        after = self._text(row, chat, turn + 1, ask=False)
        if not whole.startswith(after) and self._tokenizer.eos_token:
            # Some templates close the whole conversation with it, which is then not part of an earlier turn.
            after = after.removesuffix(self._tokenizer.eos_token)
        if not whole.startswith(after):
            self._refuse(row, "the chat template writes a turn of the assistant differently when others follow")
        if not after.startswith(before):
            self._refuse(row, "the chat template's prompt for an answer is not how it writes an answer that is there")
        return before, after

    def _refuse(self, row: Row, reason: str) -> None:
        told = "it has no {% generation %}, so turns were compared"
        raise OptionError("assistant_only_loss", True, f"{row.source} {row.where}: {reason} ({told})", _REMEDY)

    def _text(self, row: Row, chat: Chat, num_messages: int, *, ask: bool) -> str:
        return str(self._apply(row, chat, chat.messages[:num_messages], tokenize=False, add_generation_prompt=ask))

    def _apply(self, row: Row, chat: Chat, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(messages, **{**chat.options, **options})
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            row.refuse(
                f"the chat template refuses the conversation: {error}",
                "Mend that row, or give another chat_template_path",
                error,
            )

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
