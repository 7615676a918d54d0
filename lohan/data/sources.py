"""`open_rows`: rows, from wherever people keep them.

    a path        a file, a folder of files, or what `save_to_disk` of `datasets` wrote
    a hub name    through `datasets.load_dataset`
    an object     of `datasets`, or anything with a length whose items are dicts

A source is looked at here, and read as often as needed later: rows are streamed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from lohan.data.files import BATCH_ROWS, KINDS, open_files
from lohan.data.rows import Row, Rows, named
from lohan.errors import OptionError


def open_rows(source: object, split: str = "train") -> Rows:
    """The rows of `split`."""
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            import datasets

            return open_rows(datasets.load_from_disk(str(path)), split)
        if path.exists():
            return open_files(path, split)
        if isinstance(source, Path) or _looks_like_path(source):
            reason = "there is no such file or folder"
            raise OptionError("dataset_name", str(source), reason, "Check the path, or name a dataset of the hub")
        return _open_hub(source, split)
    if isinstance(source, Mapping):
        if split not in source:
            there = ", ".join(map(str, source))
            raise OptionError("dataset_train_split", split, f"there is no such split, only {there}", "Name one of these")
        source = source[split]
    return _open_object(source, "")


def _looks_like_path(source: str) -> bool:
    return Path(source).suffix.lower() in KINDS or source.startswith(("/", ".", "~")) or source.count("/") > 1


def _open_hub(name: str, split: str) -> Rows:
    import datasets

    try:
        found = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        said = str(error).splitlines()[0] if str(error) else "no reason"
        reason = f"there is no such file, and the hub did not give it ({type(error).__name__}: {said})"
        remedy = "Name a file or a folder, or check the name, the split and the network"
        raise OptionError("dataset_name", name, reason, remedy) from error
    return _open_object(found, name)


def _open_object(source: object, name: str) -> Rows:
    datasets = sys.modules.get("datasets")  # an object of it can only come from where it is imported
    if datasets is not None and isinstance(source, datasets.Dataset):
        plain = cast(Any, source).with_format(None)
        name = name or "a dataset"
        return Rows(name, plain._fingerprint, len(plain), partial(_read_dataset, plain, name))
    if datasets is not None and isinstance(source, datasets.IterableDataset):
        name = name or "a stream"
        return Rows(name, None, None, partial(_read_items, cast(Iterable[object], source), name))
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str | bytes):
        name = name or f"a {type(source).__name__}"
        return Rows(name, None, len(source), partial(_read_sequence, source, name))
    remedy = "Pass a path, a hub name, an object of `datasets`, or a list of dicts"
    raise OptionError("train_dataset", type(source).__name__, "this is no data that is known", remedy)


def _read_dataset(dataset: Any, name: str) -> Iterator[Row]:
    number = 0
    for batch in dataset.iter(BATCH_ROWS):
        for cells in zip(*batch.values(), strict=True):
            number += 1
            yield Row(dict(zip(batch, cells, strict=True)), name, f"row {number}", number)


def _read_sequence(source: Any, name: str) -> Iterator[Row]:
    yield from _read_items((source[at] for at in range(len(source))), name)


def _read_items(items: Iterable[object], name: str) -> Iterator[Row]:
    for number, item in enumerate(items, 1):
        if not isinstance(item, Mapping):
            reason = f"row {number}: {named(item)}, not a dict"
            raise OptionError("train_dataset", name, reason, 'Write each row like {"text": "..."}')
        yield Row(item, name, f"row {number}", number)
