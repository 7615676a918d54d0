"""Samples become tokens and labels.

    text                  its tokens and the end token; all are targets
    prompt, completion    the same of both joined; targets begin where the tokens of both leave those of the prompt alone
    conversation          what the chat template writes; all are targets, or what the assistant wrote
    tokens                as they are

This is how TRL's SFTTrainer tokenises, and tests hold it to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lohan.data.chat import ChatTemplate, Tokenizer, common_prefix
from lohan.data.formats import Chat, Completion, Format, Text, Tokens
from lohan.data.rows import Row
from lohan.data.settings import DataSettings
from lohan.errors import OptionError

IGNORED = -100
"""the label of a token that is no target"""

Array = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row, of any length."""

    row: Row
    input_ids: Array
    labels: Array
    crossed: bool = False
    """a token reaches from what is given into what is answered, so that training and use differ by it"""


class Encoder:
    """Rows of one format, with one tokenizer. Settings that cannot take effect are refused here."""

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, format: Format) -> None:
        self._tokenizer, self._format = tokenizer, format
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_template else None
        self._assistant_only = settings.assistant_only_loss
        self._completion_only = format.has_prompt if settings.completion_only_loss is None else settings.completion_only_loss
        if self._completion_only and not format.has_prompt:
            reason = f"the rows are {format.name}, which has no prompt"
            raise OptionError("completion_only_loss", True, reason, "Leave it out, or give `prompt` and `completion`")
        if self._assistant_only and format.name in ("text", "tokens"):
            reason = f"the rows are {format.name}, which has no assistant"
            raise OptionError("assistant_only_loss", True, reason, "Leave it out, or give `messages`")

    def encode(self, rows: Sequence[Row]) -> Iterator[Encoded]:
        """One after the other; plain texts are tokenised together."""
        samples = [self._format.read(row, self._template is not None) for row in rows]
        texts = [sample.text for sample in samples if isinstance(sample, Text)]
        tokens = iter(self._tokenizer(texts)["input_ids"] if texts else [])
        for row, sample in zip(rows, samples, strict=True):
            if isinstance(sample, Text):
                yield self._encoded(row, self._ended(next(tokens)), 0)
            elif isinstance(sample, Tokens):
                yield Encoded(row, _array(row, sample.input_ids), _array(row, sample.labels))
            elif isinstance(sample, Completion):
                yield self._completion(row, sample)
            else:
                yield self._chat(row, sample)

    def _completion(self, row: Row, sample: Completion) -> Encoded:
        if self._assistant_only:
            reason = f"{row.source} {row.where}: its prompt and completion are plain text, which has no assistant"
            raise OptionError("assistant_only_loss", True, reason, "Leave it out, or give both as messages")
        prompt, whole = self._tokenizer([sample.prompt, sample.prompt + sample.completion])["input_ids"]
        if prompt[-1:] == [self._tokenizer.eos_token_id] and not sample.prompt.endswith(str(self._tokenizer.eos_token)):
            prompt = prompt[:-1]  # some tokenizers end every text
        return self._encoded(row, self._ended(whole), *self._given(prompt, whole))

    def _chat(self, row: Row, chat: Chat) -> Encoded:
        template = self._template or ChatTemplate(self._tokenizer)
        spans, crossed = None, False
        if self._assistant_only:
            ids, spans, crossed = template.tokens_and_spans(row, chat)
        else:
            ids = template.tokens(row, chat, len(chat.messages), ask=False)
        num_given = 0
        if chat.num_given and self._completion_only:
            num_given, crosses = self._given(template.tokens(row, chat, chat.num_given, ask=True), ids)
            crossed |= crosses
        return self._encoded(row, ids, num_given, crossed, spans)

    def _given(self, prompt: Sequence[int], whole: Sequence[int]) -> tuple[int, bool]:
        """How many tokens are no targets, and whether one reaches across."""
        common = common_prefix(prompt, whole)
        return (common, common < len(prompt)) if self._completion_only else (0, False)

    def _ended(self, ids: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return ids if end is None or ids[-1:] == [end] else [*ids, end]

    def _encoded(
        self, row: Row, ids: Sequence[int], num_given: int, crossed: bool = False, spans: Sequence[range] | None = None
    ) -> Encoded:
        input_ids = _array(row, ids)
        labels = input_ids.copy() if spans is None else np.full_like(input_ids, IGNORED)
        for span in spans or ():
            labels[span.start : span.stop] = input_ids[span.start : span.stop]
        labels[:num_given] = IGNORED
        return Encoded(row, input_ids, labels, crossed)


def _array(row: Row, values: Sequence[int]) -> Array:
    try:
        return np.array(values, dtype=np.int32)
    except OverflowError as error:
        row.refuse("a token is not below 2147483648", "Mend that row, or remove it", error)
