"""Rows of a JSON file, one at a time: an array of objects, {"data": [...]}, or, misnamed, an object a line.

    buffer    text is read in pieces; what was parsed is dropped before the next piece is read
    value     a value that ends beyond the buffer is tried again with twice as much text
    shape     the first character, and then the first key, say which of the three the file is

Memory is bounded by the largest row, not by the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO, TextIO

_DECODER = json.JSONDecoder()
_PIECE = 1 << 18
_SPACE = " \t\r\n"


class MalformedError(ValueError):
    """Text that is not the JSON that it should be; `line` counts from 1."""

    def __init__(self, line: int, reason: str) -> None:
        self.line, self.reason = line, reason
        super().__init__(f"line {line}: {reason}")


def lines(file: BinaryIO) -> Iterator[tuple[int, object, int]]:
    """Line number, value and bytes read so far, of every line that is not blank."""
    position = 0
    for number, line in enumerate(file, 1):
        position += len(line)
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
            if text:
                yield number, json.loads(text), position
        except UnicodeDecodeError as error:
            raise MalformedError(number, f"not UTF-8 text ({error.reason})") from error
        except json.JSONDecodeError as error:
            raise MalformedError(number, f"not JSON: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits; lists in lists in lists
            raise MalformedError(number, f"not JSON that can be read: {error}") from error


def values(file: TextIO) -> Iterator[tuple[int, object]]:
    """Line where it begins and value, of every element of a file's array."""
    text = _Text(file)
    if text.peek() == "{":
        yield from _rows_of_object(text)
    elif text.peek() == "[":
        yield from _elements(text)
    else:
        raise MalformedError(text.line, f"starts with {text.peek()!r}, not with an array of rows")
    if text.peek():
        raise MalformedError(text.line, "there is more after the end of the data")


def _elements(text: _Text) -> Iterator[tuple[int, object]]:
    text.take("[")
    if text.peek() == "]":
        text.take("]")
        return
    while True:
        text.peek()
        line = text.line
        yield line, text.value()
        if text.peek() == "]":
            text.take("]")
            return
        text.take(",")


def _rows_of_object(text: _Text) -> Iterator[tuple[int, object]]:
    """Of {"data": [...]}; or of objects that follow each other, of which the first was read key by key."""
    line = text.line
    first: dict[str, object] = {}
    text.take("{")
    while text.peek() != "}":
        key = text.value()
        if not isinstance(key, str):
            raise MalformedError(text.line, f"a key is {key!r}, not a string")
        text.take(":")
        if key == "data" and text.peek() == "[":
            yield from _elements(text)
            _skip_rest(text)
            return
        first[key] = text.value()
        if text.peek() != "}":
            text.take(",")
    text.take("}")
    yield line, first
    while text.peek():
        line = text.line
        yield line, text.value()


def _skip_rest(text: _Text) -> None:
    """What an object holds besides its rows."""
    while text.peek() == ",":
        text.take(",")
        text.value()
        text.take(":")
        text.value()
    text.take("}")


class _Text:
    """A text of which only the part in front has been read."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._buffer, self._at, self._ended = file, "", 0, False
        self.line = 1

    def peek(self) -> str:
        """The next character that is not space; empty at the end."""
        while True:
            end = self._at
            while end < len(self._buffer) and self._buffer[end] in _SPACE:
                end += 1
            self._advance(end)
            if self._at < len(self._buffer) or not self._more(_PIECE):
                return self._buffer[self._at : self._at + 1]

    def take(self, character: str) -> None:
        found = self.peek()
        if found != character:
            raise MalformedError(self.line, f"expected {character!r}, found {found or 'the end of the file'!r}")
        self._advance(self._at + 1)

    def value(self) -> Any:
        if not self.peek():
            raise MalformedError(self.line, "the file ends where a value should begin")
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if not self._may_be_cut(error) or not self._more(max(_PIECE, len(self._buffer) - self._at)):
                    at = self.line + self._buffer.count("\n", self._at, error.pos)
                    raise MalformedError(at, f"not JSON: {error.msg}") from error
                continue
            except (ValueError, RecursionError) as error:
                raise MalformedError(self.line, f"not JSON that can be read: {error}") from error
            # A number may go on behind the buffer: 1 and 1. and 1e- are beginnings of others.
            if end < len(self._buffer) - 2 or not self._more(_PIECE):
                self._advance(end)
                return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Whether more text could mend it: what is wrong in the middle stays wrong; the longest literal is `-Infinity`."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - 9

    def _advance(self, end: int) -> None:
        self.line += self._buffer.count("\n", self._at, end)
        self._at = end

    def _more(self, num_characters: int) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        try:
            piece = self._file.read(num_characters)
        except UnicodeDecodeError as error:
            raise MalformedError(self.line, f"not UTF-8 text behind this line ({error.reason})") from error
        self._ended = not piece
        if piece:
            self._buffer, self._at = self._buffer[self._at :] + piece, 0
        return bool(piece)
