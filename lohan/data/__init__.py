"""Data, from files that people have to batches that a model takes.

    open    a file, a folder, a `datasets` object, a list or a hub name becomes a stream of rows          sources, files
    read    a row's columns say what it is: text, a conversation, a prompt with its answer, tokens        formats
    encode  chat template, tokens, and which of them are targets                                          encoding, chat
    keep    tokens go to a memory-mapped cache, published whole or not at all, reused if nothing changed  dataset, cache
    batch   a seeded order with random access; rows of one example, or packed with several                plan, packing, order
    show    what a model is going to see, targets marked                                                  show

Rows are streamed: neither the data nor its tokens have to fit into memory.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.data.dataset import Example, TokenDataset, tokenize
    from lohan.data.fit import check_packing, check_vocabulary, padding_token
    from lohan.data.plan import BatchPlan
    from lohan.data.rows import Row, Rows
    from lohan.data.settings import DataSettings
    from lohan.data.show import show_masked
    from lohan.data.sources import open_rows

_WHERE = {
    "BatchPlan": "plan",
    "DataSettings": "settings",
    "Example": "dataset",
    "Row": "rows",
    "Rows": "rows",
    "TokenDataset": "dataset",
    "check_packing": "fit",
    "check_vocabulary": "fit",
    "open_rows": "sources",
    "padding_token": "fit",
    "show_masked": "show",
    "tokenize": "dataset",
}


def __getattr__(name: str) -> Any:
    """Import on first use: settings take no torch, so that help is there at once."""
    if name not in _WHERE:
        raise AttributeError(f"module 'lohan.data' has no attribute {name!r}")
    return getattr(import_module(f"lohan.data.{_WHERE[name]}"), name)


__all__ = [
    "BatchPlan",
    "DataSettings",
    "Example",
    "Row",
    "Rows",
    "TokenDataset",
    "check_packing",
    "check_vocabulary",
    "open_rows",
    "padding_token",
    "show_masked",
    "tokenize",
]
