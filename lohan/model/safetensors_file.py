"""The safetensors format, read and written by hand, so that every byte's place is known before it moves.

A file is  [ 8 bytes: length of the header | header: JSON | data ].  The header maps a tensor's name to its dtype, shape and
range of the data. Reading trusts nothing: the ranges must tile the data exactly, and a name may stand there only once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lohan.errors import ModelError
from lohan.model.json_file import parse_object

MAX_HEADER_BYTES = 16 * 2**20
MAX_DIMENSIONS, MAX_NUMBER = 16, 2**63
"""of a shape: the product of a million long numbers takes hours"""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """of the first byte, from the start of the file"""
    num_bytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name, checked against the format and the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > size - 8:
            raise ModelError(f"{path}: not a safetensors file: {size} bytes cannot hold a header of {length} bytes")
        if length > MAX_HEADER_BYTES:
            raise ModelError(f"{path}: its header of {length} bytes is longer than the {MAX_HEADER_BYTES} that lohan accepts")
        text = file.read(length)
    return parse_header(path, text, size)


def parse_header(path: Path, text: bytes, size: int) -> dict[str, Entry]:
    """The tensors that a header tells of, in a file of `size` bytes."""
    length = len(text)
    header = parse_object(path, text, "the safetensors header")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length) for name, fields in header.items()}
    _check_tiling(path, entries.values(), 8 + length, size)
    return entries


def _entry(path: Path, name: str, fields: Any, data_offset: int) -> Entry:
    try:
        dtype_name, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        sound = len(shape) <= MAX_DIMENSIONS and all(
            type(number) is int and 0 <= number < MAX_NUMBER for number in (*shape, start, end)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: the safetensors header describes {name} by {fields!r:.200}") from error
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise ModelError(
            f"{path}: {name} is stored as {dtype_name!s:.50}; quantised weights cannot be trained. "
            "Use the bf16, fp16 or fp32 version of this model"
        )
    dtype = DTYPES[dtype_name]
    if not sound:
        raise ModelError(f"{path}: {name} does not fill its bytes: its shape or its offsets are not those of a tensor")
    if math.prod(shape) * dtype.itemsize != end - start:
        raise ModelError(f"{path}: {name} ({dtype_name} {list(shape)}) does not fill its bytes {start} to {end}")
    return Entry(path, name, dtype, shape, data_offset + start, end - start)


def _check_tiling(path: Path, entries: Iterable[Entry], start: int, end: int) -> None:
    at = start
    for entry in sorted(entries, key=lambda e: (e.offset, e.num_bytes)):
        if entry.offset != at:
            raise ModelError(f"{path}: {entry.name} starts at byte {entry.offset}, but the data before it ends at {at}")
        at += entry.num_bytes
    if at != end:
        raise ModelError(f"{path}: the tensors end at byte {at}, the file at {end}; it is cut off or damaged")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that is going to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out_file(specs: Iterable[TensorSpec]) -> tuple[bytes, dict[str, int], int]:
    """The header of a file that holds these tensors, the offset of each in the file, and the file's size.

    Wider elements come first, so that every tensor is aligned to its element; tensors may be written in any order.
    """
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for spec in ordered:
        starts[spec.name] = at
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": spec.shape, "data_offsets": [at, at + spec.num_bytes]}
        at += spec.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + start for name, start in starts.items()}, len(head) + at


def sync_folder(folder: Path) -> None:
    """Make renames within `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
