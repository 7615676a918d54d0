"""Tensors from files into given memory, past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from lohan.errors import ModelError, StoreError
from lohan.host.pool import HUGE_PAGE_BYTES
from lohan.model.safetensors_file import Entry
from lohan.model.shape import align

REQUEST_BYTES = 4 * 2**20
"""of one read; larger ones are no faster"""
BLOCK_BYTES = 4096
"""what O_DIRECT wants places in files and in memory to be multiples of"""


class FileReader:
    """Reads files past the page cache, by whole blocks; used by one thread at a time.

    Whole blocks go straight to their place where it lies in memory as the tensor lies in the file, modulo a block. All else
    goes through `bounce`, and is copied while it is still in the cache.
    """

    def __init__(self) -> None:
        self.descriptors: dict[Path, int] = {}
        self.bounce = pages(REQUEST_BYTES + BLOCK_BYTES).numpy()

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)

    def read(self, entry: Entry, into: Tensor, skip_bytes: int = 0) -> None:
        """Fill `into` with the bytes of `entry` from its byte `skip_bytes` on."""
        descriptor, out, done = self._open(entry.path), into.numpy(), 0
        start = entry.offset + skip_bytes
        in_step = (into.data_ptr() - start) % BLOCK_BYTES == 0
        while done < len(out):
            offset, left = start + done, len(out) - done
            lead = offset % BLOCK_BYTES
            if in_step and lead == 0 and left >= BLOCK_BYTES:
                wanted = min(REQUEST_BYTES, left - left % BLOCK_BYTES)
                got = os.preadv(descriptor, [out[done : done + wanted].data], offset)
            else:
                wanted = BLOCK_BYTES if in_step else min(len(self.bounce), align(lead + left, BLOCK_BYTES))
                got = max(min(os.preadv(descriptor, [self.bounce[:wanted].data], offset - lead) - lead, left), 0)
                out[done : done + got] = self.bounce[lead : lead + got]
            if got == 0:
                raise StoreError("read", str(entry.path), offset, left, 0, None, f"the file ends within {entry.name}")
            done += got

    def read_tensor(self, entry: Entry) -> Tensor:
        """One tensor, in memory of its own."""
        tensor = torch.empty(entry.num_bytes, dtype=torch.uint8)
        self.read(entry, tensor)
        return tensor.view(entry.dtype).view(entry.shape)

    def _open(self, path: Path) -> int:
        if path not in self.descriptors:
            try:
                self.descriptors[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.descriptors[path] = os.open(path, os.O_RDONLY)  # a file system in memory
        return self.descriptors[path]


def pages(num_bytes: int) -> Tensor:
    """Memory on huge pages where there are any: on small ones a request is cut up, as one transfer gathers so many only."""
    try:
        mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no memory for a buffer of {num_bytes} bytes ({error.strerror})") from error
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def read_tensor(entry: Entry) -> Tensor:
    """One tensor, in memory of its own."""
    with closing(FileReader()) as reader:
        return reader.read_tensor(entry)


def check_equal(one: Entry, other: Entry) -> None:
    """ModelError unless the two tensors, which the model ties, hold the same bytes; compared piece by piece."""
    equal = (one.dtype, one.shape) == (other.dtype, other.shape)
    with closing(FileReader()) as reader:
        for start in range(0, one.num_bytes if equal else 0, REQUEST_BYTES):
            pieces = torch.empty((2, min(REQUEST_BYTES, one.num_bytes - start)), dtype=torch.uint8)
            for entry, piece in zip((one, other), pieces, strict=True):
                reader.read(entry, piece, start)
            equal = equal and torch.equal(pieces[0], pieces[1])
    if not equal:
        raise ModelError(
            f"{one.name} and {other.name} are tied by the model's configuration but differ in the checkpoint. "
            'If they are meant to differ, set "tie_word_embeddings": false in config.json'
        )
