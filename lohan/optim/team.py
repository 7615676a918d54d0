"""Threads that do the optimizer's arithmetic together, where computing leaves cores free.

Updates are elementwise and sums of squares are made of blocks, so that who does which part changes no bit. The kernels let go
of the GIL: the parts run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")

PART_ELEMENTS = 2**18
"""of an update that one call of a kernel works on: 0.3 ms of one core, far above what a call costs"""


class Team:
    """`num` threads; one is the caller's own."""

    def __init__(self, num: int) -> None:
        self._pool = ThreadPoolExecutor(num, "lohan optimizer") if num > 1 else None

    def each(self, work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """`work` done on every part; the results in the order of the parts."""
        if self._pool is None or len(parts) < 2:
            return [work(part) for part in parts]
        return list(self._pool.map(work, parts))

    def cut(self, num: int, grain_elements: int = 0) -> list[tuple[int, int]]:
        """A range of elements in parts for everybody, whole grains each."""
        if self._pool is None:
            return [(0, num)]
        each = max(PART_ELEMENTS, grain_elements)
        return [(first, min(first + each, num)) for first in range(0, num, each)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


ALONE = Team(1)
"""the caller, and nobody else"""
