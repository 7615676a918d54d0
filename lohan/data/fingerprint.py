"""What tokens depend on, as one key: rows, tokenizer, settings, and the version of this code. Equal keys, equal tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from lohan.data.cache import VERSION
from lohan.data.rows import Rows
from lohan.data.settings import DataSettings


def cache_key(rows: Rows, tokenizer: Any, settings: DataSettings) -> str:
    """A name for a folder."""
    parts = {
        "version": VERSION,
        "rows": rows.fingerprint or _content(rows),
        "tokenizer": _tokenizer(tokenizer),
        "settings": settings.tokenization,
    }
    return hashlib.sha256(_json(parts)).hexdigest()[:32]


def _content(rows: Rows) -> str:
    """Of rows that only exist in a program: all that is in them."""
    digest = hashlib.sha256()
    for row in rows.read():
        digest.update(_json(row.values))
        digest.update(b"\n")
    return digest.hexdigest()


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    """All that turns text into tokens, whichever folder it was loaded from."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        inner: Any = sorted(tokenizer.get_vocab().items())
    else:
        # How the last call padded and cut is kept in the tokenizer, and says nothing about the next.
        inner = {name: part for name, part in json.loads(backend.to_str()).items() if name not in ("padding", "truncation")}
    return {
        "class": type(tokenizer).__name__,
        "content": hashlib.sha256(_json(inner)).hexdigest(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Arrays and the like as lists, anything else as its text."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
