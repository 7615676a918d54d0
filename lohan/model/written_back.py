"""What was written of a model is read back from the drive, past the page cache, and compared tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from lohan.checksum import checksum
from lohan.errors import ModelError
from lohan.model.file_reader import REQUEST_BYTES, FileReader, pages
from lohan.model.safetensors_file import Entry, read_header


def verify_tensors(path: Path, checksums: Mapping[str, int]) -> int:
    """ModelError unless a file holds these tensors and no others, with these bytes. Returns the bytes that were read."""
    entries = read_header(path)
    if entries.keys() != checksums.keys():
        raise ModelError(f"{path}: it holds other tensors than were written: {', '.join(entries.keys() ^ checksums.keys())}")
    with closing(FileReader()) as reader:
        for name, entry in entries.items():
            if checksum_of(reader, entry) != checksums[name]:
                raise ModelError(
                    f"{path}: {name} at byte {entry.offset} is not what was written there; the drive may be failing"
                )
    return sum(entry.num_bytes for entry in entries.values())


def checksum_of(reader: FileReader, entry: Entry) -> int:
    """Of one tensor, piece by piece."""
    buffer, found = pages(REQUEST_BYTES), 0
    for start in range(0, entry.num_bytes, REQUEST_BYTES):
        piece = buffer[: min(REQUEST_BYTES, entry.num_bytes - start)]
        reader.read(entry, piece, start)
        found = checksum(piece.numpy().data, found)
    return found
