"""A store that hands out nothing but what was written to it.

    write   a checksum of every grain goes into a table, before the bytes leave
    read    every grain is compared with the table before the caller may use it: a flipped bit, a write that the drive lost or
            tore, a read that brought something else, is an error that names the place, and no training goes on from it

Whoever passes over the bytes anyway does both on the way (`run.ssd_map`): it takes `sums_of` what it reads from `unchecked`,
compares, calls `refuse`; and gives `note` the sums of what it writes there.

A grain is a fixed part of an extent: what is read or written begins and ends with one. What was never written is zeros, as the
files of a store are made. The hash is XXH3 with 64 bits, faster than memory can bring the bytes; it is for accidents, not for
attackers. The table lies in RAM; `lohan.ssd.records` keeps it beside each commit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from lohan.errors import StoreError
from lohan.ssd.base import Request, Store, Ticket

SUM_BYTES = 8


class ChecksumError(StoreError):
    """Bytes that are not the ones that were written."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous range of a store, checked grain by grain."""

    name: str
    address: int
    nbytes: int
    grain_bytes: int

    @property
    def num_grains(self) -> int:
        return -(-self.nbytes // self.grain_bytes)

    def grain_size(self, grain: int) -> int:
        """The last one may be shorter."""
        return min(self.grain_bytes, self.nbytes - grain * self.grain_bytes)


class CheckedStore:
    """A store over another one. Reads and writes stay within its extents."""

    def __init__(self, store: Store, extents: Sequence[Extent]) -> None:
        self.unchecked = store
        self._extents = sorted(extents, key=lambda extent: extent.address)
        self._addresses = [extent.address for extent in self._extents]
        counts = [extent.num_grains for extent in self._extents]
        self._first = np.concatenate(([0], np.cumsum(counts, dtype=np.int64))).tolist()
        self.sums: NDArray[np.uint64] = np.empty(self._first[-1], np.uint64)
        """of all grains, in order of address"""
        self._sum_zeros()

    def _sum_zeros(self) -> None:
        of_zeros: dict[int, int] = {}
        for extent, first in zip(self._extents, self._first[:-1], strict=True):
            for grain in {0, extent.num_grains - 1}:
                size = extent.grain_size(grain)
                if size not in of_zeros:
                    of_zeros[size] = xxh3_64_intdigest(bytes(size))
            self.sums[first : first + extent.num_grains] = of_zeros[extent.grain_size(0)]
            self.sums[first + extent.num_grains - 1] = of_zeros[extent.grain_size(extent.num_grains - 1)]

    # ---------------------------------------------------------------- the table

    @property
    def table_bytes(self) -> int:
        return self.sums.nbytes

    def table(self) -> bytes:
        """All checksums as they stand."""
        return self.sums.astype("<u8", copy=False).tobytes()

    def restore(self, table: bytes) -> None:
        """The checksums of a commit, for the bytes that it names."""
        if len(table) != self.table_bytes:
            raise ValueError(f"{len(table)} bytes are no table of {len(self.sums)} checksums")
        self.sums[:] = np.frombuffer(table, "<u8")

    def sums_of(self, address: int, nbytes: int) -> NDArray[np.uint64]:
        """The checksums of a range as they stand, a copy."""
        return self.sums[self._range(address, nbytes)].copy()

    def note(self, address: int, nbytes: int, sums: NDArray[np.uint64]) -> None:
        """The checksums of what is about to be written to a range."""
        self.sums[self._range(address, nbytes)] = sums

    def refuse(self, address: int, nbytes: int, grain: int) -> NoReturn:
        """A grain of a range, counted from its start, is not what was written."""
        for number, (extent, in_extent, _, start, stop) in enumerate(self._grains(address, nbytes)):
            if number == grain:
                path, offset = self.unchecked.locate(address + start)
                reason = f"{extent.name}, grain {in_extent}: these are not the bytes that were written there (checksum)"
                raise ChecksumError("read", path, offset, stop - start, stop - start, None, reason)
        raise ValueError(f"a range of {nbytes} bytes has no grain {grain}")

    def verify(self, address: int, buffer: Tensor) -> None:
        """ChecksumError unless these bytes are what was written at `address`."""
        data = buffer.numpy().data
        for number, (_, _, index, start, stop) in enumerate(self._grains(address, len(data))):
            if xxh3_64_intdigest(data[start:stop]) != self.sums[index]:
                self.refuse(address, len(data), number)

    def _note(self, address: int, buffer: Tensor) -> None:
        data = buffer.numpy().data
        for _, _, index, start, stop in self._grains(address, len(data)):
            self.sums[index] = xxh3_64_intdigest(data[start:stop])

    def _range(self, address: int, nbytes: int) -> slice:
        """The entries of a range of one extent, which lie side by side."""
        grains = list(self._grains(address, nbytes))
        if len({extent.address for extent, *_ in grains}) > 1:
            raise ValueError(f"the {nbytes} bytes at {address} do not lie in one extent")
        return slice(grains[0][2], grains[-1][2] + 1)

    def _grains(self, address: int, nbytes: int) -> Iterator[tuple[Extent, int, int, int, int]]:
        """The grains of a range: extent, number in it, index in the table, and the bytes of the range that it has."""
        start, number = 0, bisect_right(self._addresses, address) - 1
        while start < nbytes:
            extent = self._extents[number] if 0 <= number < len(self._extents) else None
            inside = address + start - extent.address if extent is not None else -1
            if extent is None or not 0 <= inside < extent.nbytes or inside % extent.grain_bytes:
                raise ValueError(f"byte {address + start} of the store begins no grain of an extent")
            grain = inside // extent.grain_bytes
            stop = start + extent.grain_size(grain)
            if stop > nbytes:
                raise ValueError(f"byte {address + nbytes} of the store ends no grain of {extent.name}")
            yield extent, grain, self._first[number] + grain, start, stop
            start = stop
            number += inside + extent.grain_size(grain) == extent.nbytes

    # ---------------------------------------------------------------- a store

    @property
    def nbytes(self) -> int:
        return self.unchecked.nbytes

    @property
    def read_bytes(self) -> int:
        return self.unchecked.read_bytes

    @property
    def written_bytes(self) -> int:
        return self.unchecked.written_bytes

    def locate(self, address: int) -> tuple[str, int]:
        return self.unchecked.locate(address)

    def submit_read(self, requests: Sequence[Request]) -> Ticket:
        return _Verifying(self, self.unchecked.submit_read(requests), requests)

    def submit_write(self, requests: Sequence[Request]) -> Ticket:
        for address, buffer in requests:
            self._note(address, buffer)
        return self.unchecked.submit_write(requests)

    def flush(self) -> None:
        self.unchecked.flush()

    def close(self) -> None:
        self.unchecked.close()


class _Verifying:
    """A read on its way, whose bytes are compared by the first who waits for them."""

    def __init__(self, store: CheckedStore, ticket: Ticket, requests: Sequence[Request]) -> None:
        self._store, self._ticket, self._requests = store, ticket, requests

    @property
    def done(self) -> bool:
        return self._ticket.done

    @property
    def started_s(self) -> float | None:
        return self._ticket.started_s

    @property
    def finished_s(self) -> float | None:
        return self._ticket.finished_s

    def wait(self, timeout_s: float | None = None) -> None:
        self._ticket.wait(timeout_s)
        while self._requests:
            self._store.verify(*self._requests[0])
            self._requests = self._requests[1:]
