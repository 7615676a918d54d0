"""Where a logical range lies: the address space is cut into stripes, dealt round to the files.

    address   0        S        2S       3S       4S
              | file 0 | file 1 | file 2 | file 0 | ...         with three files and stripes of S bytes

A piece, the grain of I/O, lies in one stripe and has at most `chunk_bytes`. A single file has one endless stripe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lohan.ssd.base import BLOCK_BYTES


class Span(NamedTuple):
    """Where one piece of a request lies."""

    file: int
    offset: int
    """first byte in the file"""
    start: int
    """first byte in the request"""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Stripes:
    """How a logical address space is laid over files."""

    num_files: int
    stripe_bytes: int
    chunk_bytes: int

    def __post_init__(self) -> None:
        for name, value in (("stripe_bytes", self.stripe_bytes), ("chunk_bytes", self.chunk_bytes)):
            if value <= 0 or value % BLOCK_BYTES:
                raise ValueError(f"{name}={value}: must be a positive multiple of {BLOCK_BYTES}")
        if self.num_files <= 0:
            raise ValueError(f"num_files={self.num_files}: must be positive")

    def file_bytes(self, nbytes: int) -> int:
        """The size of each file for an address space of `nbytes`."""
        if self.num_files == 1:
            return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        return -(-nbytes // (self.num_files * self.stripe_bytes)) * self.stripe_bytes

    def split(self, address: int, nbytes: int) -> Iterator[Span]:
        """The pieces of a range, in order of address."""
        start = 0
        while start < nbytes:
            file, offset, left_bytes = self._locate(address + start)
            length = min(left_bytes, self.chunk_bytes, nbytes - start)
            yield Span(file, offset, start, length)
            start += length

    def _locate(self, address: int) -> tuple[int, int, int]:
        """File, offset in it, and bytes left in the stripe."""
        if self.num_files == 1:
            return 0, address, self.chunk_bytes
        stripe, inside = divmod(address, self.stripe_bytes)
        row, file = divmod(stripe, self.num_files)
        return file, row * self.stripe_bytes + inside, self.stripe_bytes - inside
