"""Rows of files: which files a path means, and how each kind is read.

    .jsonl .ndjson    an object a line
    .json             an array of objects, or {"data": [...]}
    .parquet          a row a row
    .txt              a line that is not blank a row

A folder holds one kind. If any of its files is named after a split (train.jsonl, test-0-of-4.parquet, validation/a.json), those
of the split are taken; else all of them are `train`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from lohan.data.json_stream import MalformedError, lines, values
from lohan.data.rows import Row, Rows, named
from lohan.errors import OptionError

KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".txt": "text"}
"""suffix -> how it is read"""
BATCH_ROWS = 64
"""rows of a table that are in memory at once"""

_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
}
_NO_DATA = {"dataset_info.json", "dataset_infos.json"}


def open_files(path: Path, split: str) -> Rows:
    """The rows of a file, which is all of its split, or of those files of a folder that belong to the split."""
    if "[" in split:
        reason = "a part of a split is known for hub names only"
        raise OptionError("dataset_train_split", split, reason, "Name a file that is that part")
    files = _files_of(path, split) if path.is_dir() else [path]
    kinds = {KINDS.get(file.suffix.lower()) for file in files}
    if None in kinds:
        suffix = path.suffix or "a name without a suffix"
        raise OptionError("dataset_name", str(path), f"{suffix} is no format that is known", f"Known are {', '.join(KINDS)}")
    if len(kinds) > 1:
        reason = f"holds files of several kinds ({', '.join(sorted(map(str, kinds)))})"
        raise OptionError("dataset_name", str(path), reason, "Name one of the files, or keep one kind in the folder")
    kind = str(kinds.pop())
    stats = [(str(file.resolve()), (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    fingerprint = hashlib.sha256(json.dumps([kind, stats]).encode()).hexdigest()
    total = sum(size for _, size, _ in stats)
    return Rows(str(path), fingerprint, total, partial(_read, kind, files, str(path)), is_text=kind == "text")


def _files_of(folder: Path, split: str) -> list[Path]:
    files = sorted(file for file in folder.rglob("*") if _is_data(file.relative_to(folder)) and file.is_file())
    if not files:
        reason = f"holds no file that ends in {', '.join(KINDS)}"
        raise OptionError("dataset_name", str(folder), reason, "Name a folder with data, or a file")
    named_after = {file: name for file in files if (name := _split_of(file.relative_to(folder)))}
    if not named_after and split == "train":
        return files
    wanted = next((name for name, spellings in _SPLITS.items() if split in spellings), split)
    chosen = [file for file, name in named_after.items() if name == wanted]
    if not chosen:
        there = ", ".join(sorted(set(named_after.values()))) or "train (no file is named after a split)"
        raise OptionError("dataset_name", str(folder), f"has no split {split!r}, only {there}", "Name one of these splits")
    return chosen


def _is_data(path: Path) -> bool:
    return path.suffix.lower() in KINDS and path.name not in _NO_DATA and not any(part.startswith(".") for part in path.parts)


def _split_of(path: Path) -> str:
    """The split that a file or a folder above it is named after; empty if none is."""
    words = [re.split(r"[-_.]", part.lower())[0] for part in path.parts]
    return next((name for word in words for name, spellings in _SPLITS.items() if word in spellings), "")


# ---------------------------------------------------------------- reading


def _read(kind: str, files: Sequence[Path], name: str) -> Iterator[Row]:
    done = 0
    for file in files:
        prefix = f"{file.name} " if len(files) > 1 else ""
        try:
            for where, found, position in _READERS[kind](file):
                if not isinstance(found, Mapping):
                    reason = f"{prefix}{where}: {named(found)}, not an object with columns"
                    raise OptionError("dataset_name", name, reason, 'Write each row like {"text": "..."}')
                yield Row(found, name, f"{prefix}{where}", done + position)
        except MalformedError as error:
            raise OptionError("dataset_name", name, f"{prefix}{error}", "Mend the file, or remove that row") from error
        except OSError as error:
            raise OptionError("dataset_name", name, f"{file.name} cannot be read ({error})", "Check the file") from error
        done += file.stat().st_size


def _read_jsonl(file: Path) -> Iterator[tuple[str, object, int]]:
    with file.open("rb") as stream:
        for line, value, position in lines(stream):
            yield f"line {line}", value, position


def _read_json(file: Path) -> Iterator[tuple[str, object, int]]:
    with file.open("rb") as raw, open(raw.fileno(), encoding="utf-8-sig", closefd=False) as stream:
        for number, (line, value) in enumerate(values(stream), 1):
            yield f"row {number} (line {line})", value, raw.tell()


def _read_text(file: Path) -> Iterator[tuple[str, object, int]]:
    position = 0
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            position += len(line)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise MalformedError(number, f"not UTF-8 text ({error.reason})") from error
            if text.strip():
                yield f"line {number}", {"text": text}, position


def _read_parquet(file: Path) -> Iterator[tuple[str, object, int]]:
    import pyarrow
    from pyarrow import parquet

    size, number = file.stat().st_size, 0
    try:
        with parquet.ParquetFile(file) as table:
            num_rows = table.metadata.num_rows
            for batch in table.iter_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row, size * number // num_rows
    except pyarrow.ArrowException as error:
        raise MalformedError(number + 1, f"not readable as Parquet ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, object, int]]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
    "text": _read_text,
}
"""how -> (where a row is, what it is, bytes of the file up to its end)"""
