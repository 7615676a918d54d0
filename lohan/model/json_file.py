"""JSON that came with a model: read up to a limit, names once each, and whatever is wrong with it a ModelError."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from lohan.errors import ModelError

MAX_BYTES = 64 * 2**20
_NUM_NAMED = 5


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file holds."""
    try:
        if (nbytes := path.stat().st_size) > MAX_BYTES:
            raise ModelError(f"{path}: its {nbytes} bytes are more than the {MAX_BYTES} that lohan reads of such a file")
        return parse_object(path, path.read_bytes(), "the file")
    except OSError as error:
        raise ModelError(f"{path}: it cannot be read ({error.strerror})") from error


def parse_object(path: Path, text: bytes, what: str) -> dict[str, Any]:
    """The object that a text of a file is; `what` names the text."""
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _once(path, what, pairs))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: {what} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: {what} is not a JSON object")
    return found


def _once(path: Path, what: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different; Python's parser would keep the last of two silently."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = [name for name, num in Counter(name for name, _ in pairs).items() if num > 1]
        raise ModelError(f"{path}: {what} names {', '.join(twice[:_NUM_NAMED])} more than once")
    return found
