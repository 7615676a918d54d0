"""Host memory that lohan moves tensors through: taken once, counted to the byte, kept until the end of the run.

    reserve(total)   map and populate one arena for many small allocations, so that they share huge pages
    allocate(n)      carve the next bytes from the arena, or, where it has no room, map memory of exactly this size
    close()          give every page back

What SSD bandwidth depends on is the pages behind a buffer more than the library that reads: from ordinary 4 KiB pages a
drive reaches 1.1 to 2.7 GB/s where huge pages give its full speed. So memory is anonymous and private (what MADV_HUGEPAGE
looks at), populated before the run (no page fault, no OOM kill in the middle of it), and not inherited by a forked child:
a fork would turn the pages of a pending O_DIRECT read into copies, and the data would land in the wrong ones.

Within an arena a buffer starts on a 4 KiB page, so that no byte is lost between two of them: starting on a huge page instead
made no difference to a drive (3.7 against 3.8 GB/s, noise).

A pool is filled by one thread, before the run. Its tensors may be used from any.
"""

from __future__ import annotations

import errno
import mmap

import torch
from torch import Tensor

from lohan.errors import BudgetError, ClosedError, OptionError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 2**20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it


class HostPool:
    """Page-aligned host memory under one budget."""

    def __init__(self, budget_bytes: int, *, option: str = "host_memory") -> None:
        """`option` names the setting that `budget_bytes` comes from, for errors."""
        self.budget_bytes = budget_bytes
        self.allocated_bytes = 0
        """of all arenas, rounding and what is not carved yet included: what the pool costs"""
        self.allocations: list[tuple[str, int]] = []
        """name and bytes, in order of allocation"""
        self._option = option
        self._arenas: list[_Arena] = []
        self._closed = False

    @property
    def arenas(self) -> tuple[Tensor, ...]:
        """All memory of the pool, one tensor for each contiguous range: what a device registers."""
        return tuple(arena.memory for arena in self._arenas)

    def reserve(self, total_bytes: int) -> None:
        """Map room for the allocations to come: each takes its size rounded up to 4096."""
        self._map(_round_up(total_bytes, PAGE_BYTES), f"a reservation of {total_bytes} bytes")

    def allocate(self, nbytes: int, name: str) -> Tensor:
        """`nbytes` bytes as uint8 [nbytes], zero, starting on a page; on a huge page where they are a mapping of their own."""
        size_bytes = _round_up(nbytes, PAGE_BYTES)
        arena = next((a for a in self._arenas if a.free_bytes >= size_bytes), None)
        if arena is None:
            arena = self._map(size_bytes, f"{name} of {nbytes} bytes")
        self.allocations.append((name, size_bytes))
        return arena.carve(size_bytes)[:nbytes]

    def close(self) -> None:
        """Give the pages back now. A tensor that outlives the pool reads zeros; devices unregister the arenas before."""
        self._closed = True
        for arena in self._arenas:
            arena.discard()
        self._arenas.clear()
        self.allocated_bytes = 0

    def _map(self, size_bytes: int, what: str) -> _Arena:
        if self._closed:
            raise ClosedError(f"the host pool is closed; it cannot hold {what}")
        if size_bytes <= 0:
            raise ValueError(f"{what}: a size must be positive")
        needed_bytes = self.allocated_bytes + size_bytes
        if needed_bytes > self.budget_bytes:
            reason = f"{what} does not fit beside the {self.allocated_bytes} bytes already allocated"
            raise BudgetError(self._option, self.budget_bytes, needed_bytes, reason)
        try:
            arena = _Arena(size_bytes)
        except OSError as error:
            reason = f"the system has no memory for {what} ({error.strerror})"
            raise OptionError(self._option, self.budget_bytes, reason, "Lower it, or free memory") from error
        self._arenas.append(arena)
        self.allocated_bytes = needed_bytes
        return arena


class _Arena:
    """One populated mapping, carved from its start to its end."""

    def __init__(self, size_bytes: int) -> None:
        # A huge page more than asked for, so that the first byte can lie on a huge page. What is never touched costs nothing.
        self._mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._start = -whole.data_ptr() % HUGE_PAGE_BYTES
        self._size_bytes = size_bytes
        self.memory = whole[self._start : self._start + size_bytes]
        self.free_bytes = size_bytes
        try:
            self._advise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel built without huge pages: slower, and right
                raise
        self._advise(mmap.MADV_DONTFORK)
        self._populate()

    def carve(self, size_bytes: int) -> Tensor:
        start = self._size_bytes - self.free_bytes
        self.free_bytes -= size_bytes
        return self.memory[start : start + size_bytes]

    def discard(self) -> None:
        # Not mmap.close(): a tensor does not keep the mapping open, and its next access would end the process.
        self._advise(mmap.MADV_DONTNEED)

    def _populate(self) -> None:
        try:
            self._advise(_MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14
                raise
            self.memory[::PAGE_BYTES].zero_()

    def _advise(self, advice: int) -> None:
        self._mapping.madvise(advice, self._start, self._size_bytes)


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
